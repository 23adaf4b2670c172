"""Every reduction of torch on every dtype, for each verb that reduces, against exact results.

The values are small integers, for which every order and precision of the sum is exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import pool_of

from qcoll.testing import Nodes

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SIZE = 5


@pytest.fixture(scope="module", params=[[2, 2], [3]], ids=["2+2", "3"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) + rank) % 3 + 1).to(dtype)


def reduced(name: str, every: list[torch.Tensor]) -> torch.Tensor:
    """The exact result, in float64 or, for operations on bits, in int64."""
    dtype = every[0].dtype
    stack = torch.stack(every).to(torch.int64 if name[0] == "B" else torch.float64)
    world = len(every)
    results = {
        "SUM": lambda: stack.sum(0),
        "AVG": lambda: stack.sum(0) / world,
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
        "PREMUL_SUM": lambda: stack.sum(0) * 0.5,
        "BAND": lambda: _fold(torch.bitwise_and, stack),
        "BOR": lambda: _fold(torch.bitwise_or, stack),
        "BXOR": lambda: _fold(torch.bitwise_xor, stack),
    }
    return results[name]().to(dtype)


def _fold(function: Any, stack: torch.Tensor) -> torch.Tensor:
    result = stack[0]
    for row in stack[1:]:
        result = function(result, row)
    return result


def operation(name: str) -> Any:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(0.5)
    return getattr(dist.ReduceOp, name)


def check_all(name: str, dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [values(r, SIZE * world, dtype) for r in range(world)]
    expected, op = reduced(name, every), operation(name)
    mine = expected.split(SIZE)[rank]

    x = every[rank].clone()
    dist.all_reduce(x, op=op)
    assert torch.equal(x, expected), f"all_reduce {name} {dtype}"
    out = torch.empty(SIZE, dtype=dtype)
    dist.reduce_scatter_tensor(out, every[rank], op=op)
    assert torch.equal(out, mine), f"reduce_scatter_tensor {name} {dtype}"
    out = torch.empty(SIZE, dtype=dtype)
    dist.reduce_scatter(out, list(every[rank].split(SIZE)), op=op)
    assert torch.equal(out, mine), f"reduce_scatter {name} {dtype}"
    if name not in ("AVG", "PREMUL_SUM"):  # which gloo's reduce does not have
        x = every[rank].clone()
        dist.reduce(x, dst=1, op=op)
        assert rank != 1 or torch.equal(x, expected), f"reduce {name} {dtype}"


def float_reductions() -> None:
    for dtype in FLOATS:
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            check_all(name, dtype)
    for dtype in FLOATS:
        for name in ("AVG", "PREMUL_SUM"):
            if dtype != torch.float64:  # a sum that gloo makes, without these
                check_all(name, dtype)


def test_floats(nodes: Nodes) -> None:
    pool_of(nodes).run(float_reductions, backend="qcoll")


def integer_reductions() -> None:
    for dtype in INTEGERS:
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            check_all(name, dtype)


def test_integers(nodes: Nodes) -> None:
    pool_of(nodes).run(integer_reductions, backend="qcoll")


def refused_reductions() -> None:
    """What has no meaning is an error, at the call or at its wait, and the group goes on."""
    for name, dtype in (
        ("BAND", torch.float32),
        ("BXOR", torch.bfloat16),
        ("AVG", torch.int32),
        ("PREMUL_SUM", torch.int64),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
            dist.all_reduce(values(dist.get_rank(), 4, dtype), op=operation(name))
        assert "cannot be used any more" not in str(raised.value)
        check_all("SUM", torch.float32)


def test_senseless_reductions(nodes: Nodes) -> None:
    pool_of(nodes).run(refused_reductions, backend="qcoll")
