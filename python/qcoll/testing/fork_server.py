"""A process that has imported torch once and forks itself on request.

``import torch`` takes seconds; a fork of a process that has done it takes milliseconds. The server
is started as a program of its own, imports, and stays single-threaded, which is what makes forking
it safe; it refuses to fork if an import has started a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from qcoll.testing.layout import QUICK_RESOLVER, SINGLE_THREADED, import_path
from qcoll.testing.processes import die_with_parent

_CLONE_NEWNET = 0x40000000
_MAX_MESSAGE = 1 << 20


@dataclass(frozen=True)
class Fork:
    """A request to fork: the child calls ``role(connection)`` and then exits.

    Attributes:
        role: "module:function" taking one Connection.
        env: variables set in the child.
        namespace: network namespace that the child enters, by name, or None.
    """

    role: str
    env: Mapping[str, str]
    namespace: str | None = None


class ForkServer:
    """Client of one server process.

    Args:
        preload: modules that the server imports.

    Raises RuntimeError when the server does not come up.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "qcoll.testing", "fork-server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SINGLE_THREADED, **QUICK_RESOLVER, **import_path()},
                start_new_session=True,  # Ctrl-C reaches the launcher, which then closes this
            )

    def fork(self, request: Fork, connection: Connection, output: int) -> int:
        """Fork a child that talks over ``connection``'s descriptor; returns its process id.

        ``output`` is the descriptor that becomes the child's standard output and error. Both
        descriptors stay open here; close them if they are not needed.
        """
        return self._ask(pickle.dumps(request), [connection.fileno(), output])

    def reap(self, pid: int) -> int:
        """Wait for a child that has ended or is about to; its status, negative for a signal."""
        return self._ask(pickle.dumps(pid), [])

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and every child it has."""
        self._socket.close()  # the server exits on this, and its children with it
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: bytes, descriptors: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [message], descriptors)
                reply = self._socket.recv(_MAX_MESSAGE)
            except OSError as error:
                raise RuntimeError(f"the fork server is gone: {error}") from None
        if not reply:
            raise RuntimeError("the fork server ended; its messages are on standard error")
        answer = pickle.loads(reply)
        if isinstance(answer, int):
            return answer
        raise RuntimeError(f"the fork server cannot fork: {answer}")


def _serve(control: socket.socket, imported: Sequence[str]) -> Callable[[], None] | None:
    """Answer requests until the client is gone. In a forked child, return what it shall do."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 2)
        if not message:
            return None
        request = pickle.loads(message)
        if isinstance(request, int):
            _, status = os.waitpid(request, 0)
            answer: int | str = os.waitstatus_to_exitcode(status)
        elif threads := len(list(Path("/proc/self/task").iterdir())) - 1:
            answer = f"importing {', '.join(imported)} started {threads} threads"
        elif pid := os.fork():
            answer = pid
        else:
            control.close()
            return lambda: _be_child(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(pickle.dumps(answer))


def _be_child(request: Fork, descriptors: list[int]) -> None:
    """Turn a fresh fork into what was asked for, and run it."""
    die_with_parent()
    connection, output = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # What a rank has printed is in its output even if the launcher has to end it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2, all_threads=True)
    os.environ.update(request.env)
    if request.namespace is not None:
        _enter_namespace(request.namespace)
    with contextlib.suppress(ImportError):
        importlib.import_module("torch").set_num_threads(1)
    module, _, name = request.role.partition(":")
    getattr(importlib.import_module(module), name)(Connection(connection))


def _enter_namespace(name: str) -> None:
    """Move this process into a named network namespace. /sys still shows the old one's devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def main(descriptor: int, preload: Sequence[str]) -> None:
    """The server: import ``preload``, then answer on the socket ``descriptor`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=descriptor)
    for module in preload:
        importlib.import_module(module)
    if "torch" in sys.modules:
        # torch reads /proc/cpuinfo at its first random numbers; once for all children.
        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        torch.randn(8)
    child = _serve(control, preload)
    status = 0
    if child is not None:
        try:
            child()
        except BaseException:  # print it and exit, as the interpreter would
            sys.excepthook(*sys.exc_info())
            status = 1
    sys.stdout.flush()
    # No interpreter teardown: a rank may have been told to stop with threads still at work.
    os._exit(status)
