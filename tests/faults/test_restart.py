"""Elastic restart: torchrun starts the workers again after a death, and training resumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from restarting import DEATHS, STEPS

from qcoll.testing.layout import QUICK_RESOLVER, SINGLE_THREADED, import_path

WORLD = 2


#: Whether the agent keeps one store over restarts, as it does by default, or each life has its own.
STORES = {"kept": "0", "new": "1"}


def launch(folder: Path, restarts: int, store: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(__file__).with_name("restarting.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORLD), "--max-restarts", str(restarts)]
    return subprocess.run(
        [*command, program, str(folder)],
        env={
            **os.environ,
            **SINGLE_THREADED,
            **QUICK_RESOLVER,
            **import_path(),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": STORES[store],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def steps_taken(folder: Path) -> list[tuple[int, int]]:
    """(restart, step) in order."""
    lines = (folder / "steps").read_text().splitlines()
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


@pytest.mark.parametrize("store", STORES)
def test_training_resumes(store: str, tmp_path: Path) -> None:
    """With a store that was kept, the records of the dead are still in it."""
    done = launch(tmp_path, len(DEATHS), store)
    assert done.returncode == 0, done.stdout
    first, second = DEATHS[0][0], DEATHS[1][0]
    expected = [(0, s) for s in range(first)]
    expected += [(1, s) for s in range(first, second)]
    expected += [(2, s) for s in range(second, STEPS)]
    assert steps_taken(tmp_path) == expected
    # Every step counted once: the sum over steps and ranks of step + rank, halved.
    total = sum(step + rank for step in range(STEPS) for rank in range(WORLD))
    assert (tmp_path / "result").read_text().split() == [str(-0.5 * total)] * 2


def test_one_restart_too_few(tmp_path: Path) -> None:
    """The workers do die: with fewer restarts the job fails, and the survivor names the dead."""
    done = launch(tmp_path, len(DEATHS) - 1, "new")
    assert done.returncode != 0
    assert steps_taken(tmp_path)[-1] == (1, DEATHS[1][0] - 1)
    assert not (tmp_path / "result").exists()
    for _, dead in DEATHS.values():
        assert re.search(rf"qcoll.TransportError: .*all_reduce.*rank {dead} .*died", done.stdout)
