"""Runs small programs as ranks, up to the very end of their interpreters, many times a second.

Started as a program. For each request on standard input (a JSON line) it forks the ranks from
itself, which has imported torch once; each runs the program in ``__main__`` and then leaves this
file by its end, so that the interpreter is finalised as after any script. The reply (a JSON line)
has the exit status and the output of each rank. Ranks meet in a FileStore.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import qcoll

PROGRAM = ""
SECONDS = 30.0


def become_rank(rank: int, names: list[str], folder: str) -> None:
    """Turn this fresh fork into one rank of the group."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ["QCOLL_NODE"] = names[rank]
    dist.init_process_group(
        "qcoll", init_method=f"file://{folder}/store", rank=rank, world_size=len(names)
    )


def wait_for(pids: list[int]) -> list[int | str]:
    """The exit status of each, or "hung"."""
    deadline = time.monotonic() + SECONDS
    statuses: list[int | str] = []
    for pid in pids:
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)
        if ended:
            statuses.append(os.waitstatus_to_exitcode(status))
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            statuses.append("hung")
    return statuses


def serve() -> str:
    """Answer requests; in a forked rank, return the program that it shall run."""
    for line in sys.stdin:
        request = json.loads(line)
        folder = tempfile.mkdtemp()
        pids = []
        for rank in range(len(request["names"])):
            pid = os.fork()
            if pid == 0:
                become_rank(rank, request["names"], folder)
                return str(request["program"])
            pids.append(pid)
        statuses = wait_for(pids)
        outputs = [Path(folder, f"output{r}").read_text() for r in range(len(pids))]
        shutil.rmtree(folder)
        print(json.dumps({"statuses": statuses, "outputs": outputs}), flush=True)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert qcoll.__version__
    PROGRAM = serve()
    rank, world = (dist.get_rank(), dist.get_world_size()) if PROGRAM else (0, 0)
    x = torch.ones(100_000)
    exec(PROGRAM)
