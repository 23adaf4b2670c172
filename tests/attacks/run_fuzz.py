"""Builds the libFuzzer targets with clang 18 or newer and runs them: ``make fuzz RUNS=10000000``.

Every target starts from its stored inputs in ``corpus/``; what a run finds in addition stays in the
build folder. The table at the end has executions, seconds, executions per second, and the edges of
the program that the inputs reach.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "fuzz"
OLDEST_CLANG = 18

#: The longest input that makes sense for each target, in bytes.
MAX_LENGTH = {
    "hello": 64,
    "guest": 160,
    "header": 70,
    "codec": 128,
    "stream": 256,
    "mapped": 256,
    "control": 256,
    "records": 600,
    "options": 40,
    "topology": 64,
    "tuning": 400,
}
# Stack traces of allocations and a large quarantine make the small runs several times slower.
_ASAN = "malloc_context_size=2:quarantine_size_mb=8:detect_stack_use_after_return=0"


@dataclass(frozen=True)
class Outcome:
    """What one run did; ``failure`` is its output if it found something."""

    target: str
    runs: int
    seconds: float
    edges: int
    failure: str = ""

    def __str__(self) -> str:
        rate = self.runs / max(self.seconds, 1e-3)
        return (
            f"{self.target:10} {self.runs:>10} {self.seconds:>8.0f} s {rate:>9.0f}/s "
            f"{self.edges:>5} edges  {'FAILED' if self.failure else 'clean'}"
        )


def clang() -> str | None:
    """A C++ compiler with libFuzzer that knows the processors that the library asks for."""
    names = ["clang++", *(f"clang++-{version}" for version in range(30, OLDEST_CLANG - 1, -1))]
    for path in filter(None, map(shutil.which, [os.environ.get("FUZZ_CLANG", ""), *names])):
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"version (\d+)", text.stdout)
        if version is None or int(version[1]) < OLDEST_CLANG:
            continue
        probe = [path, "-fsanitize=fuzzer", "-x", "c++", "-", "-o", "/dev/null"]
        source = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
        if subprocess.run(probe, input=source.encode(), capture_output=True).returncode == 0:
            return path
    return None


def build(compiler: str) -> None:
    """Builds all targets in ``build/fuzz``."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DQCOLL_TORCH=OFF", "-DQCOLL_FUZZ=ON"]
    configure += [f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (configure, ["cmake", "--build", str(BUILD), "-j", str(os.cpu_count())]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def run(target: str, runs: int, seconds: int = 0) -> Outcome:
    """Runs one target at most ``runs`` times, and at most ``seconds`` unless that is 0."""
    found = BUILD / "corpus" / target
    found.mkdir(parents=True, exist_ok=True)
    command = [str(BUILD / "tests" / "attacks" / f"fuzz_{target}"), f"-runs={runs}"]
    # Leaks are looked for once, at the end: a search after each input takes most of the time.
    command += [f"-max_len={MAX_LENGTH[target]}", "-timeout=20", "-detect_leaks=0"]
    command += [f"-max_total_time={seconds}", f"-artifact_prefix={found}/../{target}-"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(found), str(HERE / "corpus" / target)],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "ASAN_OPTIONS": _ASAN},
        check=False,
    )
    took = time.monotonic() - started
    executed = [int(n) for n in re.findall(r"(?:^#|^Done )(\d+)", done.stderr, re.MULTILINE)]
    edges = [int(n) for n in re.findall(r"cov: (\d+)", done.stderr)]
    failure = "" if done.returncode == 0 else done.stderr[-6000:]
    return Outcome(target, max(executed, default=0), took, max(edges, default=0), failure)


def main(arguments: Sequence[str] | None = None) -> int:
    """The status: 0 if no run found anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(MAX_LENGTH), help="default: all")
    parser.add_argument("--runs", type=int, default=100_000, help="executions of each target")
    options = parser.parse_args(arguments)
    compiler = clang()
    if compiler is None:
        print(
            f"no clang {OLDEST_CLANG} or newer with libFuzzer; on Debian: apt-get install clang-19"
        )
        return 1
    build(compiler)
    failures = 0
    for target in options.targets:
        outcome = run(target, options.runs)
        print(outcome, flush=True)
        if outcome.failure:
            failures += 1
            print(outcome.failure, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
