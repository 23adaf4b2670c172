"""qcoll.Communicator: the engine without torch process groups, for tensors and numpy arrays."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from codec_reference import as_float32, round_trip
from collective_cases import (
    FLOATS,
    MOVED,
    Names,
    assert_within,
    expected_sum,
    names_of,
    normal,
    pool_of,
    raw,
    result_bound,
    same_bits,
    sum_bound,
)

import qcoll
from qcoll.testing import Nodes

NUMPY_TYPES = ("f4", "f2", "f8", "i1", "u1", "i4", "i8", "u2", "u4", "u8", "?", "c8", "c16")


@pytest.fixture(scope="module", params=[[2, 2], [3], [1, 1], [1]], ids=["2+2", "3", "1+1", "1"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object) -> list[Any]:
    return pool_of(nodes).run(function, args=args, backend=None)


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fresh_store(prefix: str) -> dist.Store:
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return dist.PrefixStore(prefix, dist.TCPStore(*master, is_master=False))


def communicator(prefix: str = "test", **options: Any) -> qcoll.Communicator:
    rank, world = place()
    given = qcoll.Options(**options) if options else None
    limit = timedelta(seconds=30)
    return qcoll.Communicator(fresh_store(prefix), rank, world, given, limit)


def tensors(names: Names) -> None:
    rank, world = place()
    with communicator() as comm:
        assert (comm.rank, comm.size) == (rank, world)
        for dtype in MOVED:
            inputs = [raw(r, 333 * world, dtype) for r in range(world)]
            out = torch.empty(333 * world * world, dtype=dtype)
            comm.all_gather(out, inputs[rank])
            assert same_bits(out, torch.cat(inputs))
            out = torch.empty(333 * world, dtype=dtype)
            comm.all_to_all(out, inputs[rank])
            assert same_bits(out, torch.cat([i.split(333)[rank] for i in inputs]))
        for dtype in FLOATS:
            inputs = [normal(r, 500 * world, dtype) for r in range(world)]
            mine = [i.split(500)[rank] for i in inputs]
            expected = expected_sum(mine, "avg")
            for codec in (None, "int8/int4", "int4"):
                out = torch.empty(500, dtype=dtype)
                comm.reduce_scatter(out, inputs[rank], op="avg", codec=codec)
                bound = sum_bound(mine, rank, names, codec or "exact", dtype)
                allowed = result_bound(bound, expected, dtype, 1 / world)
                assert_within(out, expected, allowed, f"{codec} {dtype}")
            together = inputs[rank].clone()
            comm.all_reduce(together)
            total = torch.from_numpy(expected_sum(inputs, "sum"))
            assert torch.allclose(together.double(), total, rtol=0.02, atol=0.05)


def test_tensors(nodes: Nodes) -> None:
    run(nodes, tensors, names_of(nodes))


def arrays() -> None:
    rank, world = place()
    with communicator() as comm:
        for kind in NUMPY_TYPES:
            random = [np.random.default_rng(r) for r in range(world)]
            inputs = [(g.random((6, 5)) * 100).astype(kind) for g in random]
            out = np.empty((6 * world, 5), kind)
            comm.all_gather(out, inputs[rank])
            np.testing.assert_array_equal(out, np.concatenate(inputs))
            splits = [[(a + b) % 3 for b in range(world)] for a in range(world)]
            sent = [(np.arange(sum(row) * 4) + r).astype(kind) for r, row in enumerate(splits)]
            taken = [row[rank] for row in splits]
            out = np.empty((sum(taken), 4), kind)
            rows = [s.reshape(-1, 4) for s in sent]
            comm.all_to_all(out, rows[rank], taken, splits[rank])
            parts = [np.split(s, np.cumsum(row))[rank] for s, row in zip(rows, splits, strict=True)]
            np.testing.assert_array_equal(out, np.concatenate(parts))
        together = np.full((7, 3), rank + 1.0, np.float32)
        comm.all_reduce(together, op="avg")
        np.testing.assert_array_equal(together, np.full((7, 3), (world + 1) / 2, np.float32))
        part = np.empty(5, np.float32)
        comm.reduce_scatter(part, np.ones(5 * world, np.float32))
        np.testing.assert_array_equal(part, np.full(5, world, np.float32))


def test_numpy_arrays(nodes: Nodes) -> None:
    run(nodes, arrays)


def coded_arrays() -> None:
    rank, world = place()
    inputs = [normal(r, 1000, torch.float32) for r in range(world)]
    decoded = [round_trip(i, "int8") if world > 1 else i for i in inputs]
    expected = np.concatenate([as_float32(d) for d in decoded])
    with communicator() as comm:
        out = np.empty(1000 * world, np.float32)
        comm.all_gather(out, inputs[rank].numpy(), codec="int8")
        np.testing.assert_array_equal(out, expected)
        # In place and fp32: the own slice stays as it is.
        own = out[1000 * rank : 1000 * (rank + 1)]
        own[:] = inputs[rank].numpy()
        expected[1000 * rank : 1000 * (rank + 1)] = inputs[rank].numpy()
        comm.all_gather(out, own, codec="int8")
        np.testing.assert_array_equal(out, expected)
        assert comm.stats()["all_gather_into_tensor"]["calls"] == 2
        plan = comm.explain("all_gather_into_tensor", 1000 * world, torch.float32, codec="int8")
        assert world == 1 or plan["hops"][-1]["codec"] == "int8:256"
        with qcoll.exact():
            comm.all_gather(out, inputs[rank].numpy())
        np.testing.assert_array_equal(out, np.concatenate(inputs))


def test_codecs_statistics_and_plans(nodes: Nodes) -> None:
    run(nodes, coded_arrays)


def with_options() -> None:
    rank, world = place()
    inputs = [normal(r, 1000, torch.bfloat16) for r in range(world)]
    with communicator("o", all_gather="int4", scope="all", min_bytes=0) as comm:
        out = torch.empty(1000 * world, dtype=torch.bfloat16)
        comm.all_gather(out, inputs[rank])
        decoded = [round_trip(i, "int4") if world > 1 else i for i in inputs]
        assert same_bits(out, torch.cat(decoded))


def test_options(nodes: Nodes) -> None:
    run(nodes, with_options)


def caller_errors() -> None:
    _, world = place()
    with communicator() as comm:
        x = np.ones(4 * world, np.float32)
        for wrong in ([1.0, 2.0], None, 3.0):
            with pytest.raises(TypeError, match=f"tensor or numpy array.*{type(wrong).__name__}"):
                comm.all_reduce(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"world size.*{world}"):
            comm.all_gather(np.empty(4 * world + 1, np.float32), np.ones(4, np.float32))
        with pytest.raises(ValueError, match="same dtype"):
            comm.all_gather(np.empty(4 * world), np.ones(4, np.float32))
        with pytest.raises(ValueError, match="not contiguous"):
            comm.all_gather(np.empty((4 * world, 2), np.float32)[:, 0], np.ones(4, np.float32))
        locked = np.ones(4, np.float32)
        locked.flags.writeable = False
        with pytest.raises(ValueError, match=r"read-only|writable|writeable"):
            comm.all_reduce(locked)
        with pytest.raises(ValueError, match="median"):
            comm.all_reduce(x, op="median")
        with pytest.raises(ValueError, match="int7"):
            comm.all_reduce(x, codec="int7")
        with pytest.raises(ValueError, match="delegate"):
            comm.reduce_scatter(np.ones(4), np.ones(4 * world), op="sum")
        np.testing.assert_array_equal(x, np.ones(4 * world, np.float32))
        # What the engine does not reduce is gathered, and reduced by each rank.
        ranks = np.arange(3) + comm.rank
        comm.all_reduce(ranks, op=dist.ReduceOp.MAX)
        np.testing.assert_array_equal(ranks, np.arange(3) + world - 1)
        # A read-only array and a strided one are fine as input.
        source = np.arange(8.0, dtype=np.float32).reshape(4, 2)
        source.flags.writeable = False
        out = np.empty(4 * world, np.float32)
        comm.all_gather(out, source[:, 1])
        np.testing.assert_array_equal(out, np.tile(source[:, 1], world))


@pytest.mark.filterwarnings("error")
def test_errors_of_the_caller(nodes: Nodes) -> None:
    run(nodes, caller_errors)


def several() -> None:
    """Communicators beside each other, beside a process group, and one after another."""
    rank, world = place()
    dist.init_process_group("gloo", store=fresh_store("gloo"), rank=rank, world_size=world)
    pair = [communicator(f"pair {i}") for i in range(2)]
    for turn in range(3):
        with communicator(f"turn {turn}") as comm:
            for each in (comm, *pair):
                x = np.ones(1000, np.float32)
                each.all_reduce(x)
                assert x[0] == world
        y = torch.ones(3)
        dist.all_reduce(y)
        assert y[0] == world
    for each in pair:
        each.close()
        each.close()
        with pytest.raises((RuntimeError, ValueError), match=r"clos|shut|left|cannot be used"):
            each.all_reduce(np.ones(3, np.float32))
    dist.destroy_process_group()


def test_several_communicators(nodes: Nodes) -> None:
    run(nodes, several)


def over_one_store() -> None:
    """The store still holds what the ranks wrote for the one before, as after a job's restart."""
    rank, world = place()
    for turn in range(4):
        time.sleep(0.3 if turn % world == rank else 0.0)  # each comes last once
        with communicator("kept") as comm:
            x = np.full(1000, turn + rank, np.float32)
            comm.all_reduce(x)
            assert x[0] == turn * world + world * (world - 1) // 2


