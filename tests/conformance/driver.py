"""Runs tests of torch's DistributedTest suite against qcoll, each on freshly forked ranks."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from qcoll.testing import RankOutcome
from qcoll.testing.calls import environment
from qcoll.testing.fork_server import Fork, ForkServer
from qcoll.testing.layout import Layout
from qcoll.testing.outcome import describe_exit
from qcoll.testing.processes import end_with_stacks

VERBS = ("ALL_GATHER", "REDUCE_SCATTER", "ALL_REDUCE", "ALL_TO_ALL")


class Driver:
    """The suite in one world. It imports the suite once; close it.

    Args:
        world: number of ranks.
        debug: as ``TORCH_DISTRIBUTED_DEBUG`` takes it.
    """

    def __init__(self, world: int, debug: str = "OFF") -> None:
        self.layout = Layout.of(world)
        # MASTER_PORT is not set: every test of the suite meets through a file.
        self._env = {
            **self.layout.environment(0, 0),
            **{f"QCOLL_{verb}": "exact" for verb in VERBS},
            "TORCH_DISTRIBUTED_DEBUG": debug,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        for variable in ("RANK", "MASTER_PORT"):
            del self._env[variable]
        with environment(self._env):
            self._server = ForkServer(["conformance.suite"])

    def close(self) -> None:
        self._server.close()

    def tests(self) -> list[str]:
        """The names of the suite's tests that this world runs."""
        with (
            tempfile.TemporaryFile() as output,
            self._fork("list_tests", {}, output) as (pid, pipe),
        ):
            names: list[str] = pipe.recv()
            self._server.reap(pid)
        return names

    def run(self, test: str, *, timeout: float, grace: float) -> list[RankOutcome]:
        """Run one test; one outcome per rank. A rank that skips has failed.

        Args:
            timeout: seconds for the whole test.
            grace: seconds for the other ranks once one has failed.
        """
        outcomes = [RankOutcome(rank, name) for rank, name in enumerate(self.layout.names)]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qcoll-conformance-"))
            for part in ("barrier", "test_dir"):
                Path(folder, part).mkdir()
            env = {"TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/store_of_the_test"}
            waiting: dict[Connection, tuple[int, RankOutcome]] = {}
            outputs = []
            for outcome in outcomes:
                outputs.append(stack.enter_context(tempfile.TemporaryFile()))
                pid, pipe = stack.enter_context(self._fork("run_rank", env, outputs[-1]))
                pipe.send((test, outcome.rank, f"{folder}/store"))
                waiting[pipe] = pid, outcome
            self._collect(waiting, timeout, grace)
            for outcome, output in zip(outcomes, outputs, strict=True):
                output.seek(0)
                outcome.output = output.read().decode(errors="replace")
        return outcomes

    @contextlib.contextmanager
    def _fork(
        self, role: str, env: Mapping[str, str], output: IO[bytes]
    ) -> Iterator[tuple[int, Connection]]:
        ours, theirs = Pipe()
        with ours:
            with theirs:
                request = Fork(f"conformance.suite:{role}", env)
                pid = self._server.fork(request, theirs, output.fileno())
            yield pid, ours

    def _collect(
        self, waiting: dict[Connection, tuple[int, RankOutcome]], timeout: float, grace: float
    ) -> None:
        """Fill in the outcomes as the ranks leave, and end those that do not."""
        started = time.monotonic()
        deadline = started + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                pid, outcome = waiting.pop(pipe)
                status: object = None
                with contextlib.suppress(EOFError):
                    status, outcome.error = pipe.recv()
                outcome.exit_status = self._server.reap(pid)
                if outcome.exit_status:
                    outcome.error = describe_exit(outcome.exit_status)
                elif status == 0:
                    outcome.error = None
                else:
                    outcome.error = outcome.error or f"left with {status}"
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        end_with_stacks([pid for pid, _ in waiting.values()])
        for pid, outcome in waiting.values():
            self._server.reap(pid)
            outcome.ended_by_launcher = True
            outcome.error = f"was ended after {time.monotonic() - started:.1f} s"
