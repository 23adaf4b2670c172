"""The rank program of the demo: train, measure, and let rank 0 write down the results.

It knows nothing of how a backend works: it names one to ``init_process_group``. Started once per
rank by :mod:`examples.demo.run`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from examples.demo.measure import FreeAllGather, FreeReduceScatter, Meter, PayloadObserver
from examples.demo.model import GPT, GPTConfig, gathered, shard, units
from examples.demo.text import load_corpus
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

PROGRESS = "progress "
"""What a line of rank 0 that reports progress begins with; JSON follows."""

_PEAK_RATE = 1e-3
_RISE_STEPS = 40
# Steps before measuring begins: connections open, buffers and congestion windows grow.
SETTLE_STEPS = 4
_FREE_STEPS = 20
# Validation windows per rank and forward pass; and for the loss curve, its points
# and the windows per rank of each.
_ROWS = 64
_CURVE_POINTS = 8
_CURVE_ROWS = 256


def learning_rate(step: int, steps: int) -> float:
    """A short rise, then half a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return _PEAK_RATE * min((step + 1) / _RISE_STEPS, 1) * (0.05 + 0.95 * cosine)


class Trainer:
    """One rank's model, optimizer and data. Every rank draws its own batches, the same each run."""

    def __init__(self, corpus: Path, steps: int, batch: int, seed: int) -> None:
        self.config = GPTConfig()
        self.steps = steps
        self._batch = batch
        train, validation = load_corpus(corpus)
        self._train = torch.from_numpy(train)
        self._validation = self._deal(torch.from_numpy(validation))
        torch.manual_seed(seed)  # the same weights on every rank, before they are sharded
        self.model = GPT(self.config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        shard(self.model, init_device_mesh("cpu", (dist.get_world_size(),)))
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._draw = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())

    def step(self, number: int) -> float:
        """One step of training; this rank's loss in nats per character."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(number, self.steps)
        length = self.config.context + 1
        starts = torch.randint(len(self._train) - length, (self._batch,), generator=self._draw)
        rows = torch.stack([self._train[i : i + length] for i in starts.tolist()]).long()
        loss: Tensor = self.model(rows[:, :-1], rows[:, 1:]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def validate(self, rows: int | None = None) -> Tensor:
        """Loss of each held-out window, in the same order on every rank and in every run.

        Uses the gathered weights, which all ranks share. ``rows`` limits the windows per rank,
        spread over the whole set. Collective. Shape (windows,), fp32.
        """
        stride = max(1, len(self._validation) // rows) if rows else 1
        with gathered(self.model):
            mine = torch.cat(
                [
                    self.model(window[:, :-1].long(), window[:, 1:].long())
                    for window in torch.split(self._validation[::stride], _ROWS)
                ]
            )
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone, dim=1).flatten()

    def make_communication_free(self) -> None:
        """From here on FSDP's collectives send nothing; what the model learns is meaningless."""
        for unit in units(self.model):
            unit.set_custom_all_gather(FreeAllGather())
            unit.set_custom_reduce_scatter(FreeReduceScatter())

    def _deal(self, characters: Tensor) -> Tensor:
        """This rank's windows of the validation text, shape (windows, context + 1)."""
        windows = characters.unfold(0, self.config.context + 1, self.config.context)
        world = dist.get_world_size()
        return windows[: len(windows) // world * world][dist.get_rank() :: world]


def train(
    trainer: Trainer, meter: Meter, stop_after: int, report: Callable[..., None]
) -> dict[str, Any]:
    """Train ``stop_after`` steps and measure them; losses per step and the validation curve.

    The first steps and validation are left out of the measurement. Collective.
    """
    losses: list[float] = []
    curve: list[tuple[int, float]] = []
    observer = PayloadObserver()
    check_every = math.ceil(trainer.steps / _CURVE_POINTS)
    measured = 0
    for number in range(stop_after):
        if number == SETTLE_STEPS:
            meter.start()
        if number == 1:
            with observer:
                losses.append(trainer.step(number))
        else:
            losses.append(trainer.step(number))
        measured += number >= SETTLE_STEPS
        report(step=number + 1, loss=losses[-1])
        last = number + 1 == stop_after
        if measured and (last or (number + 1) % check_every == 0):
            meter.stop(measured)
            measured = 0
            curve.append((number + 1, trainer.validate(_CURVE_ROWS).mean().item()))
            if not last:
                meter.start()
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return {
        "train_losses": (mean / dist.get_world_size()).tolist(),
        "validation_curve": curve,
        "payload": dict(observer.bytes),
    }


def main() -> None:
    """Parse the command line, train, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="for init_process_group")
    parser.add_argument("--corpus", required=True, type=Path, help="as text.Corpus.save wrote it")
    parser.add_argument("--result", required=True, type=Path, help="JSON file that rank 0 writes")
    parser.add_argument("--interface", help="network interface whose bytes count, one per node")
    parser.add_argument("--steps", type=int, default=200, help="length of the schedule")
    parser.add_argument("--stop-after", type=int, help="train only so many steps of the schedule")
    parser.add_argument("--batch", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stop_after = min(args.stop_after or args.steps, args.steps)
    if stop_after <= SETTLE_STEPS:
        parser.error(f"{stop_after} steps are too few: {SETTLE_STEPS} pass before measuring begins")

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    def report(**values: object) -> None:
        if rank == 0:
            print(PROGRESS + json.dumps(values), flush=True)

    trainer = Trainer(args.corpus, args.steps, args.batch, args.seed)
    counts = args.interface if os.environ["LOCAL_RANK"] == "0" else None
    meter = Meter(args.backend, counts)
    result = train(trainer, meter, stop_after, report)
    losses = None
    if stop_after == args.steps:  # a run cut short has nothing to be compared
        report(phase="validation")
        losses = trainer.validate()
    report(phase="steps without communication")
    free = measure_free_steps(trainer, args.backend)
    result.update(
        backend=args.backend,
        steps=stop_after,
        world=dist.get_world_size(),
        parameters=trainer.parameters,
        step=meter.summary(),
        seconds_without_communication=free,
        validation_loss=None if losses is None else losses.double().mean().item(),
    )
    if rank == 0:
        args.result.write_text(json.dumps(result, indent=1))
        if losses is not None:
            np.save(args.result.with_suffix(".npy"), losses.numpy())
    dist.barrier()
    dist.destroy_process_group()


def measure_free_steps(trainer: Trainer, backend: str) -> float:
    """Seconds of a step whose collectives cost nothing, on the same ranks and cores. Collective.

    The difference to a whole step is what communication costs: bytes on the wire, the backend's
    own work, and waiting in it. Spoils the model.
    """
    trainer.make_communication_free()
    meter = Meter(backend, None)
    for _ in range(SETTLE_STEPS):
        trainer.step(trainer.steps)
    meter.start()
    for _ in range(_FREE_STEPS):
        trainer.step(trainer.steps)
    meter.stop(_FREE_STEPS)
    return meter.seconds / meter.steps


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # No interpreter teardown: gloo's threads may still hold the last collective's tensors, and when
    # they let go of them while the interpreter is taken down, torch aborts the process.
    os._exit(0)
