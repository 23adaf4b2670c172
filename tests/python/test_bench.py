"""``qcoll bench`` and ``qcoll plot``: definitions, arguments, and small real runs of every kind."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run

from qcoll.bench import BenchError, Config, Place, bus_factor, parse_size, read_report, sizes
from qcoll.bench.config import parse_nodes
from qcoll.bench.data import Buffers, Problem, deviation
from qcoll.bench.launch import find_mpirun
from qcoll.bench.plot import plot
from qcoll.bench.rendezvous import launcher
from qcoll.bench.statistics import round_medians, slowest, summary, versus
from qcoll.testing import available

_CAN, _WHY_NOT = available()
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
CODECS = ("exact", "bf16", "int8", "int4", "int8:64/int4:32")
# Relative L2 error on normal numbers, encoded once; sums of several and a second hop add to it.
BOUNDS = {"exact": 1e-6, "bf16": 0.004, "int8": 0.012, "int4": 0.18, "int8:64/int4:32": 0.18}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "qcoll.cli", *arguments]


# Definitions.


@pytest.mark.parametrize(
    ("verb", "world", "factor"),
    [
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 8, 0.875),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 2, 1.0),
        ("all_gather", 1, 0.0),
    ],
)
def test_bus_factor_is_nccl_tests(verb: str, world: int, factor: float) -> None:
    assert bus_factor(verb, world) == factor


def test_sizes() -> None:
    assert [parse_size(text) for text in ("512", "1K", "1.5k", "64M", "2G", "4KiB")] == [
        *(512, 1024, 1536, 64 << 20, 2 << 30, 4096)
    ]
    assert sizes(1024, 20000, 4) == (1024, 4096, 16384)
    for text in ("", "K", "-1", "0", "1T", "1 M K"):
        with pytest.raises(BenchError, match="is not understood"):
            parse_size(text)
    with pytest.raises(BenchError, match="factor 1"):
        sizes(1, 2, 1)
    with pytest.raises(BenchError, match="below the smallest"):
        sizes(2, 1, 2)


def test_nodes() -> None:
    assert [parse_nodes(*given) for given in (("1", 4), ("2", 4), ("2", 5), ("3,1", 4))] == [
        *((4,), (2, 2), (3, 2), (3, 1))
    ]
    for text, said in (("3", "3 nodes"), ("x", "not understood"), ("1,2", "hold 3 ranks")):
        with pytest.raises(BenchError, match=said):
            parse_nodes(text, 2)


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [[[1.0, 5.0], [2.0]], [[3.0, 4.0], [1.0]]]
    assert slowest(ranks) == [[3.0, 5.0], [2.0]]
    rounds = [[1e-6 * time for time in range(60)], [1e-6 * time for time in range(60, 101)]]
    found = summary(rounds)
    assert found == pytest.approx({"median": 50.0, "p10": 10.0, "p90": 90.0})
    assert round_medians(rounds) == pytest.approx([29.5, 80.0])


def test_ratios_are_of_rounds() -> None:
    found = versus([1.0, 2.0, 4.0], [2.0, 2.0, 12.0])
    assert found == {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": [2.0, 1.0, 3.0]}


def test_payload_rate_of_a_link() -> None:
    link = Place((1, 1), "1gbit").describe_link()
    assert link is not None
    assert link["payload_bits_per_second"] == pytest.approx(1e9 * 1448 / 1514)
    jumbo = Place((1, 1), "5gbit", 9000).describe_link()
    assert jumbo is not None
    assert jumbo["payload_bits_per_second"] == pytest.approx(5e9 * 8948 / 9014)
    assert Place((1, 1)).describe_link() is None
    assert Place((1, 1), "none").describe_link() == {
        "rate": None,
        "mtu": 1500,
        "bits_per_second": None,
        "payload_bits_per_second": None,
    }


@pytest.mark.parametrize(
    ("verb", "in_place"),
    [
        (verb, place)
        for verb in VERBS
        for place in (False, True)
        if (verb, place) != (VERBS[3], True)
    ],
)
def test_the_check_sees_one_wrong_element_and_a_missing_call(verb: str, in_place: bool) -> None:
    world, rank = 3, 1
    problems = [Problem(verb, 300, torch.float32, r, world, 7, in_place) for r in range(world)]
    mine = problems[rank]
    buffers = Buffers(mine)
    buffers.poison()
    inputs = [Buffers(problem).input for problem in problems]
    # Nobody called yet. What is input too cannot be poisoned, but it is no sum.
    missing = deviation(mine, buffers.output)["max_abs"]
    overlap = verb == "all_reduce" or (in_place and verb == "reduce_scatter")
    assert missing > 1 if overlap else math.isnan(missing)
    right = {
        "all_gather": lambda: torch.cat(inputs),
        "reduce_scatter": lambda: sum(i[mine.own] for i in inputs),
        "all_reduce": lambda: sum(inputs),
        "all_to_all": lambda: torch.cat([i[mine.own] for i in inputs]),
    }[verb]()
    buffers.output.copy_(right)
    assert deviation(mine, buffers.output)["max_abs"] < 1e-5
    buffers.output.view(-1)[-1 if verb != "all_reduce" else mine.own.start] += 0.5
    assert deviation(mine, buffers.output)["max_abs"] == pytest.approx(0.5, abs=1e-5)
    buffers.restore()
    assert torch.equal(buffers.input, Buffers(mine).input) or verb == "all_gather"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "none"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpirun"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x", "PMIX_RANK": "0"}, "torchrun"),
    ],
)
def test_launcher(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI", "PMI", "TORCHELASTIC", "MV2")) or name == "RANK":
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher() == expected


# Real runs.


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every verb and codec next to gloo, on two nodes of one rank each; a folder of files."""
    folder = tmp_path_factory.mktemp("bench")
    words = ["-b", "8K", "-e", "32K", "--ranks", "2", "--nodes", "2", "--codec", ",".join(CODECS)]
    words += ["--iters", "3", "--warmup", "0", "--compare", "gloo"]
    files = ["--json", str(folder / "out.json"), "--csv", str(folder / "out.csv")]
    done = run(command("bench", "all", *words, *files))
    (folder / "table.txt").write_text(done.stdout)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_report(folder / "out.json")["rows"]
    return rows


