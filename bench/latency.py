"""The time of small calls, layer by layer: 1 KiB gathered by two ranks of one host.

    python bench/latency.py [--rounds 5] [--json FILE]

From the engine in C++ (``latency.cc``, built here) over the Python API to torch.distributed, next
to gloo, MPI through mpi4py (under its own launcher), and a torch backend that does nothing. Each
round measures every layer once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import qcoll
from qcoll.bench.launch import find_mpirun
from qcoll.testing import RankPool

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"
CALLS, TIMES = 500, 11


def per_call(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median of some runs of many in a row."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(times)


def in_python() -> dict[str, float]:
    """Microseconds of each layer, of this rank."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    store = PrefixStore("latency", dist.distributed_c10d._get_default_store())
    whole, mine = torch.empty(256), torch.ones(128)
    one = torch.ones(256)
    a, b = np.empty(256, np.float32), np.ones(128, np.float32)
    found = {}
    with qcoll.Communicator(store, rank, world) as comm:
        found["qcoll.Communicator, numpy"] = per_call(lambda: comm.all_gather(a, b))
        found["qcoll.Communicator, torch"] = per_call(lambda: comm.all_gather(whole, mine))
    found["qcoll.all_gather_into_tensor"] = per_call(
        lambda: qcoll.all_gather_into_tensor(whole, mine)
    )
    gather = dist.all_gather_into_tensor
    found["dist.all_gather_into_tensor, qcoll"] = per_call(lambda: gather(whole, mine))
    found["dist.all_reduce, qcoll"] = per_call(lambda: dist.all_reduce(one))
    found["dist.all_gather_into_tensor, gloo"] = per_call(lambda: gather(whole, mine, group=gloo))
    found["dist.all_reduce, gloo"] = per_call(lambda: dist.all_reduce(one, group=gloo))
    return found


def floor() -> dict[str, float]:
    """What torch.distributed itself costs: its fake backend makes no communication."""
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    whole, mine = torch.empty(256), torch.ones(128)
    found = {
        "dist.all_gather_into_tensor, no backend": per_call(
            lambda: dist.all_gather_into_tensor(whole, mine)
        ),
        "dist.all_reduce, no backend": per_call(lambda: dist.all_reduce(whole)),
    }
    dist.destroy_process_group()
    return found


def in_cpp() -> dict[str, float]:
    """Microseconds of the engine and of a group, from the program in C++."""
    out = subprocess.run(
        [BUILD / "bench" / "qcoll_latency"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in out.splitlines()]
    return {f"C++ {layer}, {layout}": float(median) for layer, layout, _, median, _ in rows}


_MPI = f"""
import numpy, statistics, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
whole, mine = numpy.empty(256, numpy.float32), numpy.ones(128, numpy.float32)
times = []
for _ in range({TIMES} + 1):
    begin = time.perf_counter()
    for _ in range({CALLS}):
        comm.Allgather(mine, whole)
    times.append((time.perf_counter() - begin) / {CALLS} * 1e6)
if comm.Get_rank() == 0:
    print(statistics.median(times[1:]))
"""


def of_mpi(mpirun: str) -> dict[str, float]:
    """Microseconds of mpi4py's Allgather on numpy arrays."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(_MPI)
        program.flush()
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        out = subprocess.run(
            [mpirun, "-n", "2", "--oversubscribe", sys.executable, program.name],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout
    return {"mpi4py Allgather, numpy": float(out)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DQCOLL_TORCH=OFF"]
    build = ["cmake", "--build", str(BUILD), "--target", "qcoll_latency", "-j2"]
    for command in (configure, build):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    try:
        mpirun = find_mpirun()
    except Exception as error:
        print(f"without MPI: {error}", file=sys.stderr)
        mpirun = ""
    rounds: list[dict[str, float]] = []
    with RankPool(2) as pool, RankPool(1) as alone:
        for _ in range(arguments.rounds):
            ranks: list[dict[str, Any]] = pool.run(in_python, backend="qcoll", timeout=300)
            slowest = {layer: max(rank[layer] for rank in ranks) for layer in ranks[0]}
            rounds.append(
                {
                    **in_cpp(),
                    **slowest,
                    **alone.run(floor, backend=None)[0],
                    **(of_mpi(mpirun) if mpirun else {}),
                }
            )
    print("microseconds: median of rounds (least..most)")
    for layer in rounds[0]:
        values = [each[layer] for each in rounds]
        median = statistics.median(values)
        print(f"{layer:45} {median:8.2f} ({min(values):.2f}..{max(values):.2f})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
