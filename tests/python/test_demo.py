"""The demo runs, measures and reports. The full comparison is too long for a unit test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.demo.report import compare, draw, explanations
from examples.demo.run import main, parse, plan
from examples.demo.text import ALPHABET, load_corpus, read_corpus

from qcoll.testing import available

_CAN, _WHY_NOT = available()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of three letters, as long as it must be."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("abc\n" * (1 << 17))
    return path


def test_a_short_run_writes_numbers_and_picture(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backends=gloo", "--steps=8", "--batch=2", "--no-hosts", f"--text={text}"]
    assert main([*options, f"--out={tmp_path}"]) == 0
    report = json.loads((tmp_path / "demo.json").read_text())
    run = report["runs"]["gloo"]
    assert not report["hosts"]
    assert report["why_no_hosts"] == "--no-hosts was given"
    assert run["world"] == 4
    assert run["step"]["measured_steps"] == 4
    assert run["step"]["interface_bytes"] is None
    assert len(run["train_losses"]) == 8
    assert run["train_losses"][-1] < run["train_losses"][0]
    assert run["validation_loss"] < np.log(ALPHABET)
    assert 0 < report["comparison"]["communication_share"] < 1
    # Weights in bf16 twice and gradients in fp32 once; the root unit is gathered only once.
    payload = sum(run["payload"].values())
    assert 7 * run["parameters"] < payload < 8 * run["parameters"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())
    assert "share this machine's loopback" in printed
    assert "validation loss" in printed


@pytest.mark.net
@pytest.mark.full
@pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available")
def test_qcoll_sends_a_fraction_of_the_bytes_and_learns_the_same(tmp_path: Path) -> None:
    assert main(["--steps=12", f"--out={tmp_path}"]) == 0
    report = json.loads((tmp_path / "demo.json").read_text())
    gloo, qcoll, exact = (report["runs"][name] for name in ("gloo", "qcoll", "qcoll exact"))
    against = report["comparison"]["runs"]
    assert report["hosts"]
    assert against["qcoll"]["bytes_ratio"] <= 0.18
    assert against["qcoll"]["bytes_ratio_to_exact"] <= 0.36
    assert abs(against["qcoll"]["loss_difference"]) <= 0.03
    assert against["qcoll exact"]["largest_training_loss_difference"] < 1e-3
    assert gloo["payload"] == qcoll["payload"] == exact["payload"]
    for run in (qcoll, exact):
        assert run["step"]["library"]["payload_bytes"] == sum(run["payload"].values())
        # The interfaces saw what qcoll says it sent, and the headers around it.
        counted = run["step"]["library"]["across_nodes"]
        assert counted < run["step"]["interface_bytes"] < 1.15 * counted


def test_runs_of_one_seed_are_the_same(text: Path, tmp_path: Path) -> None:
    losses = []
    for name in ("one", "other"):
        options = ["--backends=gloo", "--steps=6", "--no-hosts", f"--text={text}"]
        assert main([*options, f"--out={tmp_path / name}"]) == 0
        report = json.loads((tmp_path / name / "demo.json").read_text())
        losses.append(report["runs"]["gloo"]["train_losses"])
    assert losses[0] == losses[1]


def test_a_failing_backend_is_reported(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backends=nonesuch", "--steps=8", "--no-hosts", f"--text={text}"]
    assert main([*options, f"--out={tmp_path}"]) == 1
    assert "nonesuch" in capsys.readouterr().out


def test_the_standard_librarys_text_is_always_the_same(tmp_path: Path) -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 2_000_000
    assert len(corpus.validation) > 100_000
    assert corpus.train.max() < ALPHABET
    corpus.save(tmp_path / "corpus.npz")
    train, validation = load_corpus(tmp_path / "corpus.npz")
    again = read_corpus()
    assert np.array_equal(train, again.train)
    assert np.array_equal(validation, again.validation)


def test_a_text_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("short")
    assert main([f"--text={path}", f"--out={tmp_path}"]) == 2
    assert "too few" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("option", ["--link=fast", "--steps=2", "--backends="])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        parse([option])


def test_qcoll_also_runs_without_quantization() -> None:
    runs = plan(["gloo", "qcoll"], 200)
    assert [run.name for run in runs] == ["gloo", "qcoll", "qcoll exact"]
    assert runs[2].env == {"QCOLL_ALL_GATHER": "exact", "QCOLL_REDUCE_SCATTER": "exact"}
    assert runs[2].steps < 200


def result(seconds: float, sent: float | None, loss: float | None = 2.0) -> dict[str, Any]:
    return {
        "train_losses": [4.0, 3.0, 2.0],
        "validation_curve": [[3, 2.0]],
        "validation_loss": loss,
        "payload": {"allgather_base": 1000},
        "seconds_without_communication": 0.1,
        "step": {
            "measured_steps": 3,
            "seconds": seconds,
            "interface_bytes": sent,
            "library": {"across_nodes": 150.0},
        },
    }


def test_the_comparison_is_arithmetic(tmp_path: Path) -> None:
    results = {
        "gloo": result(1.0, 1000),
        "qcoll": result(0.25, 200),
        "qcoll exact": result(0.5, 400, None),
    }
    losses = {"gloo": np.array([2.0, 2.0]), "qcoll": np.array([2.1, 2.3])}
    comparison = compare(results, losses)
    assert comparison["communication_share"] == pytest.approx(0.9)
    qcoll = comparison["runs"]["qcoll"]
    assert qcoll["bytes_ratio"] == pytest.approx(0.2)
    assert qcoll["speedup"] == pytest.approx(4.0)
    assert qcoll["ceiling"] == pytest.approx(1 / (0.1 + 0.9 * 0.2))
    assert qcoll["loss_difference"] == pytest.approx(0.2)
    assert qcoll["loss_difference_error"] == pytest.approx(0.1 / np.sqrt(2))
    assert qcoll["bytes_ratio_to_exact"] == pytest.approx(0.5)
    assert comparison["runs"]["qcoll exact"]["loss_difference"] is None
    report = {"title": "t", "runs": results, "comparison": comparison, "hosts": True}
    assert "3.57 times faster" in " ".join(explanations(report))
    draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_without_interface_counters_the_librarys_count_serves() -> None:
    comparison = compare({"gloo": result(1.0, None), "qcoll": result(0.5, None)}, {})
    assert comparison["runs"]["qcoll"]["bytes_ratio"] == pytest.approx(1.0)
