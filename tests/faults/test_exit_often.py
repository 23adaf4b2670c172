"""Programs that end with work pending and no destroy_process_group: 50 times, status 0 each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qcoll.testing.layout import SINGLE_THREADED, import_path

# Forks ranks that have imported torch already, and runs them to the end of their interpreters.
_DRIVER = Path(__file__).parent.parent / "python" / "exit_driver.py"

TIMES = 50

PROGRAMS = {
    "that would end": """
works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3)]
works += [dist.broadcast(x, 0, async_op=True)]
works += [qcoll.all_reduce(torch.ones(300_000), codec="int8", async_op=True) for _ in range(3)]
works += [dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)]
futures = [w.get_future().then(lambda f: f.value()) for w in works]
""",
    "that cannot end": """
import threading
def wait():
    try:
        dist.barrier()
    except qcoll.TransportError:
        pass
groups = [dist.new_group() for _ in range(2)]
if rank == 0:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    works += [dist.all_reduce(torch.ones(1000), op=dist.ReduceOp.MAX, async_op=True)]
    works += [dist.all_reduce(x, group=g, async_op=True) for g in groups]
    futures = [w.get_future().then(lambda f: f.value()) for w in works]
    threading.Thread(target=wait, daemon=True).start()
""",
}


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(_DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **SINGLE_THREADED, **import_path()},
    )
    yield process
    process.communicate()


def run(driver: subprocess.Popen[str], program: str, names: list[str]) -> dict[str, list[Any]]:
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(json.dumps({"program": program, "names": names}) + "\n")
    driver.stdin.flush()
    ended: dict[str, list[Any]] = json.loads(driver.stdout.readline())
    return ended


# Interpreters of three ranks end, one after another if the cores are few: seconds each time.
@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("what", PROGRAMS)
def test_exit_with_pending_work(driver: subprocess.Popen[str], what: str) -> None:
    names = ["a", "b", "a"]  # over shared memory and TCP
    bad = []
    for attempt in range(TIMES):
        ended = run(driver, PROGRAMS[what], names)
        if ended["statuses"] != [0] * len(names) or ended["outputs"] != [""] * len(names):
            bad.append((attempt, ended))
    assert not bad, f"{len(bad)} of {TIMES}: {bad[0]}"
