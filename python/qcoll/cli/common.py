"""What the subcommands share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from qcoll.bench.config import BenchError, Listener, Place, parse_nodes, silent


def rank() -> int:
    """This process's rank as its launcher says it, before any group exists."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def words(text: str) -> tuple[str, ...]:
    """The different words of a list with commas."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def place_of(
    command: str, started_by: str, ranks: int | None, nodes: str | None, link: str | None, mtu: int
) -> Place | None:
    """Where to start ranks; None where ``started_by`` (of :func:`launcher`) has started them."""
    if started_by != "none":
        if (ranks, nodes, link) != (None, None, None):
            raise BenchError(
                f"--ranks, --nodes and --link are for ranks started here, but {started_by} "
                "started these; set QCOLL_NODE of each rank to say where it lives"
            )
        return None
    if ranks is None:
        raise BenchError(
            f"nobody started ranks; give --ranks 2, or run under `mpirun -n 2 {command} ...` "
            "or torchrun"
        )
    if ranks < 1:
        raise BenchError(f"--ranks {ranks}: give at least 1")
    return Place(parse_nodes(nodes or "1", ranks), link, mtu)


@contextlib.contextmanager
def reported(command: str) -> Iterator[None]:
    """Errors become one line and an exit status: 2 for arguments, 1 for a run that failed."""
    try:
        yield
    except BenchError as error:
        # Every rank finds the same.
        console = Console(stderr=True, quiet=rank() != 0)
        console.print(f"{command}: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        # Where ranks print for themselves, whichever failed has something to say.
        console = Console(stderr=True)
        console.print(f"{command}: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress_bar(first: str = "starting ranks") -> Iterator[Listener]:
    """A bar on the terminal of rank 0; nothing elsewhere."""
    console = Console(stderr=True)
    if rank() != 0 or not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(first, total=None)

        def listen(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield listen


def check_outputs(json: str | None, csv: str | None) -> None:
    """BenchError where two things would go to standard output."""
    if json == "-" and csv == "-":
        raise BenchError("--json - and --csv - would mix on standard output; give one a file")
