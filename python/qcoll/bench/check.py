"""One untimed call of a channel: are its numbers right, are they the same everywhere, what did it
send."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import qcoll
from qcoll.bench.channels import Channel
from qcoll.bench.config import VERBS
from qcoll.bench.data import deviation, fingerprint
from qcoll.bench.rendezvous import World

_LEVELS = ("within_node", "across_nodes")


def check(
    channel: Channel, world: World, nodes: list[str], interface: str | None
) -> dict[str, Any]:
    """Collective. The ``error``, ``equal_bits``, ``wire`` and ``ratio`` of a row.

    Args:
        nodes: the node of each rank.
        interface: see :func:`qcoll.bench.measure.measure`.
    """
    problem, buffers = channel.problem, channel.buffers
    counts = interface is not None and nodes.index(nodes[world.rank]) == world.rank
    buffers.poison()
    world.barrier()
    before = _sent(channel), _frames(interface) if counts else 0
    world.barrier()
    channel.call()
    world.barrier()
    sent = {level: now - before[0][level] for level, now in _sent(channel).items()}
    frames = _frames(interface) - before[1] if counts else 0
    shared = problem.verb in ("all_gather", "all_reduce")
    mine = {
        "sent": sent,
        "exact": _exact(channel),
        "frames": frames,
        "deviation": deviation(problem, buffers.output),
        "bits": fingerprint(buffers.output) if shared else None,
    }
    everyone = world.gather(mine)
    return {
        "error": _error([each["deviation"] for each in everyone]),
        "equal_bits": len({each["bits"] for each in everyone}) == 1 if shared else None,
        "wire": _wire(channel, everyone, nodes, interface is not None),
        "ratio": _ratio(channel, everyone),
    }


def _sent(channel: Channel) -> dict[str, int]:
    """Bytes that this rank has sent by qcoll's own count."""
    if channel.library != "qcoll":
        return {}
    found = qcoll.stats().get(VERBS[channel.problem.verb])
    return {level: found["wire_bytes"][level] if found else 0 for level in _LEVELS}  # type: ignore[literal-required]


def _exact(channel: Channel) -> dict[str, int]:
    """Bytes that this rank would send without a codec."""
    if channel.library != "qcoll":
        return {}
    problem = channel.problem
    plan = qcoll.explain(VERBS[problem.verb], problem.count, problem.dtype, codec="exact")
    return {level: plan["wire_bytes"][level] for level in _LEVELS}  # type: ignore[literal-required]


def _frames(interface: str | None) -> int:
    """Bytes that an interface has sent, frame headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no network interface {interface!r} to count bytes on")


def _error(ranks: list[dict[str, float]]) -> dict[str, float]:
    largest = 0.0
    for rank in ranks:
        worst = rank["max_abs"]
        largest = worst if worst != worst else max(largest, worst)
    squares, norm = (sum(rank[key] for rank in ranks) for key in ("squares", "norm"))
    return {"max_abs": largest, "relative_l2": (squares / norm) ** 0.5 if norm else squares}


def _wire(
    channel: Channel, ranks: list[dict[str, Any]], nodes: list[str], interface: bool
) -> dict[str, Any]:
    """Bytes of one call: summed over all ranks, and across nodes that of the busiest node."""
    frames = Counter(dict.fromkeys(nodes, 0))
    across = Counter(dict.fromkeys(nodes, 0))
    for node, rank in zip(nodes, ranks, strict=True):
        frames[node] += rank["frames"]
        across[node] += rank["sent"].get("across_nodes", 0)
    by_qcoll = channel.library == "qcoll"
    counted = across if by_qcoll else frames
    known = by_qcoll or interface
    return {
        "within_node": sum(r["sent"]["within_node"] for r in ranks) if by_qcoll else None,
        "across_nodes": sum(counted.values()) if known else None,
        "across_nodes_busiest": max(counted.values()) if known else None,
        "interface": sum(frames.values()) if interface else None,
        "counted_by": "qcoll.stats" if by_qcoll else "interface" if interface else None,
    }


def _ratio(channel: Channel, ranks: list[dict[str, Any]]) -> float | None:
    """Bytes without a codec over bytes sent, across nodes where there are several."""
    if channel.library != "qcoll":
        return None
    for level in reversed(_LEVELS):
        sent = sum(rank["sent"][level] for rank in ranks)
        if sent:
            return float(sum(rank["exact"][level] for rank in ranks) / sent)
    return None
