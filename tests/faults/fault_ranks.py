"""What the ranks of several fault tests have in common."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qcoll

#: Separates "at once" from "waited for the timeout" of groups whose timeout is a minute, and what a
#: busy machine may add to a short one.
AT_ONCE = 10.0

Group = Any


def native(group: Group = None, count: int = 10) -> None:
    dist.all_reduce(torch.ones(count), group=group)


def delegated(group: Group = None, count: int = 10) -> None:
    dist.all_reduce(torch.ones(count), dist.ReduceOp.MAX, group=group)


KINDS: dict[str, Callable[..., None]] = {"native": native, "delegated": delegated}


def new_group(timeout: float) -> Group:
    """A group of all ranks, beside the default one, that has made a call of each kind."""
    group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=timeout))
    works(group)
    return group


def works(group: Group = None) -> None:
    """Calls of all kinds, with results."""
    world = dist.get_world_size(group)
    for codec in ("exact", "int8"):
        x = torch.ones(5000)
        qcoll.all_reduce(x, codec=codec, group=group)
        assert x.tolist() == [world] * 5000
    x = torch.full((3,), dist.get_rank(group))
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    assert x.tolist() == [world - 1] * 3


def error_of(call: Callable[[], object]) -> tuple[qcoll.TransportError, float]:
    """The TransportError that a call must end with, and the seconds that it took."""
    start = time.monotonic()
    try:
        call()
    except qcoll.TransportError as error:
        return error, time.monotonic() - start
    raise AssertionError("the call ended without an error")


def until_it_fails(call: Callable[[], object]) -> qcoll.TransportError:
    """Call again and again; the error in the end."""
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            call()
    except qcoll.TransportError as error:
        return error
    raise AssertionError("two minutes of calls without an error")


def beside(action: Callable[[], object]) -> int:
    """Fork a process that does something to this one, or in its stead; its process id.

    It dies with this one. Fork it before the group exists, or let it do nothing but system calls.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def stop_for(seconds: float, after: float = 0.0) -> Callable[[], None]:
    """What to run beside a process to have it stopped for a while."""
    pid = os.getpid()

    def stop() -> None:
        time.sleep(after)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return stop


def note(folder: str, name: str, text: str = "") -> None:
    """Leave a note for the test and the other ranks; seen whole or not at all.

    Files, because the networks of these tests break.
    """
    partial = Path(folder, f"{name}.partial")
    partial.write_text(text)
    partial.rename(Path(folder, name))


def wait_for_note(folder: str, name: str, seconds: float = 60.0) -> str:
    path = Path(folder, name)
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no note {name} after {seconds} s"
        time.sleep(0.01)
    return path.read_text()
