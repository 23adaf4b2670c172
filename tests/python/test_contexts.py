"""exact() and options(): how long they hold, and which threads they reach."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_probe import NUMEL, observe

import qcoll
from qcoll.testing import shared_pool

GATHER = "all_gather_into_tensor"
INSIDE = ("exact", "inside qcoll.exact()")
DEFAULT = ("int8:256", "")
# Nested backward passes deeper than this run on another thread of autograd (its MAX_DEPTH is 60).
DEEPER_THAN_AUTOGRAD_NESTS = 70


def two_nodes(function: Any, *args: Any) -> list[Any]:
    return shared_pool(2, [1, 1]).run(function, args, backend="qcoll")


class Backwards(torch.autograd.Function):
    """Calls ``what`` when the gradient passes; each level of ``depth`` is a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, what: Callable[[], None], depth: int = 0
    ) -> torch.Tensor:
        ctx.what, ctx.depth = what, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth == 0:
            ctx.what()
        else:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                Backwards.apply(inner, ctx.what, ctx.depth - 1).sum().backward()
        return grad, None, None


def forward(what: Callable[[], None], depth: int = 0) -> torch.Tensor:
    x = torch.ones(1, requires_grad=True)
    return Backwards.apply(x, what, depth).sum()  # type: ignore[no-any-return]