def test_successive_communicators_over_one_store(nodes: Nodes) -> None:
    run(nodes, over_one_store)


def different_options() -> None:
    rank, _ = place()
    codec = "int8" if rank == 1 else "int4"
    with pytest.raises(ValueError, match=r"int4.*int8|int8.*int4"):
        communicator(all_gather=codec)


def test_options_that_differ_between_ranks() -> None:
    run([2, 2], different_options)


def absent_rank() -> None:
    rank, world = place()
    if rank == 1:
        return
    started = time.monotonic()
    with pytest.raises(qcoll.TransportError, match="rank 1") as raised:
        qcoll.Communicator(fresh_store("absent"), rank, world, timeout=timedelta(seconds=2))
    assert raised.value.peer == 1
    assert "frame #" not in str(raised.value), "a stack trace is no explanation"
    assert time.monotonic() - started < 15


def test_a_rank_that_does_not_come_is_named() -> None:
    run([3], absent_rank)


def aborted() -> None:
    rank, _ = place()
    comm = communicator()
    comm.all_reduce(np.ones(3, np.float32))
    if rank == 2:
        time.sleep(0.2)
        comm.abort()
    with pytest.raises(qcoll.TransportError, match=r"rank 2 called abort\(\)"):
        comm.all_reduce(np.ones(3, np.float32))
    comm.close()


