"""Coded collectives. What is encoded once must arrive as the codec's reference says, bit for bit;
what is summed must stay within the bound of its encodings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from codec_reference import round_trip
from coded_checks import as_encoded, check_all_reduce, check_gather, check_reduce_scatter
from collective_cases import (
    FEW_LAYOUTS,
    FLOATS,
    LAYOUTS,
    RACKS,
    Guarded,
    Names,
    finish,
    names_of,
    normal,
    pool_of,
    same_bits,
)

import qcoll
from qcoll.testing import Nodes

GATHERS = ("int8", "int4:64", "bf16")
SUMS = ("int8", "int8:256/int4:128", "int4:32", "bf16/int8", "exact/int4:64", "int8/exact")
LARGE = (2305, 1025 * 64, 50257 * 8)


@pytest.fixture(scope="module", params=[*LAYOUTS, RACKS])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


@pytest.fixture(scope="module", params=FEW_LAYOUTS)
def few_nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object) -> list[object]:
    return pool_of(nodes).run(function, args=args, backend="qcoll")


# Encoded once: the shard of each rank, the part for each peer.


def gather_every_size() -> None:
    world = dist.get_world_size()
    for count in (*range(71), 127, 255, 256, 257):
        dtype = FLOATS[count % 3]
        inputs = [normal(r, count, dtype, count) for r in range(world)]
        check_gather(inputs, GATHERS[count // 3 % 3], async_op=count % 2 == 0, offset=count % 4)


def test_gathers_of_every_size(nodes: Nodes) -> None:
    run(nodes, gather_every_size)


def gather_large() -> None:
    for count, dtype in zip(LARGE, FLOATS, strict=True):
        inputs = [normal(r, count, dtype, count) for r in range(dist.get_world_size())]
        for codec in GATHERS:
            check_gather(inputs, codec, async_op=False, offset=1)


def test_large_gathers(few_nodes: Nodes) -> None:
    run(few_nodes, gather_large)


def huge(names: Names) -> None:
    """Activations of a transformer, and a length with large prime factors."""
    world = dist.get_world_size()
    for dtype in FLOATS:
        inputs = [normal(r, 699_051 // world * world, dtype, 2) for r in range(world)]
        check_gather(inputs, "int8", async_op=False)
        check_reduce_scatter(inputs, "int8/int4", names, async_op=True)
        check_all_reduce(inputs, "int8", names, async_op=False)
    inputs = [normal(r, 32 * 64 * 4096 // world * world, torch.bfloat16) for r in range(world)]
    check_gather([i[: len(i) // world] for i in inputs], "int8", async_op=False)
    check_reduce_scatter(inputs, "int8/int4", names, async_op=True)


@pytest.mark.full
@pytest.mark.parametrize("layout", [[2, 2], [2, 1]], ids=str)
def test_huge_tensors(layout: Nodes) -> None:
    pool = pool_of(layout)
    pool.run(huge, args=(names_of(layout),), backend="qcoll", timeout=250)


def exchange_coded() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 31, 33, 700, 4099):
        for dtype in FLOATS:
            codec = GATHERS[count % 3]
            inputs = [normal(r, count * world, dtype, count) for r in range(world)]
            parts = [i.split(count) if count else [i] * world for i in inputs]
            expected = [as_encoded(p[rank], codec) for p in parts]
            expected[rank] = parts[rank][rank]  # the own part never travels
            out = Guarded(count * world, dtype, offset=count % 4)
            qcoll.all_to_all_single(out.tensor, inputs[rank], codec=codec)
            assert same_bits(out.check(), torch.cat(expected)), (count, dtype, codec)
            sizes = [[(a * 7 + b * 3 + count) % 50 * 3 for b in range(world)] for a in range(world)]
            sent = [normal(r, sum(sizes[r]) * 2, dtype).reshape(-1, 2) for r in range(world)]
            taken = [sizes[r][rank] for r in range(world)]
            expected = [
                as_encoded(s.split(sizes[r])[rank], codec) if r != rank else s.split(sizes[r])[rank]
                for r, s in enumerate(sent)
            ]
            out = Guarded(sum(taken) * 2, dtype)
            work = qcoll.all_to_all_single(
                out.tensor.reshape(-1, 2),
                sent[rank],
                taken,
                sizes[rank],
                codec=codec,
                async_op=True,
            )
            finish(work, True)
            assert same_bits(out.check(), torch.cat(expected)), (count, dtype, codec, "uneven")


def test_all_to_all_encodes_for_each_destination(few_nodes: Nodes) -> None:
    run(few_nodes, exchange_coded)


# Summed: each contribution encoded once for each level, the own one not at all.


def sums_of_every_size(names: Names) -> None:
    world = dist.get_world_size()
    for count in (*range(71), 127):
        dtype, codec = FLOATS[count % 3], SUMS[count // 3 % len(SUMS)]
        inputs = [normal(r, count * world, dtype, count) for r in range(world)]
        check_reduce_scatter(inputs, codec, names, async_op=count % 2 == 0, offset=count % 4)
        check_all_reduce([i[:count] for i in inputs], codec, names, async_op=count % 2 == 1)


def test_sums_of_every_size(nodes: Nodes) -> None:
    run(nodes, sums_of_every_size, names_of(nodes))


def large_sums(names: Names) -> None:
    world = dist.get_world_size()
    for count, dtype, codec in zip(LARGE, FLOATS, SUMS, strict=False):
        inputs = [normal(r, count // world * world, dtype, count) for r in range(world)]
        check_reduce_scatter(inputs, codec, names, async_op=False, offset=1)
        check_all_reduce(inputs, codec, names, async_op=True)


def test_large_sums(few_nodes: Nodes) -> None:
    run(few_nodes, large_sums, names_of(few_nodes))


def own_contribution() -> None:
    """A rank that alone contributes to its slice gets it back as it was: on no hop is the own
    contribution encoded. The values would all change in an encoding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    slices = [normal(r, 1000, torch.float32) for r in range(world)]
    x = torch.zeros(world, 1000)
    x[rank] = slices[rank]
    out = torch.empty(1000)
    for codec in ("int8", "int4", "int8/int4:32"):
        assert world == 1 or not torch.equal(round_trip(slices[rank], "int4"), slices[rank])
        qcoll.reduce_scatter_tensor(out, x.reshape(-1), codec=codec)
        assert torch.equal(out, slices[rank]), codec


def test_the_own_contribution_is_exact(nodes: Nodes) -> None:
    run(nodes, own_contribution)
