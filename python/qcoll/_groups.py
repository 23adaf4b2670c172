"""From a torch process group to qcoll's backend in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from qcoll import _native

if TYPE_CHECKING:
    from qcoll import _C


def backend_of(group: dist.ProcessGroup | None) -> _C.Backend:
    """qcoll's backend for CPU tensors of ``group`` (None: the default group).

    Raises:
        ValueError: the group has another backend, or this rank is not in it.
    """
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("qcoll: this rank is not a member of the group")
    backend = group._get_backend(torch.device("cpu"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend.
    inner = getattr(backend, "wrapped_pg", backend)
    if not isinstance(inner, _native.load().Backend):
        raise ValueError(
            f"qcoll: the group's backend for CPU tensors is {inner.name()!r}, not qcoll; "
            'make the group with backend="qcoll"'
        )
    found: _C.Backend = inner
    return found
