"""Quantized collectives for sharded training over slow networks.

``torch.distributed.init_process_group("qcoll")`` sends FSDP's weights in int8 and its gradients in
int8 inside a node and int4 across; see :class:`Options` for everything else. Importing this module
only registers the backend; the compiled half is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qcoll._register import autoload, register

if TYPE_CHECKING:
    from qcoll._C import TransportError
    from qcoll.codec import decode, encode
    from qcoll.collectives import (
        all_gather_into_tensor,
        all_reduce,
        all_to_all_single,
        reduce_scatter_tensor,
    )
    from qcoll.communicator import Communicator
    from qcoll.introspection import explain, reset_stats, stats
    from qcoll.options import Options, exact, options

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
    "options",
    "reduce_scatter_tensor",
    "register",
    "reset_stats",
    "stats",
]

_HOME = {
    "Communicator": "communicator",
    "Options": "options",
    "TransportError": "_C",
    "all_gather_into_tensor": "collectives",
    "all_reduce": "collectives",
    "all_to_all_single": "collectives",
    "decode": "codec",
    "encode": "codec",
    "exact": "options",
    "explain": "introspection",
    "options": "options",
    "reduce_scatter_tensor": "collectives",
    "reset_stats": "introspection",
    "stats": "introspection",
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
    globals()[name] = value  # also puts the function before its module of the same name
    return value


register()