def in_thread(what: Callable[[], Any]) -> Any:
    """The value of ``what()``, called on a new thread."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append(what())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def backward_inherits() -> None:
    seen: list[tuple[str, str]] = []
    look = lambda: seen.append(observe(GATHER))  # noqa: E731
    loss = forward(look)
    with qcoll.exact():
        loss.backward()
    loss = forward(look)
    with qcoll.options(all_gather="int4:64"):
        loss.backward()
    forward(look).backward()
    assert seen == [INSIDE, ("int4:64", ""), DEFAULT]


def test_backward_has_the_context_that_was_active_when_it_started() -> None:
    two_nodes(backward_inherits)


def forward_alone() -> None:
    seen: list[tuple[str, str]] = []
    with qcoll.exact():
        loss = forward(lambda: seen.append(observe(GATHER)))
    loss.backward()
    assert seen == [DEFAULT]


def test_a_context_around_forward_alone_does_not_reach_backward() -> None:
    two_nodes(forward_alone)


def deep_backward() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append((observe(GATHER), threading.get_native_id() != here))

    here = threading.get_native_id()
    with qcoll.exact():
        forward(look, DEEPER_THAN_AUTOGRAD_NESTS).backward()
    with qcoll.options(all_gather="int4:64"):
        forward(look, DEEPER_THAN_AUTOGRAD_NESTS).backward()
    # The same threads of autograd again, without a context: nothing stays on them.
    forward(look, DEEPER_THAN_AUTOGRAD_NESTS).backward()
    assert seen == [(INSIDE, True), (("int4:64", ""), True), (DEFAULT, True)]


def test_threads_of_autograd_inherit_the_context() -> None:
    two_nodes(deep_backward)


def tensor_hooks() -> None:
    seen: list[tuple[str, str]] = []
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda _: seen.append(observe(GATHER)))
    x.register_post_accumulate_grad_hook(lambda _: seen.append(observe(GATHER)))
    with qcoll.exact():
        (x * 2).sum().backward()
    assert seen == [INSIDE, INSIDE]


def test_hooks_on_gradients_inherit_the_context() -> None:
    two_nodes(tensor_hooks)


def inside_backward() -> None:
    """A context opened inside backward is its own affair."""
    seen: list[tuple[str, str]] = []

    def look() -> None:
        with qcoll.exact():
            seen.append(observe(GATHER))
        seen.append(observe(GATHER))

    with qcoll.options(all_gather="int4:64"):
        forward(look).backward()
        seen.append(observe(GATHER))
    assert seen == [INSIDE, ("int4:64", ""), ("int4:64", "")]


def test_contexts_inside_backward_end_there() -> None:
    two_nodes(inside_backward)


def other_threads() -> None:
    with qcoll.exact():
        assert in_thread(lambda: observe(GATHER)) == DEFAULT
        assert observe(GATHER) == INSIDE

    def with_own_context() -> tuple[tuple[str, str], tuple[str, str]]:
        with qcoll.options(all_gather="int4:64"):
            entered.set()
            looked.wait(20)
            return observe(GATHER), observe(GATHER, dtype=torch.float16)

    entered, looked = threading.Event(), threading.Event()
    outside: list[tuple[str, str]] = []

    def main_thread_meanwhile() -> None:
        entered.wait(20)
        outside.append(observe(GATHER))
        looked.set()

    # The roles swapped: the context is on the other thread while this one calls.
    waiter = threading.Thread(target=lambda: results.append(with_own_context()))
    results: list[Any] = []
    waiter.start()
    main_thread_meanwhile()
    waiter.join()
    assert outside == [DEFAULT]
    assert results == [(("int4:64", ""), ("int4:64", ""))]


def test_contexts_do_not_leak_to_other_python_threads() -> None:
    two_nodes(other_threads)


def queued_calls() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    exactly = torch.cat(shards)
    outputs = [torch.empty_like(exactly) for _ in range(3)]
    qcoll.reset_stats()
    with qcoll.options(all_gather_dtypes=("fp32",)):
        works = [dist.all_gather_into_tensor(outputs[0], shards[rank], async_op=True)]
        with qcoll.exact():
            works.append(dist.all_gather_into_tensor(outputs[1], shards[rank], async_op=True))
        works.append(dist.all_gather_into_tensor(outputs[2], shards[rank], async_op=True))
    for work in works:
        work.wait()
    assert not torch.equal(outputs[0], exactly)
    assert torch.equal(outputs[1], exactly)
    assert torch.equal(outputs[2], outputs[0])
    counted = qcoll.stats()[GATHER]
    assert counted["calls"] == 3
    assert counted["fallbacks"] == {INSIDE[1]: 1}


def test_a_queued_call_keeps_the_context_it_was_made_in() -> None:
    two_nodes(queued_calls)


def callbacks() -> None:
    seen: list[tuple[str, str]] = []
    x = torch.ones(NUMEL)
    with qcoll.exact():
        future = dist.all_reduce(x, async_op=True).get_future()
        after = future.then(lambda _: seen.append(observe(GATHER)))
    after.wait()
    assert seen == [INSIDE]


def test_callbacks_of_futures_have_the_context_of_their_call() -> None:
    two_nodes(callbacks)


def nesting() -> None:
    with qcoll.options(all_gather="int4:64", min_bytes=0):
        with qcoll.options(all_gather="int4:32"):
            assert observe(GATHER, numel=256) == ("int4:32", "")  # min_bytes of the outer one
            with qcoll.exact(), qcoll.options(all_gather="int8:64"):
                assert observe(GATHER) == INSIDE
            assert observe(GATHER) == ("int4:32", "")
        assert observe(GATHER) == ("int4:64", "")
        with pytest.raises(ZeroDivisionError), qcoll.exact():
            1 / 0  # noqa: B018
        with pytest.raises(ValueError, match="all_gather"), qcoll.options(all_gather="int3"):
            raise AssertionError("a bad setting must not be entered")
        assert observe(GATHER) == ("int4:64", "")
    assert observe(GATHER) == DEFAULT
    assert observe(GATHER, numel=256)[0] == "exact"


def test_contexts_nest_and_end_also_after_an_exception() -> None:
    two_nodes(nesting)


@qcoll.exact()
def decorated() -> tuple[str, str]:
    return observe(GATHER)


def as_decorator() -> None:
    for _ in range(2):
        assert decorated() == INSIDE
        assert observe(GATHER) == DEFAULT


def test_a_context_works_as_a_decorator() -> None:
    two_nodes(as_decorator)


def every_verb_exact() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    everyone = [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(world)
    ]
    total = everyone[0] + everyone[1]  # two terms: one correctly rounded sum
    part = NUMEL // world
    mine = slice(rank * part, (rank + 1) * part)
    coded = {"all_gather": "int4", "all_reduce": "int4", "all_to_all": "int4", "coalesced": True}
    with qcoll.options(**coded, all_gather_dtypes=("fp32",), min_bytes=0), qcoll.exact():
        gathered = torch.empty(NUMEL * world)
        dist.all_gather_into_tensor(gathered, x)
        assert torch.equal(gathered, torch.cat(everyone))
        out = torch.empty(part)
        dist.reduce_scatter_tensor(out, x)
        assert torch.equal(out, total[mine])
        reduced = x.clone()
        dist.all_reduce(reduced)
        assert torch.equal(reduced, total)
        swapped = torch.empty(NUMEL)
        dist.all_to_all_single(swapped, x)
        assert torch.equal(swapped, torch.cat([each[mine] for each in everyone]))
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(gathered, x + 1)
        assert torch.equal(gathered, torch.cat(everyone) + 1)


def test_exact_makes_every_verb_exact() -> None:
    two_nodes(every_verb_exact)
