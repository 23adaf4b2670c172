"""The tables of docs/performance.md, made of the results in bench/results.

    python bench/performance.py            prints them
    python bench/performance.py --write    puts them into the page

Ratios are of the same round: the median of the rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
COLLECTIVES = (
    "gather_1gbit",
    "gather_200mbit",
    "scatter_1gbit",
    "reduce_1gbit",
    "four_hosts_1gbit",
    "two_by_two_1gbit",
    "gather_5gbit",
    "gather_uncapped",
    "in_place_same_host",
    "small_same_host",
    "small_two_hosts",
)


def size_text(size: int) -> str:
    """``65536`` as ``64 KiB``."""
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size // step} {unit}"
    return f"{size} B"


def time_text(microseconds: float) -> str:
    """Microseconds, in milliseconds from one on."""
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{microseconds:.1f} µs"


def ratio_text(ratio: dict[str, float] | None) -> str:
    """``4.2 (4.1..4.4)``."""
    if ratio is None:
        return "-"
    return f"{ratio['median']:.3g} ({ratio['min']:.3g}..{ratio['max']:.3g})"


def versus_exact(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """How many times faster than qcoll's own exact call, by rounds."""
    exact = [
        other
        for other in rows
        if other["channel"] == "exact"
        and (other["verb"], other["size"]) == (row["verb"], row["size"])
    ]
    if row["library"] != "qcoll" or row["channel"] == "exact" or not exact:
        return None
    pairs = zip(exact[0]["round_medians_us"], row["round_medians_us"], strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def collectives(name: str) -> list[str]:
    """The table of one scenario of bench/collectives.py."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    lines = [
        f"**{report['scenario']['about']}** (`{name}`)",
        "",
        "| verb | size | | median (10..90 %) | x gloo | x MPI | x own exact | of the line |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        time = row["time_us"]
        share = row.get("line_share")
        cells = [
            row["verb"],
            size_text(row["size"]),
            row["channel"],
            f"{time_text(time['median'])} ({time_text(time['p10'])}..{time_text(time['p90'])})",
            ratio_text(row["versus"].get("gloo")),
            ratio_text(row["versus"].get("mpi")),
            ratio_text(versus_exact(row, report["rows"])),
            "-" if share is None else f"{100 * share:.0f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def latency() -> list[str]:
    """The table of bench/latency.py."""
    rounds = json.loads((RESULTS / "latency.json").read_text())
    lines = [
        "**1 KiB gathered by two ranks of one host, layer by layer** (`latency`)",
        "",
        "| layer | µs: median of rounds (least..most) |",
        "| --- | --- |",
    ]
    for layer in rounds[0]:
        values = [each[layer] for each in rounds]
        median = statistics.median(values)
        lines.append(f"| {layer} | {median:.2f} ({min(values):.2f}..{max(values):.2f}) |")
    return [*lines, ""]


def tables() -> str:
    """All of them."""
    lines: list[str] = []
    for name in COLLECTIVES:
        lines += collectives(name)
    return "\n".join([*lines, *latency()])


def page_with(text: str, page: str) -> str:
    """The page with ``text`` between its marks."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n\n" + text + "\n" + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page_with(tables(), PAGE.read_text()))
    else:
        print(tables())


if __name__ == "__main__":
    main()
