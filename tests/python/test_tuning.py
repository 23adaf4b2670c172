"""The choice between exact and coded by measured times, and ``qcoll tune``, which measures them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_probe import DEFAULT_OF, choices, expect_error, observe

import qcoll
from qcoll.bench import BenchError
from qcoll.bench.tune import Series, check_target, configs, crossovers, series_of, write_tuning
from qcoll.testing import shared_pool
from qcoll.testing.calls import environment

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
FIRST = "qcoll-tuning 1\n"
# Gathers of bf16 are faster exact up to 200000 bytes, scatters of fp32 always coded.
MODEL = (
    FIRST
    + """1+1 all_gather bfloat16 exact 100000:100 300000:300
1+1 all_gather bfloat16 int8:256 100000:150 300000:250
1+1 reduce_scatter float32 exact 1000:20
1+1 reduce_scatter float32 int8:256/int4:128 1000:10
1+1 all_reduce bfloat16 int8:256 1000:10
"""
)
BECAUSE = "exact is faster than int8:256 by the cost model (option tuning)"


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "tuning.txt"
    file.write_text(MODEL)
    return str(file)


def both_sides() -> None:
    assert observe(GATHER, numel=99_000) == ("exact", BECAUSE)
    assert observe(GATHER, numel=100_000) == ("exact", BECAUSE)  # a tie loses nothing
    assert observe(GATHER, numel=101_000) == ("int8:256", "")
    assert observe(GATHER, numel=1000)[1] == "smaller than option min_bytes=65536"
    assert observe(GATHER, numel=99_000, codec="int8") == ("int8:256", "")
    assert observe(GATHER, numel=2_000_000, codec="exact")[1] == 'codec="exact" in the call'
    assert observe(SCATTER, dtype=torch.float32)[0] == "int4:128"
    # Not measured for this dtype, codec or both.
    assert observe(GATHER, numel=99_000, dtype=torch.float16)[0] == "int8:256"
    with qcoll.options(all_gather="int4"):
        assert observe(GATHER, numel=99_000) == ("int4:128", "")
    with qcoll.options(all_reduce="int8"):
        assert observe("all_reduce", numel=99_000) == ("int8:256", "")
    with qcoll.options(min_bytes=0):
        assert observe(GATHER, numel=1000) == ("exact", BECAUSE)
    with qcoll.exact():
        assert observe(GATHER, numel=101_000)[1] == "inside qcoll.exact()"


def predictions() -> None:
    def predicted(verb: str, numel: int, **how: Any) -> Any:
        return qcoll.explain(verb, numel, torch.bfloat16, **how)["predicted_us"]

    assert predicted(GATHER, 100_000) == pytest.approx({"exact": 200, "coded": 200})
    assert predicted(GATHER, 75_000) == pytest.approx({"exact": 150, "coded": 175})
    assert predicted(GATHER, 10) == pytest.approx({"exact": 100, "coded": 150})
    assert predicted(GATHER, 300_000) == pytest.approx({"exact": 600, "coded": 500})
    assert predicted(GATHER, 75_000, codec="int4") == {"exact": pytest.approx(150), "coded": None}
    assert predicted("all_reduce", 1000, codec="int8") == {
        "exact": None,
        "coded": pytest.approx(20),
    }
    assert predicted("all_reduce", 1000) is None  # exact by its option, and exact is not measured
    assert predicted("all_to_all_single", 1000, codec="int8") is None
    assert predicted(SCATTER, 1000) is None
    assert predicted("all_reduce", 1000, op=dist.ReduceOp.MAX) is None


@pytest.mark.parametrize("layer", ["options", "environment"])
def test_the_faster_one_is_taken(model: str, layer: str) -> None:
    given: dict[str, Any] = {"pg_options": {"tuning": model}}
    if layer == "environment":
        given = {"env": {"QCOLL_TUNING": model}}
    shared_pool(2, [1, 1]).run(both_sides, backend="qcoll", **given)
    shared_pool(2, [1, 1]).run(predictions, backend="qcoll", **given)


def as_without_a_model() -> None:
    assert choices() == DEFAULT_OF
    assert qcoll.explain(GATHER, 1 << 16, torch.bfloat16)["predicted_us"] is None


def test_a_model_of_other_layouts_or_none_changes_nothing(model: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(MODEL.replace("1+1", "2+2"))
    pool = shared_pool(2, [1, 1])
    pool.run(as_without_a_model, backend="qcoll", pg_options={"tuning": other})
    off, env = {"tuning": ""}, {"QCOLL_TUNING": model}
    pool.run(as_without_a_model, backend="qcoll", pg_options=off, env=env)


def different_files(paths: list[str], values: list[str]) -> None:
    rank = dist.get_rank()
    own = qcoll.Options(tuning=paths[rank])
    said = expect_error(
        lambda: dist.new_group(backend="qcoll", pg_options=own),
        *("disagree on tuning", "rank 0", "rank 2", *values),
    )
    assert said.count('"contents ') == 2 - len(values)


def test_ranks_with_different_files_are_refused(model: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(MODEL.replace("100000:150", "100000:151"))
    copy = tmp_path / "copy.txt"
    copy.write_text(MODEL)
    pool = shared_pool(3, [2, 1])
    pool.run(different_files, ([model, str(copy), str(other)], []), backend="gloo")
    pool.run(different_files, ([model, str(copy), ""], ['"none"']), backend="gloo")


def missing_file() -> None:
    bad = {"QCOLL_TUNING": "/nonexistent/tuning"} if dist.get_rank() == 1 else {}
    with environment(bad):
        expect_error(
            lambda: dist.new_group(backend="qcoll"),
            *("QCOLL_TUNING", '"/nonexistent/tuning"', "No such file", "qcoll tune -o FILE"),
        )


def test_a_missing_file_fails_init_on_all_ranks() -> None:
    shared_pool(2, [1, 1]).run(missing_file, backend="gloo")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("cannot be opened", "No such file")),
        ("", ("line 1", "qcoll-tuning 1")),
        (MODEL.replace("qcoll-tuning 1", "qcoll-tuning 2"), ("line 1", "qcoll-tuning 2")),
        (FIRST + "2*2 all_gather bf16 exact 1:1", ("line 2", '"2*2"', "like 2+2")),
        (FIRST + "\n1+1 all_gather bf16 int9 1:1", ("line 3", '"int9"', "int8[:block]")),
        (FIRST + "1+1 all_gather bf16 exact 2:1 1:1", ("line 2", "increasing order")),
        (FIRST + "1+1 all_gather bf16 exact 2:nan", ("line 2", '"2:nan"', "BYTES:MICROSECONDS")),
    ],
)
def test_bad_files_are_named(text: str | None, parts: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    if text is not None:
        file.write_text(text)
    expect_error(lambda: qcoll.Options(tuning=file), "tuning", str(file), "qcoll tune", *parts)


def test_a_folder_a_pipe_and_a_device_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        expect_error(lambda path=path: qcoll.Options(tuning=path), "it is not a file")
    expect_error(lambda: qcoll.Options(tuning="a\0b"), 'tuning="a')


def test_contexts_cannot_change_the_file(model: str) -> None:
    def enter() -> None:
        with qcoll.options(tuning=model):
            pass

    expect_error(enter, "tuning", model, "qcoll.Options")


WORDS = st.sampled_from(
    [
        *MODEL.split(),
        "qcoll-tuning",
        "1",
        "#",
        "\0",
        "\x1b[2J",
        "é",
        "1:",
        ":1",
        "9" * 30,
        "2+2/2x2",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300).map(lambda tail: FIRST.encode() + tail),
        st.lists(st.lists(WORDS, max_size=6).map(" ".join), max_size=6).map(
            lambda lines: (FIRST + "\n".join(lines)).encode()
        ),
    )
)
def test_hostile_texts_are_read_or_refused(tmp_path_factory: Any, text: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.txt"
    file.write_bytes(text)
    said = ""
    try:
        qcoll.Options(tuning=file)
    except ValueError as error:
        said = str(error)
    assert not said or ("is not a cost model: line " in said and "expected" in said)
    assert said.isprintable()


# qcoll tune.


def test_crossovers_are_those_of_the_model() -> None:
    def series(codec: str, *times: float) -> Series:
        points = zip((100, 200, 400, 800), times, strict=True)
        return Series("1+1", "all_gather", "float32", codec, tuple(points))

    found = crossovers(
        [
            series("exact", 10, 20, 40, 80),
            series("int8:256", 20, 20, 20, 20),
            series("int4:128", 5, 30, 30, 90),
            series("bf16", 5, 5, 5, 5),
            series("int8:64", 99, 99, 99, 99),
        ]
    )
    assert [one.coded for one in found] == [
        ((200, None),),
        ((0, 133), (300, 600)),
        ((0, None),),
        (),
    ]
    assert [one.gain for one in found] == pytest.approx([4, 80 / 90, 16, 80 / 99])


def test_what_is_measured() -> None:
    found = configs((4096, 2 << 20), ("bf16", "fp16"), iters=3)
    assert {(c.verbs, c.codecs) for c in found} == {
        (("all_gather",), ("exact", "int8:256")),
        (("reduce_scatter",), ("exact", "int8:256/int4:128")),
        (("all_reduce",), ("exact", "int8:256")),
    }
    calls = {(c.sizes, c.dtype): c.calls for c in found}
    assert calls[(4096,), "bf16"] > calls[(2 << 20,), "bf16"] == calls[(4096,), "fp16"] == 1
    own = configs((4096,), ("bf16",), ("int4", "exact"))
    assert {c.codecs for c in own} == {("exact", "int4")}
    with pytest.raises(BenchError, match="codec 'int3'"):
        configs((4096,), ("bf16",), ("int3",))


def test_a_file_keeps_other_layouts_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "tuning.txt"
    one, two = (
        Series(name, "all_gather", "float32", "exact", ((8, 1.0),)) for name in ("1+1", "2")
    )

    def layouts() -> list[str]:
        return [line.split()[0] for line in file.read_text().splitlines()[1:] if line[0] != "#"]

    write_tuning(file, [one], None, keep_others=True)
    write_tuning(file, [two], None, keep_others=True)
    write_tuning(file, [two], None, keep_others=True)
    assert layouts() == ["2", "1+1"]
    assert file.read_text().count("# layout") == 1
    assert sum("kernels" in line for line in file.read_text().splitlines()) == 2
    write_tuning(file, [two], None, keep_others=False)
    assert layouts() == ["2"]
    assert list(file.parent.iterdir()) == [file]
    file.write_text("something else")
    with pytest.raises(BenchError, match="line 1"):
        check_target(file, keep_others=True)
    with pytest.raises(BenchError, match="cannot be written"):
        check_target(file / "below", keep_others=False)
    with pytest.raises(BenchError, match="is a folder"):
        check_target(file.parent, keep_others=False)


def measured_times() -> None:
    predicted = qcoll.explain(SCATTER, 4096, torch.float32)["predicted_us"]
    assert predicted is not None
    assert predicted["exact"] is not None
    assert predicted["coded"] is not None
    for verb in (GATHER, SCATTER):
        chosen, because = observe(verb, dtype=torch.float32)
        assert (chosen == "exact") == ("cost model" in because or "all_gather_dtypes" in because)


def run_tune(*words: str, status: int = 0, env: dict[str, str] | None = None) -> str:
    pytest.importorskip("typer", reason="typer is not installed")
    done = run([sys.executable, "-m", "qcoll.cli", "tune", *words], env, status)
    return done.stdout + done.stderr


def test_tune_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "tuning.txt"
    words = ["-o", str(file), "-b", "4K", "-e", "16K", "--iters", "2", "--rounds", "1"]
    # The file that it will write must not be needed.
    env = {"QCOLL_TUNING": str(file)}
    printed = run_tune(*words, "--ranks", "2", "--nodes", "2", "--json", env=env)
    found = json.loads(printed)
    assert [(one["collective"], one["dtype"], one["codec"]) for one in found] == [
        (verb, dtype, codec)
        for dtype in ("bfloat16", "float32")
        for verb, codec in (
            ("all_gather", "int8:256"),
            ("reduce_scatter", "int8:256/int4:128"),
            ("all_reduce", "int8:256"),
        )
    ]
    assert {one["layout"] for one in found} == {"1+1"}
    lines = [line for line in file.read_text().splitlines() if line.startswith("1+1")]
    assert len(lines) == 12
    assert all([p.split(":")[0] for p in ln.split()[4:]] == ["4096", "16384"] for ln in lines)
    shared_pool(2, [1, 1]).run(measured_times, backend="qcoll", pg_options={"tuning": file})
    table = run_tune(*words, "--ranks", "2", "--codec", "int4", "--dtype", "fp32", "--add")
    assert "layout 2:" in table
    assert "int4" in table
    assert {line.split()[0] for line in file.read_text().splitlines()[1:]} == {"#", "1+1", "2"}


def test_bad_arguments_of_tune(tmp_path: Path) -> None:
    good = ["-o", str(tmp_path / "out"), "--ranks", "2"]
    assert "nobody started ranks" in run_tune(*good[:2], status=2)
    assert "codec 'int3'" in run_tune(*good, "--codec", "int3", status=2)
    assert "is a folder" in run_tune("-o", str(tmp_path), "--ranks", "2", status=2)


def test_medians_of_several_measurements_become_series() -> None:
    def row(size: int, codec: str, time: float) -> dict[str, Any]:
        fields = {"verb": "all_gather", "dtype": "float32", "codec": codec, "size": size}
        return {**fields, "time_us": {"median": time}}

    rows = [[row(64, "exact", 2.04), row(64, "int8:256", 0.01)], [row(8, "exact", 1.0)]]
    found = series_of({"layout": "1+1", "rows": rows})
    assert [one.line() for one in found] == [
        "1+1 all_gather float32 exact 8:1.0 64:2.0",
        "1+1 all_gather float32 int8:256 64:0.1",
    ]
