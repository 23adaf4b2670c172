"""What qcoll would do with a call, and what it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from qcoll._groups import backend_of

if TYPE_CHECKING:
    from qcoll._C import CollectiveStats, Plan


def explain(
    verb: str,
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    codec: str | None = None,
) -> Plan:
    """What a call would do, without communication.

    Args:
        verb: torch.distributed's name, for example ``"reduce_scatter_tensor"``.
        numel: elements of the gathered, unreduced, reduced or exchanged tensor.
        dtype: of the tensor.
        codec: as in the explicit verbs.

    Returns:
        A dict: ``algorithm``, ``topology``, ``hops`` (level, codec, ranks), ``exact_because``
        (empty when a codec applies), ``payload_bytes``, ``wire_bytes`` that this rank sends
        (``within_node``, ``across_nodes``; headers included), ``node_across_nodes_bytes`` that all
        ranks of this node send, ``chunk_elements`` and ``slots``.

    Raises:
        ValueError: unknown verb or codec.
    """
    return backend_of(group).explain(verb, numel, dtype, codec)


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
