"""Collectives in exact mode, on every layout: what moves arrives bit for bit, what is summed is
within the rounding of fp32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from coded_checks import FACTOR, operations
from collective_cases import (
    EXACT,
    FEW_LAYOUTS,
    FLOATS,
    LAYOUTS,
    MOVED,
    RACKS,
    Guarded,
    Names,
    assert_within,
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

from qcoll.testing import Nodes

LARGE = (2305, 1025 * 64, 50257 * 8, 699051)


@pytest.fixture(scope="module", params=[*LAYOUTS, RACKS])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


@pytest.fixture(scope="module", params=FEW_LAYOUTS)
def few_nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object) -> None:
    pool_of(nodes).run(function, args=args, backend="qcoll", pg_options=EXACT)


# Moves.


def gather(count: int, dtype: torch.dtype, async_op: bool, offset: int = 0) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [raw(r, count, dtype, count) for r in range(world)]
    shifted = torch.cat([raw(9, offset, dtype), inputs[rank]])[offset:]
    out = Guarded(count * world, dtype, offset)
    finish(dist.all_gather_into_tensor(out.tensor, shifted, async_op=async_op), async_op)
    assert same_bits(out.check(), torch.cat(inputs)), (count, dtype)
    assert same_bits(shifted, inputs[rank])
    outs = [Guarded(count, dtype, offset) for _ in range(world)]
    finish(dist.all_gather([o.tensor for o in outs], inputs[rank], async_op=async_op), async_op)
    assert all(same_bits(o.check(), i) for o, i in zip(outs, inputs, strict=True)), (count, dtype)


def splits_of(world: int, rows: int, seed: int) -> np.ndarray:
    """splits[a][b]: rows from rank a to rank b; some are zero."""
    return np.random.default_rng(seed).integers(0, rows + 1, (world, world)) * (
        np.random.default_rng(seed + 1).integers(0, 3, (world, world)) > 0
    )


def exchange(count: int, dtype: torch.dtype, async_op: bool, offset: int = 0) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [raw(r, count * world, dtype, count) for r in range(world)]
    expected = torch.cat([i[rank * count : (rank + 1) * count] for i in inputs])
    out = Guarded(count * world, dtype, offset)
    finish(dist.all_to_all_single(out.tensor, inputs[rank], async_op=async_op), async_op)
    assert same_bits(out.check(), expected), (count, dtype)
    uneven = splits_of(world, count, count)
    sent = [raw(r, int(uneven[r].sum()) * 3, dtype, count).reshape(-1, 3) for r in range(world)]
    parts = [sent[r].split(uneven[r].tolist()) for r in range(world)]
    taken = uneven[:, rank].tolist()
    out = Guarded(sum(taken) * 3, dtype, offset)
    work = dist.all_to_all_single(
        out.tensor.reshape(-1, 3), sent[rank], taken, uneven[rank].tolist(), async_op=async_op
    )
    finish(work, async_op)
    assert same_bits(out.check(), torch.cat([p[rank] for p in parts])), (count, dtype, uneven)
    outs = [Guarded(n * 3, dtype, offset) for n in taken]
    into = [o.tensor.reshape(-1, 3) for o in outs]
    finish(dist.all_to_all(into, list(parts[rank]), async_op=async_op), async_op)
    for r, o in enumerate(outs):
        assert same_bits(o.check(), parts[r][rank]), (count, dtype, uneven)


def every_size() -> None:
    for count in (*range(71), 127):
        dtype = MOVED[count % len(MOVED)]
        gather(count, dtype, async_op=count % 2 == 0)
        exchange(count, dtype, async_op=count % 2 == 1)
        gather(count, torch.bfloat16, async_op=count % 2 == 1, offset=count % 4)


def test_every_size_moves_exactly(nodes: Nodes) -> None:
    run(nodes, every_size)


def every_dtype() -> None:
    for dtype in MOVED:
        for count, offset in ((0, 0), (1, 1), (1000, 0), (1000, 1), (4099, 3)):
            for async_op in (False, True):
                gather(count, dtype, async_op, offset)
                exchange(count, dtype, async_op, offset)


def test_every_dtype_moves_exactly(few_nodes: Nodes) -> None:
    run(few_nodes, every_dtype)


def large_moves() -> None:
    for count, dtype in zip(LARGE, (*FLOATS, torch.uint8), strict=True):
        gather(count, dtype, async_op=False, offset=1)
        exchange(count // 5, dtype, async_op=True, offset=3)


def test_large_tensors_move_exactly(few_nodes: Nodes) -> None:
    run(few_nodes, large_moves)


def shapes() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for shape in ((64, 3, 7, 7), (1025, 64), (4, 64, 409), (), (1,), (2, 0, 3)):
        inputs = [normal(r, int(np.prod(shape, dtype=int)), torch.float32) for r in range(world)]
        everyone = torch.stack([i.reshape(shape) for i in inputs])
        stacked = torch.empty(world, *shape)
        dist.all_gather_into_tensor(stacked, everyone[rank])
        assert torch.equal(stacked, everyone)
        if shape:
            joined = torch.empty(world * shape[0], *shape[1:])
            dist.all_gather_into_tensor(joined, everyone[rank])
            assert torch.equal(joined, everyone.flatten(0, 1))
        wide = everyone.expand(world, *everyone.shape).contiguous()
        reduced = torch.empty(shape)
        dist.reduce_scatter_tensor(reduced, wide[rank])
        assert torch.allclose(reduced, everyone[rank] * world, rtol=1e-6)


def test_shapes(few_nodes: Nodes) -> None:
    run(few_nodes, shapes)


def strided_tensors() -> None:
    """Inputs may be strided, list forms may also write to strided outputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [normal(r, 35, torch.float32).reshape(5, 7).t() for r in range(world)]
    assert world == 1 or not inputs[rank].is_contiguous()
    joined = torch.empty(world * 7, 5)
    dist.all_gather_into_tensor(joined, inputs[rank])
    assert torch.equal(joined, torch.cat(inputs))
    outs = [torch.empty(5, 14)[:, ::2].t() for _ in range(world)]
    dist.all_gather(outs, inputs[rank])
    assert all(torch.equal(o, i) for o, i in zip(outs, inputs, strict=True))
    outs = [torch.empty(5, 7).t() for _ in range(world)]
    dist.all_to_all(outs, [inputs[rank] + r for r in range(world)])
    assert all(torch.equal(o, i + rank) for o, i in zip(outs, inputs, strict=True))
    reduced = torch.empty(5, 7).t()
    dist.reduce_scatter(reduced, [inputs[rank]] * world)
    total = torch.stack(inputs).double().sum(0)
    assert torch.allclose(reduced.double(), total, atol=1e-5)
    summed = normal(rank, 70, torch.float32).reshape(10, 7).t()[:, ::2]
    expected = torch.stack([normal(r, 70, torch.float64) for r in range(world)]).sum(0)
    dist.all_reduce(summed)
    assert torch.allclose(summed.double(), expected.reshape(10, 7).t()[:, ::2], atol=1e-5)


