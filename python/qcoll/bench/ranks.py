"""A measurement by ranks that mpirun or torchrun started, each of which runs this."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from qcoll.bench.config import BenchError, Config, Listener
from qcoll.bench.measure import measure_all
from qcoll.bench.rendezvous import join, launcher
from qcoll.bench.results import Report, make_report


def report_of_ranks(
    config: Config,
    command: Sequence[str],
    listener: Listener,
) -> Report | None:
    """Joins the other ranks and measures; the report on rank 0, None on the others.

    Raises:
        BenchError: the same on every rank.
        RuntimeError: this rank failed. Under mpirun it ends the others and does not return.
    """
    started_by = launcher()
    if "mpi" in config.peers and started_by != "mpirun":
        raise BenchError(
            f"mpi can be compared only where mpirun started the ranks, but {started_by} did; "
            "use mpirun, or --ranks, which finds it by itself"
        )
    found = measure_ranks([config], listener)
    if found is None:
        return None
    return make_report(found["rows"][0], config, found["nodes"], started_by, command)


def measure_ranks(configs: Sequence[Config], listener: Listener) -> dict[str, Any] | None:
    """What :func:`qcoll.bench.measure.measure_all` found, and the ``nodes`` of the ranks, on rank
    0; None on the others. Raises as :func:`report_of_ranks`."""
    world = join(configs[0].timeout)
    try:
        found = measure_all(configs, world, listener=listener)
        found["nodes"] = world.gather(os.environ.get("QCOLL_NODE") or socket.gethostname())
        world.close()
    except BenchError:
        raise
    except Exception as error:
        if world.mpi is not None:
            print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
            world.fail()
        raise RuntimeError(f"rank {world.rank}: {type(error).__name__}: {error}") from error
    return found if world.rank == 0 else None
