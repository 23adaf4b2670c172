"""Trains under torchrun, and dies twice in the middle of a collective: see test_restart.py.

    torchrun ... restarting.py FOLDER

FOLDER keeps the checkpoint, a line for each step that was taken, and the result.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 12
#: restart -> the step in which a rank dies, and which
DEATHS = {0: (4, 1), 1: (8, 0)}


def main(folder: Path) -> None:
    os.environ["QCOLL_NODE"] = f"node{os.environ['LOCAL_RANK']}"
    dist.init_process_group("qcoll", timeout=timedelta(seconds=60))
    rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    weights, step = torch.zeros(400_000), 0
    if (folder / "checkpoint").exists():
        saved = torch.load(folder / "checkpoint")
        weights, step = saved["weights"], saved["step"]
    while step < STEPS:
        # Under way when the rank dies: the others are in the same call.
        if DEATHS.get(restart) == (step, rank):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                dist.all_reduce(torch.ones(400_000))
        gradient = torch.full_like(weights, float(step + rank))
        dist.all_reduce(gradient)
        while DEATHS.get(restart, (-1,))[0] == step:
            dist.all_reduce(torch.ones(400_000))
        weights -= 0.5 * gradient
        step += 1
        if rank == 0:
            torch.save({"weights": weights, "step": step}, folder / "partial")
            (folder / "partial").rename(folder / "checkpoint")
            with (folder / "steps").open("a") as log:
                log.write(f"{restart} {step - 1}\n")
        dist.barrier()
    total = torch.stack([weights.min(), weights.max()])
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if rank == 0:
        (folder / "result").write_text(f"{total[0].item()} {total[1].item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
