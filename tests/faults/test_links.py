"""Links that break in the middle: errors that name the far side, at the timeout at the latest."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from belongings import Belongings
from fault_ranks import AT_ONCE, KINDS, new_group, note, until_it_fails, wait_for_note, works

from qcoll.testing import Hosts, RankPool, available

_CAN, _WHY_NOT = available()
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available"),
]

TIMEOUT = 3.0
COUNT = 200_000
FAR = 2  # the rank on the host whose link breaks
NODES = [2, 1]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(len(NODES)) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def pool(hosts: Hosts) -> Iterator[RankPool]:
    with RankPool(sum(NODES), NODES, hosts=hosts) as pool:
        yield pool


def inside(hosts: Hosts, host: int, *command: str) -> None:
    subprocess.run([*hosts.command_prefix(host), *command], check=True, capture_output=True)


def pull_cable(hosts: Hosts) -> None:
    hosts.set_link(1, up=False)


def plug_cable(hosts: Hosts) -> None:
    hosts.set_link(1, up=True)


def interface_down(hosts: Hosts) -> None:
    inside(hosts, 1, "ip", "link", "set", "eth0", "down")


def interface_up(hosts: Hosts) -> None:
    inside(hosts, 1, "ip", "link", "set", "eth0", "up")
    # Taking it down forgot what it knew of its neighbours.
    inside(
        hosts,
        1,
        *("ip", "neighbour", "replace", hosts.addresses[0], "lladdr", "02:00:00:00:00:01"),
        *("dev", "eth0", "nud", "permanent"),
    )


def drop_what_it_sends(hosts: Hosts) -> None:
    """A bucket that no packet fits into: what the far host sends vanishes, the rest arrives."""
    bucket = ("tbf", "rate", "8bit", "burst", "1", "limit", "1")
    inside(hosts, 1, "tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)


def let_it_send(hosts: Hosts) -> None:
    inside(hosts, 1, "tc", "qdisc", "delete", "dev", "eth0", "root")


def no_route(hosts: Hosts) -> None:
    inside(hosts, 1, "ip", "route", "add", "prohibit", f"{hosts.addresses[0]}/32")


def route(hosts: Hosts) -> None:
    inside(hosts, 1, "ip", "route", "delete", "prohibit", f"{hosts.addresses[0]}/32")


FAULTS: dict[str, tuple[Callable[[Hosts], None], Callable[[Hosts], None]]] = {
    "cable": (pull_cable, plug_cable),
    "interface": (interface_down, interface_up),
    "one way": (drop_what_it_sends, let_it_send),
    "route": (no_route, route),
}


class Breaker(threading.Thread):
    """Breaks something while the ranks make calls, and repairs it when they have all failed."""

    def __init__(self, folder: Path, actions: list[Callable[[], object]], ranks: list[int]) -> None:
        super().__init__()
        self._folder, self._actions, self._ranks = str(folder), actions, ranks
        self._over = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        *breaks, repair = self._actions
        try:
            self._wait_for("calling", AT_ONCE + 50)
            time.sleep(0.3)  # into the middle of some call
            note(self._folder, "broken", repr(time.monotonic()))
            for action in breaks:
                action()
            self._wait_for("failed", TIMEOUT + 3 * AT_ONCE)
        except BaseException as failure:
            self.failure = failure
        finally:
            repair()
            note(self._folder, "repaired")

    def _wait_for(self, what: str, seconds: float) -> None:
        """Until all ranks have left that note, or their call is over without it."""
        deadline = time.monotonic() + seconds
        missing = {f"{what} {rank}" for rank in self._ranks}
        while missing and not self._over.wait(0.01):
            missing = {name for name in missing if not Path(self._folder, name).exists()}
            assert time.monotonic() < deadline, f"no notes {missing} after {seconds} s"

    def finish(self) -> None:
        self._over.set()
        self.join()
        if self.failure is not None:
            raise self.failure


def call_until_it_breaks(kind: str, folder: str) -> tuple[str, int, float]:
    """Calls over the link; (text, peer, seconds since the link broke)."""
    rank = dist.get_rank()
    group = new_group(TIMEOUT)
    note(folder, f"calling {rank}")
    error = until_it_fails(lambda: KINDS[kind](group, COUNT))
    failed_at = time.monotonic()
    note(folder, f"failed {rank}")
    broken_at = float(wait_for_note(folder, "broken"))
    dist.destroy_process_group(group)
    return str(error), error.peer, failed_at - broken_at


def call_over_the_link(kind: str, folder: str, survivors: list[int]) -> tuple[str, int, float]:
    """The same, and then: is anything left behind, and does a new group work?"""
    before = Belongings()
    seen = call_until_it_breaks(kind, folder)
    wait_for_note(folder, "repaired")
    left = before.left_behind()
    assert not left, left
    again = dist.new_group(survivors, backend="qcoll", use_local_synchronization=True)
    works(again)
    dist.destroy_process_group(again)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_link_that_breaks(
    fault: str, kind: str, hosts: Hosts, pool: RankPool, tmp_path: Path
) -> None:
    damage, repair = FAULTS[fault]
    ranks = list(range(sum(NODES)))
    breaker = Breaker(tmp_path, [lambda: damage(hosts), lambda: repair(hosts)], ranks)
    breaker.start()
    try:
        seen = pool.run(
            call_over_the_link, (kind, str(tmp_path), ranks), backend="gloo", fresh=True, timeout=90
        )
    finally:
        breaker.finish()
    for rank, (text, peer, seconds) in enumerate(seen):
        assert seconds < TIMEOUT + AT_ONCE, text
        # The far rank finds those on the near host silent; they find it so.
        far_side = [FAR] if rank != FAR else [0, 1]
        assert peer in far_side, f"rank {rank} blames {peer}: {text}"
        assert re.search(rf"\brank {peer} \([^)]*pid \d+\)", text), text
        assert re.search(r"[Tt]imed out|does not answer|[Nn]etwork|[Uu]nreachable|[Rr]oute", text)


def vanish(kind: str, folder: str) -> tuple[str, int, float] | None:
    note(folder, f"pid {dist.get_rank()}", str(os.getpid()))
    return call_over_the_link(kind, folder, [0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_vanishes(kind: str, hosts: Hosts, pool: RankPool, tmp_path: Path) -> None:
    """The far rank dies behind a broken link: no packet tells of it, connections stay half open."""

    def kill() -> None:
        os.kill(int(wait_for_note(str(tmp_path), f"pid {FAR}")), signal.SIGKILL)

    actions = [lambda: pull_cable(hosts), kill, lambda: plug_cable(hosts)]
    # The far one's note of its failure is never written.
    breaker = Breaker(tmp_path, actions, [0, 1])
    breaker.start()
    try:
        outcomes = pool.outcomes(vanish, (kind, str(tmp_path)), backend="gloo", timeout=90)
    finally:
        breaker.finish()
    assert outcomes[FAR].exit_status == -signal.SIGKILL
    for outcome in outcomes[:FAR]:
        assert outcome.error is None, outcome.error
        text, peer, seconds = outcome.value
        assert seconds < TIMEOUT + AT_ONCE
        assert peer == FAR, text
        assert re.search(rf"\brank {FAR} \([^)]*\) does not answer", text), text


def pause(folder: str) -> None:
    group = new_group(60.0)
    note(folder, f"calling {dist.get_rank()}")
    x = torch.ones(COUNT)
    calls = 0
    while True:
        x.fill_(1.0)
        dist.all_reduce(x, group=group)
        assert x.eq(dist.get_world_size()).all()
        # All stop together.
        more = torch.tensor([float(Path(folder, "repaired").exists())])
        dist.all_reduce(more, dist.ReduceOp.MIN, group=group)
        calls += 1
        if more.item() and calls >= 10:
            break
    note(folder, f"failed {dist.get_rank()}")
    works(group)


def test_a_link_that_comes_back_in_time(hosts: Hosts, pool: RankPool, tmp_path: Path) -> None:
    """Packets lost for two seconds: work goes on."""

    def outage() -> None:
        pull_cable(hosts)
        time.sleep(2.0)
        plug_cable(hosts)
        note(str(tmp_path), "repaired")

    breaker = Breaker(tmp_path, [outage, lambda: None], list(range(sum(NODES))))
    breaker.start()
    try:
        pool.run(pause, (str(tmp_path),), backend="gloo", fresh=True, timeout=90)
    finally:
        breaker.finish()
