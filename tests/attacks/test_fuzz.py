"""The fuzz targets of the C++ parsers: over their stored inputs, and for a while with libFuzzer."""

from __future__ import annotations

import subprocess

import pytest
from run_fuzz import HERE, MAX_LENGTH, OLDEST_CLANG, ROOT, build, clang, run

REPLAY = ROOT / "build" / "cmake" / "tests" / "attacks" / "qcoll_replay"
CORPUS = HERE / "corpus"
VARIATIONS = 500


def test_every_target_has_inputs() -> None:
    assert REPLAY.exists(), f"{REPLAY} is missing; `make test` builds it"
    assert {folder.name for folder in CORPUS.iterdir()} == set(MAX_LENGTH)
    assert {source.stem for source in HERE.glob("fuzz_*.cc")} == {f"fuzz_{n}" for n in MAX_LENGTH}


@pytest.mark.parametrize("target", MAX_LENGTH)
def test_stored_inputs_and_variations(target: str) -> None:
    result = subprocess.run(
        [REPLAY, CORPUS, str(VARIATIONS), target],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    inputs = len(list((CORPUS / target).iterdir()))
    runs = inputs * (VARIATIONS + 1)
    assert result.stdout == f"{target}: {inputs} inputs, {runs} runs\n"


@pytest.fixture(scope="module")
def fuzzers() -> None:
    compiler = clang()
    if compiler is None:
        pytest.skip(f"no clang {OLDEST_CLANG} or newer with libFuzzer (apt-get install clang-19)")
    build(compiler)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("fuzzers")
@pytest.mark.parametrize("target", MAX_LENGTH)
def test_libfuzzer_finds_nothing(target: str) -> None:
    outcome = run(target, runs=200_000, seconds=60)
    assert not outcome.failure, outcome.failure
    assert outcome.runs > 1000, outcome
