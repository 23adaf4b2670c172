"""The subcommands together."""

from __future__ import annotations

from typing import Annotated

import typer

import qcoll
from qcoll.cli.bench import bench
from qcoll.cli.plot import plot

app = typer.Typer(
    name="qcoll",
    help="Quantized collectives: measure them, draw what was measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench)
app.command("plot")(plot)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qcoll {qcoll.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Quantized collectives: measure them, draw what was measured."""
