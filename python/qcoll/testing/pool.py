"""Ranks that stay alive between calls, for tests that should cost milliseconds.

    pool = shared_pool(world=4, nodes=[2, 2])
    results = pool.run(gather, args=(1024,), backend="gloo")      # gather(1024) on every rank

Workers are forked from a server that has imported torch once. The process group of the last call is
kept and used again by a call that asks for the same one. A pool whose rank failed, died or hung is
taken down, and the next call builds it anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any

from qcoll.testing.calls import Call, Function, GroupSpec, attempt, environment
from qcoll.testing.fork_server import Fork, ForkServer
from qcoll.testing.hosts import Hosts
from qcoll.testing.layout import Layout, Nodes
from qcoll.testing.outcome import RankOutcome, RanksFailed, describe_exit
from qcoll.testing.processes import end_with_stacks

if TYPE_CHECKING:
    from typing import Self

_START_SECONDS = 60.0
_server: ForkServer | None = None
_shared: dict[tuple[str, ...], RankPool] = {}
_MAX_SHARED = 6


@dataclass
class _Worker:
    """One rank's process as the pool sees it."""

    pid: int
    connection: Connection
    output: IO[bytes]
    seen: int = 0  # bytes of output that belong to earlier calls
    exit_status: int | None = None  # once it has ended and its process id is no longer its own

    def take_output(self) -> str:
        """What the rank wrote since the last time."""
        data = os.pread(self.output.fileno(), 1 << 24, self.seen)
        self.seen += len(data)
        return data.decode(errors="replace")


@dataclass(frozen=True)
class _Job:
    """What the pool sends to its workers: a call, and the store's port if its group is new."""

    call: Call
    port: int | None


