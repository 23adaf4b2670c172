"""Makes ``init_process_group("qcoll")`` known to torch."""

from __future__ import annotations

import atexit
import datetime
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from qcoll import _native

if TYPE_CHECKING:
    from qcoll import _C

_EXIT_GRACE = datetime.timedelta(seconds=1)


def register() -> None:
    """Registers the backend for cpu and cuda tensors. The compiled half is loaded on first use."""
    if not dist.is_available() or "QCOLL" in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        "qcoll", _create_backend, extended_api=True, devices=["cpu", "cuda"]
    )
    if os.environ.get("QCOLL_DEFAULT", "0") not in ("", "0"):
        # Trainers without a setting for the backend ask this map.
        dist.Backend.default_device_backend_map["cpu"] = "qcoll"


def autoload() -> None:
    """Entry point of torch's backend autoload, at the end of ``import torch``. Never raises: an
    error here would break ``import torch`` for every program of the environment."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"qcoll could not register itself with torch: {error}", stacklevel=2)


def _options_for(given: Any, timeout: datetime.timedelta) -> _C.Options:
    native = _native.load()
    if isinstance(given, native.Options):
        options: _C.Options = given.copy()  # the user may pass one object to several groups
    else:
        if given is not None:
            warnings.warn(
                f"qcoll ignores pg_options of type {type(given).__name__}; pass qcoll.Options",
                stacklevel=2,
            )
        options = native.Options()
    options._timeout = timeout
    return options


def _create_backend(backend_options: Any, pg_options: Any = None) -> _C.Backend:
    native = _native.load()
    rank = backend_options.group_rank
    size = backend_options.group_size
    # What qcoll does not change stays with gloo, connected now and under its own keys.
    gloo = dist.ProcessGroupGloo(
        dist.distributed_c10d.PrefixStore("qcoll-delegate", backend_options.store),
        rank,
        size,
        timeout=backend_options.timeout,
    )
    # Empty means the default group, whose ranks are the global ones.
    global_ranks = list(backend_options.global_ranks_in_group) or list(range(size))
    gloo.options.global_ranks_in_group = global_ranks
    gloo._set_sequence_number_for_group()
    options = _options_for(pg_options, backend_options.timeout)
    options.global_ranks_in_group = global_ranks
    options.group_name = backend_options.group_id
    shutdown_at_exit()
    backend: _C.Backend = native.Backend(backend_options.store, rank, size, options, gloo)
    return backend


_exit_registered = False


def shutdown_at_exit() -> None:
    """Ends groups that the user did not destroy, while the interpreter still lives: a thread that
    drops a tensor after that would end the process with an abort."""
    global _exit_registered
    if not _exit_registered:
        atexit.register(_native.load().shutdown_all, _EXIT_GRACE)
        _exit_registered = True
