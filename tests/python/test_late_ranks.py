"""A rank that does not come: at the timeout the others get an error that names it; so does it."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import RankPool, shared_pool

# Long enough that the ranks that wait have asked the others where they are (after one second).
TIMEOUT = 2.0
GENEROUS = 15.0


def exchange(group: Any) -> None:
    x = torch.ones(1000 * dist.get_world_size(group))
    dist.all_to_all_single(torch.empty_like(x), x, group=group)


def gather(group: Any) -> None:
    whole = torch.empty(300_000 * dist.get_world_size(group))
    qcoll.all_gather_into_tensor(whole, torch.ones(300_000), codec="int8", group=group)


def queued(group: Any) -> None:
    works = [dist.all_reduce(torch.ones(500), group=group, async_op=True) for _ in range(3)]
    works[-1].wait()


CALLS: dict[str, Callable[[Any], object]] = {
    "all_gather_into_tensor": gather,
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(
        torch.empty(1000), torch.ones(1000 * dist.get_world_size(g)), group=g
    ),
    "all_reduce": lambda g: dist.all_reduce(torch.ones(1000), group=g),
    "all_to_all_single": exchange,
    "queued": queued,
    "barrier": lambda g: dist.barrier(group=g),
}


def one_call(name: str, group: Any, late: int, store: Any) -> tuple[str, int, float]:
    """(text, peer, seconds) of the error of one call; the late rank comes when all have failed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == late:
        for other in set(range(world)) - {late}:
            store.wait([f"{name}/{other}"], datetime.timedelta(seconds=TIMEOUT + GENEROUS))
    start = time.monotonic()
    try:
        CALLS[name](group)
        raise AssertionError(f"{name} ended without rank {late}")
    except qcoll.TransportError as error:
        return str(error), error.peer, time.monotonic() - start
    finally:
        if rank != late:
            store.set(f"{name}/{rank}", "failed")


def come_late(late: int) -> dict[str, tuple[str, int, float]]:
    """All calls at once, each in a group and on a thread of its own."""
    timeout = datetime.timedelta(seconds=TIMEOUT)
    groups = {name: dist.new_group(backend="qcoll", timeout=timeout) for name in CALLS}
    for group in groups.values():
        dist.all_reduce(torch.ones(10), group=group)
    store = dist.PrefixStore(f"late-{late}", dist.distributed_c10d._get_default_store())
    with ThreadPoolExecutor(len(CALLS)) as threads:
        futures = {
            name: threads.submit(one_call, name, group, late, store)
            for name, group in groups.items()
        }
        seen = {name: future.result() for name, future in futures.items()}
    for group in groups.values():
        dist.destroy_process_group(group)
    return seen


@pytest.fixture(scope="module", params=[([2, 2], 0), ([2, 2], 3), ([1, 1, 1], 1), ([3, 1], 2)])
def seen(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, tuple[str, int, float]]]]:
    """(the late rank, what every rank saw of every call)"""
    layout, late = request.param
    pool = shared_pool(sum(layout), layout)
    return late, pool.run(come_late, (late,), backend="gloo", fresh=True, timeout=60)


@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_are_told_who_was_late(name: str, seen: Any) -> None:
    late, ranks = seen
    for rank, calls in enumerate(ranks):
        text, peer, seconds = calls[name]
        assert seconds < TIMEOUT + GENEROUS
        assert re.search(r"[Tt]imed out", text), text
        assert re.search(rf"\brank {late}\b", text), text
        assert peer == late, f"rank {rank} blames rank {peer}: {text}"
        if rank == late:
            assert seconds < TIMEOUT / 2  # told at its first call, it does not wait for anybody
            # The news may come just before its call or just after.
            assert "failed earlier" in text or f"failed on rank {late} after 0.0" in text


@pytest.mark.parametrize("name", CALLS)
def test_the_error_tells_the_call_and_the_time(name: str, seen: Any) -> None:
    late, ranks = seen
    for rank, calls in enumerate(ranks):
        text, _, seconds = calls[name]
        if rank == late:
            continue
        assert seconds > TIMEOUT / 2
        assert ("all_reduce" if name == "queued" else name) in text
        assert re.search(r"#\d+", text), text  # its number in the group
        assert f"failed on rank {rank}" in text
        assert re.search(r"after \d+\.\d+ s", text), text


def patience_ends() -> None:
    """wait(timeout) that expires leaves the call, and the group, as they are."""
    rank = dist.get_rank()
    x = torch.ones(1000)
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["impatient"])
    work = dist.all_reduce(x, async_op=True)
    if rank != 0:
        with pytest.raises(qcoll.TransportError, match="still running") as caught:
            work.wait(datetime.timedelta(seconds=0.2))
        assert "#" in str(caught.value)
        assert not work.is_completed()
        dist.distributed_c10d._get_default_store().set("impatient", "1")
    work.wait()
    assert x.tolist() == [2.0] * 1000
    dist.all_reduce(x)
    assert x.tolist() == [4.0] * 1000


def test_a_wait_that_expires_leaves_the_group_usable() -> None:
    shared_pool(2, [1, 1]).run(patience_ends, backend="qcoll", fresh=True)


def later_than_gloo_connects() -> None:
    import qcoll._register

    qcoll._register._CONNECT_TIMEOUT = datetime.timedelta(seconds=1)
    dist.init_process_group("qcoll", timeout=datetime.timedelta(seconds=20))
    rank = dist.get_rank()
    calls: list[Callable[[torch.Tensor], object]] = [
        lambda x: dist.send(x, 0) if rank == 1 else dist.recv(x, 1),
        lambda x: dist.send(x, 0) if rank == 1 else dist.recv(x),
        lambda x: dist.broadcast(x, 1),
        lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
        lambda _: dist.barrier(),
    ]
    for call in calls:
        if rank == 1:
            time.sleep(1.5)
        x = torch.full((3,), float(rank))
        call(x)
        assert call is calls[-1] or x.tolist() == [1.0] * 3


def test_calls_of_the_delegate_wait_longer_than_its_connecting() -> None:
    with RankPool(2) as pool:
        pool.run(later_than_gloo_connects, backend=None)