class RankPool:
    """``world`` worker processes; see the module's text. A context manager; :meth:`close` ends it.

    Args:
        world: number of ranks.
        nodes: where the ranks live, see :data:`qcoll.testing.layout.Nodes`.
        hosts: node j lives on host j; the pool must end before the hosts do.
        env: variables set in every rank.
    """

    def __init__(
        self,
        world: int,
        nodes: Nodes = None,
        *,
        hosts: Hosts | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.layout = Layout.of(world, nodes)
        self.layout.check_hosts(hosts)
        self._hosts = hosts
        self._env = dict(env or {})
        self._workers: list[_Worker] = []
        self._keeper: _Worker | None = None
        self._group: object = None  # what the workers' process group was made for

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, to stop or kill them during a call; builds the pool."""
        self._build()
        return [worker.pid for worker in self._workers]

    def run(
        self,
        function: Function,
        args: Sequence[Any] = (),
        *,
        backend: str | None = "gloo",
        pg_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        timeout: float = 60.0,
        group_timeout: float = 60.0,
        grace: float = 5.0,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank; what each returned.

        Args:
            function, args, backend, pg_options: as in :func:`qcoll.testing.spawn.run_function`.
            env: variables set during the call (and while its group is made).
            fresh: make a new process group even if the last call's would do.
            timeout: seconds for the whole call.
            group_timeout: seconds that the process group gives each collective.
            grace: seconds that the others get after one rank has failed.

        Raises RanksFailed with the traceback of every rank that failed.
        """
        call = Call.of(function, args, GroupSpec(backend, pg_options, group_timeout), env)
        outcomes = self._perform(call, fresh, timeout, grace)
        if any(outcome.error is not None for outcome in outcomes):
            raise RanksFailed(str(call), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Function,
        args: Sequence[Any] = (),
        *,
        backend: str | None = "gloo",
        pg_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = True,
        timeout: float = 60.0,
        group_timeout: float = 60.0,
    ) -> list[RankOutcome]:
        """As :meth:`run`, for calls in which ranks are meant to fail or die: never raises for that.

        Every rank has the whole ``timeout``, whatever happened to the others.
        """
        call = Call.of(function, args, GroupSpec(backend, pg_options, group_timeout), env)
        return self._perform(call, fresh, timeout, grace=timeout)

    def close(self) -> None:
        """End the workers. The pool can still be used: the next call builds it again."""
        everyone = [*self._workers, *([self._keeper] if self._keeper else [])]
        for worker in everyone:
            worker.connection.close()
            _kill(worker)
            worker.output.close()
        self._workers, self._keeper, self._group = [], None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        # An idle worker has nothing to say: if there is something to read, it is the end.
        if any(worker.connection.poll() for worker in self._workers):
            self.close()
        if self._workers:
            return
        try:
            # A process of its own keeps the store, so that any rank can die without taking it.
            address = "127.0.0.1" if self._hosts is None else self._hosts.addresses[0]
            self._keeper = self._fork("keep_stores", 0, {"MASTER_ADDR": address})
            for rank in range(self.layout.world):
                variables = self.layout.environment(rank, 0, self._hosts)
                # Agent store: torch's env:// rendezvous then connects, and does not listen.
                variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                self._workers.append(self._fork("work", rank, {**variables, **self._env}))
        except BaseException:
            self.close()
            raise

    def _fork(self, role: str, rank: int, env: Mapping[str, str]) -> _Worker:
        host = self.layout.node(rank)
        namespace = None if self._hosts is None else self._hosts.namespaces[host]
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        with theirs:
            request = Fork(f"qcoll.testing.pool:{role}", env, namespace)
            pid = _fork_server().fork(request, theirs, output.fileno())
        return _Worker(pid, ours, output)

    def _perform(self, call: Call, fresh: bool, timeout: float, grace: float) -> list[RankOutcome]:
        self._build()
        group = None if call.group.backend is None else (call.group, dict(call.env))
        new_group = fresh or group is None or group != self._group
        job = pickle.dumps(_Job(call, self._new_store() if new_group else None))
        self._group = group
        for worker in self._workers:
            worker.take_output()
            worker.connection.send_bytes(job)
        outcomes = [RankOutcome(rank, name) for rank, name in enumerate(self.layout.names)]
        started = time.monotonic()
        stuck = self._collect(outcomes, started + timeout, grace)
        end_with_stacks([self._workers[rank].pid for rank in stuck])
        for rank in stuck:
            outcomes[rank].ended_by_launcher = True
            outcomes[rank].error = f"was ended after {time.monotonic() - started:.1f} s"
        for worker, outcome in zip(self._workers, outcomes, strict=True):
            outcome.output = worker.take_output()
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
        return outcomes

    def _new_store(self) -> int:
        """The port of a store that holds nothing yet."""
        assert self._keeper is not None
        connection = self._keeper.connection
        connection.send_bytes(b"new")
        if not connection.poll(_START_SECONDS):
            raise RuntimeError(f"no store after {_START_SECONDS} s")
        port = pickle.loads(connection.recv_bytes())
        assert isinstance(port, int)
        return port

    def _collect(self, outcomes: list[RankOutcome], deadline: float, grace: float) -> list[int]:
        """Fill ``outcomes`` as replies come; the ranks that did not reply by the deadline."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                outcome = outcomes[waiting.pop(ready)]
                try:
                    outcome.value, outcome.error = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    worker = self._workers[outcome.rank]
                    worker.exit_status = _fork_server().reap(worker.pid)
                    outcome.exit_status = worker.exit_status
                    outcome.error = describe_exit(worker.exit_status)
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return sorted(waiting.values())


def shared_pool(world: int, nodes: Nodes = None) -> RankPool:
    """A pool for this layout that lives until the interpreter exits, shared by all who ask.

    The few used last are kept running; others are ended and built again when asked for.
    """
    names = Layout.of(world, nodes).names
    pool = _shared.pop(names, None) or RankPool(world, names)
    _shared[names] = pool  # at the end: the one used last
    if len(_shared) > _MAX_SHARED:
        _shared.pop(next(iter(_shared))).close()
    return pool


def _fork_server() -> ForkServer:
    global _server
    if _server is None or not _server.alive():
        _server = ForkServer(["torch", "torch.distributed", "qcoll.testing.pool"])
        atexit.register(_server.close)
    return _server


def _kill(worker: _Worker) -> None:
    """End a worker and let the server forget it."""
    if worker.exit_status is None and _server is not None and _server.alive():
        with contextlib.suppress(ProcessLookupError, RuntimeError):
            os.kill(worker.pid, signal.SIGKILL)
            worker.exit_status = _server.reap(worker.pid)


# Below: what runs in the forked processes.


def keep_stores(connection: Connection) -> None:
    """Serve a new TCPStore whenever asked, and send its port, until the pool goes away."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The last group may still use its store while the next is made.
    stores: deque[TCPStore] = deque(maxlen=2)
    with contextlib.suppress(EOFError):
        while connection.recv_bytes():
            address = os.environ["MASTER_ADDR"]
            stores.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))
            connection.send_bytes(pickle.dumps(stores[-1].port))


def work(connection: Connection) -> None:
    """One rank: perform jobs until the pool goes away."""
    with contextlib.suppress(EOFError):
        while True:
            job = pickle.loads(connection.recv_bytes())
            reply = attempt(functools.partial(_perform, job))
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(reply)


def _perform(job: _Job) -> Any:
    """Make the process group if it is to be a new one, then call."""
    import torch.distributed as dist

    if job.port is not None:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(job.port)
        with environment(job.call.env):
            job.call.group.init()
    return job.call()
