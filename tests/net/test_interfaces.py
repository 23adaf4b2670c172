"""QCOLL_SOCKET_IFNAME between hosts: the one chosen is used, a wrong one is an error at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import Hosts, RankPool, available
from qcoll.testing.calls import environment

_CAN, _WHY_NOT = available()
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available"),
]

AT_ONCE = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Hosts, RankPool]]:
    with Hosts(2) as hosts, RankPool(3, [2, 1], hosts=hosts) as pool:
        yield hosts, pool


def works(group: object = None) -> None:
    x = torch.ones(50_000)
    qcoll.all_reduce(x, group=group, codec="int8")
    assert x.eq(3).all()


def with_names(names: str | None) -> None:
    """Forms a group while the variable has a value (None: unset), and uses it."""
    with environment({"QCOLL_SOCKET_IFNAME": names or ""}):
        works(dist.new_group(backend="qcoll"))


@pytest.mark.parametrize("names", ["eth0", "eth0,lo", "eth9,eth0", None])
def test_groups_form_over_the_chosen_interface(
    names: str | None, network: tuple[Hosts, RankPool]
) -> None:
    hosts, pool = network
    before = hosts.interface_bytes(0)[1]
    pool.run(with_names, (names,), backend="gloo", fresh=True)
    assert hosts.interface_bytes(0)[1] - before > 50_000


def with_wrong_name(ranks: tuple[int, ...]) -> None:
    start = time.monotonic()
    name = "eth7" if dist.get_rank() in ranks else os.environ["QCOLL_SOCKET_IFNAME"]
    with (
        environment({"QCOLL_SOCKET_IFNAME": name}),
        pytest.raises(ValueError, match="QCOLL_SOCKET_IFNAME") as caught,
    ):
        dist.new_group(backend="qcoll")
    text = str(caught.value)
    for part in ("eth7", "eth0", "lo"):  # the wrong one, and those that there are
        assert part in text, text
    if dist.get_rank() not in ranks:
        assert f"rank {ranks[0]}" in text
    assert time.monotonic() - start < AT_ONCE
    works(dist.new_group(backend="qcoll"))


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,), (2,)])
def test_a_wrong_name_lists_the_interfaces_on_all_ranks(
    ranks: tuple[int, ...], network: tuple[Hosts, RankPool]
) -> None:
    network[1].run(with_wrong_name, (ranks,), backend="gloo", fresh=True, timeout=40)


def over_loopback() -> str:
    """lo cannot reach another host: an error that says so, not a hang."""
    start = time.monotonic()
    with environment({"QCOLL_SOCKET_IFNAME": "lo"}), pytest.raises((ValueError, RuntimeError)) as c:
        dist.new_group(backend="qcoll")
    assert time.monotonic() - start < AT_ONCE
    return str(c.value)


def test_an_interface_that_reaches_nobody_is_named(network: tuple[Hosts, RankPool]) -> None:
    texts = network[1].run(over_loopback, backend="gloo", fresh=True, timeout=30)
    for text in texts:
        assert "QCOLL_SOCKET_IFNAME" in text or "127.0.0.1" in text, text
