"""What a training step costs: time, bytes on the network, bytes handed to the collectives.

Bytes that cross nodes are read from the counters of the node's network interface, not from the
library under test.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils._python_dispatch import TorchDispatchMode


def sent_bytes(interface: str) -> int:
    """Bytes that a network interface of this process's network namespace has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no network interface {interface!r}")


def library_counters(backend: str) -> Counter[str]:
    """qcoll's own counters of this rank, summed over collectives; empty for other backends.

    Keys: ``payload_bytes``, ``within_node``, ``across_nodes``, and ``fallback: REASON`` (calls).
    """
    total: Counter[str] = Counter()
    if backend != "qcoll":
        return total
    import qcoll

    stats: Mapping[str, Mapping[str, Any]] = qcoll.stats(dist.group.WORLD)
    for collective in stats.values():
        total["payload_bytes"] += collective["payload_bytes"]
        total.update(collective["wire_bytes"])
        total.update({f"fallback: {why}": n for why, n in collective["fallbacks"].items()})
    return total


class Meter:
    """Adds up what the steps between :meth:`start` and :meth:`stop` cost.

    Start-up, validation and warm-up stay outside. Both ends are barriers, so that no rank's step
    leaks in or out; a barrier's own few hundred bytes are inside.

    Args:
        backend: of the default process group.
        interface: whose sent bytes to count on this rank, or None. One rank per node counts.
    """

    def __init__(self, backend: str, interface: str | None) -> None:
        self._backend = backend
        self._interface = interface
        self._begin: tuple[float, int, Counter[str]] = (0.0, 0, Counter())
        self.steps = 0
        self.seconds = 0.0
        self.sent = 0
        self.library: Counter[str] = Counter()

    def start(self) -> None:
        """Begin a stretch of steps. Collective."""
        dist.barrier()
        self._begin = self._now()

    def stop(self, steps: int) -> None:
        """End a stretch of ``steps`` steps. Collective."""
        dist.barrier()
        seconds, sent, library = self._now()
        self.steps += steps
        self.seconds += seconds - self._begin[0]
        self.sent += sent - self._begin[1]
        library.subtract(self._begin[2])
        self.library.update(library)

    def summary(self) -> dict[str, Any]:
        """Per step: seconds, bytes sent by all nodes, qcoll's counters over all ranks. Collective.

        ``interface_bytes`` is None where no rank counts, ``library`` is empty without qcoll.
        """
        mine = (self.sent if self._interface else None, dict(self.library))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        counted = [sent for sent, _ in everyone if sent is not None]
        library: Counter[str] = Counter()
        for _, counters in everyone:
            library.update(counters)
        return {
            "measured_steps": self.steps,
            "seconds": self.seconds / self.steps,
            "interface_bytes": sum(counted) / self.steps if counted else None,
            # What crosses nodes is summed over ranks; every rank passes the same payload.
            "library": {
                key: value / self.steps / (len(everyone) if key == "payload_bytes" else 1)
                for key, value in library.items()
                if value
            },
        }

    def _now(self) -> tuple[float, int, Counter[str]]:
        sent = sent_bytes(self._interface) if self._interface else 0
        return time.perf_counter(), sent, library_counters(self._backend)


class PayloadObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes handed to collectives by the calls made in its context.

    ``bytes`` maps each collective to bytes on this rank: of the gathered tensor for an all-gather,
    of the unreduced one for a reduce-scatter, of the tensors themselves for anything else.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            # An all-gather's or reduce-scatter's arguments begin with (output, input).
            sizes = [_tensor_bytes(argument) for argument in args[:2]]
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A new buffer, as FSDP's own collectives allocate it."""
        return torch.empty(*size, dtype=dtype, device=device)


class FreeAllGather(_Allocate, AllGather):
    """Stands in for FSDP's all-gather and sends nothing: every rank's part is this rank's."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        parts = output_tensor.view(group.size(), -1)
        own = parts[group.rank()]
        own.copy_(input_tensor)
        for rank, part in enumerate(parts):
            if rank != group.rank():
                part.copy_(own)


class FreeReduceScatter(_Allocate, ReduceScatter):
    """Stands in for FSDP's reduce-scatter and sends nothing: the result is this rank's share."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
