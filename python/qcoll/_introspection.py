"""What qcoll would do with a call, and what it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from qcoll._collectives import Op, reduce_op
from qcoll._groups import backend_of

if TYPE_CHECKING:
    from qcoll._C import CollectiveStats, FlightRecord, Plan


def explain(
    verb: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    op: Op = "sum",
    codec: str | None = None,
) -> Plan:
    """What a call would do, without communication.

    Args:
        verb: torch.distributed's name, for example ``"reduce_scatter_tensor"``.
        numel: elements of the gathered, unreduced, reduced or exchanged tensor.
        dtype: of the tensor.
        op: of a reduction; as in the explicit verbs.
        codec: as in the explicit verbs.

    Returns:
        A dict: ``algorithm``, ``topology``, ``hops`` (level, codec, ranks), ``exact_because``
        (empty when a codec applies), ``payload_bytes``, ``wire_bytes`` that this rank sends
        (``within_node``, ``across_nodes``; headers included), ``node_across_nodes_bytes`` that all
        ranks of this node send, ``chunk_elements``, ``slots``, ``not_in_shared_memory``
        (ranks of this node that are reached by TCP, and why), and ``predicted_us``: microseconds
        by the cost model of option ``tuning``, ``exact`` and ``coded`` with the codec of the call
        or of the options, each None where it was not measured; None where neither was. Of a call
        that goes to the delegate only the payload is known, and ``exact_because`` says why it goes
        there.

    Raises:
        ValueError: unknown verb, op or codec; elements that do not divide by the world size.
    """
    return backend_of(group).explain(verb, numel, dtype, reduce_op(op), codec)


def stats(group: dist.ProcessGroup | None = None) -> dict[str, CollectiveStats]:
    """Counters of this rank since the group was made (or :func:`reset_stats`), by verb.

    Each is a dict: ``calls``, ``payload_bytes`` (gathered or unreduced tensor, as passed),
    ``wire_bytes`` sent (``within_node``, ``across_nodes``; headers included), ``fallbacks`` (calls
    that were exact, by reason), ``nonfinite_blocks`` (encoded with NaN or Inf in them),
    ``encode_seconds``, ``decode_seconds``, ``wait_seconds``.
    """
    return backend_of(group).stats()


def reset_stats(group: dist.ProcessGroup | None = None) -> None:
    """Sets all counters of :func:`stats` to zero."""
    backend_of(group).reset_stats()


def flight_record(group: dist.ProcessGroup | None = None) -> FlightRecord:
    """The last 2000 collectives of this rank and what it waits for, also after a failure.

    ``QCOLL_DUMP=DIR`` writes the same as text to ``DIR/qcoll_GROUP_rankN.txt`` when a group fails
    or ends.

    Returns:
        A dict: ``rank``, ``size``, ``label``, ``topology``, ``failure`` (the group's first, empty
        while it lives), ``waits_for`` (which rank this one waits for now, and for what; empty when
        it does not) and ``operations``, oldest first: ``number`` (the same on all ranks),
        ``call``, ``state`` (queued, running, finished, failed), and the times ``queued``,
        ``started``, ``ended`` in seconds since 1970, None for what has not happened; ``messages``,
        the same of the last 2000 sends and receives, numbered by this rank alone. Their end is
        known once somebody has waited for them.
    """
    return backend_of(group).flight_record()
