"""The ways a payload can take: qcoll with one codec, gloo, MPI. To a timer all look the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import qcoll
from qcoll.bench.data import Buffers, Problem

Call = Callable[[], object]


@dataclass
class Channel:
    """One way for one problem.

    Attributes:
        name: for people, and the key of a peer's ratio: ``"int8"``, ``"gloo"``.
        library: ``"qcoll"``, ``"gloo"`` or ``"mpi"``.
        codec: of qcoll; None for peers.
        buffers: shared with the channels of the same dtype.
        call: makes one call.
    """

    name: str
    library: str
    codec: str | None
    buffers: Buffers
    call: Call

    @property
    def problem(self) -> Problem:
        """What the call works on."""
        return self.buffers.problem


def qcoll_channel(codec: str, buffers: Buffers) -> Channel:
    """qcoll's explicit verb in the default group."""
    out, source, verb = buffers.output, buffers.input, buffers.problem.verb
    calls: dict[str, Call] = {
        "all_gather": lambda: qcoll.all_gather_into_tensor(out, source, codec=codec),
        "reduce_scatter": lambda: qcoll.reduce_scatter_tensor(out, source, codec=codec),
        "all_reduce": lambda: qcoll.all_reduce(out, codec=codec),
        "all_to_all": lambda: qcoll.all_to_all_single(out, source, codec=codec),
    }
    return Channel(codec, "qcoll", codec, buffers, calls[verb])


def gloo_channel(group: dist.ProcessGroup, buffers: Buffers) -> Channel:
    """torch.distributed's verb in a group of gloo."""
    out, source, verb = buffers.output, buffers.input, buffers.problem.verb
    calls: dict[str, Call] = {
        "all_gather": lambda: dist.all_gather_into_tensor(out, source, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, source, group=group),
        "all_reduce": lambda: dist.all_reduce(out, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, source, group=group),
    }
    return Channel("gloo", "gloo", None, buffers, calls[verb])


def mpi_dtype(verb: str, dtype: torch.dtype) -> torch.dtype:
    """What MPI takes: it has no 16-bit floats, which matters where it must add."""
    return torch.float32 if verb in ("reduce_scatter", "all_reduce") else dtype


def mpi_channel(comm: Any, in_place_mark: Any, buffers: Buffers) -> Channel:
    """mpi4py's buffer verb on the same memory."""
    problem = buffers.problem
    out, source = _array(buffers.output), _array(buffers.input)
    verb = problem.verb
    calls: dict[str, Call] = {
        "all_gather": lambda: comm.Allgather(source, out),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(source, out),
        "all_reduce": lambda: comm.Allreduce(in_place_mark, out),
        "all_to_all": lambda: comm.Alltoall(source, out),
    }
    if problem.in_place and verb == "all_gather":
        calls[verb] = lambda: comm.Allgather(in_place_mark, out)
    return Channel("mpi", "mpi", None, buffers, calls[verb])


def _array(tensor: torch.Tensor) -> Any:
    """The same memory as a numpy array of a type that MPI knows."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)).numpy()
