"""Verbs that qcoll does not change behave as gloo's own, to the letter."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import normal, pool_of, same_bits
from torch.distributed.distributed_c10d import _get_default_store

import qcoll
from qcoll.testing import Nodes

ReduceOp = dist.ReduceOp
Group = dist.ProcessGroup | None
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)


@pytest.fixture(scope="module", params=[[2, 2], [3], [1, 1]], ids=["2+2", "3", "1+1"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object) -> list[object]:
    return pool_of(nodes).run(function, args=args, backend="qcoll")


def outcome(call: Callable[[Group], Any], group: Group) -> Any:
    """What the call gave: its result, or the kind of error."""
    try:
        return call(group)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__ if isinstance(error, ValueError) else "refused"


def same(a: Any, b: Any) -> bool:
    """Equality that compares tensors by their bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and same_bits(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def compare(*calls: Callable[[Group], Any]) -> None:
    """Each call gives the same in the default group, which is qcoll's, as in one of gloo."""
    gloo = dist.new_group(backend="gloo")
    for number, call in enumerate(calls):
        expected, got = outcome(call, gloo), outcome(call, None)
        assert same(expected, got), (number, expected, got)
    dist.all_reduce(torch.ones(1))  # all ranks are done with it
    dist.destroy_process_group(gloo)


def mine(dtype: torch.dtype, count: int = 37) -> torch.Tensor:
    return (normal(dist.get_rank(), count, torch.float32) * 10).abs().to(dtype)


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def broadcasts_and_reductions() -> None:
    world = dist.get_world_size()
    for dtype in DTYPES:
        for async_op in (False, True):

            def broadcast(group: Group, dtype: Any = dtype, async_op: bool = async_op) -> Any:
                x = mine(dtype)
                wait(dist.broadcast(x, src=world - 1, group=group, async_op=async_op))
                return x

            def reduce(group: Group, dtype: Any = dtype, async_op: bool = async_op) -> Any:
                results = []
                for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT):
                    x = mine(dtype)
                    wait(dist.reduce(x, dst=1, op=op, group=group, async_op=async_op))
                    results.append(x if dist.get_rank() == 1 else None)
                return results

            compare(broadcast, reduce)


def test_broadcast_and_reduce(nodes: Nodes) -> None:
    run(nodes, broadcasts_and_reductions)


OPERATIONS = ("MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")


