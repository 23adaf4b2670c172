"""What ``qcoll bench codec`` leaves: rows and where they were measured, and the tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from qcoll import _native
from qcoll.bench import codec
from qcoll.bench.codec import Figure, Spread
from qcoll.bench.config import DTYPES, BenchError
from qcoll.bench.results import Report, machine, versions
from qcoll.bench.table import short_size, widen

_KIND = "qcoll bench codec"
_SCHEMA = 1
_NOTHING = dict.fromkeys(("median", "p10", "p90"))
_HEADS = ["GB/s\nmedian", "GB/s\np10..p90", "of\nmemcpy", "of plain\nfp32 add"]


def codec_report(
    rows: Sequence[str] | None,
    sizes: Sequence[int],
    codecs: Sequence[str],
    dtypes: Sequence[str],
    rounds: int,
    command: Sequence[str] = (),
    progress: Callable[[Figure], None] | None = None,
) -> Report:
    """Measures, as :func:`qcoll.bench.codec.measure`; everything as plain data.

    Keys: ``kind``, ``schema``, ``date``, ``command``, ``machine``, ``versions``, ``config``,
    ``rows``. A row has ``row`` (of the kernel table; of a yardstick the one whose rounds it was
    measured in), ``kernel``, ``codec`` (empty: a yardstick), ``dtype``, ``size``, and ``median``,
    ``p10`` and ``p90`` of ``speed_GBps``, ``to_memcpy`` and ``to_add`` (None for 16-bit types).

    Args:
        dtypes: keys of :data:`qcoll.bench.config.DTYPES`.

    Raises:
        BenchError: there is no such row, codec or dtype; a number is too small.
    """
    for name in dtypes:
        if name not in DTYPES:
            raise BenchError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    for what, given in (("codec", codecs), ("dtype", dtypes), ("size", sizes)):
        if not given:
            raise BenchError(f"no {what} given: there is nothing to measure")
    if rounds < 1:
        raise BenchError(f"rounds is {rounds}; give at least 1")
    wanted = tuple(rows or _native.load().isa_rows())
    found = []
    try:
        for row in wanted:
            figures = codec.measure(
                [row], sizes, codecs, [DTYPES[name] for name in dtypes], rounds, progress=progress
            )
            found += [_plain(row, figure) for figure in figures]
    except ValueError as error:
        raise BenchError(str(error)) from error
    return {
        "kind": _KIND,
        "schema": _SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "machine": machine(),
        "versions": versions(()),
        "config": {
            "rows": list(wanted),
            "sizes": list(sizes),
            "codecs": list(codecs),
            "dtypes": list(dtypes),
            "rounds": rounds,
        },
        "rows": found,
    }


def _plain(row: str, figure: Figure) -> dict[str, Any]:
    return {
        "row": row,
        "kernel": figure.kernel,
        "codec": figure.codec,
        "dtype": str(figure.dtype).removeprefix("torch."),
        "size": figure.size,
        "speed_GBps": _spread(figure.speed),
        "to_memcpy": _spread(figure.to_memcpy),
        "to_add": _NOTHING if figure.to_add is None else _spread(figure.to_add),
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "p10": spread.p10, "p90": spread.p90}


def print_codec_report(console: Console, report: Report) -> None:
    """Where it was measured, then a table for each row of the kernel table."""
    about, parts = report["machine"], report["versions"]
    line = (
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, "
        f"collectives use kernels {about['isa']}; "
        + ", ".join(f"{name} {version}" for name, version in parts.items())
        + f"; one thread, {report['config']['rounds']} rounds in turns"
    )
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    tables = []
    for row in report["config"]["rows"]:
        lines = [line for line in report["rows"] if line["row"] == row]
        if lines:
            tables.append(_table(row, lines))
        else:
            largest = short_size(codec.REFERENCE_LARGEST)
            note = f"{row}: a definition, measured up to {largest} only"
            console.print(note, highlight=False)
    if tables:
        widen(console, tables)
    for table in tables:
        console.print(table)


def _table(row: str, lines: list[dict[str, Any]]) -> Table:
    table = Table(title=f"kernels {row}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.caption = "GB of unencoded tensor. Shares: median (p10..p90) of ratios within a round."
    for name in ("dtype", "size", "kernel", "codec"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    for position, line in enumerate(lines):
        speed = line["speed_GBps"]
        after = lines[position + 1] if position + 1 < len(lines) else None
        last = after is None or (after["dtype"], after["size"]) != (line["dtype"], line["size"])
        table.add_row(
            line["dtype"],
            short_size(line["size"]),
            line["kernel"],
            line["codec"] or "-",
            f"{speed['median']:.2f}",
            f"{speed['p10']:.2f}..{speed['p90']:.2f}",
            _share(line["to_memcpy"]),
            _share(line["to_add"]),
            end_section=last,
        )
    return table


def _share(ratio: dict[str, float | None]) -> str:
    if ratio["median"] is None:
        return "-"
    return f"{ratio['median']:.0%} ({ratio['p10']:.0%}..{ratio['p90']:.0%})"
