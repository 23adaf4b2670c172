"""``qcoll bench codec``: rows, tables and files of a small run, and its arguments."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from qcoll import _native

testing = pytest.importorskip("typer.testing", reason="typer is not installed")
pytest.importorskip("rich", reason="rich is not installed")

SPREADS = ("speed_GBps", "to_memcpy", "to_add")


def invoke(*words: str, status: int = 0) -> str:
    """Runs the command in this process; what it printed."""
    from qcoll.cli.app import app

    result = testing.CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == status, result.output
    output: str = result.output
    return output


def test_every_kernel_row_beside_its_yardsticks(tmp_path: Path) -> None:
    files = [tmp_path / "out.json", tmp_path / "out.csv"]
    words = ["-b", "4K", "-e", "16K", "--rounds", "3", "--codec", "int8:64,int4,bf16"]
    table = invoke("codec", *words, "--json", str(files[0]), "--csv", str(files[1]))
    report = json.loads(files[0].read_text())
    assert set(report) == {
        *("kind", "schema", "date", "command", "machine", "versions", "config", "rows"),
    }
    assert report["kind"] == "qcoll bench codec"
    assert set(report["machine"]) == {"cpu", "cores", "kernel", "isa", "load"}
    assert set(report["versions"]) == {"qcoll", "torch", "python"}
    rows = report["rows"]
    codecs = ("int8:64", "int4", "bf16")
    kernels = {"float32": ("encode", "decode", "decode_add", "requantize")}
    kernels["bfloat16"] = kernels["float32"][:2]
    expected = [
        (row, kernel, codec, dtype, size)
        for row in _native.load().isa_rows()
        for dtype in kernels
        for size in (4096, 16384)
        for kernel, codec in (
            *[("memcpy", ""), ("add", "")][: 2 if dtype == "float32" else 1],
            *((kernel, codec) for kernel in kernels[dtype] for codec in codecs),
        )
    ]
    keys = ("row", "kernel", "codec", "dtype", "size")
    assert [tuple(row[key] for key in keys) for row in rows] == expected
    for row in rows:
        for spread in (row[name] for name in SPREADS):
            if row["dtype"] == "bfloat16" and spread is row["to_add"]:
                assert spread == {"median": None, "p10": None, "p90": None}
            else:
                assert 0 < spread["p10"] <= spread["median"] <= spread["p90"]
        if row["kernel"] == "memcpy":
            assert row["to_memcpy"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    for text in (*_native.load().isa_rows(), "requantize", "int8:64", "16K", "kernel"):
        assert text in table
    assert "…" not in table
    flat = list(csv.DictReader(files[1].open()))
    assert len(flat) == len(rows)
    assert set(flat[0]) == {*keys, *(f"{s}.{p}" for s in SPREADS for p in ("median", "p10", "p90"))}


def test_default_sizes_skip_the_reference_beyond_its_limit() -> None:
    words = ["--rows", "reference", "-b", "512K", "-e", "512K", "--rounds", "1", "--dtype", "bf16"]
    assert "a definition, measured up to 256K only" in invoke("codec", *words)
    assert json.loads(invoke("codec", *words, "--json", "-"))["rows"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["codec", "--rows", "v9"], 'no kernel row "v9"; this machine runs: reference'),
        (["codec", "--codec", "int3"], 'codec "int3": unknown codec; accepted: exact'),
        (["codec", "--codec", ","], "no codec given"),
        (["codec", "--dtype", "fp64"], "dtype 'fp64' is not one of fp32"),
        (["codec", "--rounds", "0"], "rounds is 0"),
        (["codec", "-b", "1X"], "size '1X' is not understood"),
        (["codec", "-b", "1M", "-e", "1K"], "below the smallest"),
        (["codec", "--json", "-", "--csv", "-"], "would mix"),
        (["all_gather", "codec", "--ranks", "2"], "give `qcoll bench codec` alone"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[:20],
)
def test_bad_arguments(words: list[str], said: str) -> None:
    assert said in invoke(*words, status=2)
