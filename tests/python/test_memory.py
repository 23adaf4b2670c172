"""A collective needs inputs, outputs and at most 32 MiB of staging per group, whatever the size.

Measured from outside: the kernel's record of the peak of each process, the group's shared memory
included. A page that several ranks of a node map counts for each of them by its share (Pss), so
that the sum over the ranks is what the machine holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import run_function

MIB = 1 << 20
STAGING = 32 * MIB
SIZES = (64 * MIB, 256 * MIB)
# What a call may leave behind elsewhere: pages of code and of the heap that it is first to touch.
NOISE = 2 * MIB


def memory(key: str) -> int:
    """VmHWM or VmRSS of this process, in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def shared_segments() -> tuple[int, int]:
    """(resident, share of it) of the group's shared memory in this process."""
    resident = share = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "memfd:qcoll" in line
        elif ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif ours and line.startswith("Pss:"):
            share += int(line.split()[1]) * 1024
    return resident, share


def private() -> int:
    """Resident memory without the group's shared segments."""
    return memory("VmRSS") - shared_segments()[0]


def peak_of(call: Callable[[], object], before: int) -> int:
    """Bytes beyond ``before`` that this process held at the peak of ``call``, with its share of all
    of the group's memory, touched now or earlier."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    call()
    peak = memory("VmHWM")
    resident, share = shared_segments()
    return peak - resident + share - before


def collectives(size: int, codec: str) -> dict[str, Callable[[], object]]:
    """Calls whose gathered, unreduced or reduced tensor has ``size`` bytes. The tensors are written
    beforehand, so that their pages exist."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(size // 4)
    part = whole.chunk(world)[rank]  # in place: nothing else is needed
    return {
        "all_gather": lambda: qcoll.all_gather_into_tensor(whole, part, codec=codec),
        "reduce_scatter": lambda: qcoll.reduce_scatter_tensor(part, whole, op="avg", codec=codec),
        "all_reduce": lambda: qcoll.all_reduce(whole, op="avg", codec=codec),
        "async": lambda: qcoll.all_reduce(whole, op="avg", codec=codec, async_op=True).wait(),
    }


def measure() -> dict[tuple[str, str, int], int]:
    # The measurement itself must see what a call takes, also when it is given back at once.
    assert peak_of(lambda: torch.ones(10 * MIB), private()) > 39 * MIB
    assert peak_of(lambda: None, private()) < NOISE
    before = private()  # what calls keep for later ones counts for all of them
    peaks = {}
    for codec in ("exact", "int8/int4"):
        for size in SIZES:
            for verb, call in collectives(size, codec).items():
                peaks[verb, codec, size] = peak_of(call, before + size)
    return peaks


def check(ranks: list[dict[tuple[str, str, int], int]]) -> None:
    for rank, peaks in enumerate(ranks):
        for (verb, codec, size), peak in peaks.items():
            what = f"{verb} {codec} {size // MIB} MiB on rank {rank}: {peak / MIB:.1f} MiB"
            assert peak < STAGING + NOISE, what
        for (verb, codec, size), peak in peaks.items():
            smallest = peaks[verb, codec, SIZES[0]]
            assert abs(peak - smallest) < STAGING / 4, f"{verb} {codec} {size} {peak} {smallest}"


@pytest.mark.parametrize("layout", [[1, 1], [2, 2]], ids=str)
def test_staging_is_bounded_whatever_the_size(layout: list[int]) -> None:
    # Fresh processes: nothing of earlier groups is in them.
    check(run_function(measure, sum(layout), nodes=layout, backend="qcoll", timeout=280))
