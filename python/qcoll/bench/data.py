"""Inputs that every rank can generate for any other, and outputs checked in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Elements compared at a time: float64 copies of a large tensor would take many times its memory.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One call: a verb on tensors of ``count`` elements, as seen by one rank."""

    verb: str
    count: int
    dtype: torch.dtype
    rank: int
    world: int
    seed: int
    in_place: bool

    @property
    def slice_count(self) -> int:
        """Elements of a rank's slice."""
        return self.count // self.world

    @property
    def own(self) -> slice:
        """This rank's slice of the large tensor."""
        return slice(self.rank * self.slice_count, (self.rank + 1) * self.slice_count)

    def part(self, rank: int, index: int) -> torch.Tensor:
        """Slice ``index`` of the input of ``rank``: normal numbers from a seed of its own."""
        seed = (self.seed * 4099 + rank) * 4099 + index
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.slice_count, generator=generator).to(self.dtype)

    def fill(self, tensor: torch.Tensor) -> None:
        """This rank's input into ``tensor``."""
        for index, piece in enumerate(torch.split(tensor, self.slice_count)):
            piece.copy_(self.part(self.rank, index))

    def expected(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Parts of this rank's output with the float64 numbers that belong there.

        Of an all-reduce each rank takes its own slice: all ranks together cover the result, and
        that their results are the same is checked by their bits.
        """
        n = self.slice_count
        if self.verb in ("all_gather", "all_to_all"):
            index = self.rank if self.verb == "all_to_all" else 0
            for rank in range(self.world):
                yield slice(rank * n, (rank + 1) * n), self.part(rank, index).double()
            return
        total = torch.zeros(n, dtype=torch.float64)
        for rank in range(self.world):
            total += self.part(rank, self.rank)
        yield (self.own if self.verb == "all_reduce" else slice(0, n)), total


class Buffers:
    """Tensors of one problem. All channels of one dtype share them.

    Attributes:
        input: what the verb reads; of an all-reduce the tensor itself.
        output: what it writes.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        large = torch.empty(problem.count, dtype=problem.dtype)
        if problem.verb == "all_reduce":
            other = large
        elif problem.verb == "all_to_all":
            other = torch.empty_like(large)
        elif problem.in_place:
            other = large[problem.own]
        else:
            other = torch.empty(problem.slice_count, dtype=problem.dtype)
        gather = problem.verb == "all_gather"
        self.input, self.output = (other, large) if gather else (large, other)
        problem.fill(self.input)
        # What calls overwrite of their own input, and what was there.
        overlap = problem.in_place or problem.verb == "all_reduce"
        self._overwritten = other if overlap else None
        self._pristine = other.clone() if overlap else None

    def restore(self) -> None:
        """Undo what a call in place did to its input."""
        if self._overwritten is not None and self._pristine is not None:
            self._overwritten.copy_(self._pristine)

    def poison(self) -> None:
        """Make an output that nobody wrote look wrong, whatever an earlier call left there."""
        self.output.fill_(float("nan"))
        self.restore()


def deviation(problem: Problem, output: torch.Tensor) -> dict[str, float]:
    """Largest absolute error, and sums of squares of error and of the expected numbers."""
    largest = squares = norm = 0.0
    for where, expected in problem.expected():
        blocks = zip(torch.split(output[where], _BLOCK), torch.split(expected, _BLOCK), strict=True)
        for got, wanted in blocks:
            difference = got.double() - wanted
            worst = float(difference.abs().max())
            # max() of Python forgets a NaN that comes second.
            largest = worst if worst != worst else max(largest, worst)
            squares += float(difference.square().sum())
            norm += float(wanted.square().sum())
    return {"max_abs": largest, "squares": squares, "norm": norm}


def fingerprint(tensor: torch.Tensor) -> str:
    """A hash of the bits of a tensor."""
    raw: Any = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
