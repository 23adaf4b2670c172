"""The subcommands together."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import qcoll
from qcoll.cli.bench import bench
from qcoll.cli.codec import codec
from qcoll.cli.plot import plot
from qcoll.cli.tune import tune

_BENCH_CODEC = "bench codec"


class _Commands(TyperGroup):
    """Takes ``bench codec`` for a command of its own: it shares no option with the verbs, which
    need ranks."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:2] == _BENCH_CODEC.split():
            args = [_BENCH_CODEC, *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="qcoll",
    cls=_Commands,
    help="Quantized collectives: measure them, draw what was measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench)
app.command(_BENCH_CODEC)(codec)
app.command("plot")(plot)
app.command("tune")(tune)


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
