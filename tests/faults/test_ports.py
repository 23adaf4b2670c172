"""A host that has no port left: named errors, and work goes on for who has its connections."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_ranks import AT_ONCE, error_of, works

from qcoll.testing import Hosts, RankPool, available

_CAN, _WHY_NOT = available()
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available"),
]

TIMEOUT = 3.0
POOR = 1  # its host has no port
CAUSE = r"Address already in use|Cannot assign requested address"


_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the network namespace of who looks
_fresh_ports = itertools.count(31000, 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with Hosts(2) as hosts, RankPool(2, [1, 1], hosts=hosts) as pool:
        yield pool


@contextlib.contextmanager
def no_ports() -> Iterator[None]:
    """The kernel may give two ports only, and both are taken.

    By sockets that were bound to them: a port that a connection got by itself, the kernel gives
    again for a connection to somewhere else.
    """
    before = _RANGE.read_text()
    first = next(_fresh_ports)
    with contextlib.ExitStack() as stack:
        for port in (first, first + 1):
            stack.enter_context(socket.socket()).bind(("", port))
        stack.callback(_RANGE.write_text, before)
        _RANGE.write_text(f"{first} {first + 1}")
        yield


def form() -> str:
    start = time.monotonic()
    with no_ports() if dist.get_rank() == POOR else contextlib.nullcontext():
        try:
            dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
            text = ""
        except RuntimeError as error:
            text = str(error)
    assert time.monotonic() - start < TIMEOUT + AT_ONCE
    return text


def test_forming_a_group(pool: RankPool) -> None:
    seen = pool.run(form, backend="gloo", fresh=True, timeout=60)
    assert re.search(CAUSE, seen[POOR]), seen[POOR]
    assert re.search(rf"\brank {POOR}\b", seen[0]), seen[0]


def call(warm: bool) -> tuple[str, float]:
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
    if warm:
        works(group)
    dist.barrier()
    with no_ports() if dist.get_rank() == POOR else contextlib.nullcontext():
        dist.barrier()
        if warm:
            for _ in range(10):
                works(group)
            dist.destroy_process_group(group)
            return "", 0.0
        whole = torch.empty(2000)
        error, seconds = error_of(
            lambda: dist.all_gather_into_tensor(whole, torch.ones(1000), group=group)
        )
        dist.destroy_process_group(group)
    dist.barrier()
    works(dist.new_group(backend="qcoll"))
    return str(error), seconds


def test_the_first_call(pool: RankPool) -> None:
    for rank, (text, seconds) in enumerate(
        pool.run(call, (False,), backend="gloo", fresh=True, timeout=60)
    ):
        assert seconds < TIMEOUT + AT_ONCE
        assert re.search(rf"\brank {POOR}\b", text), f"rank {rank}: {text}"
        assert re.search(CAUSE, text), text


def test_calls_that_have_their_connections(pool: RankPool) -> None:
    pool.run(call, (True,), backend="gloo", fresh=True, timeout=60)