def test_strided_tensors(few_nodes: Nodes) -> None:
    run(few_nodes, strided_tensors)


def uneven_lists() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [raw(r, 10 + 7 * r, torch.int16) for r in range(world)]
    outs = [torch.empty_like(i) for i in inputs]
    dist.all_gather(outs, inputs[rank])
    assert all(torch.equal(o, i) for o, i in zip(outs, inputs, strict=True))


def test_lists_of_unequal_sizes(few_nodes: Nodes) -> None:
    run(few_nodes, uneven_lists)


# Sums.


def reduce(count: int, dtype: torch.dtype, names: Names, async_op: bool, offset: int = 0) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [normal(r, count * world, dtype, count) for r in range(world)]
    parts = [i.split(count) if count else [i] * world for i in inputs]
    mine = [p[rank] for p in parts]
    for name, op, scale in operations():
        expected = expected_sum(mine, name, FACTOR if name == "premul_sum" else 1.0)
        bound = result_bound(sum_bound(mine, rank, names, "exact", dtype), expected, dtype, scale)
        out = Guarded(count, dtype, offset)
        work = dist.reduce_scatter_tensor(out.tensor, inputs[rank], op=op, async_op=async_op)
        finish(work, async_op)
        assert_within(out.check(), expected, bound, f"reduce_scatter_tensor {name} {dtype} {count}")
        listed = Guarded(count, dtype, offset)
        work = dist.reduce_scatter(listed.tensor, list(parts[rank]), op=op, async_op=async_op)
        finish(work, async_op)
        assert same_bits(listed.check(), out.tensor), "the list form computes the same"


