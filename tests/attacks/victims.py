"""Ranks under attack: a group that keeps making checked collectives, and how strangers reach it."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

import qcoll
from qcoll.testing import RankOutcome, RankPool

CONTROL, DATA = 1, 2
NONCE = bytes(range(16))
# A machine that does other work too; nothing below measures speed.
PATIENCE = 60.0


# ---- the ranks ----------------------------------------------------------------------------------


def checked_collectives(comm: qcoll.Communicator, step: int) -> None:
    """One collective of each kind, native and delegated, exact and encoded; all check results."""
    rank, size = comm.rank, comm.size
    values = torch.arange(4000.0) + rank + step % 7
    comm.all_reduce(values)
    assert values.equal(size * (torch.arange(4000.0) + step % 7) + sum(range(size)))

    gathered = torch.empty(size * 500)
    comm.all_gather(gathered, torch.full((500,), float(rank)), codec="int4:64")
    assert gathered.equal(torch.arange(float(size)).repeat_interleave(500))

    shard = torch.empty(2048)
    qcoll.reduce_scatter_tensor(shard, torch.full((2048 * size,), 2.0), codec="int8")
    assert shard.equal(torch.full((2048,), 2.0 * size))

    largest = torch.tensor([rank * step])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.item() == (size - 1) * step


def new_groups() -> None:
    """Handshakes of control links and, with the first collective, of data streams."""
    group = dist.new_group(backend="qcoll")
    ones = torch.ones(3000)
    dist.all_reduce(ones, group=group)
    assert ones.equal(torch.full((3000,), float(dist.get_world_size())))
    dist.destroy_process_group(group)


def train(folder: str) -> int:
    """Calls until the file "stop" is there; the number of steps.

    While the file "groups" is there, each step also forms a new group.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("attacked", _get_default_store())
    with qcoll.Communicator(store, rank, size, timeout=timedelta(seconds=PATIENCE)) as comm:
        secret = store.get("qcoll/secret")
        group = int.from_bytes(secret[:8], "little")
        record = store.get(f"qcoll/{group:x}/rank/{rank}").decode()
        facts = dict(line.partition("=")[::2] for line in record.splitlines())
        victim = {
            "rank": rank,
            "pid": os.getpid(),
            "port": int(facts["port"]),
            "address": facts["addresses"].split(",")[0],
            "group": group,
            "secret": secret[8:40].hex(),
        }
        # Open from here on: an attack may leave this process without descriptors.
        steps = os.open(Path(folder, f"step{rank}"), os.O_WRONLY | os.O_CREAT)
        step, command = 0, 0
        while command != 1:
            checked_collectives(comm, step)
            command = 0
            if rank == 0:
                command = 1 if Path(folder, "stop").exists() else 0
                command = command or (2 if Path(folder, "groups").exists() else 0)
            told = torch.tensor([command])
            dist.broadcast(told, 0)
            command = int(told.item())
            if command == 2:
                new_groups()
            step += 1
            if step == 3:  # connections and caches are there
                Path(folder, f"{rank}.partial").write_text(json.dumps(victim))
                Path(folder, f"{rank}.partial").rename(Path(folder, f"rank{rank}"))
            os.pwrite(steps, str(step).encode(), 0)
        os.close(steps)
        return step


