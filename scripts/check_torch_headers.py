"""Compiles cpp/ (syntax only) against the headers of several minor versions of torch.

    python scripts/check_torch_headers.py 2.10 2.13 2.14

Of each minor version's newest wheel only the headers are fetched, by ranges, where the index allows
them; they stay in build/torch_headers. Needs a C++ compiler, Python's headers and fsspec[http].
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "torch_headers"
# A wheel's headers lie side by side in some 10 MB of it: one read fetches them all.
READ_BYTES = 16 << 20
# What every file includes in the end. Parsed once for each version, as in the build.
COMMON = """\
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
"""


def wheel_url(minor: str) -> tuple[str, str]:
    """The version and the address of the newest wheel of a minor version, from pip."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--only-binary=:all:", "--report=-", f"torch=={minor}.*"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    (wheel,) = report["install"]
    return wheel["metadata"]["version"], wheel["download_info"]["url"]


def extract_headers(url: str, folder: Path) -> None:
    with fsspec.open(url, "rb", block_size=READ_BYTES, cache_type="readahead") as file:
        if not file.seekable():  # the server sends whole files only
            with fsspec.open(f"simplecache::{url}", "rb") as whole, zipfile.ZipFile(whole) as wheel:
                _extract(wheel, folder)
            return
        with zipfile.ZipFile(file) as wheel:
            _extract(wheel, folder)


def _extract(wheel: zipfile.ZipFile, folder: Path) -> None:
    headers = [i for i in wheel.infolist() if i.filename.startswith("torch/include/")]
    wheel.extractall(folder, sorted(headers, key=lambda info: info.header_offset))


def headers_of(minor: str) -> Path:
    """The folder of a minor version's headers, fetched if they are not there yet."""
    folder = CACHE / minor
    if folder.exists():
        return folder
    version, url = wheel_url(minor)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        partial = Path(name) / "partial"
        extract_headers(url, partial)
        template = (ROOT / "cpp" / "version.h.in").read_text()
        (partial / "version.h").write_text(re.sub("@.*?@", version, template))
        (partial / "common.h").write_text(COMMON)
        partial.rename(folder)  # whole or not at all
    return folder


def compile_syntax(headers: Path, arguments: list[str | Path]) -> str:
    """The compiler's messages; empty when it has none."""
    include = headers / "torch" / "include"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fmax-errors=30", "-w"]
    command += [f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'libqcoll'}", f"-I{headers}", "-isystem", include]
    command += ["-isystem", include / "torch" / "csrc" / "api" / "include"]
    command += ["-isystem", sysconfig.get_path("include"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stderr


def check(minor: str, jobs: int) -> list[str]:
    """The messages of the files that do not compile."""
    headers = headers_of(minor)
    common = headers / "common.h"
    parsed = headers / "common.h.gch"
    try:
        failure = compile_syntax(headers, ["-x", "c++-header", common, "-o", parsed])
        if failure:
            return [failure]
        with ThreadPoolExecutor(jobs) as pool:
            files = sorted((ROOT / "cpp").glob("*.cc"))
            results = pool.map(
                lambda file: compile_syntax(headers, ["-fsyntax-only", "-include", common, file]),
                files,
            )
            return [result for result in results if result]
    finally:
        parsed.unlink(missing_ok=True)  # hundreds of megabytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minor", nargs="+", help="of torch, as 2.13")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    failed = []
    for minor in arguments.minor:
        started = time.monotonic()
        messages = check(minor, arguments.jobs)
        seconds = time.monotonic() - started
        print(*messages, sep="\n", end="\n" if messages else "")
        verdict = f"{len(messages)} files do not compile" if messages else "compiles"
        print(f"torch {minor}: {verdict} ({seconds:.0f} s)", flush=True)
        if messages:
            failed.append(minor)
    print(f"failed: {', '.join(failed)}" if failed else "all compile")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
