"""The caller's errors: ValueError with the value, what was expected and the fix; no more breaks.

A rank that is told so has not taken part: the group goes on working, for it and for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_probe import expect_error

import qcoll
from qcoll.testing import shared_pool

Bad = tuple[Callable[[], object], tuple[str, ...]]
WORLD = 3


def bad_gathers(rank: int) -> dict[str, Bad]:
    whole, part = torch.zeros(3 * 8), torch.ones(8)
    strided = torch.zeros(3 * 8, 2)[:, 0]
    other = (rank + 1) % WORLD
    gather, qgather = dist.all_gather_into_tensor, qcoll.all_gather_into_tensor
    return {
        "too short": (lambda: gather(whole[:-1], part), ("3", "23", "8")),
        "too long": (lambda: gather(torch.zeros(25), part), ("3", "25", "8")),
        "dtype": (lambda: gather(whole.double(), part), ("dtype", "Double", "Float")),
        "strided": (lambda: gather(strided, part), ("contiguous", "Float[24]")),
        "overlap": (lambda: gather(whole, whole[1:9] if rank else whole[9:17]), ("overlap",)),
        "not its slice": (
            lambda: gather(whole, whole[other * 8 : other * 8 + 8]),
            ("overlap", f"slice {rank}"),
        ),
        "codec of ints": (
            lambda: qgather(whole.int(), part.int(), codec="int8"),
            ("int8", "int32", "float32"),
        ),
        "codec of doubles": (
            lambda: qgather(whole.double(), part.double(), codec="int4"),
            ("int4", "float64", "bfloat16"),
        ),
        "unknown codec": (lambda: qgather(whole, part, codec="int9"), ("int9", "int8[:block]")),
        "block": (lambda: qgather(whole, part, codec="int8:7"), ("int8:7", "multiple of 32")),
        "empty codec": (lambda: qgather(whole, part, codec=""), ("int8[:block]",)),
        "list too short": (lambda: dist.all_gather([part] * 2, part), ("3", "2")),
        "list too long": (lambda: dist.all_gather([part.clone()] * 4, part), ("3", "4")),
        "list dtype": (lambda: dist.all_gather([part.int()] * 3, part), ("dtype",)),
    }


def bad_reductions(rank: int) -> dict[str, Bad]:
    whole, part = torch.zeros(3 * 8), torch.ones(8)
    scatter, qscatter = dist.reduce_scatter_tensor, qcoll.reduce_scatter_tensor
    ints = torch.zeros(24, dtype=torch.int64)
    product = dist.ReduceOp.PRODUCT
    other = (rank + 1) % WORLD
    return {
        "too short": (lambda: scatter(part[:7], whole), ("3", "24", "7")),
        "too long": (lambda: scatter(part, torch.zeros(27)), ("3", "27", "8")),
        "dtype": (lambda: scatter(part.half(), whole), ("dtype", "Half", "Float")),
        "strided": (lambda: scatter(torch.zeros(8, 2)[:, 0], whole), ("contiguous",)),
        "overlap": (lambda: scatter(whole[other * 8 :][:8], whole), ("overlap", f"slice {rank}")),
        "half overlap": (lambda: scatter(whole[rank * 4 + 2 :][:8], whole), ("overlap",)),
        "op": (lambda: qscatter(part, whole, op="median"), ("median", "sum", "avg")),
        "codec and op": (
            lambda: qscatter(part, whole, op=product, codec="int8"),
            ("product", "premul_sum"),
        ),
        "codec of ints": (
            lambda: qscatter(ints[:8], ints, codec="int8"),
            ("Long[24]", "float32"),
        ),
        "list too short": (lambda: dist.reduce_scatter(part, [part] * 2), ("3", "2")),
        "list dtype": (lambda: dist.reduce_scatter(part, [part.int()] * 3), ("dtype",)),
        "all_reduce codec": (lambda: qcoll.all_reduce(ints, codec="int8"), ("Long[24]", "float32")),
        "all_reduce op": (
            lambda: qcoll.all_reduce(whole, op=dist.ReduceOp.MAX, codec="int4"),
            ("max", "sum"),
        ),
        "all_reduce block": (lambda: qcoll.all_reduce(whole, codec="int4:31"), ("int4:31", "32")),
    }


def bad_exchanges(_: int) -> dict[str, Bad]:
    rows, out = torch.zeros(6, 2), torch.zeros(6, 2)
    exchange = dist.all_to_all_single
    return {
        "does not divide": (
            lambda: exchange(torch.zeros(7), torch.zeros(7)),
            ("Float[7]", "3", "split_sizes"),
        ),
        "splits too few": (
            lambda: exchange(out, rows, [3, 3], [3, 3]),
            ("split_sizes", "3 numbers", "6"),
        ),
        "input sum": (
            lambda: exchange(out, rows, [2, 2, 2], [2, 2, 1]),
            ("input_split_sizes", "6"),
        ),
        "output sum": (
            lambda: exchange(out, rows, [2, 2, 9], [2, 2, 2]),
            ("output_split_sizes", "6"),
        ),
        "negative": (lambda: exchange(out, rows, [2, 2, 2], [9, -5, 2]), ("input_split_sizes",)),
        "negative output": (
            lambda: exchange(out, rows, [-1, 1, 6], [2, 2, 2]),
            ("output_split_sizes",),
        ),
        "overlap": (lambda: exchange(rows, rows), ("share memory",)),
        "partial overlap": (lambda: exchange(rows.view(-1)[:6], rows.view(-1)[3:9]), ("memory",)),
        "dtype": (lambda: exchange(out.half(), rows), ("dtype",)),
        "strided": (lambda: exchange(torch.zeros(6, 4)[:, :2], rows), ("contiguous",)),
        "codec of ints": (
            lambda: qcoll.all_to_all_single(out.int(), rows.int(), codec="int8"),
            ("int8", "int32"),
        ),
        "list too short": (lambda: dist.all_to_all([out] * 2, [rows] * 2), ("3", "2")),
        "lists differ": (lambda: dist.all_to_all([out] * 3, [rows] * 2), ("3", "2")),
        "list dtype": (lambda: dist.all_to_all([out] * 3, [rows.int()] * 3), ("dtype",)),
    }


def good_calls() -> None:
    """One of each kind, with results."""
    rank = dist.get_rank()
    whole = torch.empty(3 * 4)
    dist.all_gather_into_tensor(whole, torch.full((4,), float(rank)))
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    part = torch.empty(4)
    dist.reduce_scatter_tensor(part, whole)
    assert part.tolist() == [3.0 * rank] * 4
    dist.all_reduce(part)
    assert part.tolist() == [9.0] * 4
    out = torch.empty(3)
    dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank)
    assert out.tolist() == [rank, 10.0 + rank, 20.0 + rank]
    dist.broadcast(out, 2)
    assert out.tolist() == [2.0, 12.0, 22.0]


KINDS: dict[str, Callable[[int], dict[str, Bad]]] = {
    "gathers": bad_gathers,
    "reductions": bad_reductions,
    "exchanges": bad_exchanges,
}


def one_bad_call(kind: str, name: str, guilty: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    good_calls()
    if rank in guilty:
        call, parts = KINDS[kind](rank)[name]
        text = expect_error(call, *parts)
        assert len(text) > 20
    good_calls()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, make in KINDS.items() for name in make(0)]
)
def test_a_bad_call_is_a_value_error_and_the_group_goes_on(kind: str, name: str) -> None:
    pool = shared_pool(WORLD, [2, 1])
    pool.run(one_bad_call, (kind, name, (0, 1, 2)), backend="qcoll", timeout=20)
    pool.run(one_bad_call, (kind, name, (1,)), backend="qcoll", timeout=20)


def asynchronous() -> None:
    whole = torch.zeros(24)
    for call in (
        lambda: dist.all_gather_into_tensor(whole, torch.zeros(9), async_op=True),
        lambda: qcoll.all_reduce(whole, codec="int8:1", async_op=True),
        lambda: dist.all_to_all_single(whole, whole, async_op=True),
    ):
        expect_error(call, "qcoll")  # at the call itself, not in wait()
    good_calls()


def test_asynchronous_calls_raise_at_the_call() -> None:
    shared_pool(WORLD, [2, 1]).run(asynchronous, backend="qcoll")


def sparse_and_empty() -> None:
    sparse = torch.eye(3).to_sparse()
    expect_error(lambda: qcoll.all_gather_into_tensor(torch.zeros(27), sparse), "sparse")
    expect_error(lambda: qcoll.all_reduce(sparse, codec="int8"), "float32")
    # Nothing to send is no error.
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0, 5), torch.empty(0, 5))
    dist.all_reduce(torch.empty(0))
    dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), [0, 0, 0], [0, 0, 0])
    # Shapes need not match, only numbers of elements.
    out = torch.empty(2, 3, 2)
    dist.all_gather_into_tensor(out, torch.ones(4, 1))
    assert out.eq(1).all()
    good_calls()


def test_sparse_tensors_are_refused_and_empty_ones_are_not() -> None:
    shared_pool(WORLD, [2, 1]).run(sparse_and_empty, backend="qcoll")


def wrong_group() -> None:
    everyone: Any = dist.new_group(backend="gloo")
    for call in (
        lambda: qcoll.stats(everyone),
        lambda: qcoll.all_reduce(torch.ones(1), group=everyone),
    ):
        expect_error(call, "gloo", 'backend="qcoll"')
    others = dist.new_group([0], backend="qcoll")
    if dist.get_rank() != 0:
        expect_error(lambda: qcoll.all_reduce(torch.ones(1), group=others), "not a member")


def test_groups_that_are_not_qcolls_are_named() -> None:
    shared_pool(WORLD, [2, 1]).run(wrong_group, backend="qcoll", fresh=True)
