"""Makes ``init_process_group("qcoll")`` known to torch."""

from __future__ import annotations

import atexit
import datetime
import errno
import os
import resource
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from qcoll import _native

if TYPE_CHECKING:
    from qcoll import _C

_EXIT_GRACE = datetime.timedelta(seconds=1)
# gloo waits so long for the address of a rank, and five times as long for its connection. All ranks
# have met by then. Its calls have the group's timeout.
_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)


def register() -> None:
    """Registers the backend for cpu and cuda tensors. The compiled half is loaded on first use."""
    if not dist.is_available() or "QCOLL" in dist.Backend._plugins:
        return
    dist.Backend.register_backend(
        "qcoll", _create_backend, extended_api=True, devices=["cpu", "cuda"]
    )
    wanted = os.environ.get("QCOLL_DEFAULT") or "0"
    if wanted == "1":
        # Trainers without a setting for the backend ask this map.
        dist.Backend.default_device_backend_map["cpu"] = "qcoll"
    elif wanted != "0":
        warnings.warn(
            f"environment variable QCOLL_DEFAULT={wanted!r} is neither 0 nor 1: qcoll does not "
            "become the default backend",
            stacklevel=2,
        )


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


def _require_descriptors(size: int) -> None:
    """gloo ends the process when its listener finds no free descriptor; better not to begin.

    Raises:
        OSError: fewer are free than the group may need, with the numbers.
    """
    needed = 16 + 6 * size  # gloo's and qcoll's connections to each rank, and what each needs once
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(list(Path("/proc/self/fd").iterdir()))
    if free < needed:
        raise OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}: a group of {size} ranks needs up to {needed} file "
            f"descriptors, {free} of {limit} are free; raise the limit (ulimit -n)",
        )


def _gloo_options(timeout: datetime.timedelta) -> tuple[Any, list[int]]:
    """What gloo's own constructor makes of a timeout, and the ports of its listeners."""
    gloo: Any = dist.ProcessGroupGloo
    before = _native.load().listening_ports()
    options = gloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
        gloo.create_default_device()
    ]
    options._timeout = timeout
    options._threads = 2 * len(options._devices)
    ports = sorted(set(_native.load().listening_ports()) - set(before))
    # More than gloo's own: another thread began to listen meanwhile, and none can be told apart.
    return options, ports if len(ports) == len(options._devices) else []


def _connected_gloo(backend: _C.Backend, store: Any, rank: int, size: int, options: Any) -> Any:
    """gloo's process group. Its constructor cannot be interrupted and does not learn of deaths: it
    runs in a thread of its own, which is left to gloo's timeout when the group fails meanwhile."""
    made: list[Any] = []
    ended = threading.Event()

    def make() -> None:
        try:
            made.append(dist.ProcessGroupGloo(store, rank, size, options))
        except Exception as error:
            made.append(error)
        finally:
            ended.set()

    threading.Thread(target=make, name="qcoll_gloo", daemon=True).start()
    while not ended.wait(0.02):
        if backend.get_error().value != 0:
            backend.fail_without_delegate("the group failed before gloo was connected")
    if isinstance(made[0], Exception):
        backend.fail_without_delegate(str(made[0]))
    return made[0]


def _create_backend(backend_options: Any, pg_options: Any = None) -> _C.Backend:
    native = _native.load()
    store = backend_options.store
    rank = backend_options.group_rank
    size = backend_options.group_size
    # Empty means the default group, whose ranks are the global ones.
    global_ranks = list(backend_options.global_ranks_in_group) or list(range(size))
    options = _options_for(pg_options, backend_options.timeout)
    options.global_ranks_in_group = global_ranks
    options.group_name = backend_options.group_id
    # What this rank alone may fail in comes before the roll call, where the others learn of it.
    try:
        _require_descriptors(size)
        gloo_options, gloo_ports = _gloo_options(min(backend_options.timeout, _CONNECT_TIMEOUT))
    except Exception as error:
        native.refuse_to_join(store, rank, str(error))
        raise native.TransportError(f"qcoll: rank {rank} cannot join the group: {error}") from error
    shutdown_at_exit()
    backend: _C.Backend = native.Backend(store, rank, size, options)
    if not backend.may_delegate:
        return backend
    # What qcoll does not change stays with gloo, connected now and under its own keys.
    # A store that outlives a group (a restarted job's) holds the delegate's old addresses.
    keys = dist.distributed_c10d.PrefixStore(f"qcoll-delegate/{backend.group_number:x}", store)
    backend.meet()
    gloo = _connected_gloo(backend, keys, rank, size, gloo_options)
    gloo._set_default_timeout(backend_options.timeout)
    gloo.options.global_ranks_in_group = global_ranks
    gloo._set_sequence_number_for_group()
    backend.set_delegate(gloo, gloo_ports)
    return backend


_exit_registered = False


def shutdown_at_exit() -> None:
    """Ends groups that the user did not destroy, while the interpreter still lives: a thread that
    drops a tensor after that would end the process with an abort."""
    global _exit_registered
    if not _exit_registered:
        atexit.register(_native.load().shutdown_all, _EXIT_GRACE)
        _exit_registered = True
