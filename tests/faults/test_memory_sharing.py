"""Shared memory that fails: TCP instead where that is possible, a named error where it is not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from belongings import Belongings
from fault_ranks import AT_ONCE, error_of, works

from qcoll.testing import RankPool

TIMEOUT = 5.0
POOR = 1
LAYOUTS = [[3], [2, 2]]
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights, so needs them")


@pytest.fixture(params=LAYOUTS, ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """A pool of its own: what its ranks do to themselves cannot be undone."""
    with RankPool(sum(request.param), request.param) as pool:
        yield pool


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 4 KiB; that holds for anonymous ones as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused() -> str:
    start = time.monotonic()
    with small_files() if dist.get_rank() == POOR else contextlib.nullcontext():
        error, _ = error_of(form_and_call)
    assert time.monotonic() - start < TIMEOUT + AT_ONCE
    dist.barrier()
    works(dist.new_group(backend="qcoll"))
    return str(error)


def form_and_call() -> None:
    """Ranks of other nodes need not wait for that memory; they hear of it in their first call."""
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=TIMEOUT))
    dist.all_reduce(torch.ones(10), group=group)


def test_memory_that_cannot_be_had(pool: RankPool) -> None:
    for rank, text in enumerate(pool.run(refused, backend="gloo", timeout=60)):
        assert "File too large" in text, f"rank {rank}: {text}"
        assert rank == POOR or re.search(rf"\brank {POOR}\b", text), f"rank {rank}: {text}"


def mount(*arguments: bytes | int | None) -> None:
    if _LIBC.mount(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"mount {arguments}")


def own_mounts() -> None:
    """From now on this process has mounts of its own, as a container has."""
    if _LIBC.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount(b"none", b"/", None, _MS_REC_PRIVATE, None)


def no_rights() -> None:
    """Another user's processes keep their descriptors to themselves."""
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


def no_other_processes() -> None:
    """/proc shows this process, and no other's descriptors."""
    own_mounts()
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        if int(pid) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                mount(b"none", f"/proc/{pid}".encode(), b"tmpfs", 0, b"size=4k")


def full_dev_shm() -> None:
    own_mounts()
    mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=4k")
    with pytest.raises(OSError, match="No space left"):
        Path("/dev/shm/full").write_bytes(bytes(100_000))


#: name -> (what a rank does to itself, whether it shares memory all the same)
STATES: dict[str, tuple[Callable[[], None], bool]] = {
    "another user": (no_rights, False),
    "/proc hides others": (no_other_processes, False),
    "/dev/shm is full": (full_dev_shm, True),
}


def sockets() -> int:
    return sum(target.startswith("socket:") for target in Belongings().descriptors.values())


def falls_back(name: str) -> int:
    """The results are right; the connections that the calls have opened."""
    if dist.get_rank() == POOR:
        STATES[name][0]()
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=60))
    dist.barrier(group=group)
    before = sockets()
    works(group)
    x = torch.full((300_000,), float(dist.get_rank()))
    whole = torch.empty(300_000 * dist.get_world_size())
    dist.all_gather_into_tensor(whole, x, group=group)
    for rank, part in enumerate(whole.chunk(dist.get_world_size())):
        assert part.eq(rank).all()
    dist.barrier(group=group)
    return sockets() - before


@pytest.mark.parametrize("name", STATES)
def test_memory_that_cannot_be_shared(name: str, pool: RankPool) -> None:
    opened = pool.run(falls_back, (name,), backend="gloo", timeout=60)
    across = len(pool.layout.nodes) > 1
    for rank, count in enumerate(opened):
        if STATES[name][1]:
            assert (count > 0) == across
        elif pool.layout.node(rank) == pool.layout.node(POOR):
            # One each way with every neighbour that cannot share, at least one with the poor rank.
            assert count > (2 if across else 0), f"rank {rank}: {opened}"
