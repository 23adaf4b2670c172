"""No file descriptors left, when a group is formed and later: named errors, on all ranks."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import AT_ONCE, error_of, works

from qcoll.testing import shared_pool

TIMEOUT = 3.0
POOR = 1  # the rank that runs out
LAYOUTS = [[3], [1, 1, 1], [2, 2]]
CAUSE = "Too many open files"


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Leave this process ``free`` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    # The lowest numbers are given first; so fill the gaps, and let the limit do the rest.
    fillers = []
    while (fd := os.open(os.devnull, os.O_RDONLY)) <= max(used):
        fillers.append(fd)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def form_with(free: int) -> str:
    """Form a group while one rank has ``free`` descriptors; the error, or nothing if it worked."""
    poor = dist.get_rank() == POOR
    start = time.monotonic()
    text = ""
    with descriptors(free) if poor else contextlib.nullcontext():
        try:
            group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
        except (RuntimeError, ValueError) as error:
            text = str(error)
    assert time.monotonic() - start < TIMEOUT + AT_ONCE
    if not text:
        # Enough to form it. What its first calls open is the next test's.
        dist.destroy_process_group(group)
    return text


def form_with_fewer_and_fewer() -> list[str]:
    return [form_with(free) for free in range(80, -1, -8)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_forming_a_group(layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    seen = pool.run(form_with_fewer_and_fewer, backend="gloo", fresh=True, timeout=200)
    attempts = list(zip(*seen, strict=True))
    assert not any(attempts[0]), attempts[0]  # there is something to lose
    assert all(attempts[-1])
    for texts in attempts:
        if not any(texts):
            continue
        for rank, text in enumerate(texts):
            assert text, f"rank {rank} noticed nothing: {texts}"
            if rank == POOR:
                assert CAUSE in text, text
            else:
                assert re.search(rf"\brank {POOR}\b", text), text


def clock_of_control_thread() -> int:
    """The clock that counts the CPU time of qcoll's control thread; to read it opens no file."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "qcoll_control":
            return (~int(task.name) << 3) | 6  # as pthread_getcpuclockid does
    raise AssertionError("no control thread")


def first_call_without(free: int) -> tuple[str, int, float, float]:
    """The first call opens connections, which one rank cannot; (text, peer, seconds, CPU)."""
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
    whole = torch.empty(1000 * dist.get_world_size())
    poor = dist.get_rank() == POOR
    clock = clock_of_control_thread()
    with descriptors(free) if poor else contextlib.nullcontext():
        dist.barrier()
        spent = time.clock_gettime(clock)
        error, seconds = error_of(
            lambda: dist.all_gather_into_tensor(whole, torch.ones(1000), group=group)
        )
        spent = time.clock_gettime(clock) - spent
    dist.destroy_process_group(group)
    dist.barrier()
    works(dist.new_group(backend="qcoll"))
    return str(error), error.peer, seconds, spent


@pytest.mark.parametrize("layout", [[1, 1, 1], [1, 1]], ids=str)
def test_the_first_call(layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    seen = pool.run(first_call_without, (0,), backend="gloo", fresh=True, timeout=90)
    for rank, (text, _, seconds, spent) in enumerate(seen):
        assert seconds < TIMEOUT + AT_ONCE, text
        assert re.search(rf"\brank {POOR}\b", text), f"rank {rank}: {text}"
        assert CAUSE in text or re.search("[Tt]imed out", text), text
        # A listener that cannot accept must not be asked without a pause.
        assert spent < 0.5 * TIMEOUT, f"rank {rank}'s control thread ran for {spent} s"


def go_on_without(free: int) -> None:
    """What has its connections needs no more descriptors."""
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
    works(group)
    calls: list[Any] = [lambda: works(group), lambda: dist.barrier(group=group)]
    with descriptors(free) if dist.get_rank() == POOR else contextlib.nullcontext():
        for _ in range(20):
            for call in calls:
                call()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_calls_that_have_their_connections(layout: list[int]) -> None:
    shared_pool(sum(layout), layout).run(go_on_without, (0,), backend="gloo", fresh=True)