def test_every_verb_and_codec_is_right(small_run: Path) -> None:
    rows = rows_of(small_run)
    assert {(row["verb"], row["size"], row["channel"]) for row in rows} == {
        (verb, size, channel)
        for verb in VERBS
        for size in (8192, 32768)
        for channel in (*CODECS, "gloo")
    }
    for row in rows:
        error = row["error"]
        assert 0 <= error["relative_l2"] <= BOUNDS[row["codec"] or "exact"], row
        assert error["max_abs"] <= 20 * BOUNDS[row["codec"] or "exact"], row
        assert row["equal_bits"] is (
            True if row["verb"] in ("all_gather", "all_reduce") else None
        ), row
        if row["codec"] == "exact" and row["verb"] in ("all_gather", "all_to_all"):
            assert error["max_abs"] == 0.0
        if row["codec"] in ("int8", "int4"):
            assert error["max_abs"] > 0.0


def test_bandwidth_and_bytes_of_a_row(small_run: Path) -> None:
    for row in rows_of(small_run):
        time = row["time_us"]
        assert 0 < time["p10"] <= time["median"] <= time["p90"]
        assert row["algbw_GBps"] == pytest.approx(row["size"] / time["median"] / 1e3)
        factor = 1.0 if row["verb"] == "all_reduce" else 0.5
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * factor)
        assert row["iterations"] == 3
        assert len(row["round_medians_us"]) == 3
        assert (row["count"], row["dtype"]) == (row["size"] // 4, "float32")
        wire = row["wire"]
        if row["library"] == "qcoll":
            assert wire["within_node"] == 0
            assert wire["across_nodes"] == 2 * wire["across_nodes_busiest"]
            assert set(row["versus"]) == {"gloo"}
            assert len(row["versus"]["gloo"]["rounds"]) == 3
        else:
            assert wire["across_nodes"] is None
            assert row["versus"] == {}
        if row["codec"] == "exact":
            assert row["ratio"] == 1.0
            assert wire["across_nodes"] >= row["size"] * factor * 2
        if row["codec"] == "int8" and row["size"] == 32768:
            assert 3.5 < row["ratio"] < 4


def test_the_report_says_where_it_was_measured(small_run: Path) -> None:
    report = read_report(small_run / "out.json")
    assert set(report) == {
        *("kind", "schema", "date", "command", "launcher", "machine", "versions", "layout"),
        *("link", "config", "rows"),
    }
    assert set(report["machine"]) == {"cpu", "cores", "kernel", "isa", "load"}
    assert set(report["versions"]) >= {"qcoll", "torch", "python"}
    assert report["layout"] == {"ranks": 2, "nodes": ["node0", "node1"]}
    assert "--codec" in report["command"]
    assert (report["launcher"], report["link"]) == ("self", None)
    assert Config.from_json(report["config"]).codecs == CODECS


def test_the_table_and_the_csv(small_run: Path) -> None:
    table = (small_run / "table.txt").read_text()
    for text in (*VERBS, "int8:64/int4:32", "gloo", "busbw", "2 ranks on 2 nodes", "32K"):
        assert text in table
    assert "…" not in table
    with (small_run / "out.csv").open() as file:
        flat = list(csv.DictReader(file))
    assert len(flat) == len(rows_of(small_run))
    assert float(flat[0]["time_us.median"]) > 0
    assert float(flat[0]["versus.gloo.median"]) > 0


def test_plot(small_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    png, svg = tmp_path / "out.png", tmp_path / "out.svg"
    source = small_run / "out.json"
    run(command("plot", str(source), "-o", str(png)))
    assert png.read_bytes().startswith(b"\x89PNG")
    capped = read_report(source)
    capped["link"] = Place((1, 1), "1gbit").describe_link()
    plot([read_report(source), capped], svg)
    assert "<svg" in svg.read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        read_report(Path(__file__))
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(BenchError, match="is not a report; make one with"):
        read_report(other)
    other.write_text('{"kind": "qcoll bench", "schema": 99}')
    with pytest.raises(BenchError, match="has schema 99"):
        read_report(other)


def test_in_place_on_standard_output() -> None:
    words = ["--ranks", "2", "-b", "8K", "-e", "8K", "--in-place", "--iters", "1", "--json", "-"]
    words += ["--dtype", "bf16", "--codec", "exact,int8", "--compare", "gloo", "--calls", "3"]
    done = run(command("bench", "all_gather", "reduce_scatter", *words))
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["in_place"]
        assert row["calls_per_iteration"] == 3
        assert row["error"]["relative_l2"] < 0.02
        assert row["equal_bits"] in (True, None)


def test_torchrun() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    words = ["bench", "all_gather", "-b", "4K", "-e", "4K", "--iters", "1", "--json", "-"]
    done = run([*launch, "-m", "qcoll.cli", *words])
    report = json.loads(done.stdout)
    assert report["launcher"] == "torchrun"
    assert report["layout"]["ranks"] == 2
    assert [row["channel"] for row in report["rows"]] == ["exact", "int8", "int4"]


@pytest.fixture(scope="module")
def mpirun() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    try:
        return find_mpirun()
    except BenchError as error:
        pytest.skip(str(error))


def test_mpirun(mpirun: str) -> None:
    words = ["bench", "all", "-b", "4K", "-e", "4K", "--iters", "2", "--codec", "int8"]
    words += ["--compare", "gloo,mpi", "--dtype", "bf16", "--json", "-"]
    # PATH, because this mpirun starts programs of its own by name.
    env = {"PATH": f"{Path(mpirun).parent}{os.pathsep}{os.environ['PATH']}"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run([mpirun, "--oversubscribe", "-n", "2", *command(*words)], env)
    report = json.loads(done.stdout)
    assert report["launcher"] == "mpirun"
    check_mpi(report)
    # MPI adds in float32, and moves any dtype.
    dtypes = {row["verb"]: row["dtype"] for row in report["rows"] if row["library"] == "mpi"}
    assert dtypes == {
        **dict.fromkeys(("all_gather", "all_to_all"), "bfloat16"),
        **dict.fromkeys(("reduce_scatter", "all_reduce"), "float32"),
    }


@pytest.mark.net
@pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available")
def test_mpi_between_namespaces(mpirun: str) -> None:
    assert mpirun
    words = ["bench", "all", "-b", "4M", "-e", "4M", "--iters", "1", "--warmup", "0"]
    words += ["--rounds", "1", "--codec", "exact,int8", "--compare", "gloo,mpi"]
    words += ["--ranks", "3", "--nodes", "2,1", "--link", "1gbit", "--json", "-"]
    report = json.loads(run(command(*words)).stdout)
    check_mpi(report)
    assert (report["launcher"], report["link"]["rate"]) == ("self, by mpirun", "1gbit")
    assert report["layout"]["nodes"] == ["node0", "node0", "node1"]
    for row in report["rows"]:
        wire = row["wire"]
        assert wire["interface"] >= (wire["across_nodes"] if row["codec"] else 1 << 20)
        assert row["line_share"] is None or row["line_share"] > 0
        if row["codec"] == "exact":
            assert row["line_share"] is not None


def check_mpi(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        assert row["error"]["relative_l2"] < 0.015, row
        assert row["equal_bits"] is not False, row
        if row["library"] == "qcoll":
            assert set(row["versus"]) == {"gloo", "mpi"}
    assert "mpi4py" in report["versions"]


# Errors.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_gather"], "nobody started ranks; give --ranks"),
        (["gather", "--ranks", "2"], "verb 'gather' is not one of all_gather"),
        (["all_gather", "--ranks", "2", "-b", "1X"], "size '1X' is not understood"),
        (["all_gather", "--ranks", "2", "-b", "4", "-e", "4"], "give at least 8 bytes"),
        (["all_gather", "--ranks", "2", "--codec", "int3"], "codec 'int3'"),
        (["all_gather", "--ranks", "2", "--dtype", "fp8"], "dtype 'fp8' is not one of fp32"),
        (["all_gather", "--ranks", "2", "--compare", "nccl"], "peer 'nccl' is not one of gloo"),
        (["all_gather", "--ranks", "2", "--nodes", "3"], "3 nodes for 2 ranks"),
        (["all_gather", "--ranks", "2", "--link", "fast"], "rate 'fast'"),
        (["all_gather", "--ranks", "2", "--rounds", "0"], "rounds is 0"),
        (["all_to_all", "--ranks", "2", "--in-place"], "no form in place"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[:20],
)
def test_bad_arguments(words: list[str], said: str) -> None:
    typer_testing = pytest.importorskip("typer.testing", reason="typer is not installed")
    from qcoll.cli.app import app

    result = typer_testing.CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_failing_rank_is_named() -> None:
    words = ["bench", "all_gather", "-b", "4K", "-e", "4K", "--ranks", "2"]
    done = run(command(*words), env={"QCOLL_SCOPE": "everywhere"}, status=1)
    assert "rank 0: ValueError" in done.stderr
    assert "everywhere" in done.stderr
    assert done.stdout == ""
