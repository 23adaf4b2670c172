"""The launcher's side of the soak: processes, rounds, kills, and the comparison across ranks."""

from __future__ import annotations

import collections
import os
import pickle
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

import torch.distributed as dist
from tests.soak.lanes import Tally
from tests.soak.plan import SLOTS, Part, Round
from tests.soak.ranks import READY, Report, Sample

from qcoll.testing.fork_server import Fork, ForkServer
from qcoll.testing.layout import QUICK_RESOLVER, SINGLE_THREADED, import_path
from qcoll.testing.outcome import describe_exit
from qcoll.testing.processes import end_with_stacks

#: A round that is not over by then hangs.
_ROUND_SECONDS = 90.0
#: From the kill to the error, on a machine that has more ranks than cores. Promised is a second;
#: waiting for the groups' timeout, half a minute, would be the failure.
_DETECTION_BOUND = 10.0

_ENVIRONMENT = {
    # torch warns of host names that cannot be found; whatever else ranks print is a fault.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # malloc keeps what threads have freed, hundreds of MB of it, and what it keeps grows for long.
    # One arena, which can be trimmed, and mappings for all that is large leave what is in use.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
}


@dataclass
class _Process:
    pid: int
    connection: Connection
    output: IO[bytes]
    seen: int = 0
    samples: list[Sample] = field(default_factory=list)
    ended: bool = False

    def take_output(self) -> str:
        data = os.pread(self.output.fileno(), 1 << 20, self.seen)
        self.seen += len(data)
        return data.decode(errors="replace")


@dataclass
class Outcome:
    """What became of a round."""

    round: Round
    tally: Tally = field(default_factory=Tally)
    detections: list[float] = field(default_factory=list)
    """Seconds from the kill to the error, of each lane of each survivor that waited."""
    problems: list[str] = field(default_factory=list)


class Launcher:
    """The processes of a soak; a context manager."""

    def __init__(self) -> None:
        modules = ["torch", "torch.distributed", "tests.soak.ranks"]
        os.environ.update(_ENVIRONMENT)  # read at the start of a program, which is the server's
        self._server = ForkServer(modules)
        self._processes: dict[int, _Process] = {}
        # The last round's clients may still be leaving when the next round begins.
        self._stores: collections.deque[dist.TCPStore] = collections.deque(maxlen=2)
        self.lives: dict[int, list[list[Sample]]] = {slot: [] for slot in range(SLOTS)}
        """By slot, the samples of each process that has lived there."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in list(self._processes):
            self._end(slot)
        self._server.close()

    def play(self, plan: Round) -> Outcome:
        """Plays a round. Processes that had problems in it are replaced by fresh ones."""
        outcome = Outcome(plan)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        processes = [self._process(slot) for slot in plan.slots]
        victim_pid = processes[plan.victim].pid if plan.deadly else -1
        for rank, process in enumerate(processes):
            part = Part(plan, rank, store.port, victim_pid)
            process.connection.send_bytes(pickle.dumps(part))
        reports = self._collect(outcome, processes)
        for rank, process in enumerate(processes):
            if output := process.take_output():
                outcome.problems.append(f"rank {rank} printed:\n{output}")
        self._compare(outcome, reports)
        for rank, slot in enumerate(plan.slots):
            if rank == plan.victim or outcome.problems:
                self._end(slot)
        return outcome

    def _process(self, slot: int) -> _Process:
        if slot not in self._processes:
            ours, theirs = Pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "QCOLL_SOCKET_IFNAME": "lo",
                "GLOO_SOCKET_IFNAME": "lo",
                **SINGLE_THREADED,
                **QUICK_RESOLVER,
                **import_path(),
            }
            with theirs:
                fork = Fork("tests.soak.ranks:work", variables)
                pid = self._server.fork(fork, theirs, output.fileno())
            self._processes[slot] = _Process(pid, ours, output)
            self.lives[slot].append(self._processes[slot].samples)
        return self._processes[slot]

    def _end(self, slot: int) -> None:
        process = self._processes.pop(slot)
        process.connection.close()
        if not process.ended:
            os.kill(process.pid, signal.SIGKILL)
            self._server.reap(process.pid)
        process.output.close()

    def _collect(self, outcome: Outcome, processes: list[_Process]) -> dict[int, Report]:
        """The reports of the ranks, killing the victim meanwhile."""
        plan = outcome.round
        reports: dict[int, Report] = {}
        waiting = {process.connection: rank for rank, process in enumerate(processes)}
        ready: set[int] = set()
        kill_at = killed_at = float("inf")
        deadline = time.monotonic() + _ROUND_SECONDS
        while waiting and time.monotonic() < deadline:
            patience = min(deadline, kill_at) - time.monotonic()
            for connection in wait(list(waiting), max(0.0, patience)):
                rank = waiting[connection]  # type: ignore[index]
                try:
                    value, error = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del waiting[connection]  # type: ignore[arg-type]
                    self._has_ended(outcome, processes[rank], rank)
                    continue
                if error is None and value == READY:
                    ready.add(rank)
                    if len(ready) == plan.world:
                        kill_at = time.monotonic() + plan.delay
                    continue
                del waiting[connection]  # type: ignore[arg-type]
                if error is not None:
                    outcome.problems.append(f"rank {rank}: {error}")
                else:
                    reports[rank] = value
                    processes[rank].samples.append(value.sample)
            if time.monotonic() >= kill_at:
                kill_at = float("inf")
                killed_at = time.monotonic()
                os.kill(processes[plan.victim].pid, signal.SIGKILL)
        if waiting:
            outcome.problems.append(f"ranks {sorted(waiting.values())} hang; their stacks follow")
            end_with_stacks([processes[rank].pid for rank in waiting.values()])
        self._judge_times(outcome, reports, killed_at)
        return reports

    def _has_ended(self, outcome: Outcome, process: _Process, rank: int) -> None:
        status = self._server.reap(process.pid)
        process.ended = True
        if rank != outcome.round.victim or status != -signal.SIGKILL:
            outcome.problems.append(f"rank {rank} {describe_exit(status)}")

    def _judge_times(self, outcome: Outcome, reports: dict[int, Report], killed_at: float) -> None:
        if not outcome.round.deadly:
            return
        if killed_at == float("inf"):
            outcome.problems.append("the round ended before its kill")
            return
        for rank, report in reports.items():
            for raised_at in report.tally.raised_at:
                seconds = raised_at - killed_at
                outcome.detections.append(seconds)
                if not 0 <= seconds <= _DETECTION_BOUND:
                    outcome.problems.append(f"rank {rank} raised {seconds:.2f} s after the kill")

    def _compare(self, outcome: Outcome, reports: dict[int, Report]) -> None:
        """Results that all ranks of a group have are the same on all."""
        seen: dict[tuple[int, int, int], tuple[int, int]] = {}
        for rank, report in reports.items():
            for call, digest in report.tally.digests.items():
                first, expected = seen.setdefault(call, (rank, digest))
                if digest != expected:
                    outcome.problems.append(
                        f"phase {call[0]} lane {call[1]} call {call[2]}: ranks {first} and {rank} "
                        "have different results"
                    )
            report.tally.digests.clear()
            outcome.tally.add(report.tally)
        # A rank in trouble aborts its group: what the others say of that comes last.
        outcome.problems += sorted(
            outcome.tally.problems, key=lambda problem: "called abort()" in problem
        )
