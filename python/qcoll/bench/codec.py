"""How fast the codec kernels of this machine are, next to memcpy and a plain sum.

Chunks are encoded into and decoded from a small ring of slots, as in a collective. Times are those
of the CPU for one thread. Every round measures each kernel and the yardsticks once, close together,
and ratios are taken within a round: a machine that is shared with others disturbs both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qcoll import _native

if TYPE_CHECKING:
    from qcoll._C import CodecTimer

KIB = 1 << 10
MIB = 1 << 20
SIZES = (256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB)
CODECS = ("int8:256", "int4:128")
DTYPES = (torch.float32, torch.bfloat16)
# The reference is a definition, one element after the other.
REFERENCE_LARGEST = 256 * KIB


@dataclass(frozen=True)
class Spread:
    """What the rounds gave: the median, and the values that a tenth were below and above."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return Spread(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        )


@dataclass(frozen=True)
class Figure:
    """One kernel at one size.

    ``kernel`` is "encode", "decode", "decode_add" (onto a float32 tensor of that size),
    "requantize" (chunks of four peers summed and encoded again), or a yardstick: "memcpy", "add".
    ``row`` and ``codec`` of a yardstick are empty. Speeds are in GB (10^9 bytes) of unencoded
    tensor for each second, and of all four inputs for "requantize".
    """

    row: str
    kernel: str
    codec: str
    dtype: torch.dtype
    size: int  # bytes
    speed: Spread
    to_memcpy: Spread  # this kernel's speed / that of memcpy in the same round
    to_add: Spread | None  # the same for a plain sum of float32; None for other types


Pass = Callable[[int], float]


def _kernels(
    timer: CodecTimer, row: str, codecs: Sequence[str], dtype: torch.dtype
) -> dict[tuple[str, str, str], Pass]:
    def bound(call: Callable[[str, str, int], float], codec: str) -> Pass:
        return lambda repeats: call(row, codec, repeats)

    calls = {"encode": timer.encode, "decode": timer.decode}
    if dtype == torch.float32:  # sums are
        calls |= {"decode_add": timer.decode_add, "requantize": timer.requantize}
    return {
        (row, kernel, codec): bound(call, codec)
        for kernel, call in calls.items()
        for codec in codecs
    }


def _repeats(run: Pass, least_seconds: float) -> int:
    run(1)
    return max(1, round(least_seconds / max(run(1), 1e-9)))


def _measure(
    row: str,
    dtype: torch.dtype,
    size: int,
    codecs: Sequence[str],
    rounds: int,
    least_seconds: float,
) -> list[Figure]:
    generator = torch.Generator().manual_seed(0)
    source = torch.empty(size // dtype.itemsize, dtype=dtype).normal_(generator=generator)
    timer = _native.load().CodecTimer(source, torch.zeros_like(source))
    passes: dict[tuple[str, str, str], Pass] = {("", "memcpy", ""): timer.copy}
    if dtype == torch.float32:
        passes["", "add", ""] = timer.add
    passes |= _kernels(timer, row, codecs, dtype)
    repeats = {key: _repeats(run, least_seconds) for key, run in passes.items()}
    speeds: dict[tuple[str, str, str], list[float]] = {key: [] for key in passes}
    for _ in range(rounds):
        for key, run in passes.items():
            speeds[key].append(size / run(repeats[key]) / 1e9)

    def ratio(values: Sequence[float], yardstick: str) -> Spread | None:
        to = speeds.get(("", yardstick, ""))
        return None if to is None else Spread.of([v / t for v, t in zip(values, to, strict=True)])

    figures = []
    for (name, kernel, codec), values in speeds.items():
        to_memcpy = ratio(values, "memcpy")
        assert to_memcpy is not None
        figures.append(
            Figure(
                name, kernel, codec, dtype, size, Spread.of(values), to_memcpy, ratio(values, "add")
            )
        )
    return figures


def measure(
    rows: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    codecs: Sequence[str] = CODECS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    rounds: int = 15,
    least_seconds: float = 0.008,
    progress: Callable[[Figure], None] | None = None,
) -> list[Figure]:
    """Measures every kernel.

    Args:
        rows: names of kernel rows; all that this machine runs if None.
        sizes: bytes of unencoded tensor.
        codecs: block codecs.
        dtypes: of float32, bfloat16 and float16.
        rounds: how often each kernel is measured.
        least_seconds: short kernels are repeated to take as long in each round.
        progress: called with each figure.

    Returns:
        The figures of the kernels and, for each row, type and size, of the yardsticks beside them.
    """
    figures = []
    for row in rows or _native.load().isa_rows():
        for dtype in dtypes:
            for size in sizes:
                if row == "reference" and size > REFERENCE_LARGEST:
                    continue
                for figure in _measure(row, dtype, size, codecs, rounds, least_seconds):
                    figures.append(figure)
                    if progress is not None:
                        progress(figure)
    return figures
