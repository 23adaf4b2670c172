"""Infinities and NaNs in gradients reach the loss scaler of every rank, through FSDP2 and the
default recipe; and do not spread beyond their blocks, nor appear where all was finite."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qcoll
from qcoll.testing import shared_pool

LAYOUT = [2, 2]
WORLD = 4
ROWS, COLUMNS = 512, 256  # in fp32 and bf16 above the recipe's min_bytes
COUNT = ROWS * COLUMNS // WORLD  # of a shard
SCALE = 1024.0
#: An element takes its block of int8:256 with it in the first hop, and those of int4:128 that
#: lie on this in the second; blocks start anew with each shard.
MOST = 256
POLICIES = {
    "fp32 sums": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 sums": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}


class Weighted(nn.Module):
    """A loss whose gradient is what one gives it: the coefficients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        return (self.weight * coefficients).sum()  # type: ignore[no-any-return]


@dataclass
class Step:
    """What one rank saw of a step."""

    bad: list[int]
    """Places of its shard whose gradient is not finite."""
    rest: tuple[float, float]
    """Least and greatest gradient of the others, unscaled."""
    scale: tuple[float, float]
    """Of the scaler, before and after."""
    moved: bool
    """Whether the optimizer stepped."""


class Trainer:
    def __init__(self, policy: str) -> None:
        mesh = init_device_mesh("cpu", (WORLD,))
        self._group = mesh.get_group()
        self._model: Any = fully_shard(Weighted(), mesh=mesh, mp_policy=POLICIES[policy])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        # Scales back by 2 after a step with infinities, up by 2 after each without.
        self._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)

    def step(self, coefficients: torch.Tensor) -> Step:
        before, scale = self._weights(), self._scaler.get_scale()
        self._optimizer.zero_grad()
        self._scaler.scale(self._model(coefficients)).backward()
        gradient = self._model.weight.grad.to_local().flatten().double()
        finite = gradient.isfinite()
        rest = gradient[finite] / scale
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return Step(
            bad=(~finite).nonzero().flatten().tolist(),
            rest=(rest.min().item(), rest.max().item()) if rest.numel() else (0.0, 0.0),
            scale=(scale, self._scaler.get_scale()),
            moved=not torch.equal(before, self._weights()),
        )

    def check_coded(self) -> None:
        """The gradients went through the codecs of the recipe."""
        counted = qcoll.stats(self._group)["reduce_scatter_tensor"]
        assert counted["calls"] > 0
        assert counted["fallbacks"] == {}, counted

    def _weights(self) -> torch.Tensor:
        return self._model.weight.to_local().detach().clone()  # type: ignore[no-any-return]


def poisoned(policy: str, value: float) -> list[tuple[int, int, Step]]:
    """(owner, place in its shard, what this rank saw) for a poison from each rank for each."""
    trainer, draw = Trainer(policy), torch.Generator().manual_seed(int(value == value) + 5)
    seen = []
    for source, owner in itertools.product(range(WORLD), repeat=2):
        place = int(torch.randint(COUNT, (1,), generator=draw))
        coefficients = torch.ones(ROWS, COLUMNS)
        if dist.get_rank() == source:
            coefficients.view(-1)[owner * COUNT + place] = value
        seen.append((owner, place, trainer.step(coefficients)))
        clean = trainer.step(torch.ones(ROWS, COLUMNS))
        assert clean.bad == []
        assert clean.moved
        assert clean.scale[1] == 2 * clean.scale[0]
    trainer.check_coded()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_rank_skips_the_step(value: float, policy: str) -> None:
    ranks = shared_pool(WORLD, LAYOUT).run(poisoned, (policy, value), backend="qcoll", timeout=100)
    for rank, steps in enumerate(ranks):
        assert len(steps) == WORLD**2
        for owner, place, step in steps:
            assert step.scale == (SCALE, SCALE / 2), f"rank {rank}, of {owner}: {step}"
            assert not step.moved
            if rank == owner:
                assert place in step.bad
                assert len(step.bad) <= MOST
                assert max(step.bad) - min(step.bad) < MOST  # no farther than its blocks
            else:
                assert step.bad == []
            assert step.rest == (1.0, 1.0)  # ones are exact in all codecs


def large(policy: str) -> list[Step]:
    """Gradients whose scaled sum is the largest that the type has: of one rank, of all."""
    trainer = Trainer(policy)
    largest = torch.finfo(torch.bfloat16).max / SCALE
    steps = []
    for value in (largest if dist.get_rank() == 1 else 0.0, largest / WORLD):
        trainer._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
        steps.append(trainer.step(torch.full((ROWS, COLUMNS), value)))
    trainer.check_coded()
    return steps


@pytest.mark.parametrize("policy", POLICIES)
def test_finite_gradients_stay_finite(policy: str) -> None:
    """What rounding does to a block's scale must not push a finite number into infinity."""
    mean = torch.finfo(torch.bfloat16).max / SCALE / WORLD
    for steps in shared_pool(WORLD, LAYOUT).run(large, (policy,), backend="qcoll", timeout=100):
        for step in steps:
            assert step.bad == []
            assert step.scale == (SCALE, SCALE)
            assert step.moved
            assert 0.99 * mean < step.rest[0] <= step.rest[1] < 1.01 * mean
