"""Collectives whose input lies in their output, as FSDP2 and Megatron call them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from codec_reference import round_trip
from collective_cases import (
    FEW_LAYOUTS,
    FLOATS,
    Guarded,
    Names,
    assert_within,
    digest,
    expected_sum,
    finish,
    names_of,
    normal,
    pool_of,
    raw,
    result_bound,
    same_bits,
    sum_bound,
)

import qcoll
from qcoll.testing import Nodes

SIZES = (1, 33, 1000, 70001)
OPTED_IN = {"all_gather": "int8", "all_gather_dtypes": ["fp32", "bf16"], "min_bytes": 0}


@pytest.fixture(scope="module", params=FEW_LAYOUTS)
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object, **options: object) -> list[object]:
    given = {"scope": "all", **options}
    return pool_of(nodes).run(function, args=args, backend="qcoll", pg_options=given)


def in_place(
    inputs: list[torch.Tensor], offset: int, call: Callable[[torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Calls with input = own slice of the output; the output."""
    rank, count = dist.get_rank(), inputs[0].numel()
    out = Guarded(count * dist.get_world_size(), inputs[0].dtype, offset)
    own = out.tensor[rank * count : (rank + 1) * count]
    own.copy_(inputs[rank])
    call(out.tensor, own)
    return out.check()


def gather_coded() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    digests = []
    for dtype in FLOATS:
        for count in SIZES:
            inputs = [normal(r, count, dtype, count) for r in range(world)]
            expected = [round_trip(i, "int8") for i in inputs]
            apart = torch.empty(count * world, dtype=dtype)
            qcoll.all_gather_into_tensor(apart, inputs[rank], codec="int8")
            assert same_bits(apart, torch.cat(expected)), (dtype, count)
            if dtype == torch.float32:
                expected[rank] = inputs[rank]  # it may be the only copy of the master weights
            for async_op in (False, True):

                def call(out: torch.Tensor, own: torch.Tensor, async_op: bool = async_op) -> None:
                    work = qcoll.all_gather_into_tensor(out, own, codec="int8", async_op=async_op)
                    finish(work, async_op)

                out = in_place(inputs, count % 4, call)
                assert same_bits(out, torch.cat(expected)), (dtype, count)
                if dtype != torch.float32:
                    digests.append(digest(out))
    return digests


def test_coded_gathers(nodes: Nodes) -> None:
    digests = run(nodes, gather_coded)
    assert all(d == digests[0] for d in digests)


