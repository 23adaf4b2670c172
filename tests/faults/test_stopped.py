"""SIGSTOP of a rank for three seconds: the others wait, and all go on after SIGCONT."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from fault_ranks import beside, stop_for, works

import qcoll
from qcoll.testing import shared_pool

PAUSE = 3.0
LAYOUTS = {"shared memory": [3], "TCP": [1, 1, 1], "both": [2, 2]}


def calls(step: int) -> None:
    """One of each kind, sync or async, with a result that depends on the step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((70_000,), float(step % 7))
    coded = torch.ones(70_000)
    jobs = [
        dist.all_reduce(x, async_op=step % 2 == 0),
        qcoll.all_reduce(coded, codec="int8", async_op=step % 2 == 0),
    ]
    top = torch.full((100,), float(step + rank))
    jobs.append(dist.all_reduce(top, dist.ReduceOp.MAX, async_op=step % 3 == 0))
    for job in jobs:
        if job is not None:
            job.wait()
    assert x.eq(world * (step % 7)).all()
    assert coded.eq(world).all()
    assert top.eq(step + world - 1).all()


def work_on(victim: int) -> tuple[int, float]:
    """(steps in all, the longest of them), until some steps after the pause."""
    works()
    helper = beside(stop_for(PAUSE, after=0.3)) if dist.get_rank() == victim else 0
    steps, longest, after = 0, 0.0, 0
    while after < 20:
        start = time.monotonic()
        calls(steps)
        steps += 1
        over = torch.tensor([float(helper == 0 or os.waitpid(helper, os.WNOHANG)[0] != 0)])
        if over.item():
            helper = 0
        dist.all_reduce(over, dist.ReduceOp.MIN)
        after = after + 1 if over.item() else 0
        longest = max(longest, time.monotonic() - start)
    works()
    return steps, longest


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("transport", LAYOUTS)
def test_work_goes_on(transport: str, victim: int) -> None:
    layout = LAYOUTS[transport]
    pool = shared_pool(sum(layout), layout)
    for steps, longest in pool.run(work_on, (victim,), backend="qcoll", fresh=True):
        assert steps > 20
        assert longest > PAUSE / 2  # it was stopped indeed
