"""Measured times as a cost model: the file that option ``tuning`` reads, and what it decides.

libqcoll's comm/cost_model.h defines the format and how times between the points are predicted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from qcoll import _native
from qcoll.bench.config import BenchError, Config, Place
from qcoll.bench.results import machine, versions

#: The verbs that are chosen by time, with the codecs that are measured for each beside exact: those
#: of the default recipe, and for all_reduce, which it leaves exact, the one that is usual.
RECIPE = {
    "all_gather": ("int8:256",),
    "reduce_scatter": ("int8:256/int4:128",),
    "all_reduce": ("int8:256",),
}
_FIRST_LINE = "qcoll-tuning 1"
# Leaving a barrier takes longer than a small call: several of them follow each other.
_SMALL = 1 << 20
_SMALL_CALLS = 8
# Times of a series are told apart at a tenth of a microsecond.
_DIGITS = 1


@dataclass(frozen=True)
class Series:
    """One line of the file: microseconds by bytes."""

    layout: str
    collective: str
    dtype: str
    codec: str
    points: tuple[tuple[int, float], ...]

    def line(self) -> str:
        """As the file has it."""
        points = (f"{size}:{time:.{_DIGITS}f}" for size, time in self.points)
        return " ".join((self.layout, self.collective, self.dtype, self.codec, *points))


@dataclass(frozen=True)
class Crossover:
    """Where a codec is faster than exact.

    Attributes:
        coded: ranges of bytes, by the model; the end of the last is None where it has none.
        gain: times faster than exact at the largest size measured.
    """

    layout: str
    collective: str
    dtype: str
    codec: str
    coded: tuple[tuple[int, int | None], ...]
    gain: float


def configs(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    codecs: Sequence[str] = (),
    **how: Any,
) -> list[Config]:
    """What has to be measured.

    Args:
        dtypes: keys of :data:`qcoll.bench.config.DTYPES`.
        codecs: instead of the recipe's, for every verb.
        how: further fields of :class:`Config`.
    """
    small = tuple(size for size in sizes if size <= _SMALL)
    large = tuple(size for size in sizes if size > _SMALL)
    return [
        Config(
            verbs=(verb,),
            sizes=some,
            calls=_calls(some is small, dtype),
            codecs=("exact", *(codec for codec in codecs or own if codec != "exact")),
            dtype=dtype,
            **how,
        )
        for dtype in dtypes
        for verb, own in RECIPE.items()
        for some in (small, large)
        if some
    ]


def _calls(small: bool, dtype: str) -> int:
    # Sums in place grow with every call, and those of fp16 would soon be infinite.
    return _SMALL_CALLS if small and dtype != "fp16" else 1


def series_of(measured: Mapping[str, Any]) -> list[Series]:
    """From what :func:`qcoll.bench.measure.measure_all` found: medians of the slowest rank."""
    points: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in (row for rows in measured["rows"] for row in rows):
        key = (row["verb"], row["dtype"], row["codec"])
        # Small sizes may be cut to the same whole number of elements for each rank.
        time = round(row["time_us"]["median"], _DIGITS)
        points.setdefault(key, {})[row["size"]] = max(time, 10.0**-_DIGITS)
    return [
        Series(measured["layout"], *key, tuple(sorted(times.items())))
        for key, times in points.items()
    ]


def crossovers(series: Sequence[Series]) -> list[Crossover]:
    """Of every codec against exact, on the lines between the points, as the model has them."""
    exact = {
        (one.layout, one.collective, one.dtype): one.points
        for one in series
        if one.codec == "exact"
    }
    return [
        Crossover(
            one.layout,
            one.collective,
            one.dtype,
            one.codec,
            _faster(exact[one.layout, one.collective, one.dtype], one.points),
            exact[one.layout, one.collective, one.dtype][-1][1] / one.points[-1][1],
        )
        for one in series
        if one.codec != "exact"
    ]


def _faster(
    exact: Sequence[tuple[int, float]], coded: Sequence[tuple[int, float]]
) -> tuple[tuple[int, int | None], ...]:
    """Both have the same sizes. The first points hold for all below, the last ratio beyond."""
    gains = [(size, slow - quick) for (size, slow), (_, quick) in zip(exact, coded, strict=True)]
    ranges: list[tuple[int, int | None]] = []
    begin = 0 if gains[0][1] > 0 else None
    for (low, before), (high, after) in itertools.pairwise(gains):
        if (before > 0) == (after > 0):
            continue
        at = round(low + (high - low) * before / (before - after))
        if begin is None:
            begin = at
        else:
            ranges.append((begin, at))
            begin = None
    return (*ranges, (begin, None)) if begin is not None else tuple(ranges)


def write_tuning(
    path: Path, series: Sequence[Series], place: Place | None, keep_others: bool
) -> None:
    """Writes the file, all or nothing; it has been read back by the core.

    Args:
        keep_others: leave what an earlier file says of other layouts.
    """
    layout = series[0].layout
    about, parts = machine(), versions(())
    link = "" if place is None or place.link is None else f", link {place.link}, MTU {place.mtu}"
    lines = [
        _FIRST_LINE,
        "# layout collective dtype codecs BYTES:MICROSECONDS ...",
        f"# {datetime.now(timezone.utc).isoformat(timespec='seconds')}: layout {layout}{link}; "
        f"{about['cpu']}, {about['cores']} cores, kernels {about['isa']}; "
        + ", ".join(f"{name} {version}" for name, version in parts.items()),
        *(one.line() for one in series),
    ]
    if keep_others and path.exists():
        lines += _others(path, layout)
    with _draft_of(path) as draft:
        draft.write_text("\n".join(lines) + "\n")
        check_tuning(draft)
        draft.replace(path)


def check_target(path: Path, keep_others: bool) -> None:
    """BenchError where :func:`write_tuning` would fail, before much time is spent."""
    if keep_others and path.exists():
        check_tuning(path)
    with _draft_of(path) as draft:
        draft.touch()
        if path.is_dir():
            raise BenchError(f"{path} is a folder; give -o a file")


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """A file beside ``path``, gone afterwards."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
    except OSError as error:
        raise BenchError(f"the cost model cannot be written to {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _others(path: Path, layout: str) -> list[str]:
    """Lines of other layouts, each with the comments that precede it."""
    check_tuning(path)
    kept: list[str] = []
    comments: list[str] = []
    for line in path.read_text().splitlines()[2:]:
        words = line.split()
        if not words or words[0].startswith("#"):
            comments.append(line)
            continue
        if words[0] != layout:
            kept += [*comments, line]
        comments = []
    return kept


def check_tuning(path: Path) -> None:
    """BenchError when there is no cost model that the core reads."""
    try:
        _native.load().Options().set("tuning", str(path))
    except ValueError as error:
        raise BenchError(str(error)) from error
