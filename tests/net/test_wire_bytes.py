"""What a collective really sends between hosts, read from the hosts' interface counters.

With equal nodes, a node sends (N-1)/N of the payload, shrunk by the codec of the level that crosses
nodes. The interface counts more than that, and the allowance is worked out, not guessed:

- 64 bytes of header for each message (docs/wire_format.md);
- for each TCP segment of MTU - 52 bytes (20 of IPv4, 32 of TCP with timestamps), 66 bytes of
  headers, Ethernet's 14 among them; segments that the kernel never had to cut count headers once;
- an acknowledgement of 66 bytes for each segment that arrives, at most;
- 2 % for segments that are not full, window updates and the like.

Below the formula there is no allowance: those bytes must cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import Hosts, RankPool, available

_CAN, _WHY_NOT = available()
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available"),
]

MTU = 9000
SEGMENT = MTU - 52
FRAME_HEADERS = 66
MESSAGE_HEADER = 64
# Elements of the whole tensor: a multiple of ranks times block for all layouts here, and enough
# that headers are small.
NUMEL = 2 * 3 * 4 * 4096 * 48

LAYOUTS = [(2, 2), (2, 2, 2), (3, 3), (3, 1), (2, 1, 1)]
#: bits of an encoded element; exact ones keep the tensor's
BITS = {"int8:256": 8 + 16 / 256, "int4:128": 4 + 16 / 128}
CODECS = ("exact", "int8:256", "int8:256/int4:128")


@dataclass(frozen=True)
class Call:
    verb: str
    codec: str
    dtype: torch.dtype

    @property
    def bytes_per_element(self) -> float:
        """On the level that crosses nodes, the last of the list."""
        return BITS.get(self.codec.split("/")[-1], self.dtype.itemsize * 8) / 8


CALLS = [
    Call(verb, codec, dtype)
    for verb in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    for codec in CODECS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def network(request: pytest.FixtureRequest) -> Iterator[tuple[Hosts, RankPool]]:
    sizes = request.param
    with (
        Hosts(len(sizes), mtu=MTU) as hosts,
        RankPool(sum(sizes), list(sizes), hosts=hosts) as pool,
    ):
        pool.run(perform, (CALLS[0],), backend="qcoll")  # connects
        yield hosts, pool


def perform(call: Call) -> tuple[dict[str, Any], int]:
    """Makes the call; (its plan, the bytes that this rank counted across nodes)."""
    world = dist.get_world_size()
    part, whole = (torch.ones(n, dtype=call.dtype) for n in (NUMEL // world, NUMEL))
    qcoll.reset_stats()
    if call.verb == "all_gather_into_tensor":
        qcoll.all_gather_into_tensor(whole, part, codec=call.codec)
        assert whole.eq(1).all()
    elif call.verb == "reduce_scatter_tensor":
        qcoll.reduce_scatter_tensor(part, whole, codec=call.codec)
        assert part.eq(world).all()
    else:
        qcoll.all_reduce(whole, codec=call.codec)
        assert whole.eq(world).all()
    counted = qcoll.stats()[call.verb]["wire_bytes"]["across_nodes"]
    return dict(qcoll.explain(call.verb, NUMEL, call.dtype, codec=call.codec)), counted


def formula(call: Call, sizes: tuple[int, ...], node: int) -> float:
    """Encoded bytes that must leave ``node``."""
    whole = NUMEL * call.bytes_per_element
    if len(set(sizes)) == 1:
        once = whole * (len(sizes) - 1) / len(sizes)
        return 2 * once if call.verb == "all_reduce" else once
    # Uneven: gathers take one ring through the nodes, on which all shards but those of the next
    # node leave a node; scatters go from each rank to each rank of other nodes.
    world = sum(sizes)
    gather = whole * (world - sizes[(node + 1) % len(sizes)]) / world
    scatter = whole * sizes[node] * (world - sizes[node]) / world
    return {
        "all_gather_into_tensor": gather,
        "reduce_scatter_tensor": scatter,
        "all_reduce": gather + scatter,
    }[call.verb]


def messages(call: Call, sizes: tuple[int, ...], node: int, chunk: int) -> int:
    """Messages in which the bytes of :func:`formula` travel: slices are cut into chunks."""
    one = Call(call.verb, "exact", torch.uint8)  # a byte for each element: counts elements
    slices = formula(one, sizes, node) / (NUMEL / sum(sizes))
    return round(slices) * math.ceil(NUMEL / sum(sizes) / chunk)


def framed(sent: float, received: float) -> float:
    """The most that an interface may count for bytes that it sent, while others arrived."""
    segments, arrived = math.ceil(sent / SEGMENT), math.ceil(received / SEGMENT)
    return 1.02 * (sent + FRAME_HEADERS * (segments + arrived))


@pytest.mark.parametrize("call", CALLS, ids=lambda c: f"{c.verb}-{c.codec}-{c.dtype}")
def test_interfaces_count_the_formulas_bytes(call: Call, network: tuple[Hosts, RankPool]) -> None:
    hosts, pool = network
    sizes = tuple(pool.layout.names.count(name) for name in pool.layout.nodes)
    before = [hosts.interface_bytes(node) for node in range(hosts.count)]
    results = pool.run(perform, (call,), backend="qcoll")
    after = [hosts.interface_bytes(node) for node in range(hosts.count)]
    for node in range(hosts.count):
        received, sent = (after[node][i] - before[node][i] for i in range(2))
        ranks = [rank for rank in range(sum(sizes)) if pool.layout.node(rank) == node]
        plan = results[ranks[0]][0]
        expected = formula(call, sizes, node)
        headers = MESSAGE_HEADER * messages(call, sizes, node, plan["chunk_elements"])
        what = f"node {node} of {sizes} sent {sent}, formula {expected:.0f}, plan {plan}"
        assert expected <= sent <= framed(expected + headers, received), what
        planned = plan["node_across_nodes_bytes"]
        assert planned <= sent <= framed(planned, received), what
        assert all(results[rank][0]["node_across_nodes_bytes"] == planned for rank in ranks)
        assert sum(results[rank][1] for rank in ranks) == planned, what


def test_encoding_is_what_shrinks_the_bytes(network: tuple[Hosts, RankPool]) -> None:
    """The same call costs what its codec says, in both directions of the comparison."""
    hosts, pool = network
    sent: dict[str, int] = {}
    for codec in CODECS:
        before = hosts.interface_bytes(0)[1]
        pool.run(perform, (Call("all_gather_into_tensor", codec, torch.float32),), backend="qcoll")
        sent[codec] = hosts.interface_bytes(0)[1] - before
    assert sent["int8:256"] / sent["exact"] == pytest.approx(BITS["int8:256"] / 32, rel=0.03)
    assert sent[CODECS[2]] / sent["exact"] == pytest.approx(BITS["int4:128"] / 32, rel=0.03)


def inside(codec: str) -> None:
    """A group inside one node."""
    groups = [dist.new_group(ranks, backend="qcoll") for ranks in ([0, 1], [2, 3])]
    dist.barrier()
    mine = groups[dist.get_rank() // 2]
    out = torch.empty(NUMEL)
    for _ in range(2):
        qcoll.all_gather_into_tensor(out, torch.ones(NUMEL // 2), codec=codec, group=mine)


def test_groups_inside_a_node_send_nothing_between_hosts() -> None:
    with Hosts(2, mtu=MTU) as hosts, RankPool(4, [2, 2], hosts=hosts) as pool:
        for codec in ("exact", "int8"):
            before = hosts.interface_bytes(0)[1]
            pool.run(inside, (codec,), backend="qcoll", fresh=True)
            # Forming the groups goes over the network; 4 x 4.7 MB of data do not.
            assert hosts.interface_bytes(0)[1] - before < 500_000