def gather_by_options() -> None:
    """As a trainer does: the codec comes from the options."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, coded in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        inputs = [normal(r, 5000, dtype) for r in range(world)]
        expected = [round_trip(i, "int8") if coded else i for i in inputs]
        if dtype == torch.float32:
            expected[rank] = inputs[rank]
        out = in_place(inputs, 0, lambda o, i: dist.all_gather_into_tensor(o, i))
        assert same_bits(out, torch.cat(expected)), dtype


def test_fp32_that_is_opted_in_keeps_the_own_slice(nodes: Nodes) -> None:
    run(nodes, gather_by_options, **OPTED_IN)


def gather_by_default() -> None:
    world = dist.get_world_size()
    for dtype in FLOATS:
        inputs = [normal(r, 40000, dtype) for r in range(world)]
        coded = dtype != torch.float32
        expected = [round_trip(i, "int8") if coded else i for i in inputs]
        out = in_place(inputs, 0, lambda o, i: dist.all_gather_into_tensor(o, i))
        assert same_bits(out, torch.cat(expected)), dtype


def test_fp32_is_exact_by_default(nodes: Nodes) -> None:
    run(nodes, gather_by_default)


def gather_exactly() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (*FLOATS, torch.int64, torch.uint8, torch.bool):
        for count in SIZES:
            inputs = [raw(r, count, dtype, count) for r in range(world)]
            with qcoll.exact():
                out = in_place(inputs, count % 4, lambda o, i: dist.all_gather_into_tensor(o, i))
            assert same_bits(out, torch.cat(inputs)), (dtype, count)
            outs = [torch.empty_like(i) for i in inputs]
            outs[rank] = inputs[rank].clone()
            dist.all_gather(outs, outs[rank])
            assert all(same_bits(o, i) for o, i in zip(outs, inputs, strict=True)), (dtype, count)


def test_exact_gathers(nodes: Nodes) -> None:
    run(nodes, gather_exactly)


def reduce_in_place(names: Names) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        for count in SIZES:
            inputs = [normal(r, count * world, dtype, count) for r in range(world)]
            slices = [i.split(count) for i in inputs]
            mine = [s[rank] for s in slices]
            expected = expected_sum(mine, "avg")
            for codec in ("int8/int4", "exact"):
                x = inputs[rank].clone()
                own = x[rank * count : (rank + 1) * count]
                qcoll.reduce_scatter_tensor(own, x, op="avg", codec=codec)
                bound = sum_bound(mine, rank, names, codec, dtype)
                allowed = result_bound(bound, expected, dtype, 1 / world)
                assert_within(own, expected, allowed, f"{codec} {dtype} {count}")
                apart = torch.empty_like(own)
                qcoll.reduce_scatter_tensor(apart, inputs[rank], op="avg", codec=codec)
                assert same_bits(own, apart), "in place and apart are the same"
                others = [r for r in range(world) if r != rank]
                assert all(same_bits(x.split(count)[r], slices[rank][r]) for r in others)
            listed = [s.clone() for s in slices[rank]]
            dist.reduce_scatter(listed[rank], listed, op=dist.ReduceOp.AVG)
            assert same_bits(listed[rank], apart), "the list form is exact"


def test_reduce_scatters(nodes: Nodes) -> None:
    run(nodes, reduce_in_place, names_of(nodes))


def overlaps() -> None:
    """Memory that is shared in any other way is refused, before anything is sent or written."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = torch.arange(400.0 * world + 100)
    before = memory.clone()
    whole = memory[: 100 * world]
    wrong = (rank + 1) % world * 100 if world > 1 else 1
    begins = (rank * 100 + 1, rank * 100 + 50, wrong, 100 * world - 1)
    for begin, codec in itertools.product(begins, (None, "int8", "exact")):
        part = memory[begin : begin + 100]
        for async_op in (False, True):
            with pytest.raises(ValueError, match=f"all_gather_into_tensor.*overlap.*slice {rank}"):
                qcoll.all_gather_into_tensor(whole, part, codec=codec, async_op=async_op)
            with pytest.raises(ValueError, match=f"reduce_scatter_tensor.*overlap.*slice {rank}"):
                qcoll.reduce_scatter_tensor(part, whole, codec=codec, async_op=async_op)
    for begin, codec in itertools.product((0, 1, 99), (None, "int8", "exact")):
        shifted = memory[begin : begin + 100 * world]
        with pytest.raises(ValueError, match=r"all_to_all_single.*share memory"):
            qcoll.all_to_all_single(shifted, whole, codec=codec)
    assert torch.equal(memory, before)
    dist.all_reduce(torch.ones(10))  # the group goes on


def test_other_overlaps_are_refused(nodes: Nodes) -> None:
    run(nodes, overlaps)


def neighbours() -> None:
    """Tensors that touch, but do not overlap, are not refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = torch.zeros(100 * world + 200)
    whole = memory[100 : 100 + 100 * world]
    for part in (memory[:100], memory[100 + 100 * world :]):
        part.copy_(normal(rank, 100, torch.float32))
        qcoll.all_gather_into_tensor(whole, part)
        assert torch.equal(whole, torch.cat([normal(r, 100, torch.float32) for r in range(world)]))
        qcoll.reduce_scatter_tensor(part, whole, op="avg", codec="exact")
        assert torch.allclose(part, normal(rank, 100, torch.float32))
    empty = memory[:0]
    qcoll.all_gather_into_tensor(empty, memory[0:0], codec="int8")


def test_neighbours_are_not_refused(nodes: Nodes) -> None:
    run(nodes, neighbours)


def lists_that_overlap() -> None:
    """As with gloo: lists may hold the input in any place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [normal(r, 300_001, torch.float32) for r in range(world)]
    outs = [torch.empty_like(i) for i in inputs]
    outs[(rank + 1) % world] = inputs[rank].clone()
    dist.all_gather(outs, outs[(rank + 1) % world])
    assert all(same_bits(o, i) for o, i in zip(outs, inputs, strict=True))


def test_lists_that_overlap(nodes: Nodes) -> None:
    run(nodes, lists_that_overlap)
