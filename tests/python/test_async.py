"""Asynchronous calls: works, futures and their callbacks, threads."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collective_cases import pool_of
from torch.distributed.distributed_c10d import _get_default_store

import qcoll
from qcoll.testing import Nodes

Issue = Callable[[torch.Tensor], dist.Work]


@pytest.fixture(scope="module", params=[[2, 2], [3]], ids=["2+2", "3"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object, **options: object) -> list[object]:
    return pool_of(nodes).run(function, args=args, backend="qcoll", pg_options=options)


# Works.


def all_reduce(x: torch.Tensor) -> dist.Work:
    return dist.all_reduce(x, async_op=True)


def coded_all_reduce(x: torch.Tensor) -> dist.Work:
    return qcoll.all_reduce(x, codec="int8", async_op=True)


def delegated_product(x: torch.Tensor) -> dist.Work:
    return dist.all_reduce(x, op=dist.ReduceOp.PRODUCT, async_op=True)


ISSUES: dict[str, tuple[Issue, Callable[[int], float]]] = {
    "native": (all_reduce, lambda world: 2.0 * world),
    "coded": (coded_all_reduce, lambda world: 2.0 * world),
    "delegated": (delegated_product, lambda world: 2.0**world),
}


class Held:
    """A call that rank 0 has made and the others make only when rank 0 lets them."""

    def __init__(self, kind: str, key: str) -> None:
        issue, expected = ISSUES[kind]
        self.tensor = torch.full((1000,), 2.0)
        self._expected = expected(dist.get_world_size())
        self._key, self._store = key, _get_default_store()
        if dist.get_rank() > 0:
            self._store.wait([key], timedelta(seconds=30))
        self.work = issue(self.tensor)

    def let_go(self) -> None:
        if dist.get_rank() == 0:
            self._store.set(self._key, "")

    def check(self) -> None:
        assert torch.equal(self.tensor, torch.full((1000,), self._expected))


def life_of_a_work(kind: str) -> None:
    held = Held(kind, f"life {kind}")
    if dist.get_rank() == 0:
        assert not held.work.is_completed()
        with pytest.raises(RuntimeError, match="not completed"):
            held.work.result()
    held.let_go()
    assert held.work.wait() is True
    held.check()
    assert held.work.is_completed()
    assert held.work.is_success()
    assert held.work.exception() is None
    assert held.work.result()[0].data_ptr() == held.tensor.data_ptr()
    assert held.work.wait() is True, "a second time is harmless"


@pytest.mark.parametrize("kind", ISSUES)
def test_the_life_of_a_work(nodes: Nodes, kind: str) -> None:
    run(nodes, life_of_a_work, kind)


def impatient_wait(kind: str) -> None:
    held = Held(kind, f"impatient {kind}")
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match="still running"):
                held.work.wait(timedelta(milliseconds=30))
        assert not held.work.is_completed()
        assert held.work.exception() is None
    held.let_go()
    assert held.work.wait(timedelta(seconds=30)) is True
    held.check()
    dist.all_reduce(held.tensor)  # the group is none the worse


@pytest.mark.parametrize("kind", ISSUES)
def test_a_wait_that_expires_leaves_the_work_running(nodes: Nodes, kind: str) -> None:
    run(nodes, impatient_wait, kind)


def dropped_works() -> None:
    """Works and tensors that the caller drops live until they are done."""
    for i in range(50):
        dist.all_reduce(torch.full((5000,), float(i)), async_op=True)
        qcoll.all_gather_into_tensor(
            torch.empty(1000 * dist.get_world_size()), torch.ones(1000), codec="int8", async_op=True
        )
    x = torch.ones(10)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((10,), float(dist.get_world_size())))


def test_dropped_works(nodes: Nodes) -> None:
    run(nodes, dropped_works)


# Futures.


def futures(kind: str) -> None:
    held = Held(kind, f"future {kind}")
    future = held.work.get_future()
    chained = future.then(lambda f: f.value()[0].sum().item()).then(lambda f: f.value() + 1)
    if dist.get_rank() == 0:
        assert not future.done()
        assert not chained.done()
    held.let_go()
    value = future.wait()
    assert held.work.is_completed(), "a completed future belongs to a completed work"
    assert isinstance(value, list)
    assert value[0].data_ptr() == held.tensor.data_ptr()
    held.check()
    assert chained.wait() == held.tensor.sum().item() + 1
    late = held.work.get_future()
    assert late.done()
    assert late.then(lambda f: len(f.value())).wait() == 1


@pytest.mark.parametrize("kind", ISSUES)
def test_futures(nodes: Nodes, kind: str) -> None:
    run(nodes, futures, kind)


def waiting_callbacks() -> None:
    """Callbacks that wait for collectives: torch's PowerSGD and quantization hooks do. Many at
    once, and the works they wait for are behind theirs in the queue."""
    world = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group()]
    firsts = [torch.full((100,), float(i)) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in firsts]
    seconds = [torch.full((20_000,), float(i)) for i in range(40)]
    later = [dist.all_reduce(x, group=groups[i % 2], async_op=True) for i, x in enumerate(seconds)]

    def then(i: int) -> Callable[[torch.futures.Future], float]:
        def callback(future: torch.futures.Future) -> float:
            later[i].wait()
            later[39 - i].wait()
            total = future.value()[0][0] + seconds[i][0] + seconds[39 - i][0]
            return total.item()

        return callback

    results = [w.get_future().then(then(i)) for i, w in enumerate(works)]
    assert [f.wait() for f in results] == [world * (i + 39.0) for i in range(20)]


def test_callbacks_that_wait_for_other_works(nodes: Nodes) -> None:
    run(nodes, waiting_callbacks)


def issuing_callbacks() -> None:
    """A callback that makes synchronous calls, of its own and of another group, in a chain."""
    world = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group()]

    def callback(future: torch.futures.Future) -> torch.Tensor:
        x = future.value()[0].clone()
        for group in groups:
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
            dist.broadcast(x, src=0, group=group)
        qcoll.all_reduce(x, op="avg", codec="int8")  # up to 8 bits: exact
        return x

    x = torch.ones(100)
    for depth in range(1, 6):
        result = dist.all_reduce(x, async_op=True).get_future().then(callback).wait()
        assert torch.equal(result, torch.full((100,), float(world) ** depth))
        x = result


def test_callbacks_that_make_calls(nodes: Nodes) -> None:
    run(nodes, issuing_callbacks)


def failing_callback() -> None:
    def callback(_: torch.futures.Future) -> None:
        raise ValueError("the callback's own error")

    future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(callback)
    with pytest.raises(Exception, match="the callback's own error"):
        future.wait()
    dist.all_reduce(torch.ones(4))


def test_an_error_in_a_callback_is_the_futures_alone(nodes: Nodes) -> None:
    run(nodes, failing_callback)


def order_of_calls() -> None:
    """Synchronous calls queue behind the asynchronous ones before them, over the same memory."""
    world = dist.get_world_size()
    x = torch.ones(200_001)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, float(world) ** 4))
    assert all(work.is_completed() for work in works)


def test_calls_of_a_group_keep_their_order(nodes: Nodes) -> None:
    run(nodes, order_of_calls)


# Threads.


def threads() -> None:
    """A group for each thread; their calls interleave differently on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group() for _ in range(4)]

    def work(index: int) -> int:
        pause = random.Random(100 * rank + index)
        for i in range(60):
            x = torch.full((3000,), float(i))
            if i % 3 == 0:
                dist.all_reduce(x, group=groups[index])
            elif i % 3 == 1:
                qcoll.all_reduce(x, codec="int8", group=groups[index])
            else:
                dist.all_reduce(x, group=groups[index], async_op=True).wait()
            assert torch.equal(x, torch.full_like(x, float(i * world)))
            if pause.random() < 0.1:
                time.sleep(0.002)
        return index

    with ThreadPoolExecutor(4) as executor:
        assert sorted(executor.map(work, range(4))) == [0, 1, 2, 3]


