"""What to measure, and where: plain data, checked before any rank starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcoll import _native
from qcoll.testing import Layout
from qcoll.testing.hosts import rate_bits

#: The verbs, with torch.distributed's name of each.
VERBS = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
}
PEERS = ("gloo", "mpi")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMG]?)(?:i?B)?", re.IGNORECASE)
# A fragment of this many bytes of TCP payload goes into a frame of this many, by the link's MTU:
# 40 bytes of IP and TCP headers with 12 of timestamps, and 14 of Ethernet.
_TCP_HEADERS = 52
_ETHERNET_HEADER = 14


#: Begins a line of a rank that tells its launcher, as JSON, how far the measurement is.
PROGRESS = "@qcoll-bench "

#: Called as a measurement goes on, with (steps done, steps in all, what is next).
Listener = Callable[[int, int, str], None]


def silent(_done: int, _total: int, _label: str) -> None:
    """A listener that does nothing."""


class BenchError(ValueError):
    """The arguments do not describe a measurement, or this machine cannot make it."""


def parse_size(text: str) -> int:
    """Bytes of ``"1K"``, ``"64M"``, ``"1.5G"`` (powers of 1024) or a plain number."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match["number"]) * _UNITS[match["unit"].upper()]) if match else 0
    if size <= 0:
        raise BenchError(f"size {text!r} is not understood; give bytes above 0 like 4096, 1K, 64M")
    return size


def sizes(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """``begin``, ``begin * factor``, ... up to ``end``, as nccl-tests' -b, -e and -f."""
    if factor < 2:
        raise BenchError(f"factor {factor}: sizes would not grow; give at least 2")
    if end < begin:
        raise BenchError(f"the largest size {end} is below the smallest {begin}; give -e >= -b")
    found = []
    while begin <= end:
        found.append(begin)
        begin *= factor
    return tuple(found)


@dataclass(frozen=True)
class Config:
    """One measurement: every verb with every size through every channel.

    A channel is qcoll with one codec, or a peer. They take turns: ``rounds`` times each runs its
    share of the iterations, so that drift of the machine falls on all alike.

    Attributes:
        verbs: keys of :data:`VERBS`.
        sizes: bytes of the gathered, unreduced, reduced or exchanged tensor (of each rank).
        codecs: of qcoll's explicit verbs; ``"a/b"`` names one codec for each level.
        dtype: a key of :data:`DTYPES`.
        peers: out of :data:`PEERS`.
        iters: timed iterations of each channel, at least.
        warmup: untimed ones before them.
        rounds: turns of each channel.
        calls: calls back to back in one timed iteration, for messages that take microseconds.
        min_seconds: timed seconds of each channel, at least.
        in_place: the small tensor is the rank's slice of the large one. all_reduce always is.
        seed: of the inputs.
        timeout: seconds that a group gives each collective.
    """

    verbs: tuple[str, ...]
    sizes: tuple[int, ...]
    codecs: tuple[str, ...] = ("exact", "int8", "int4")
    dtype: str = "fp32"
    peers: tuple[str, ...] = ()
    iters: int = 20
    warmup: int = 3
    rounds: int = 3
    calls: int = 1
    min_seconds: float = 0.0
    in_place: bool = False
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _check_names("verb", self.verbs, VERBS)
        _check_names("dtype", [self.dtype], DTYPES)
        _check_names("peer", self.peers, PEERS)
        for name in ("verbs", "sizes"):
            if not getattr(self, name):
                raise BenchError(f"no {name} given: there is nothing to measure")
        if not self.codecs and not self.peers:
            raise BenchError("neither codecs nor peers given: there is nothing to measure")
        for codec in self.codecs:
            _check_codec(codec)
        for name, least in (("iters", 1), ("warmup", 0), ("rounds", 1), ("calls", 1)):
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; give at least {least}")
        if self.in_place and "all_to_all" in self.verbs:
            raise BenchError("all_to_all has no form in place; leave out the verb or --in-place")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype]

    def count(self, size: int, world: int) -> int:
        """Elements of a tensor of at most ``size`` bytes that divides by the number of ranks."""
        count = size // self.torch_dtype.itemsize // world * world
        if count == 0:
            least = self.torch_dtype.itemsize * world
            raise BenchError(
                f"size {size} holds less than one {self.dtype} element for each of {world} ranks; "
                f"give at least {least} bytes"
            )
        return count

    def check_world(self, world: int) -> None:
        """BenchError if a size is too small for ``world`` ranks."""
        self.count(min(self.sizes), world)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of :meth:`to_json`."""
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class Place:
    """Ranks that this package starts by itself.

    Attributes:
        ranks_per_node: one entry for each node.
        link: rate of every node's link (``"1gbit"``), with each node in a network namespace;
            ``"none"``: namespaces without a cap; None: all share the loopback.
        mtu: of the links.
    """

    ranks_per_node: tuple[int, ...]
    link: str | None = None
    mtu: int = 1500

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise BenchError(f"ranks per node {list(self.ranks_per_node)}: give at least 1 each")
        if self.rate is not None:
            try:
                rate_bits(self.rate)
            except ValueError as error:
                raise BenchError(f"link: {error}, or 'none' for namespaces without cap") from None
        if not 576 <= self.mtu <= 65535:
            raise BenchError(f"mtu {self.mtu} is not in 576..65535")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(self.ranks_per_node)

    @property
    def rate(self) -> str | None:
        """The cap of a link, None where there is none."""
        return None if self.link in (None, "none") else self.link

    @property
    def layout(self) -> Layout:
        """The node of each rank."""
        return Layout.of(self.world, self.ranks_per_node)

    def describe_link(self) -> dict[str, Any] | None:
        """For the report: rate, MTU, and the bits per second that are left for TCP's payload."""
        if self.link is None:
            return None
        bits = None if self.rate is None else rate_bits(self.rate)
        frame = self.mtu + _ETHERNET_HEADER
        share = (self.mtu - _TCP_HEADERS) / frame
        return {
            "rate": self.rate,
            "mtu": self.mtu,
            "bits_per_second": bits,
            "payload_bits_per_second": None if bits is None else bits * share,
        }


def parse_nodes(text: str, ranks: int) -> tuple[int, ...]:
    """Ranks of each node, from ``"2"`` (nodes, filled evenly) or ``"3,1"`` (ranks of each)."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise BenchError(
            f"nodes {text!r} is not understood; give a number of nodes (2) or ranks per node (3,1)"
        ) from None
    if len(numbers) > 1:
        if sum(numbers) != ranks:
            raise BenchError(f"nodes {text} hold {sum(numbers)} ranks, but there are {ranks}")
        return tuple(numbers)
    if not 1 <= numbers[0] <= ranks:
        raise BenchError(f"{numbers[0]} nodes for {ranks} ranks; give 1 to {ranks}")
    each, more = divmod(ranks, numbers[0])
    return tuple(each + (node < more) for node in range(numbers[0]))


def _check_names(what: str, given: Sequence[str], known: Mapping[str, Any] | Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise BenchError(f"{what} {name!r} is not one of {', '.join(known)}")


def _check_codec(codec: str) -> None:
    try:
        _native.load().Options().set("all_gather", codec)
    except ValueError as error:
        raise BenchError(f"codec {codec!r}: {error}") from None
