"""One rank that :func:`qcoll.bench.launch` started: ``python -m qcoll.bench.worker FOLDER``.

Reads ``job.json`` in the folder; rank 0 writes ``rows.json`` there and prints its progress.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from qcoll.bench.config import PROGRESS, BenchError, Config
from qcoll.bench.measure import measure_all
from qcoll.bench.rendezvous import join


def main(folder: Path) -> int:
    """Measure; the exit status."""
    job = json.loads((folder / "job.json").read_text())
    configs = [Config.from_json(config) for config in job["configs"]]
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is None:
        raise BenchError("neither RANK nor OMPI_COMM_WORLD_RANK is set: `qcoll bench` starts this")
    # mpirun gives all ranks one environment.
    os.environ["QCOLL_NODE"] = job["nodes"][int(rank)]
    world = None
    try:
        world = join(configs[0].timeout)
        measured = measure_all(configs, world, job["interface"], _report_progress)
        if world.rank == 0:
            (folder / "rows.json").write_text(json.dumps(measured))
        world.close()
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        # These say all there is to say; another kind is a mistake of this program.
        if not isinstance(error, (ValueError, RuntimeError)):
            traceback.print_exc()
        if world is not None:
            world.fail()
        return 1
    return 0


def _report_progress(done: int, total: int, label: str) -> None:
    print(PROGRESS + json.dumps([done, total, label]), flush=True)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        sys.exit(status)  # MPI takes a rank that skips its own shutdown for a crash
    # No interpreter teardown: gloo's thread may still hold the last collective's tensors, and a
    # thread that asks for the interpreter while it is taken down aborts the process.
    os._exit(status)
