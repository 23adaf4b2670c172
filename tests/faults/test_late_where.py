"""The error about a late rank tells where that rank was: computing, stopped, or not even begun."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import AT_ONCE, KINDS, beside, error_of, new_group, stop_for

from qcoll.testing import shared_pool

TIMEOUT = 2.0
LATE = 1

Calls = Callable[[Any], object]


def gather_and_meet(group: Any) -> None:
    """Only the root of a gather waits for all; the others do so in the barrier."""
    root = dist.get_rank() == 0
    parts = [torch.empty(3) for _ in range(dist.get_world_size())] if root else None
    dist.gather(torch.ones(3), parts, group=group)
    dist.barrier(group=group)


CALLS: dict[str, Calls] = {
    **KINDS,
    "broadcast": lambda g: dist.broadcast(torch.ones(10), LATE, group=g),
    "gather": gather_and_meet,
    "queued": lambda g: [
        work.wait()
        for work in [dist.all_reduce(torch.ones(500), group=g, async_op=True) for _ in range(4)]
    ],
}


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def wait_for_others(name: str) -> None:
    """The late rank: until all others have failed."""
    for rank in set(range(dist.get_world_size())) - {dist.get_rank()}:
        store().wait([f"{name}/{rank}"], timedelta(seconds=TIMEOUT + 2 * AT_ONCE))


def late(name: str) -> tuple[str, int, float] | None:
    group = new_group(TIMEOUT)
    if dist.get_rank() == LATE:
        # Its last call in the group, which it made like all: the errors must tell of it.
        dist.all_to_all_single(torch.empty(60), torch.ones(60), group=group)
        wait_for_others(name)
        return None
    dist.all_to_all_single(torch.empty(60), torch.ones(60), group=group)
    error, seconds = error_of(lambda: CALLS[name](group))
    store().set(f"{name}/{dist.get_rank()}", "failed")
    return str(error), error.peer, seconds


def check(text: str, peer: int, seconds: float) -> None:
    assert peer == LATE, text
    assert re.search(r"[Tt]imed out", text), text
    assert TIMEOUT / 2 < seconds < TIMEOUT + AT_ONCE, text


@pytest.mark.parametrize("layout", [[2, 2], [3], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_call_that_it_made_last_is_told(name: str, layout: list[int]) -> None:
    seen = shared_pool(sum(layout), layout).run(late, (name,), backend="gloo", fresh=True)
    for one in [each for each in seen if each is not None]:
        check(*one)
        pattern = rf"rank {LATE} \([^)]*\) has not made this call: it is .*all_to_all_single"
        assert re.search(pattern, one[0]), one[0]


def not_begun() -> tuple[str, int, float] | None:
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
    if dist.get_rank() == LATE:
        wait_for_others("begun")
        return None
    error, seconds = error_of(lambda: CALLS["native"](group))
    store().set(f"begun/{dist.get_rank()}", "failed")
    return str(error), error.peer, seconds


def test_a_rank_that_has_made_no_call_yet() -> None:
    seen = shared_pool(4, [2, 2]).run(not_begun, backend="gloo", fresh=True)
    for one in [each for each in seen if each is not None]:
        check(*one)
        assert re.search(rf"rank {LATE} \(.*has run no collective yet", one[0]), one[0]


def stopped(kind: str) -> tuple[str, int, float]:
    """The late rank lies in SIGSTOP; it hears of the failure when it is continued."""
    group = new_group(TIMEOUT)
    dist.barrier()
    if dist.get_rank() == LATE:
        helper = beside(stop_for(TIMEOUT + 3.0))
        # Until it has been stopped for good: a clock that jumps.
        before = time.monotonic()
        while (now := time.monotonic()) - before < TIMEOUT:
            before = now
        os.waitpid(helper, 0)
    error, seconds = error_of(lambda: KINDS[kind](group))
    return str(error), error.peer, seconds


@pytest.mark.parametrize("layout", [[2, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_stopped(kind: str, layout: list[int]) -> None:
    seen = shared_pool(sum(layout), layout).run(stopped, (kind,), backend="gloo", fresh=True)
    for rank, one in enumerate(seen):
        if rank == LATE:
            assert "failed earlier" in one[0]
            assert one[1] == LATE
            assert one[2] < TIMEOUT / 2
        else:
            check(*one)
        assert re.search(rf"rank {LATE} \([^)]*\) does not answer \(is it stopped\?\)", one[0])
