"""A small regression task for the trainers: the same data, whatever the backend and sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import qcoll

WIDTH, HIDDEN, BLOCKS, BATCH = 96, 384, 2, 16


class Block(nn.Module):
    """A residual block; in bf16 its weights have 144 KiB, above qcoll's min_bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)  # type: ignore[no-any-return]


class Toy(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank: a fixed non-linear map to be learnt."""
    generator = torch.Generator().manual_seed(100_000 + 1000 * step + 10 * rank + micro)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    teacher = torch.Generator().manual_seed(7)
    weight = torch.randn(WIDTH, WIDTH, generator=teacher) / WIDTH**0.5
    return x, torch.tanh(x @ weight)


@dataclass
class Run:
    """What one rank reports of a training."""

    losses: list[float] = field(default_factory=list)  # means over the ranks
    first: dict[str, torch.Tensor] = field(default_factory=dict)  # weights after one step
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end
    stats: dict[str, Any] = field(default_factory=dict)  # of all groups; empty without qcoll


def mean_over_ranks(value: float) -> float:
    """Through objects, which every backend carries exactly."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return sum(values) / len(values)


def train(
    optimizer: torch.optim.Optimizer,
    step_of: Callable[[int], float],
    steps: int,
    local_weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    groups: Sequence[Any] = (None,),
) -> Run:
    """``step_of`` runs forward and backward of one step and returns this rank's loss.

    ``groups`` are those that the trainer communicates in.
    """
    run = Run()
    groups = groups if dist.get_backend() == "qcoll" else ()
    for group in groups:
        qcoll.reset_stats(group)
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_of(step)
        optimizer.step()
        run.losses.append(mean_over_ranks(loss))
        if step == 0:
            run.first = {name: w.detach().clone() for name, w in local_weights()}
    run.weights = {name: w.detach().clone() for name, w in local_weights()}
    for group in groups:
        run.stats |= qcoll.stats(group)
    return run


def loss_of(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    x, target = batch(step, dist.get_rank(), micro)
    return torch.nn.functional.mse_loss(model(x).float(), target)


def same_bits(a: Run, b: Run) -> None:
    assert a.losses == b.losses
    assert a.weights.keys() == b.weights.keys()
    for name, weight in a.weights.items():
        assert torch.equal(weight, b.weights[name]), name
        assert weight.dtype == b.weights[name].dtype


def same_but_for_order(a: Run, b: Run, bound: float = 1e-6) -> None:
    """After one step: sums of more than two gradients may be added in another order."""
    assert a.first.keys() == b.first.keys()
    for name, weight in a.first.items():
        other = b.first[name]
        error = (weight.double() - other.double()).abs().max() if weight.numel() else 0.0
        scale = weight.double().abs().max() if weight.numel() else 1.0
        assert error <= bound * scale, f"{name}: {error} against {scale}"
    assert abs(a.losses[0] - b.losses[0]) <= bound * abs(a.losses[0])
