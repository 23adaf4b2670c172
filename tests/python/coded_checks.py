"""Runs a coded collective on this rank and checks the result: bit for bit against the codec's
reference where a value is encoded once, within the bound of its encodings where values are summed.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from codec_reference import Codec, error_bound, round_trip, window_maxima
from collective_cases import (
    Doubles,
    Guarded,
    Names,
    assert_within,
    expected_sum,
    finish,
    result_bound,
    same_bits,
    sum_bound,
)

import qcoll


def as_encoded(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    """What ranks see of a tensor; a world of one has nothing to encode."""
    return tensor.clone() if dist.get_world_size() == 1 else round_trip(tensor, codec)


def check_gather(inputs: list[torch.Tensor], codec: str, async_op: bool, offset: int = 0) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = Guarded(inputs[0].numel() * world, inputs[0].dtype, offset)
    shard = inputs[rank].clone()
    work = qcoll.all_gather_into_tensor(out.tensor, shard, codec=codec, async_op=async_op)
    finish(work, async_op)
    expected = torch.cat([as_encoded(i, codec) for i in inputs])
    assert same_bits(out.check(), expected), (codec, inputs[0].dtype, inputs[0].numel())
    assert same_bits(shard, inputs[rank])


FACTOR = 0.3  # of PREMUL_SUM


def operations() -> list[tuple[str, object, float]]:
    """Name, operation, what the sum is multiplied with."""
    average = 1.0 / dist.get_world_size()
    return [
        ("sum", dist.ReduceOp.SUM, 1.0),
        ("avg", dist.ReduceOp.AVG, average),
        ("premul_sum", dist._make_nccl_premul_sum(FACTOR), FACTOR),
    ]


def check_reduce_scatter(
    inputs: list[torch.Tensor], codec: str, names: Names, async_op: bool, offset: int = 0
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype, count = inputs[0].dtype, inputs[0].numel() // world
    mine = [i[rank * count : (rank + 1) * count] for i in inputs]
    bound = sum_bound(mine, rank, names, codec, dtype)
    for name, op, scale in operations():
        out = Guarded(count, dtype, offset)
        work = qcoll.reduce_scatter_tensor(
            out.tensor, inputs[rank], op=op, codec=codec, async_op=async_op
        )
        finish(work, async_op)
        expected = expected_sum(mine, name, FACTOR if name == "premul_sum" else 1.0)
        allowed = result_bound(bound, expected, dtype, scale)
        assert_within(out.check(), expected, allowed, f"{codec} {name} {dtype} {count}")


def check_all_reduce(
    inputs: list[torch.Tensor], codec: str, names: Names, async_op: bool
) -> torch.Tensor:
    """All operations; returns the mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = inputs[0].dtype
    # Which rank sums an element is the library's choice, and where its blocks begin.
    bounds = [sum_bound(inputs, r, names, codec, dtype, aligned=False) for r in range(world)]
    for name, op, scale in operations():
        result = inputs[rank].clone()
        work = qcoll.all_reduce(result, op=op, codec=codec, async_op=async_op)
        finish(work, async_op)
        expected = expected_sum(inputs, name, FACTOR if name == "premul_sum" else 1.0)
        allowed = result_bound(np.max(bounds, axis=0), expected, dtype, scale)
        allowed = gathered_bound(allowed, expected, codec, names, dtype)
        assert_within(result, expected, allowed, f"all_reduce {codec} {name} {dtype}")
        if name == "avg":
            mean = result
    return mean


def gathered_bound(
    bound: Doubles, expected: Doubles, codec: str, names: Names, dtype: torch.dtype
) -> Doubles:
    """The sum is encoded once more on its way to all ranks: in the codec of the outermost level."""
    outermost = codec.split("/")[0 if len(set(names)) == 1 else -1]
    if outermost == "exact" or len(names) == 1:
        return bound
    largest = window_maxima(np.abs(expected) + bound, Codec.of(outermost).block or 1)
    return bound + error_bound(largest, outermost, dtype)
