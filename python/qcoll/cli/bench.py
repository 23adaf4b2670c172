"""``qcoll bench``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from qcoll.bench.config import VERBS, BenchError, Config, parse_size, sizes
from qcoll.bench.launch import launch
from qcoll.bench.ranks import report_of_ranks
from qcoll.bench.rendezvous import launcher
from qcoll.bench.results import Report, write_csv, write_json
from qcoll.bench.table import print_report
from qcoll.cli.common import check_outputs, place_of, progress_bar, reported, words

_CODECS = "exact,int8,int4"


def bench(
    verbs: Annotated[list[str], typer.Argument(help=f"Out of {', '.join(VERBS)}; or all.")],
    begin: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size.")] = "1K",
    end: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "16M",
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="Of sizes.")] = 4,
    codec: Annotated[str, typer.Option(help="Codecs, by commas; a/b: one per level.")] = _CODECS,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    compare: Annotated[str, typer.Option(help="Peers, by commas: gloo, mpi.")] = "",
    iters: Annotated[int, typer.Option(help="Timed iterations of each channel.")] = 20,
    warmup: Annotated[int, typer.Option(help="Untimed iterations before.")] = 3,
    rounds: Annotated[int, typer.Option(help="Turns that the channels take.")] = 3,
    calls: Annotated[int, typer.Option(help="Calls back to back in an iteration.")] = 1,
    min_seconds: Annotated[float, typer.Option(help="Timed seconds per channel, at least.")] = 0.0,
    in_place: Annotated[bool, typer.Option("--in-place", help="Slices in place.")] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
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
    json: Annotated[str | None, typer.Option(help="Write all as JSON; - for stdout.")] = None,
    csv: Annotated[str | None, typer.Option(help="Write the rows as CSV; - for stdout.")] = None,
) -> None:
    """Measure collectives: time, bandwidth, bytes on the wire, error.

    Sizes are bytes of the gathered, unreduced, reduced or exchanged tensor, bandwidths those of
    nccl-tests over these bytes. Run it under mpirun or torchrun, or let it start --ranks itself.
    `qcoll bench codec` measures the codecs of this machine instead, without ranks.
    """
    with reported("qcoll bench"):
        if "codec" in verbs:
            raise BenchError("codecs are measured without ranks; give `qcoll bench codec` alone")
        config = Config(
            verbs=tuple(VERBS) if verbs == ["all"] else tuple(verbs),
            sizes=sizes(parse_size(begin), parse_size(end), factor),
            codecs=words(codec),
            dtype=dtype,
            peers=words(compare),
            iters=iters,
            warmup=warmup,
            rounds=rounds,
            calls=calls,
            min_seconds=min_seconds,
            in_place=in_place,
            seed=seed,
            timeout=timeout,
        )
        check_outputs(json, csv)
        place = place_of("qcoll bench", launcher(), ranks, nodes, link, mtu)
        with progress_bar() as listener:
            if place is not None:
                report: Report | None = launch(config, place, sys.argv, listener)
            else:
                report = report_of_ranks(config, sys.argv, listener)
        if report is not None:
            _write(report, json, csv)


def _write(report: Report, json: str | None, csv: str | None) -> None:
    if json is not None:
        write_json(report, json)
    if csv is not None:
        write_csv(report, csv)
    if "-" not in (json, csv):
        # mpirun gives ranks a terminal that is not the user's.
        console = Console(force_terminal=False if launcher() == "mpirun" else None)
        print_report(console, report)
