"""The engine without torch process groups."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from qcoll import _native
from qcoll._collectives import Op, reduce_op
from qcoll._mpi_store import store_over_mpi
from qcoll._register import shutdown_at_exit

if TYPE_CHECKING:
    from qcoll import _C
    from qcoll._C import CollectiveStats, Plan
    from qcoll._options import Options

Array = torch.Tensor | npt.NDArray[Any]
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


def _input(array: Array) -> torch.Tensor:
    """The same memory as a tensor; a copy of a read-only array."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return torch.from_numpy(array.copy())
    return _output(array)


def _output(array: Array) -> torch.Tensor:
    """The same memory as a tensor, to be written."""
    if isinstance(array, torch.Tensor):
        return array
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"qcoll: expected a torch tensor or numpy array, got {type(array).__name__}"
        )
    if not array.flags.writeable:
        raise ValueError("qcoll: the output is a read-only numpy array; pass a writable one")
    return torch.from_numpy(array)


class Communicator:
    """qcoll's collectives between ``size`` processes that share a torch ``Store``.

    Takes CPU tensors and numpy arrays (which are read and written in place); every call blocks.
    Options, environment, context managers and errors are those of the process-group backend.

    Args:
        store: any torch store that all ranks reach, under a prefix of its own.
        rank, size: of this process, of all.
        options: as ``pg_options``; the same on all ranks.
        timeout: of forming the group and of each call.

    Raises:
        ValueError: options of ranks differ, or are not understood.
        qcoll.TransportError: a rank did not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options | None = None,
        timeout: datetime.timedelta = _DEFAULT_TIMEOUT,
    ) -> None:
        native = _native.load()
        own = native.Options() if options is None else options.copy()
        own._timeout = timeout
        self.rank = rank
        self.size = size
        self._store = store
        self._backend: _C.Backend = native.Backend(store, rank, size, own)
        shutdown_at_exit()

    @classmethod
    def from_mpi(
        cls,
        comm: Any,
        options: Options | None = None,
        timeout: datetime.timedelta = _DEFAULT_TIMEOUT,
    ) -> Communicator:
        """From an ``mpi4py`` communicator, ``MPI.COMM_WORLD`` or any other. MPI carries only the
        address of a store that its rank 0 opens; all data travels by qcoll."""
        rank, size = comm.Get_rank(), comm.Get_size()
        store = store_over_mpi(comm, timeout)
        return cls(PrefixStore("qcoll-communicator", store), rank, size, options, timeout)

    def all_gather(self, output: Array, input: Array, *, codec: str | None = None) -> None:
        """As :func:`qcoll.all_gather_into_tensor`."""
        self._backend.all_gather_with(_output(output), _input(input), codec, False)

    def reduce_scatter(
        self, output: Array, input: Array, *, op: Op = "sum", codec: str | None = None
    ) -> None:
        """As :func:`qcoll.reduce_scatter_tensor`."""
        self._backend.reduce_scatter_with(
            _output(output), _input(input), reduce_op(op), codec, False
        )

    def all_reduce(self, array: Array, *, op: Op = "sum", codec: str | None = None) -> None:
        """As :func:`qcoll.all_reduce`."""
        self._backend.all_reduce_with(_output(array), reduce_op(op), codec, False)

    def all_to_all(
        self,
        output: Array,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        codec: str | None = None,
    ) -> None:
        """As :func:`qcoll.all_to_all_single`."""
        self._backend.all_to_all_with(
            _output(output),
            _input(input),
            list(output_split_sizes or ()),
            list(input_split_sizes or ()),
            codec,
            False,
        )

    def explain(
        self,
        verb: str,
        numel: int,
        dtype: torch.dtype,
        *,
        op: Op = "sum",
        codec: str | None = None,
    ) -> Plan:
        """As :func:`qcoll.explain`."""
        return self._backend.explain(verb, numel, dtype, reduce_op(op), codec)

    def stats(self) -> dict[str, CollectiveStats]:
        """As :func:`qcoll.stats`."""
        return self._backend.stats()

    def abort(self) -> None:
        """Fails the group on all ranks and wakes everything that waits."""
        self._backend.abort()

    def close(self) -> None:
        """Leaves the group; calls in flight get a short grace."""
        self._backend.shutdown()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
