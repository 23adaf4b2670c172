"""The encoded bytes themselves cross the network: nothing is decoded before the destination.

A packet socket on the middle host of three records what passes; TCP streams are put together again
and searched for what the codec makes of each rank's shard.
"""

from __future__ import annotations

import collections
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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

COUNT = 8192  # of a shard: one message
CODEC = "int8:256"

# Writes every frame that eth0 sends or receives to a file, each after its length.
_CAPTURE = """
import socket, struct, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
tap.bind(("eth0", 0))
with open(sys.argv[1], "wb", buffering=0) as out:
    print("ready", flush=True)
    while True:
        frame = tap.recv(1 << 17)
        out.write(struct.pack("<I", len(frame)) + frame)
"""

Flow = tuple[str, str]


def shard(rank: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(50 + rank)).bfloat16()


def gather() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.empty(COUNT * world, dtype=torch.bfloat16)
    qcoll.all_gather_into_tensor(whole, shard(rank), codec=CODEC)
    for r, mine in enumerate(whole.chunk(world)):
        encoded = qcoll.encode(shard(r), CODEC)
        assert torch.equal(mine, qcoll.decode(encoded, [COUNT], torch.bfloat16, CODEC))


def streams(capture: Path) -> dict[Flow, bytes]:
    """The bytes that each host sent to each other, connections of the pair one after another."""
    segments: dict[tuple[str, int, str, int], dict[int, bytes]] = collections.defaultdict(dict)
    data = capture.read_bytes()
    at = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        frame = data[at + 4 : at + 4 + length]
        at += 4 + length
        if frame[12:14] != b"\x08\x00" or frame[23] != 6:  # not TCP over IPv4
            continue
        tcp = 14 + (frame[14] & 15) * 4
        total = struct.unpack_from(">H", frame, 16)[0] or len(frame) - 14  # 0: larger than 64 KiB
        source, target = (socket.inet_ntoa(frame[i : i + 4]) for i in (26, 30))
        ports = struct.unpack_from(">HH", frame, tcp)
        (sequence,) = struct.unpack_from(">I", frame, tcp + 4)
        payload = frame[tcp + (frame[tcp + 12] >> 4) * 4 : 14 + total]
        if payload:
            segments[source, ports[0], target, ports[1]][sequence] = payload
    flows: dict[Flow, bytes] = collections.defaultdict(bytes)
    for (source, _, target, _), parts in segments.items():
        flows[source, target] += b"".join(parts[sequence] for sequence in sorted(parts))
    return flows


def capture_of(
    hosts: Hosts, host: int, pool: RankPool, file: Path, function: Callable[[], None] = gather
) -> dict[Flow, bytes]:
    """What passes ``host`` during one call, by default a gather."""
    command = [*hosts.command_prefix(host), sys.executable, "-c", _CAPTURE, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tap:
        assert tap.stdout is not None
        assert tap.stdout.readline() == "ready\n"
        try:
            pool.run(function, backend="qcoll")
            size = -1
            deadline = time.monotonic() + 10
            while size != file.stat().st_size and time.monotonic() < deadline:
                size = file.stat().st_size
                time.sleep(0.3)
        finally:
            tap.kill()
    return streams(file)


def test_encoded_bytes_are_forwarded_unchanged(tmp_path: Path) -> None:
    with Hosts(3) as hosts, RankPool(3, [1, 1, 1], hosts=hosts) as pool:
        pool.run(gather, backend="qcoll")  # connects
        flows = capture_of(hosts, 1, pool, tmp_path / "frames")
        address = hosts.addresses
    encoded = [bytes(qcoll.encode(shard(r), CODEC).numpy()) for r in range(3)]
    plain = [shard(r).view(torch.uint8).numpy().tobytes() for r in range(3)]

    def times(needle: bytes, flow: Flow) -> int:
        return flows.get(flow, b"").count(needle)

    # The ring runs 0 -> 1 -> 2 -> 0: host 1 receives the shards of 0 and 2, and sends 1 and 0 on.
    arriving, leaving = (address[0], address[1]), (address[1], address[2])
    assert [times(e, arriving) for e in encoded] == [1, 0, 1]
    assert [times(e, leaving) for e in encoded] == [1, 1, 0]
    for flow in flows:
        for text in plain:
            assert times(text[:64], flow) == 0, f"values as they are between {flow}"
    others = set(flows) - {arriving, leaving}
    assert all(times(e, flow) == 0 for e in encoded for flow in others)


PATTERN = b"nobody outside may read this"


def verbs_with_a_pattern() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    text = torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8)
    dist.broadcast(text.clone(), src=1)
    dist.gather(text, [torch.empty_like(text) for _ in range(world)] if rank == 1 else None, dst=1)
    dist.all_gather([torch.empty_like(text) for _ in range(world)], text)
    gather()


@pytest.mark.parametrize("encrypt", ["0", "native", "1"])
def test_encrypted_groups_show_nothing(tmp_path: Path, encrypt: str) -> None:
    env = {"QCOLL_ENCRYPT": encrypt}
    with Hosts(2) as hosts, RankPool(2, [1, 1], hosts=hosts, env=env) as pool:
        pool.run(verbs_with_a_pattern, backend="qcoll")
        flows = capture_of(hosts, 1, pool, tmp_path / "frames", verbs_with_a_pattern)
    seen = b"".join(flows.values())
    texts = seen.count(PATTERN)
    codes = sum(seen.count(bytes(qcoll.encode(shard(r), CODEC).numpy())[:4000]) for r in range(2))
    assert len(seen) > 4 * 1000 * len(PATTERN)  # it did pass
    if encrypt == "0":
        assert texts >= 4 * 900
        assert codes == 2
    else:
        assert codes == 0
        assert (texts == 0) == (encrypt == "1")  # gloo's broadcast and gather
