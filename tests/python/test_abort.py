"""Aborting a group from another thread, and destroying one that others still use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective_cases import pool_of
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store

import qcoll
from qcoll.testing import Nodes

#: Separates "woke at once" from "waited for the timeout", which is 60 s.
AT_ONCE = 10.0


@pytest.fixture(scope="module", params=[[2, 2], [3]], ids=["2+2", "3"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object) -> None:
    pool_of(nodes).run(function, args=args, backend="qcoll", fresh=True)


def native() -> None:
    dist.all_reduce(torch.ones(10))


def delegated() -> None:
    dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX)


def unlike(call: Callable[[], None]) -> Callable[[], None]:
    return delegated if call is native else native


CALLS = {"native": native, "delegated": delegated}


def by_group() -> None:
    dist.group.WORLD.abort()  # type: ignore[union-attr]


def by_backend() -> None:
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]


def by_torch() -> None:
    _abort_process_group()


ABORTS = {"group.abort()": by_group, "backend.abort()": by_backend, "torch": by_torch}


def blocked_rank(kind: str, how: str) -> None:
    """Rank 0 blocks in a call that nobody joins, and aborts from another thread; then all ranks
    learn of it, whatever they do."""
    call, store, rank = CALLS[kind], _get_default_store(), dist.get_rank()
    call()
    if rank == 0:
        killer = threading.Timer(0.3, ABORTS[how])
        killer.start()
    else:
        store.wait(["blocked rank is free"], timedelta(seconds=30))
        call = unlike(call)
    started = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    assert time.monotonic() - started < AT_ONCE
    if how != "torch" or rank > 0:  # torch itself may find the group gone first
        assert isinstance(raised.value, qcoll.TransportError)
        raised.match(r"rank 0 called abort\(\)")
    if rank == 0:
        killer.join()
        store.set("blocked rank is free", "")


@pytest.mark.parametrize("how", ABORTS)
@pytest.mark.parametrize("kind", CALLS)
def test_abort_wakes_a_blocked_rank(nodes: Nodes, kind: str, how: str) -> None:
    run(nodes, blocked_rank, kind, how)


def all_blocked(kind: str) -> None:
    """All ranks but the last wait for it; it aborts instead of calling."""
    call, rank, last = CALLS[kind], dist.get_rank(), dist.get_world_size() - 1
    call()
    started = time.monotonic()
    if rank == last:
        time.sleep(0.3)
        by_group()
        by_group()  # twice is harmless
    with pytest.raises(qcoll.TransportError, match=rf"rank {last} called abort\(\)"):
        call()
    assert time.monotonic() - started < AT_ONCE


@pytest.mark.parametrize("kind", CALLS)
def test_abort_reaches_all_ranks(nodes: Nodes, kind: str) -> None:
    run(nodes, all_blocked, kind)


def queued_works() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.all_reduce(torch.ones(10))
    if rank == last:
        time.sleep(0.2)
        by_group()
        return
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    futures = [w.get_future() for w in works]
    for work, future in zip(works, futures, strict=True):
        with pytest.raises(qcoll.TransportError, match="abort"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(RuntimeError, match="abort"):
            future.wait()


def test_abort_fails_queued_works(nodes: Nodes) -> None:
    run(nodes, queued_works)


def call_until_it_fails(group: dist.ProcessGroup) -> None:
    """The news of an abort needs a moment."""
    for _ in range(1000):
        dist.all_reduce(torch.ones(10), group=group)
        time.sleep(0.01)


def one_group_of_several() -> None:
    """The abort of one group leaves the others alone."""
    other = dist.new_group()
    dist.all_reduce(torch.ones(10), group=other)
    dist.barrier()
    if dist.get_rank() == 0:
        other.abort()
    with pytest.raises(qcoll.TransportError, match="abort"):
        call_until_it_fails(other)
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()
    dist.destroy_process_group(other)
    again = dist.new_group()
    dist.all_reduce(x, group=again)
    assert x[0] == dist.get_world_size() ** 2


def test_other_groups_survive_an_abort(nodes: Nodes) -> None:
    run(nodes, one_group_of_several)


def early_leaver() -> None:
    """A rank that destroys its group while the others still call is named to them."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(10), group=group)
    started = time.monotonic()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(qcoll.TransportError, match="rank 1") as raised:
            dist.all_reduce(torch.ones(10), group=group)
        raised.match("left the group")
        assert raised.value.peer == 1
    assert time.monotonic() - started < AT_ONCE


def test_a_rank_that_leaves_early_is_named(nodes: Nodes) -> None:
    run(nodes, early_leaver)


def timeouts(kind: str) -> None:
    """A rank that does not come: all that wait get an error that names it, at the timeout."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    op = dist.ReduceOp.SUM if kind == "native" else dist.ReduceOp.MAX
    dist.all_reduce(torch.ones(10), op=op, group=group)
    store = _get_default_store()
    started = time.monotonic()
    if dist.get_rank() == 1:
        store.wait(["all have given up"], timedelta(seconds=40))
        return
    with pytest.raises(qcoll.TransportError, match="rank 1"):
        dist.all_reduce(torch.ones(10), op=op, group=group)
    assert 1.5 < time.monotonic() - started < 2 + AT_ONCE
    if store.add("gave up", 1) == dist.get_world_size() - 1:
        store.set("all have given up", "")


@pytest.mark.parametrize("kind", CALLS)
def test_a_late_rank_is_named(kind: str) -> None:
    run([2, 2], timeouts, kind)
