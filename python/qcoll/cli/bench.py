"""``qcoll bench``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from qcoll.bench.config import (
    VERBS,
    BenchError,
    Config,
    Listener,
    Place,
    parse_nodes,
    parse_size,
    silent,
    sizes,
)
from qcoll.bench.launch import launch
from qcoll.bench.ranks import report_of_ranks
from qcoll.bench.rendezvous import launcher
from qcoll.bench.results import Report, write_csv, write_json
from qcoll.bench.table import print_report

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
    """
    started_by = launcher()
    speaks = _rank() == 0
    errors = Console(stderr=True, quiet=not speaks)
    try:
        config = Config(
            verbs=tuple(VERBS) if verbs == ["all"] else tuple(verbs),
            sizes=sizes(parse_size(begin), parse_size(end), factor),
            codecs=_words(codec),
            dtype=dtype,
            peers=_words(compare),
            iters=iters,
            warmup=warmup,
            rounds=rounds,
            calls=calls,
            min_seconds=min_seconds,
            in_place=in_place,
            seed=seed,
            timeout=timeout,
        )
        if json == "-" and csv == "-":
            raise BenchError("--json - and --csv - would mix on standard output; give one a file")
        place = None if started_by != "none" else _place(ranks, nodes, link, mtu)
        if place is None and (ranks, nodes, link) != (None, None, None):
            raise BenchError(
                f"--ranks, --nodes and --link are for ranks started here, but {started_by} "
                "started these; set QCOLL_NODE of each rank to say where it lives"
            )
        with _progress(speaks) as listener:
            if place is not None:
                report: Report | None = launch(config, place, sys.argv, listener)
            else:
                report = report_of_ranks(config, sys.argv, listener)
        if report is not None:
            _write(report, json, csv)
    except BenchError as error:
        errors.print(f"qcoll bench: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        # Where ranks print for themselves, whichever failed has something to say.
        console = Console(stderr=True)
        console.print(f"qcoll bench: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _rank() -> int:
    """This process's rank as its launcher says it, before any group exists."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _place(ranks: int | None, nodes: str | None, link: str | None, mtu: int) -> Place:
    if ranks is None:
        raise BenchError(
            "nobody started ranks; give --ranks 2, or run under `mpirun -n 2 qcoll bench ...` "
            "or torchrun"
        )
    if ranks < 1:
        raise BenchError(f"--ranks {ranks}: give at least 1")
    return Place(parse_nodes(nodes or "1", ranks), link, mtu)


@contextlib.contextmanager
def _progress(speaks: bool) -> Iterator[Listener]:
    """A bar on the terminal of whoever speaks; nothing elsewhere."""
    console = Console(stderr=True)
    if not speaks or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def listen(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield listen


def _write(report: Report, json: str | None, csv: str | None) -> None:
    if json is not None:
        write_json(report, json)
    if csv is not None:
        write_csv(report, csv)
    if "-" not in (json, csv):
        # mpirun gives ranks a terminal that is not the user's.
        console = Console(force_terminal=False if launcher() == "mpirun" else None)
        print_report(console, report)
