"""The C++ tests, one pytest case for each of theirs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parent.parent / "build" / "cmake"
PROGRAM = BUILD / "tests" / "cpp" / "qcoll_tests"
PROCESSES = BUILD / "tests" / "cpp" / "qcoll_processes"


def _list_cases() -> list[str]:
    if not PROGRAM.exists():
        return []
    listing = subprocess.run(
        [PROGRAM, "--list-test-cases", "--no-version"], capture_output=True, text=True, check=True
    )
    return [
        line
        for line in listing.stdout.splitlines()
        if line and not line.startswith(("===", "[doctest]"))
    ]


def test_the_program_is_built() -> None:
    assert PROGRAM.exists(), f"{PROGRAM} is missing; `make test` builds it"
    assert len(_list_cases()) > 50


@pytest.mark.parametrize("case", _list_cases())
def test_cpp(case: str) -> None:
    # A comma would separate two filters; "?" stands for any character.
    result = subprocess.run(
        [PROGRAM, f"--test-case={case.replace(',', '?')}", "--no-version"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "test cases: 0" not in " ".join(result.stdout.split()), f"no case matched {case!r}"


@pytest.mark.parametrize("scenario", ["collectives", "forming", "death", "abort", "shutdown"])
def test_processes(scenario: str) -> None:
    assert PROCESSES.exists(), f"{PROCESSES} is missing; `make test` builds it"
    result = subprocess.run(
        [PROCESSES, scenario], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr[-8000:]
    assert result.stdout.startswith(f"{scenario}: right"), result.stdout


@pytest.mark.parametrize("isa", ["v2", "v3", "v4"])
def test_kernel_object_exports_one_symbol(isa: str) -> None:
    result = subprocess.run(
        ["ctest", "--test-dir", str(BUILD), "-R", f"^symbols_{isa}$", "--output-on-failure"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "100% tests passed" in result.stdout, result.stdout
