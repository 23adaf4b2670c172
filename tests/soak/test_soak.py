"""Short soaks: all collectives, checked, with deaths. `make soak MINUTES=60` has longer ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qcoll.testing.layout import import_path

_REPOSITORY = Path(__file__).parents[2]


def soak(seconds: float, kill_every: float, seed: int) -> str:
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(seconds / 60)]
    command += ["--kill-every", str(kill_every), "--seed", str(seed)]
    # A round that hangs is ended after a minute and a half, and its stacks are in the output.
    done = subprocess.run(
        command,
        cwd=_REPOSITORY,
        env={**os.environ, **import_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + 150,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def kills_in(output: str) -> int:
    found = re.search(r"kills (\d+)$", output, re.MULTILINE)
    assert found, output
    return int(found[1])


def test_a_short_soak() -> None:
    assert kills_in(soak(20, 7, seed=1)) == 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_longer_soak() -> None:
    assert kills_in(soak(180, 21, seed=2)) == 8
