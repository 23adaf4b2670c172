"""``qcoll bench codec``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from qcoll.bench.codec import CODECS, SIZES
from qcoll.bench.codec_report import codec_report, print_codec_report
from qcoll.bench.config import parse_size, sizes
from qcoll.bench.results import write_csv, write_json
from qcoll.bench.table import short_size
from qcoll.cli.common import check_outputs, progress_bar, reported, words

_DEFAULT_SIZES = f"Of the tensor; {', '.join(map(short_size, SIZES))} without -b, -e, -f."


def codec(
    begin: Annotated[str | None, typer.Option("-b", "--minbytes", help=_DEFAULT_SIZES)] = None,
    end: Annotated[str | None, typer.Option("-e", "--maxbytes", help="Largest size.")] = None,
    factor: Annotated[int | None, typer.Option("-f", "--stepfactor", help="Of sizes.")] = None,
    codec: Annotated[str, typer.Option(help="Codecs, by commas.")] = ",".join(CODECS),
    dtype: Annotated[str, typer.Option(help="Out of fp32, bf16, fp16, by commas.")] = "fp32,bf16",
    rows: Annotated[
        str, typer.Option(help="Rows of the kernel table, by commas; all that run here.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Turns that the kernels take.")] = 15,
    json: Annotated[str | None, typer.Option(help="Write all as JSON; - for stdout.")] = None,
    csv: Annotated[str | None, typer.Option(help="Write the rows as CSV; - for stdout.")] = None,
) -> None:
    """Measure the codec kernels of this machine, beside memcpy and a plain sum of float32.

    One thread encodes, decodes, adds and sums chunks as in a collective; no ranks are started.
    """
    with reported("qcoll bench codec"):
        check_outputs(json, csv)
        chosen: tuple[int, ...] = SIZES
        if (begin, end, factor) != (None, None, None):
            chosen = sizes(parse_size(begin or "256K"), parse_size(end or "256M"), factor or 4)
        with progress_bar("measuring") as listener:
            report = codec_report(
                words(rows) or None,
                chosen,
                words(codec),
                words(dtype),
                rounds,
                sys.argv,
                lambda figure: listener(0, 0, f"{figure.kernel} {short_size(figure.size)}"),
            )
        if json is not None:
            write_json(report, json)
        if csv is not None:
            write_csv(report, csv)
        if "-" not in (json, csv):
            print_codec_report(Console(), report)
