"""The explicit verbs: torch.distributed's, with a codec in the call.

A codec given here always applies, whatever the options, the size or the scope; ``codec=None``
leaves it to them. A codec list names one codec for each level, inner hop first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qcoll._groups import backend_of

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "mean": dist.ReduceOp.AVG,
}
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType


def reduce_op(op: Op) -> dist.ReduceOp:
    if isinstance(op, str):
        if op not in _OPS:
            raise ValueError(f'qcoll: op="{op}" is not one of {sorted(_OPS)} or a ReduceOp')
        return dist.ReduceOp(_OPS[op])
    return op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)


def _finish(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    codec: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Gathers ``input`` (any shape, n elements) of all ranks into ``output`` (world x n elements,
    contiguous, same dtype), in rank order. ``input`` may be this rank's slice of ``output``.

    All ranks get the same bits: the owner decodes its own encoded bytes too, except for float32
    in place, where its slice stays exact.

    Raises:
        ValueError: sizes, dtype, device or codec do not fit; the text says how.
        qcoll.TransportError: a peer died, was late or disagreed.
    """
    work = backend_of(group).all_gather_with(output, input, codec, async_op)
    return _finish(work, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    op: Op = "sum",
    codec: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduces ``input`` (world x n elements) over all ranks and leaves slice ``rank`` of the result
    in ``output`` (n elements, contiguous, same dtype), which may be that slice of ``input``.

    Sums are fp32, in fixed rank order. ``op``: "sum", "avg" or a ReduceOp; a codec needs sum, avg
    or PREMUL_SUM and float32, bfloat16 or float16. Two hops as in qgZ (arXiv 2306.10209).

    Raises:
        ValueError, qcoll.TransportError: as :func:`all_gather_into_tensor`.
    """
    work = backend_of(group).reduce_scatter_with(output, input, reduce_op(op), codec, async_op)
    return _finish(work, async_op)


def all_reduce(
    tensor: torch.Tensor,
    *,
    op: Op = "sum",
    codec: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduces ``tensor`` over all ranks, in place: a reduce-scatter, then an all-gather, each
    encoded. All ranks get the same bits.

    Raises:
        ValueError, qcoll.TransportError: as :func:`all_gather_into_tensor`.
    """
    work = backend_of(group).all_reduce_with(tensor, reduce_op(op), codec, async_op)
    return _finish(work, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    codec: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sends part r of ``input`` to rank r and takes part r of ``output`` from it. Splits are sizes
    in dimension 0; without them the parts are equal. The own part is copied exactly.

    Raises:
        ValueError, qcoll.TransportError: as :func:`all_gather_into_tensor`.
    """
    work = backend_of(group).all_to_all_with(
        output,
        input,
        list(output_split_sizes or ()),
        list(input_split_sizes or ()),
        codec,
        async_op,
    )
    return _finish(work, async_op)


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """``torch.distributed.monitored_barrier``, which torch keeps to gloo's own groups: a barrier
    that names the rank that does not come. The group stays usable.

    Args:
        timeout: how long the first rank waits; default: the group's timeout.
        wait_all_ranks: name all that do not come, not only the first.

    Raises:
        RuntimeError: a rank did not come in time.
        qcoll.TransportError: a peer died, or the group was aborted.
    """
    backend_of(group)  # refuses a group of another backend
    members: Any = group or dist.distributed_c10d._get_default_group()
    if timeout is None:
        members.monitored_barrier(wait_all_ranks=wait_all_ranks)
    else:
        members.monitored_barrier(timeout, wait_all_ranks)
