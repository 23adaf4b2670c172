"""A report as tables for people, one for each verb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from qcoll.bench.results import Report

_NONE = "-"
_WIDEST = 1000
_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))


def print_report(console: Console, report: Report) -> None:
    """Where it was measured, then a table for each verb."""
    verbs = dict.fromkeys(row["verb"] for row in report["rows"])
    tables = [_table(report, verb) for verb in verbs]
    widen(console, tables)
    for line in describe(report):
        console.print(line, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def widen(console: Console, tables: Sequence[Table]) -> None:
    """Let all columns fit: rich would cut cells short, and a number cut short says nothing."""
    wide = console.options.update(width=_WIDEST)
    needed = [Measurement.get(console, wide, table).maximum for table in tables]
    console.width = max(console.width, *needed)


def describe(report: Report) -> list[str]:
    """Machine, versions and layout in two lines."""
    machine, versions = report["machine"], report["versions"]
    nodes = Counter(report["layout"]["nodes"])
    link = report["link"]
    if link is None:
        network = "no link between nodes (loopback)" if report["launcher"] != "mpirun" else ""
    elif link["rate"] is None:
        network = f"a namespace each, no cap, MTU {link['mtu']}"
    else:
        network = f"a namespace each, {link['rate']}, MTU {link['mtu']}"
    ranks = "+".join(map(str, nodes.values()))
    settings = report["config"]
    return [
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"kernels {machine['isa']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"{report['layout']['ranks']} ranks on {len(nodes)} node{'s' * (len(nodes) > 1)} ({ranks})"
        + (f", {network}" if network else "")
        + f"; {settings['rounds']} rounds in turns, time of the slowest rank"
        + (f", {settings['calls']} calls back to back" if settings["calls"] > 1 else ""),
    ]


def _table(report: Report, verb: str) -> Table:
    rows = [row for row in report["rows"] if row["verb"] == verb]
    peers = list(dict.fromkeys(name for row in rows for name in row["versus"]))
    place = " in place" if rows[0]["in_place"] else ""
    table = Table(title=f"{verb}{place}", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.caption = "Bytes are of one call, summed over ranks; ratio: without a codec over with it."
    if any(row["equal_bits"] is False and _keeps_own_exact(row) for row in rows):
        table.caption += " In place, the own slice of a gathered float32 tensor stays exact."
    for name in ("size", "count", "dtype", "codec"):
        table.add_column(
            name, justify="left" if name in ("dtype", "codec") else "right", no_wrap=True
        )
    heads = ["median\nµs", "p10..p90\nµs", "algbw\nGB/s", "busbw\nGB/s", "bytes in\nnodes"]
    heads += ["bytes\nacross", "ratio", "max\nerror", "relative\nL2", "same\nbits"]
    heads += [f"times faster\nthan {peer}" for peer in peers]
    lines = any(row["line_share"] is not None for row in rows)
    for head in heads + ["of line\nrate"] * lines:
        table.add_column(head, justify="right", no_wrap=True)
    for position, row in enumerate(rows):
        last = position + 1 == len(rows) or rows[position + 1]["count"] != row["count"]
        cells = _cells(row, peers)
        table.add_row(*(cells + [_percent(row["line_share"])] * lines), end_section=last)
    return table


def _cells(row: Mapping[str, Any], peers: list[str]) -> list[str]:
    time, wire = row["time_us"], row["wire"]
    return [
        short_size(row["size"]),
        str(row["count"]),
        row["dtype"],
        row["channel"],
        _micro(time["median"]),
        f"{_micro(time['p10'])}..{_micro(time['p90'])}",
        f"{row['algbw_GBps']:.3f}",
        f"{row['busbw_GBps']:.3f}",
        _bytes(wire["within_node"]),
        _bytes(wire["across_nodes"]),
        _NONE if row["ratio"] is None else f"{row['ratio']:.2f}",
        f"{row['error']['max_abs']:.2g}",
        f"{row['error']['relative_l2']:.2g}",
        {True: "yes", False: "NO", None: _NONE}[row["equal_bits"]],
        *(_versus(row["versus"].get(peer)) for peer in peers),
    ]


def _keeps_own_exact(row: Mapping[str, Any]) -> bool:
    """Whether ranks may differ: each would destroy its own weights by gathering them coded."""
    return bool(row["verb"] == "all_gather" and row["in_place"] and row["dtype"] == "float32")


def short_size(size: int) -> str:
    """``64M``, ``1K``; plain bytes where no unit divides it."""
    for unit, letter in _UNITS:
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def _micro(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _bytes(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def _versus(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return _NONE
    return f"{entry['median']:.3g} ({entry['min']:.3g}..{entry['max']:.3g})"