def other_reductions() -> None:
    """All-reduce and reduce-scatter with operations that the engine does not compute."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (*DTYPES, torch.int64, torch.bool):
        for name in OPERATIONS:
            op = getattr(ReduceOp, name)
            if dtype.is_floating_point and name in ("BAND", "BOR", "BXOR"):
                continue

            def all_reduce(group: Group, dtype: Any = dtype, op: Any = op) -> Any:
                x = mine(dtype)
                dist.all_reduce(x, op=op, group=group)
                return x

            def reduce_scatter_tensor(group: Group, dtype: Any = dtype, op: Any = op) -> Any:
                x, out = mine(dtype, 5 * world), torch.empty(5, dtype=dtype)
                wait(dist.reduce_scatter_tensor(out, x, op=op, group=group, async_op=rank >= 0))
                return out

            def reduce_scatter(group: Group, dtype: Any = dtype, op: Any = op) -> Any:
                x, out = mine(dtype, 5 * world), torch.empty(5, dtype=dtype)
                dist.reduce_scatter(out, list(x.split(5)), op=op, group=group)
                return out

            compare(all_reduce, reduce_scatter_tensor, reduce_scatter)


def test_other_reductions(nodes: Nodes) -> None:
    run(nodes, other_reductions)


def gathers_and_scatters() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()

    def gather(group: Group) -> Any:
        x = mine(torch.float32)
        outs = [torch.empty_like(x) for _ in range(world)] if rank == world - 1 else None
        dist.gather(x, outs, dst=world - 1, group=group)
        return outs

    def scatter(group: Group) -> Any:
        out = torch.empty(4)
        parts = list(torch.arange(4.0 * world).split(4)) if rank == 1 else None
        wait(dist.scatter(out, parts, src=1, group=group, async_op=True))
        return out

    def all_gather_coalesced(group: Group) -> Any:
        xs = [mine(torch.float32), mine(torch.float32, 5)]
        outs = [[torch.empty_like(x) for x in xs] for _ in range(world)]
        dist.all_gather_coalesced(outs, xs, group=group)
        return outs

    def all_reduce_coalesced(group: Group) -> Any:
        xs = [mine(torch.int32), mine(torch.int32, 5)]
        dist.all_reduce_coalesced(xs, group=group)
        return xs

    compare(gather, scatter, all_gather_coalesced, all_reduce_coalesced)


def test_gather_and_scatter(nodes: Nodes) -> None:
    run(nodes, gathers_and_scatters)


def objects() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()

    def broadcast(group: Group) -> Any:
        things = [{"rank": rank}, [1, 2], "text" * 5000] if rank == 1 else [None] * 3
        dist.broadcast_object_list(things, src=1, group=group)
        return things

    def all_gather(group: Group) -> Any:
        things: list[Any] = [None] * world
        dist.all_gather_object(things, {"rank": rank, "data": "x" * 10 * rank}, group=group)
        return things

    def gather(group: Group) -> Any:
        things: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(("from", rank), things, dst=0, group=group)
        return things

    def scatter(group: Group) -> Any:
        things: list[Any] = [None]
        dist.scatter_object_list(things, [f"for {r}" for r in range(world)], src=0, group=group)
        return things

    compare(broadcast, all_gather, gather, scatter)


def test_objects(nodes: Nodes) -> None:
    run(nodes, objects)


def sparse() -> None:
    rank = dist.get_rank()

    def all_reduce(group: Group) -> Any:
        indices = torch.tensor([[0, rank, 5], [1, 2, rank]])
        x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (7, 7))
        dist.all_reduce(x, group=group)
        return x.coalesce().to_dense()

    compare(all_reduce)


def test_sparse_all_reduce(nodes: Nodes) -> None:
    run(nodes, sparse)


def point_to_point() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % world, (rank - 1) % world

    def blocking(group: Group) -> Any:
        x, got = mine(torch.float32), torch.empty(37)
        if rank % 2 == 0:
            dist.send(x, right, group=group)
            source = dist.recv(got, left, group=group)
        else:
            source = dist.recv(got, left, group=group)
            dist.send(x, right, group=group)
        return got, source

    def tagged(group: Group) -> Any:
        """Two messages that arrive by their tags, not in their order."""
        got = [torch.empty(3), torch.empty(3)]
        works = [dist.isend(torch.full((3,), float(t)), right, group=group, tag=t) for t in (7, 8)]
        works += [dist.irecv(g, left, group=group, tag=t) for g, t in zip(got, (8, 7), strict=True)]
        for work in works:
            work.wait()
        return got

    def any_source(group: Group) -> Any:
        if rank > 0:
            dist.send(torch.full((3,), float(rank)), 0, group=group)
            return None
        sources = []
        for _ in range(world - 1):
            got = torch.empty(3)
            sources.append(dist.recv(got, group=group))
            assert torch.equal(got, torch.full((3,), float(sources[-1])))
        return sorted(sources)

    def object_list(group: Group) -> Any:
        things = [{"from": rank}, "x" * 1000] if rank == 0 else [None, None]
        if rank == 0:
            dist.send_object_list(things, dst=1, group=group)
        elif rank == 1:
            dist.recv_object_list(things, src=0, group=group)
        return things

    calls = [tagged, any_source, object_list]
    compare(*([blocking, *calls] if world % 2 == 0 else calls))


def test_point_to_point(nodes: Nodes) -> None:
    run(nodes, point_to_point)


def barriers() -> None:
    for async_op in (False, True):
        wait(dist.barrier(async_op=async_op))
    qcoll.monitored_barrier()
    qcoll.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)


def test_barriers(nodes: Nodes) -> None:
    run(nodes, barriers)


def barrier_without(absent: list[int], wait_all_ranks: bool) -> None:
    """Rank 0 names who did not come, and the group lives on."""
    rank, store = dist.get_rank(), _get_default_store()
    key = f"a barrier without {absent} is over, {time.time_ns() if rank == 0 else 0}"
    keys = [key]
    dist.broadcast_object_list(keys, src=0)
    key = keys[0]
    if rank not in absent:
        with pytest.raises(RuntimeError) as raised:
            qcoll.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
        named = ", ".join(map(str, absent if wait_all_ranks else absent[:1]))
        assert re.search(rf"Ranks? {named} failed to pass monitoredBarrier", str(raised.value))
        if rank == 0:
            store.set(key, "")
    store.wait([key])
    if rank in absent:  # the late hear that they were
        with pytest.raises(RuntimeError, match="failed to pass"):
            qcoll.monitored_barrier()
    qcoll.monitored_barrier()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()


def test_a_monitored_barrier_names_who_is_absent(nodes: Nodes) -> None:
    world = sum(nodes)
    run(nodes, barrier_without, [world - 1], False)
    run(nodes, barrier_without, list(range(1, world)), True)


def interleaved() -> None:
    """Native and delegated calls take turns over the same tensor."""
    world = dist.get_world_size()
    x = torch.ones(1000)
    for _ in range(10):
        dist.all_reduce(x, op=ReduceOp.MAX)
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        dist.all_reduce(x, op=ReduceOp.AVG)
        x /= world
        assert torch.equal(x, torch.ones(1000))


def test_native_and_delegated_calls_in_turn(nodes: Nodes) -> None:
    run(nodes, interleaved)


def refusals() -> None:
    """What gloo refuses of a caller, qcoll refuses too, and the group goes on."""

    def mean_of_integers(group: Group) -> Any:
        x = torch.ones(3, dtype=torch.int64)
        dist.all_reduce(x, op=ReduceOp.AVG, group=group)
        return x

    def bits_of_floats(group: Group) -> Any:
        x = torch.ones(3)
        dist.all_reduce(x, op=ReduceOp.BAND, group=group)
        return x

    compare(mean_of_integers, bits_of_floats)
    with pytest.raises(RuntimeError, match="root"):
        dist.broadcast(torch.ones(3), src=dist.get_world_size())
    with pytest.raises(Exception, match="Float can't be cast") as raised:
        mean_of_integers(None)
    assert "cannot be used any more" not in str(raised.value)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()


def test_refusals(nodes: Nodes) -> None:
    run(nodes, refusals)