def reduce_together(
    count: int, dtype: torch.dtype, names: Names, async_op: bool, offset: int = 0
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [normal(r, count, dtype, count) for r in range(world)]
    raw_bound = np.max([sum_bound(parts, r, names, "exact", dtype) for r in range(world)], axis=0)
    for name, op, scale in operations():
        expected = expected_sum(parts, name, FACTOR if name == "premul_sum" else 1.0)
        bound = result_bound(raw_bound, expected, dtype, scale)
        together = torch.cat([parts[rank][:offset], parts[rank]])[min(offset, count) :]
        finish(dist.all_reduce(together, op=op, async_op=async_op), async_op)
        assert_within(together, expected, bound, f"all_reduce {name} {dtype} {count}")


def sums_of_every_size(names: Names) -> None:
    for count in (*range(71), 127):
        reduce(count, FLOATS[count % 3], names, async_op=count % 2 == 0, offset=count % 4)
        reduce_together(count, FLOATS[count % 3], names, count % 2 == 1, offset=count % 4)


def test_sums_of_every_size(nodes: Nodes) -> None:
    run(nodes, sums_of_every_size, names_of(nodes))


def large_sums(names: Names) -> None:
    for count, dtype in zip(LARGE[:3], FLOATS, strict=True):
        reduce(count // dist.get_world_size(), dtype, names, async_op=False, offset=1)
        reduce(count // 7, dtype, names, async_op=True)
        reduce_together(count, dtype, names, async_op=False, offset=1)


def test_large_sums(few_nodes: Nodes) -> None:
    run(few_nodes, large_sums, names_of(few_nodes))


def integer_sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float64):
        inputs = [(normal(r, 60, torch.float64) * 5).abs().to(dtype) for r in range(world)]
        total = torch.stack(inputs).sum(0).to(dtype)
        together = inputs[rank].clone()
        dist.all_reduce(together)
        assert torch.allclose(together.double(), total.double(), rtol=1e-14), dtype
        if 60 % world == 0:
            part = torch.empty(60 // world, dtype=dtype)
            dist.reduce_scatter_tensor(part, inputs[rank])
            mine = total.split(60 // world)[rank]
            assert torch.allclose(part.double(), mine.double(), rtol=1e-14), dtype


def test_integers_and_doubles_are_summed_in_their_own_type(few_nodes: Nodes) -> None:
    run(few_nodes, integer_sums)


def complex_sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [
        torch.view_as_complex(normal(r, 60, torch.float32).reshape(-1, 2)) for r in range(world)
    ]
    total = torch.stack(inputs).to(torch.complex128).sum(0)
    together = inputs[rank].clone()
    dist.all_reduce(together)
    assert torch.allclose(together.to(torch.complex128), total, atol=1e-5)
    if 30 % world == 0:
        part = torch.empty(30 // world, dtype=torch.complex64)
        dist.reduce_scatter_tensor(part, inputs[rank])
        mine = total.split(30 // world)[rank]
        assert torch.allclose(part.to(torch.complex128), mine, atol=1e-5)


def test_complex_sums(few_nodes: Nodes) -> None:
    run(few_nodes, complex_sums)


def no_overflow() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000 * world,), 60000.0, dtype=torch.float16)
    out = torch.empty(1000, dtype=torch.float16)
    dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.AVG)
    assert torch.equal(out, x[:1000])
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert torch.equal(x, torch.full_like(x, 60000.0))
    # A plain sum may overflow, and one that comes back into range must not have.
    signs = torch.full((64,), 60000.0 if rank % 2 == 0 else -60000.0, dtype=torch.float16)
    dist.all_reduce(signs)
    assert torch.equal(signs, torch.full_like(signs, 60000.0 if world % 2 else 0.0))


def test_fp16_is_summed_in_fp32(nodes: Nodes) -> None:
    run(nodes, no_overflow)
