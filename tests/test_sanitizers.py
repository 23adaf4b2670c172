"""The C++ tests under sanitizers, in builds of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Schedules and the codec's exhaustive sweeps have no threads; they would take long under TSan.
THREADED = "*test_group*,*test_exchange*,*test_handshake*,*test_communicator*"


def _build(name: str, flags: str) -> Path:
    build = ROOT / "build" / name
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DQCOLL_TORCH=OFF"]
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_CXX_FLAGS={flags}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", str(build), "--target", "qcoll_tests", "-j", "2"],
        check=True,
        capture_output=True,
    )
    return build / "tests" / "cpp" / "qcoll_tests"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "flags", "only"),
    [
        ("tsan", "-fsanitize=thread -g", THREADED),
        ("asan", "-fsanitize=address,undefined -fno-sanitize-recover=all -g", "*"),
    ],
)
def test_no_report(name: str, flags: str, only: str) -> None:
    program = _build(name, flags)
    result = subprocess.run(
        [program, f"--source-file={only}", "--no-version"],
        capture_output=True,
        text=True,
        env={**os.environ, "TSAN_OPTIONS": "exitcode=66"},
        check=False,
    )
    report = result.stdout[-4000:] + result.stderr[-8000:]
    assert result.returncode == 0, report
    assert "Sanitizer" not in result.stderr, report