# ---- from outside -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Victim:
    """One rank as others see it; the group's number and secret are for those who may know them."""

    rank: int
    pid: int
    port: int
    address: str
    group: int
    secret: str

    def connect(self, patience: float = 10.0) -> socket.socket:
        return socket.create_connection((self.address, self.port), timeout=patience)

    def listening_ports(self) -> set[int]:
        """Of this process, by the kernel's tables."""
        inodes = {
            match[1]
            for link in Path(f"/proc/{self.pid}/fd").iterdir()
            if (match := re.match(r"socket:\[(\d+)\]", _target(link)))
        }
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
        return ports

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def resident(self) -> int:
        """Bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def control_thread_seconds(self) -> float:
        """Processor time that the control thread has used."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "qcoll_control":
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        raise AssertionError("there is no control thread")

    # ---- the handshake, as docs/wire_format.md has it

    def hello(self, purpose: int = DATA, sender: int = -1, **other: int) -> bytes:
        """From ``sender``, by default some other rank of the group."""
        sender = sender if sender >= 0 else (self.rank + 1) % 3
        group, to = other.get("group", self.group), other.get("to", self.rank)
        return struct.pack("<IBBHQII16sQ", 0x53484351, 1, purpose, 0, group, sender, to, NONCE, 0)

    def mac(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(bytes.fromhex(self.secret), role + hello + nonce, hashlib.sha256)

    def challenge(self, peer: socket.socket, hello: bytes) -> bytes:
        """Sends the hello; the listener's nonce, after a check of its own proof."""
        peer.sendall(hello)
        answer = receive(peer, 48)
        assert answer[16:] == self.mac(b"L", hello, answer[:16])
        return answer[:16]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def receive(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise ConnectionError(f"the listener closed after {len(data)} of {count} bytes")
        data += part
    return data


def shown_out(peer: socket.socket, patience: float = PATIENCE) -> bool:
    """Whether the listener ends the connection, without a byte, before ``patience`` is over."""
    peer.settimeout(patience)
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def eventually(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Session:
    """Three ranks on three nodes that train until :meth:`stop`."""

    WORLD = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = RankPool(self.WORLD, [1] * self.WORLD)
        self.outcomes: list[RankOutcome] = []
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        ready = [folder / f"rank{rank}" for rank in range(self.WORLD)]
        eventually(lambda: all(path.exists() for path in ready) or not self.alive())
        self.check_alive()
        self.victims = [Victim(**json.loads(path.read_text())) for path in ready]
        self.before = self.resources()

    def _run(self) -> None:
        try:
            self.outcomes = self.pool.outcomes(
                train, [str(self.folder)], backend="qcoll", timeout=1200, group_timeout=PATIENCE
            )
        except BaseException as error:
            self.failure = error

    def alive(self) -> bool:
        return self._thread.is_alive()

    def check_alive(self) -> None:
        if not self.alive():
            errors = "\n".join(str(o.error) for o in self.outcomes if o.error)
            raise AssertionError(f"the group failed: {errors or self.failure}")

    def steps(self) -> int:
        """Of the slowest rank."""
        return min(
            int((self.folder / f"step{rank}").read_text() or 0) for rank in range(self.WORLD)
        )

    def check_undisturbed(self) -> None:
        """The ranks take more steps, and hold what they held before the attacks."""
        target = self.steps() + 5
        assert eventually(lambda: self.steps() >= target or not self.alive()), "no more steps"
        self.check_alive()
        wanted = [before["descriptors"] for before in self.before]
        assert eventually(lambda: [v.descriptors() for v in self.victims] == wanted), (
            f"descriptors {[v.descriptors() for v in self.victims]}, before the attacks {wanted}"
        )
        for before, after in zip(self.before, self.resources(), strict=True):
            assert after["threads"] == before["threads"]
            assert after["resident"] - before["resident"] < 16 << 20

    def resources(self) -> list[dict[str, int]]:
        return [
            {
                "descriptors": victim.descriptors(),
                "threads": victim.threads(),
                "resident": victim.resident(),
            }
            for victim in self.victims
        ]

    def stop(self) -> list[RankOutcome]:
        (self.folder / "stop").touch()
        self._thread.join(PATIENCE)
        self.pool.close()
        return self.outcomes


def sampled(value: Callable[[], Any], every: float = 0.02) -> Iterator[list[Any]]:
    """For contextlib.contextmanager: the values of a function while a block runs."""
    values = [value()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            values.append(value())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield values
    finally:
        done.set()
        thread.join()
