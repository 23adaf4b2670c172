"""``qcoll plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from qcoll.bench.config import BenchError
from qcoll.bench.plot import plot as draw
from qcoll.bench.results import read_report


def plot(
    files: Annotated[list[Path], typer.Argument(help="What `qcoll bench --json` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A .png or .svg file.")] = Path(
        "bench.png"
    ),
) -> None:
    """Draw bandwidth and time over the size, one column for each verb."""
    try:
        draw([read_report(file) for file in files], out)
    except BenchError as error:
        Console(stderr=True).print(f"qcoll plot: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    Console().print(f"drawn in {out}", highlight=False)
