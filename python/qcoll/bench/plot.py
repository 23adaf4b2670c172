"""Reports as curves over the size: bandwidth above, time below, one column for each verb."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from qcoll.bench.config import BenchError
from qcoll.bench.results import Report
from qcoll.bench.table import short_size

_COLOURS = ("#762a83", "#1b7837", "#2166ac", "#b35806", "#c51b7d", "#4d9221")
_LINES = ("-", "--", ":", "-.")
_PEER_COLOURS = {"gloo": "#6b6b6b", "mpi": "#000000"}


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draws the reports into ``path``; its suffix (``.png``, ``.svg``) says the format.

    Raises:
        BenchError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"plots need matplotlib ({error}); pip install matplotlib") from error
    verbs = list(dict.fromkeys(row["verb"] for report in reports for row in report["rows"]))
    if not verbs:
        raise BenchError("the reports have no rows: there is nothing to draw")
    figure = Figure(figsize=(1.5 + 4.2 * len(verbs), 7.5), layout="constrained")
    panels = figure.subplots(2, len(verbs), squeeze=False, sharex="col")
    for column, verb in enumerate(verbs):
        above, below = panels[0][column], panels[1][column]
        above.set(title=verb, xscale="log", yscale="log")
        below.set(xscale="log", yscale="log", xlabel="bytes")
        _draw(above, below, reports, verb)
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    panels[0][0].set_ylabel("bus bandwidth of the payload, GB/s")
    panels[1][0].set_ylabel("time of the slowest rank, µs (p10 to p90)")
    names = {label: line for axes in panels[0] for line, label in zip(*_legend(axes), strict=True)}
    place: Literal["outside lower center"] = "outside lower center"
    columns = 2 * len(verbs) if len(reports) == 1 else len(verbs)
    figure.legend(list(names.values()), list(names), loc=place, ncols=columns, frameon=False)
    figure.suptitle(_title(reports))
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be drawn: {error}; give a .png or .svg file") from error


def _legend(axes: Any) -> tuple[Sequence[Any], Sequence[str]]:
    found: tuple[Sequence[Any], Sequence[str]] = axes.get_legend_handles_labels()
    return found


def _draw(above: Any, below: Any, reports: Sequence[Report], verb: str) -> None:
    """All channels of one verb, and the line rate."""
    position = 0
    sizes: set[int] = set()
    for report, line in zip(reports, itertools.cycle(_LINES)):
        rows = [row for row in report["rows"] if row["verb"] == verb]
        name = f" ({_place(report)})" if len(reports) > 1 else ""
        for channel in dict.fromkeys(row["channel"] for row in rows):
            mine = sorted((r for r in rows if r["channel"] == channel), key=lambda r: r["size"])
            colour = _PEER_COLOURS.get(channel, _COLOURS[position % len(_COLOURS)])
            position += channel not in _PEER_COLOURS
            x = [row["size"] for row in mine]
            sizes.update(x)
            style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 4}
            above.plot(x, [row["busbw_GBps"] for row in mine], label=channel + name, **style)
            times = [row["time_us"] for row in mine]
            below.plot(x, [time["median"] for time in times], **style)
            low, high = ([time[key] for time in times] for key in ("p10", "p90"))
            below.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    for rate, bits in _line_rates(reports).items():
        above.axhline(bits / 8e9, color="black", linestyle=":", linewidth=1, label=f"{rate} line")
    ticks = sorted(sizes)[:: max(1, len(sizes) // 6)]
    below.set_xticks(ticks, [short_size(size) for size in ticks])
    below.minorticks_off()
    # Above and below share the axis; a single size would be at its edge.
    below.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)


def _line_rates(reports: Sequence[Report]) -> dict[str, float]:
    """What each capped link leaves for payload, in bits per second, by its name."""
    links = [report["link"] for report in reports if report["link"] is not None]
    return {
        f"{link['rate']}, MTU {link['mtu']}": link["payload_bits_per_second"]
        for link in links
        if link["rate"] is not None
    }


def _place(report: Report) -> str:
    nodes = report["layout"]["nodes"]
    link = report["link"]
    network = "loopback" if link is None else link["rate"] or "no cap"
    return f"{len(set(nodes))} nodes, {len(nodes)} ranks, {network}"


def _title(reports: Sequence[Report]) -> str:
    places = list(dict.fromkeys(_place(report) for report in reports))
    machine = reports[0]["machine"]
    return f"{'; '.join(places)}; {machine['cpu']}, {machine['cores']} cores"
