"""The C++ tests under sanitizers, in builds of their own.

A short part runs always: groups of processes and the parsers under ASan and UBSan.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "attacks" / "corpus"

COMMON = "-O1 -g1 -fno-omit-frame-pointer"
ASAN = f"-fsanitize=address,undefined -fno-sanitize-recover=all {COMMON}"
TSAN = f"-fsanitize=thread {COMMON}"

# Schedules and the codec's exhaustive sweeps have no threads; they would take long under TSan.
THREADED = "*test_group*,*test_exchange*,*test_handshake*,*test_communicator*"

# Of tests/python, those that reach most of the binding: every verb, gloo, TLS, failures.
PYTHON = ("collectives", "delegated", "encryption", "abort")


@cache
def _build(name: str, flags: str, *targets: str, parts: tuple[str, ...] = ("TESTS",)) -> Path:
    """The folder of a build of these targets alone."""
    build = ROOT / "build" / name
    configure = ["cmake", "-S", str(ROOT), "-B", str(build)]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    for part in ("TORCH", "TESTS"):
        configure += [f"-DQCOLL_{part}={'ON' if part in parts else 'OFF'}"]
    # No build type that CMake knows: the flags say it all.
    configure += ["-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_CXX_FLAGS={flags}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    if shutil.which("ccache"):
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    make = ["cmake", "--build", str(build), "-j", "2", "--target", *targets]
    for command in (configure, make):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return build


def _expect_no_report(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    report = result.stdout[-4000:] + result.stderr[-12000:]
    assert result.returncode == 0, report
    assert "Sanitizer" not in result.stderr, report
    assert "runtime error" not in result.stderr, report


@pytest.mark.timeout(600)
def test_processes_and_parsers_in_brief() -> None:
    build = _build("asan", ASAN, "qcoll_processes", "qcoll_replay")
    _expect_no_report(build / "tests" / "cpp" / "qcoll_processes", "--brief")
    _expect_no_report(build / "tests" / "attacks" / "qcoll_replay", CORPUS, "200")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_addresses_and_undefined_behaviour() -> None:
    build = _build("asan", ASAN, "qcoll_tests", "qcoll_processes", "qcoll_replay")
    _expect_no_report(build / "tests" / "cpp" / "qcoll_tests", "--no-version")
    _expect_no_report(build / "tests" / "cpp" / "qcoll_processes")
    _expect_no_report(build / "tests" / "attacks" / "qcoll_replay", CORPUS, "500")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_threads() -> None:
    build = _build("tsan", TSAN, "qcoll_tests", "qcoll_processes")
    _expect_no_report(
        build / "tests" / "cpp" / "qcoll_tests", f"--source-file={THREADED}", "--no-version"
    )
    _expect_no_report(build / "tests" / "cpp" / "qcoll_processes")


def _gcc_library(name: str) -> str:
    command = ["gcc", f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(path).is_absolute():  # gcc repeats the name of what it does not have
        pytest.skip(f"gcc has no {name}, which python would have to load first")
    return path


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_backend_in_python(tmp_path: Path) -> None:
    # With libstdc++ beside it: libasan looks for __cxa_throw when it is loaded, before any module.
    preload = f"{_gcc_library('libasan.so')} {_gcc_library('libstdc++.so.6')}"
    build = _build("asan_python", ASAN, "_C", parts=("TORCH",))
    sources_alone = shutil.ignore_patterns("*.so", "_build.py", "__pycache__")
    shutil.copytree(ROOT / "python" / "qcoll", tmp_path / "qcoll", ignore=sources_alone)
    for file in (*(build / "cpp").glob("_C.*.so"), build / "cpp" / "_build.py"):
        shutil.copy(file, tmp_path / "qcoll")
    tests = [str(ROOT / "tests" / "python" / f"test_{name}.py") for name in PYTHON]
    reports = tmp_path / "report"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": preload,
            # The interpreter and torch leave much behind. Reports of ranks go to files: what
            # collects the output of a rank may drop it.
            "ASAN_OPTIONS": f"detect_leaks=0:log_path={reports}",
            "UBSAN_OPTIONS": f"log_path={reports}",
            "PYTHONPATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = "".join(file.read_text()[:8000] for file in tmp_path.glob("report.*"))
    assert not found, found
    assert result.returncode == 0, result.stdout[-8000:]
