"""Bytes that a collective sends, worked out from the documents alone, to check plans and counters.

docs/wire_format.md gives the size of an encoded chunk and of a header; the schedules are those of
arXiv 2306.10209: gathers carry each shard once into each node along rails, reduce-scatters go in
one all-to-all hop inside the nodes and one between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = 64


def encoded_bytes(codec: str, itemsize: int, count: int) -> int:
    """One encoded chunk: payload and bf16 scales, each padded to 16 bytes."""
    pad = lambda n: -(-n // 16) * 16  # noqa: E731
    if codec == "exact":
        return pad(count * itemsize)
    if codec == "bf16":
        return pad(count * 2)
    name, block = codec.split(":")
    payload = {"int8": count, "int4": -(-count // 32) * 16}[name]
    return pad(payload) + pad(-(-count // int(block)) * 2)


def messages_bytes(codec: str, itemsize: int, length: int, chunk: int, parts: int = 1) -> int:
    """A slice of ``length`` elements as a sequence of messages of ``parts`` chunks each."""
    return sum(
        HEADER + parts * encoded_bytes(codec, itemsize, count) for count in _chunks(length, chunk)
    )


def _chunks(length: int, chunk: int) -> Iterator[int]:
    for begin in range(0, length, chunk):
        yield min(chunk, length - begin)


@dataclass(frozen=True)
class Case:
    """A call on nodes of ``sizes`` ranks, numbered node by node."""

    sizes: tuple[int, ...]
    codecs: tuple[str, str]  # inside the node, between nodes
    itemsize: int
    chunk: int
    sum_itemsize: int = 4  # of an exact partial sum between hops

    @property
    def world(self) -> int:
        return sum(self.sizes)

    @property
    def equal(self) -> bool:
        return len(set(self.sizes)) == 1

    def place(self, rank: int) -> tuple[int, int]:
        """(node, index in it)"""
        for node, size in enumerate(self.sizes):
            if rank < size:
                return node, rank
            rank -= size
        raise ValueError(rank)

    @property
    def crossing(self) -> str:
        """The codec of the outermost level that there is."""
        return self.codecs[1] if len(self.sizes) > 1 else self.codecs[0]

    def gather(self, rank: int, length: int) -> tuple[int, int]:
        """(within node, across nodes) that ``rank`` sends to gather slices of ``length``."""
        shard = messages_bytes(self.crossing, self.itemsize, length, self.chunk)
        node, index = self.place(rank)
        nodes, peers = len(self.sizes), self.sizes[node] - 1
        if self.equal:
            # It sends on along its rail what it encoded or received, all but the last arrival, and
            # its peers read all of that, the last too.
            return nodes * peers * shard, (nodes - 1) * shard
        if index > 0:
            return peers * shard, 0
        # The first rank of a node carries for the node: all shards but those of the next node
        # leave here, and its peers read from it what comes from other nodes.
        foreign = self.world - self.sizes[node]
        onward = self.world - self.sizes[(node + 1) % nodes]
        return (1 + foreign) * peers * shard, onward * shard

    def scatter(self, rank: int, length: int) -> tuple[int, int]:
        node, _ = self.place(rank)
        nodes, size = len(self.sizes), self.sizes[node]
        if not self.equal:  # one flat hop with the crossing codec
            part = messages_bytes(self.crossing, self.itemsize, length, self.chunk)
            return (size - 1) * part, (self.world - size) * part
        inner, outer = self.codecs
        within = messages_bytes(inner, self.itemsize, length, self.chunk, parts=nodes)
        # The second hop carries fp32 sums.
        itemsize = self.sum_itemsize if size > 1 else self.itemsize
        across = messages_bytes(outer, itemsize, length, self.chunk)
        return (size - 1) * within, (nodes - 1) * across

    def reduce(self, rank: int, numel: int) -> tuple[int, int]:
        blocks = [int(c.split(":")[1]) for c in self.used_codecs() if ":" in c]
        unit = math.lcm(32, *blocks)
        length = math.ceil(math.ceil(numel / self.world) / unit) * unit
        scatter, gather = self.scatter(rank, length), self.gather(rank, length)
        return scatter[0] + gather[0], scatter[1] + gather[1]

    def used_codecs(self) -> tuple[str, ...]:
        if not self.equal:
            return (self.crossing,)
        return (self.codecs[0],) * (self.sizes[0] > 1) + (self.codecs[1],) * (len(self.sizes) > 1)

    def exchange(self, rank: int, length: int) -> tuple[int, int]:
        node, _ = self.place(rank)
        peers = self.sizes[node] - 1
        inner = self.codecs[0] if self.equal else self.crossing
        parts = [
            messages_bytes(c, self.itemsize, length, self.chunk) for c in (inner, self.crossing)
        ]
        if length == 0:
            parts = [HEADER, HEADER]  # both ends compare their splits even when there is nothing
        return peers * parts[0], (self.world - 1 - peers) * parts[1]

    def sent(self, verb: str, rank: int, numel: int) -> tuple[int, int]:
        """(within node, across nodes) that ``rank`` sends in a call of ``verb``."""
        length = numel // self.world
        if verb.startswith("all_gather"):
            return self.gather(rank, length)
        if verb.startswith("reduce_scatter"):
            return self.scatter(rank, length)
        if verb.startswith("all_reduce"):
            return self.reduce(rank, numel)
        return self.exchange(rank, length)
