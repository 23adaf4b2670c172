"""``qcoll tune``."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from qcoll.bench.config import parse_size, sizes
from qcoll.bench.launch import launch_all
from qcoll.bench.ranks import measure_ranks
from qcoll.bench.rendezvous import launcher
from qcoll.bench.table import short_size, widen
from qcoll.bench.tune import (
    Crossover,
    check_target,
    configs,
    crossovers,
    series_of,
    write_tuning,
)
from qcoll.cli.common import place_of, progress_bar, rank, reported, words


def tune(
    out: Annotated[Path, typer.Option("-o", "--out", help="The file for option tuning.")],
    begin: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size.")] = "4K",
    end: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="Of sizes.")] = 4,
    codec: Annotated[
        str, typer.Option(help="Codecs beside exact, by commas; those of the recipe.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Out of fp32, bf16, fp16, by commas.")] = "bf16,fp32",
    iters: Annotated[int, typer.Option(help="Timed iterations of each.")] = 20,
    rounds: Annotated[int, typer.Option(help="Turns that they take.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds for each collective.")] = 300.0,
    ranks: Annotated[int | None, typer.Option(help="Start so many ranks here.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes to spread them over: 2, or ranks of each: 3,1.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Namespaces joined by links of this rate: 1gbit, none (no cap)."),
    ] = None,
    mtu: Annotated[int, typer.Option(help="Of the links.")] = 1500,
    add: Annotated[bool, typer.Option("--add", help="Keep the file's other layouts.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the crossovers as JSON.")] = False,
) -> None:
    """Measure where a codec is faster than exact, for option tuning (QCOLL_TUNING).

    Run it under mpirun or torchrun where the job will run, with the same ranks per node, and give
    all ranks the file. Groups of another layout need a run of their own, with --add.
    """
    # What an earlier file decides has no say in a new one.
    os.environ.pop("QCOLL_TUNING", None)
    with reported("qcoll tune"):
        place = place_of("qcoll tune", launcher(), ranks, nodes, link, mtu)
        chosen = sizes(parse_size(begin), parse_size(end), factor)
        how = {"iters": iters, "rounds": rounds, "timeout": timeout}
        wanted = configs(chosen, words(dtype), words(codec), **how)
        if rank() == 0:
            check_target(out, add)
        with progress_bar() as listener:
            if place is not None:
                measured: dict[str, Any] | None = launch_all(wanted, place, listener)
            else:
                measured = measure_ranks(wanted, listener)
        if measured is None:
            return
        series = series_of(measured)
        write_tuning(out, series, place, add)
        found = crossovers(series)
        if json:
            typer.echo(json_module.dumps([dataclasses.asdict(one) for one in found], indent=1))
            return
        _print(found, chosen[-1])
        Console().print(f"written to {out}", highlight=False, soft_wrap=True)


def _print(found: list[Crossover], largest: int) -> None:
    console = Console(force_terminal=False if launcher() == "mpirun" else None)
    title = f"layout {found[0].layout}: sizes for which a codec is faster than exact"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.caption = "Options min_bytes and scope are asked before, codec= in a call instead."
    gain = f"times faster\nat {short_size(largest)}"
    for head in ("collective", "dtype", "codec", "coded", gain):
        table.add_column(head, justify="right" if head == gain else "left", no_wrap=True)
    for one in found:
        ranges = ", ".join(_range(*limits) for limits in one.coded) or "never"
        table.add_row(one.collective, one.dtype, one.codec, ranges, f"{one.gain:.2f}")
    widen(console, [table])
    console.print(table)


def _range(low: int, high: int | None) -> str:
    if high is None:
        return f"from {low:,} bytes" if low else "always"
    return f"{low:,} to {high:,}" if low else f"up to {high:,} bytes"
