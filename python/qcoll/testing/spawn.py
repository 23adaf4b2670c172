"""Run a program, or a function, once per rank, each in a process of its own.

    run_ranks(["train.py", "--steps", "10"], world=4, nodes=[2, 2])
    results = run_function("tests/python/test_x.py:gather", world=3, nodes=[2, 1], args=(1024,))

Ranks get torchrun's environment variables and ``QCOLL_NODE``; with ``hosts`` every node runs in a
network namespace of its own (:mod:`qcoll.testing.hosts`). Whatever happens, the call returns or
raises within its timeout and leaves no process behind. For many short calls, a
:class:`qcoll.testing.pool.RankPool` costs milliseconds where a new process costs seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qcoll.testing.calls import Call, Function, GroupSpec, attempt
from qcoll.testing.hosts import Hosts
from qcoll.testing.layout import Layout, Nodes
from qcoll.testing.outcome import RankOutcome, RanksFailed, describe_exit
from qcoll.testing.processes import ProcessSet

# Ports inside a namespace are ours alone; below the range that the kernel hands out by itself.
_NAMESPACE_PORTS = itertools.cycle(range(20000, 30000))


def run_ranks(
    program: str | Sequence[str],
    world: int,
    *,
    nodes: Nodes = None,
    hosts: Hosts | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    grace: float = 5.0,
    on_line: Callable[[int, str], None] | None = None,
) -> list[RankOutcome]:
    """Run ``program`` as ``world`` ranks and wait for all of them.

    Args:
        program: arguments of this Python interpreter (``["train.py", "--steps", "3"]``,
            ``["-m", "package.module"]``), or the name of a module to run.
        nodes: where the ranks live, see :data:`qcoll.testing.layout.Nodes`.
        hosts: run node j on host j; without, all ranks share the machine's loopback.
        env: variables added to this process's environment for every rank.
        timeout: seconds until the ranks that still run are ended.
        grace: seconds that the others get to end by themselves after one has failed.
        on_line: called with (rank, line) for each line that a rank writes, as it comes.

    Returns one outcome per rank, all without errors. Raises RanksFailed otherwise, with the output
    of every rank and, for those that had to be ended, the stacks of their Python threads.
    """
    layout = Layout.of(world, nodes)
    layout.check_hosts(hosts)
    arguments = ["-m", program] if isinstance(program, str) else list(program)
    processes = ProcessSet(on_line)
    started = time.monotonic()
    with contextlib.closing(processes), _master_port(hosts) as port:
        for rank in range(world):
            prefix = [] if hosts is None else hosts.command_prefix(layout.node(rank))
            processes.start(
                [*prefix, sys.executable, *arguments],
                {
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **layout.environment(rank, port, hosts),
                    **(env or {}),
                },
            )
        ended = processes.wait(timeout, grace)
        outcomes = []
        for rank in range(world):
            outcome = RankOutcome(rank, layout.names[rank], exit_status=processes.status(rank))
            outcome.output = processes.output(rank)
            if rank in ended:
                outcome.ended_by_launcher = True
                outcome.error = f"was ended after {time.monotonic() - started:.1f} s"
            elif outcome.exit_status:
                outcome.error = describe_exit(outcome.exit_status)
            outcomes.append(outcome)
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailed(" ".join(["python", *arguments]), outcomes)
    return outcomes


def run_function(
    function: Function,
    world: int,
    *,
    nodes: Nodes = None,
    args: Sequence[Any] = (),
    backend: str | None = "gloo",
    pg_options: Mapping[str, Any] | None = None,
    hosts: Hosts | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new process group; what each returned.

    ``function`` is at the top level of a module or file, given as itself, ``"module:function"`` or
    ``"path/to/file.py:function"``; arguments and results travel pickled. ``pg_options`` are the
    keyword arguments of ``qcoll.Options``, ``group_timeout`` the seconds that the group gives each
    collective. ``backend=None`` initialises no group: the function can, from its environment.
    Raises RanksFailed with each rank's traceback.
    """
    group = GroupSpec(backend, pg_options, group_timeout)
    call = Call.of(function, args, group)
    with tempfile.TemporaryDirectory(prefix="qcoll-call-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps(call))
        failure: RanksFailed | None = None
        program = ["-m", "qcoll.testing", "rank", folder]
        try:
            outcomes = run_ranks(program, world, nodes=nodes, hosts=hosts, env=env, timeout=timeout)
        except RanksFailed as failed:
            failure, outcomes = failed, failed.outcomes
        for outcome in outcomes:
            result = Path(folder, f"rank{outcome.rank}")
            if result.exists():
                outcome.value, error = pickle.loads(result.read_bytes())
                outcome.error = error or outcome.error
    if failure is not None:
        raise RanksFailed(str(call), outcomes) from None
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def _master_port(hosts: Hosts | None) -> Iterator[int]:
    """A TCP port that rank 0's store can listen on and nobody else gets meanwhile.

    On the machine's own network the port is held by a bound socket that never listens: with
    SO_REUSEADDR on both sides the store may listen on it all the same, while the kernel gives it to
    nobody who asks for any free port.
    """
    if hosts is not None:
        yield next(_NAMESPACE_PORTS)
        return
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def rank_main(folder: Path) -> int:
    """One rank of run_function: leave a pickled (value, error) in ``folder``; the exit status."""
    rank = os.environ["RANK"]
    call: Call | None = None

    def work() -> Any:
        nonlocal call
        call = pickle.loads((folder / "call").read_bytes())
        call.group.init()
        return call()

    reply = attempt(work)
    # Written whole or not at all: the launcher may end this process at any moment.
    partial = folder / f"rank{rank}.partial"
    partial.write_bytes(reply)
    partial.rename(folder / f"rank{rank}")
    error = pickle.loads(reply)[1]
    if error is not None:
        print(error, file=sys.stderr)
        return 1
    if call is not None and call.group.backend is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
