"""Quantized collectives for sharded training over slow networks.

``torch.distributed.init_process_group("qcoll")`` sends FSDP's weights in int8 and its gradients in
int8 inside a node and int4 across; see :class:`Options` for everything else. Importing this module
only registers the backend; the compiled half is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  before qcoll._register: at its end torch loads that module itself

from qcoll._register import autoload, register

if TYPE_CHECKING:
    from qcoll._C import TransportError
    from qcoll._codec import decode, encode
    from qcoll._collectives import (
        all_gather_into_tensor,
        all_reduce,
        all_to_all_single,
        monitored_barrier,
        reduce_scatter_tensor,
    )
    from qcoll._communicator import Communicator
    from qcoll._introspection import explain, flight_record, reset_stats, stats
    from qcoll._options import Options, exact, options

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "Options",
    "TransportError",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "autoload",
    "decode",
    "encode",
    "exact",
    "explain",
    "flight_record",
    "monitored_barrier",
    "options",
    "reduce_scatter_tensor",
    "register",
    "reset_stats",
    "stats",
]

_HOME = {
    "Communicator": "_communicator",
    "Options": "_options",
    "TransportError": "_C",
    "all_gather_into_tensor": "_collectives",
    "all_reduce": "_collectives",
    "all_to_all_single": "_collectives",
    "decode": "_codec",
    "encode": "_codec",
    "exact": "_options",
    "explain": "_introspection",
    "flight_record": "_introspection",
    "monitored_barrier": "_collectives",
    "options": "_options",
    "reduce_scatter_tensor": "_collectives",
    "reset_stats": "_introspection",
    "stats": "_introspection",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'qcoll' has no attribute {name!r}")
    if home == "_C":
        from qcoll import _native

        value = getattr(_native.load(), name)
    else:
        value = getattr(importlib.import_module(f"qcoll.{home}"), name)
    globals()[name] = value
    return value


register()
