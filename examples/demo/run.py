"""Train a small GPT with FSDP2 on two nodes, through one backend after the other, and compare.

Where it may (as root on Linux), each node is a network namespace, with a slow link between.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from examples.demo.report import compare, draw, print_table, write_json
from examples.demo.text import read_corpus
from examples.demo.train import PROGRESS, SETTLE_STEPS
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from qcoll.testing import Hosts, RanksFailed, available, run_ranks
from qcoll.testing.hosts import rate_bits

NODES = [2, 2]
"""Ranks per node."""

_EXACT_STEPS = 24
_LINE_STEPS = 20
_EXACT = {"QCOLL_ALL_GATHER": "exact", "QCOLL_REDUCE_SCATTER": "exact"}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: for people.
        backend: for ``init_process_group``.
        steps: number of steps trained, of the schedule that all runs share.
        env: environment variables that set the backend's options.
    """

    name: str
    backend: str
    steps: int
    env: Mapping[str, str] = field(default_factory=dict)


def plan(backends: list[str], steps: int) -> list[Run]:
    """The runs: each backend as it is, and qcoll also for a few steps without quantization."""
    runs = [Run(name, name, steps) for name in backends]
    if "qcoll" in backends:
        runs.append(Run("qcoll exact", "qcoll", min(_EXACT_STEPS, steps), _EXACT))
    return runs


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--text", type=Path, help="train on this file (default: Python's sources)")
    parser.add_argument("--link", default="200mbit", help="rate between nodes, or 'none'")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--batch", type=int, default=4, help="rows per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default="gloo,qcoll", help="the first is the baseline")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for results")
    parser.add_argument("--no-hosts", action="store_true", help="make no network namespaces")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    args = parser.parse_args(arguments)
    args.link = None if args.link == "none" else args.link
    args.backends = [name for name in args.backends.split(",") if name]
    if not args.backends:
        parser.error("--backends names none")
    if args.steps <= SETTLE_STEPS:
        parser.error(f"--steps {args.steps}: needs more than {SETTLE_STEPS}")
    if args.link is not None:
        try:
            rate_bits(args.link)
        except ValueError as error:
            parser.error(f"--link: {error}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit status."""
    args = parse(arguments)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        corpus = read_corpus(args.text)
    except (OSError, ValueError) as error:
        console.print(f"cannot read the text: {error}", style="red")
        return 2
    corpus.save(args.out / "corpus.npz")
    console.print(f"Text: {corpus.origin}, {len(corpus.train):,} characters to train on.")
    started = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with open_hosts(args, console) as (hosts, why_not), _progress(console) as progress:
        try:
            for run in plan(args.backends, args.steps):
                results[run.name] = execute(run, args, hosts, progress)
        except RanksFailed as failure:
            progress.stop()
            console.print(str(failure), style="red", markup=False)
            return 1
    losses = {
        name: np.load(path)
        for name in results
        if (path := _result_path(args.out, name).with_suffix(".npy")).exists()
    }
    report = {
        "title": _title(args, hosts is not None),
        "text": corpus.origin,
        "hosts": hosts is not None,
        "why_no_hosts": why_not,
        "link": args.link if hosts is not None else None,
        "nodes": NODES,
        "machine": _machine(),
        "seconds": time.monotonic() - started,
        "comparison": compare(results, losses),
        "runs": results,
    }
    write_json(report, args.out / "demo.json")
    draw(report, args.out / "demo.png")
    print_table(console, report)
    console.print(f"{report['seconds']:.0f} s; numbers and picture in {args.out}/demo.json, .png")
    return 0


@contextlib.contextmanager
def open_hosts(args: argparse.Namespace, console: Console) -> Iterator[tuple[Hosts | None, str]]:
    """The two nodes as network namespaces, or (None, why not); says which."""
    can, why_not = (False, "--no-hosts was given") if args.no_hosts else available()
    if not can:
        console.print(
            f"The two nodes share this machine's loopback, and no link slows them: {why_not}.",
            style="yellow",
        )
        yield None, why_not
        return
    with Hosts(len(NODES), rate=args.link) as hosts:
        link = f"a link of {args.link}/s" if args.link else "a link without a limit"
        console.print(f"Two nodes of two ranks, each a network namespace, with {link} between.")
        yield hosts, ""


def execute(
    run: Run, args: argparse.Namespace, hosts: Hosts | None, progress: Progress
) -> dict[str, Any]:
    """One training run; what its rank 0 wrote. Raises RanksFailed."""
    result = _result_path(args.out, run.name)
    for stale in (result, result.with_suffix(".npy")):
        stale.unlink(missing_ok=True)
    options = {
        "--backend": run.backend,
        "--corpus": args.out / "corpus.npz",
        "--result": result,
        "--steps": args.steps,
        "--stop-after": run.steps,
        "--batch": args.batch,
        "--seed": args.seed,
        **({"--interface": "eth0"} if hosts is not None else {}),
    }
    command = [str(word) for option in options.items() for word in option]
    run_ranks(
        ["-m", "examples.demo.train", *command],
        sum(NODES),
        nodes=NODES,
        hosts=hosts,
        env=run.env,
        timeout=args.timeout,
        on_line=_follow(run, progress),
    )
    written: dict[str, Any] = json.loads(result.read_text())
    return {**written, "env": dict(run.env)}


def _follow(run: Run, progress: Progress) -> Callable[[int, str], None]:
    """A listener that moves the run's progress bar by what rank 0 prints.

    Where the output is no terminal, and so has no moving bar, it prints a line now and then.
    """
    console = progress.console
    task = progress.add_task(run.name, total=run.steps, state="starting")

    def listen(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith(PROGRESS):
            return
        values = json.loads(line.removeprefix(PROGRESS))
        if "step" in values:
            state = f"loss {values['loss']:.3f}"
            progress.update(task, completed=values["step"], state=state)
            if not console.is_terminal and values["step"] % _LINE_STEPS == 0:
                console.print(f"{run.name}: step {values['step']} of {run.steps}, {state}")
        else:
            progress.update(task, state=values["phase"])

    return listen


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    )


def _result_path(out: Path, name: str) -> Path:
    return out / f"{name.replace(' ', '-')}.json"


def _title(args: argparse.Namespace, with_hosts: bool) -> str:
    link = f"{args.link}/s between nodes" if with_hosts and args.link else "no limit between nodes"
    return f"FSDP2, 2 nodes x 2 ranks, {link}"


def _machine() -> dict[str, Any]:
    from torch import __version__ as torch_version

    return {
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": str(torch_version),
    }
