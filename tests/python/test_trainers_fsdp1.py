"""FSDP1 on CPU: list gathers stay exact, gradients take the recipe; all exact it equals gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toy_training import WIDTH, Block, Run, Toy, loss_of, same_bits, same_but_for_order, train

from qcoll.testing import shared_pool

EXACT = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), "exact")
LAYOUTS = [[1, 1], [2, 2]]


def fsdp1(strategy: str = "FULL_SHARD", precision: str = "fp32", steps: int = 4) -> Run:
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        Toy(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=mixed if precision == "bf16" else None,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step_of(step: int) -> float:
        loss = loss_of(model, step)
        loss.backward()
        if precision == "clip":
            model.clip_grad_norm_(0.05)
        return loss.item()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()

    run = train(optimizer, step_of, steps, weights)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        run.weights |= {f"full {k}": v.clone() for k, v in model.state_dict().items()}
    return run


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("FULL_SHARD", "fp32"),
        ("FULL_SHARD", "bf16"),
        ("FULL_SHARD", "clip"),
        ("SHARD_GRAD_OP", "bf16"),
        ("NO_SHARD", "fp32"),
    ],
)
def test_exact_training_equals_gloos(strategy: str, precision: str, layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    case = (strategy, precision)
    theirs = pool.run(fsdp1, case, backend="gloo", timeout=100)
    ours: list[Run] = pool.run(fsdp1, case, backend="qcoll", pg_options=EXACT, timeout=100)
    for one, other in zip(ours, theirs, strict=True):
        if sum(layout) == 2:
            same_bits(one, other)
        else:
            same_but_for_order(one, other)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_recipe_trains_as_well_as_gloo(layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    case: tuple[Any, ...] = ("FULL_SHARD", "fp32", 20)
    exact = pool.run(fsdp1, case, backend="gloo", timeout=100)
    coded = pool.run(fsdp1, case, backend="qcoll", timeout=100)
    for one, other in zip(coded, exact, strict=True):
        assert one.losses != other.losses
        assert other.losses[-1] < 0.6 * other.losses[0]
        for mine, theirs in zip(one.losses, other.losses, strict=True):
            assert abs(mine - theirs) < 0.002 * theirs
        gathers, scatters = one.stats["all_gather"], one.stats["reduce_scatter_tensor"]
        assert gathers["calls"] == sum(gathers["fallbacks"].values())
        assert scatters["calls"] > sum(scatters["fallbacks"].values())
        # Half of the gradients cross, shared by the node's ranks: those of the blocks in 4 + 16/128
        # of 32 bits, those of the head as they are (below min_bytes).
        head = 20 * 4 * (WIDTH + 1) * WIDTH
        blocks = (scatters["payload_bytes"] - head) * (4.125 / 32)
        share = (head + blocks) / 2 / layout[0]
        assert share < scatters["wire_bytes"]["across_nodes"] < 1.02 * share
