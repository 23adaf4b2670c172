"""Processes of one launch: started together, watched together, and never left behind.

Each process leads a session of its own, so that it can be ended with all that it started, and dies
with its launcher even if that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# At most this long between SIGABRT, on which a rank prints its stacks, and SIGKILL.
_STACKS_SECONDS = 2.0
_POLL_SECONDS = 0.05


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends; and leave no core dumps."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_stacks(pids: Sequence[int]) -> None:
    """SIGABRT, so that processes with faulthandler print their stacks, then SIGKILL."""
    _signal_all(pids, signal.SIGABRT)
    patience = time.monotonic() + _STACKS_SECONDS
    while any(_runs(pid) for pid in pids) and time.monotonic() < patience:
        time.sleep(0.02)
    _signal_all(pids, signal.SIGKILL)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


class ProcessSet:
    """Processes whose output is collected until all have ended.

    Args:
        on_line: called with (index, line without its end) for every line of output as it comes.
    """

    def __init__(self, on_line: Callable[[int, str], None] | None = None) -> None:
        self._on_line = on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: list[bytearray] = []
        self._shown: list[int] = []
        self._ended: set[int] = set()
        self._closed = False
        self._selector = selectors.DefaultSelector()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start one more process; its index is the number of those started before."""
        # preexec_fn makes one system call and allocates nothing, so threads do not matter.
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, len(self._processes))
        self._processes.append(process)
        self._output.append(bytearray())
        self._shown.append(0)

    def wait(self, timeout: float, grace: float) -> set[int]:
        """Wait until all have ended; after ``timeout`` seconds, or ``grace`` seconds after the
        first failure, end the others. Returns the indices of those that had to be ended.
        """
        deadline = time.monotonic() + timeout
        failed = False
        while self._alive():
            self._collect(_POLL_SECONDS)
            statuses = [self._reap(index) for index in self._alive()]
            if not failed and any(status not in (None, 0) for status in statuses):
                failed = True
                deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() >= deadline:
                break
        stuck = set(self._alive())
        self.close()
        return stuck

    def close(self) -> None:
        """End what still runs, with all that it started, and collect the last output.

        Harmless when called twice.
        """
        if self._closed:
            return
        self._closed = True
        alive = self._alive()
        end_with_stacks([self._processes[index].pid for index in alive])
        for index in alive:
            self._reap(index, block=True)
        while self._selector.get_map() and self._collect(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._forget(key.fileobj)
        self._selector.close()

    def status(self, index: int) -> int:
        """Exit status of an ended process, negative for a signal."""
        status = self._processes[index].returncode
        assert status is not None
        return status

    def output(self, index: int) -> str:
        """What the process wrote so far, standard output and error together."""
        return self._output[index].decode(errors="replace")

    def _alive(self) -> list[int]:
        return [i for i in range(len(self._processes)) if i not in self._ended]

    def _reap(self, index: int, block: bool = False) -> int | None:
        """Exit status if the process has ended (its session's leftovers are ended first)."""
        process = self._processes[index]
        # Look without reaping, so that the process group's number cannot have been given anew.
        options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        if os.waitid(os.P_PID, process.pid, options) is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._ended.add(index)
        return process.wait()

    def _collect(self, timeout: float) -> bool:
        """Read what is there, waiting at most ``timeout`` seconds; whether anything came."""
        events = self._selector.select(timeout)
        for key, _ in events:
            data = os.read(key.fd, 65536)
            if data:
                self._output[key.data] += data
            else:
                self._forget(key.fileobj)
            if self._on_line is not None:
                for line in self._new_lines(key.data, ended=not data):
                    self._on_line(key.data, line)
        return bool(events)

    def _new_lines(self, index: int, ended: bool) -> Iterator[str]:
        """Lines completed since the last call; at the end also an unfinished one."""
        output = self._output[index]
        end = len(output) if ended else output.rfind(b"\n") + 1
        lines = output[self._shown[index] : end].decode(errors="replace").splitlines()
        self._shown[index] = max(end, self._shown[index])
        yield from lines

    def _forget(self, stream: int | IO[bytes] | object) -> None:
        self._selector.unregister(stream)  # type: ignore[arg-type]
        stream.close()  # type: ignore[union-attr]