def test_threads_with_a_group_each(nodes: Nodes) -> None:
    run(nodes, threads)


def orders() -> None:
    """Ranks may call different groups in different orders, as long as they do not wait between."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group() for _ in range(5)]
    for turn in range(20):
        order = list(range(5))
        random.Random(turn * 10 + rank).shuffle(order)
        tensors = {g: torch.full((20_000,), float(g + turn)) for g in order}
        works = [dist.all_reduce(tensors[g], group=groups[g], async_op=True) for g in order]
        for w in random.Random(rank).sample(works, 5):
            w.wait()
        for g in range(5):
            assert torch.equal(tensors[g], torch.full((20_000,), float((g + turn) * world)))


def test_groups_called_in_different_orders(nodes: Nodes) -> None:
    run(nodes, orders)


def blocked_group() -> None:
    """A group that waits for a slow rank blocks no other group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    slow, store = dist.new_group(), _get_default_store()
    x = torch.ones(100)
    if rank > 0:
        work = dist.all_reduce(x, group=slow, async_op=True)
    for _ in range(10):
        dist.all_reduce(torch.ones(50_000))
        dist.barrier()
    if rank > 0:
        assert not work.is_completed()
        store.set(f"blocked {rank}", "")
    else:
        store.wait([f"blocked {r}" for r in range(1, world)], timedelta(seconds=30))
        work = dist.all_reduce(x, group=slow, async_op=True)
    work.wait()
    assert torch.equal(x, torch.full((100,), float(world)))


def test_a_blocked_group_blocks_no_other(nodes: Nodes) -> None:
    run(nodes, blocked_group)