def test_abort() -> None:
    run([2, 1], aborted)


# MPI.


class FakeMpi:
    """What Communicator.from_mpi needs of an mpi4py communicator, over a store."""

    def __init__(self) -> None:
        self._rank, self._size = place()
        self._store = fresh_store("mpi")
        self._calls = 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def bcast(self, thing: Any, root: int = 0) -> Any:
        key = f"bcast {self._calls}"
        self._calls += 1
        if self._rank == root:
            self._store.set(key, pickle.dumps(thing))
            return thing
        return pickle.loads(self._store.get(key))


def from_mpi() -> None:
    rank, world = place()
    fake = FakeMpi()
    for _ in range(2):
        options = qcoll.Options(all_gather="int8", scope="all", min_bytes=0)
        with qcoll.Communicator.from_mpi(fake, options, timedelta(seconds=30)) as comm:
            assert (comm.rank, comm.size) == (rank, world)
            x = np.full(100, rank, np.float32)
            comm.all_reduce(x)
            assert (x == sum(range(world))).all()
            inputs = [normal(r, 300, torch.bfloat16) for r in range(world)]
            out = torch.empty(300 * world, dtype=torch.bfloat16)
            comm.all_gather(out, inputs[rank])
            decoded = [round_trip(i, "int8") if world > 1 else i for i in inputs]
            assert same_bits(out, torch.cat(decoded))


def test_from_mpi_with_a_stand_in(nodes: Nodes) -> None:
    run(nodes, from_mpi)


MPI_PROGRAM = """
import numpy as np, qcoll
from mpi4py import MPI
with qcoll.Communicator.from_mpi(MPI.COMM_WORLD) as comm:
    x = np.full(1000, comm.rank + 1.0, np.float32)
    comm.all_reduce(x, codec="int8")
    assert comm.size == 3, comm.size
    assert (x == 6.0).all(), x
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() % 2)
with qcoll.Communicator.from_mpi(half) as comm:
    x = np.ones(10, np.float32)
    comm.all_reduce(x)
    assert (x == half.Get_size()).all()
print("rank", MPI.COMM_WORLD.Get_rank(), "is done", flush=True)
"""


def test_from_mpi(tmp_path: Path) -> None:
    # The one of this environment first; it is not on the path of whoever has not activated it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpirun = shutil.which("mpirun", path=path)
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if mpirun is None:
        pytest.skip("there is no mpirun on the path")
    program = tmp_path / "program.py"
    program.write_text(MPI_PROGRAM)
    flags = ["--allow-run-as-root", "--oversubscribe"] if "open" in mpi_version(mpirun) else []
    result = subprocess.run(
        [mpirun, *flags, "-n", "3", sys.executable, str(program)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n"))[1:] == [f"rank {r} is done" for r in range(3)]


def mpi_version(mpirun: str) -> str:
    text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return text.stdout.lower()
