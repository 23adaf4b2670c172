"""Strangers at the control plane of a group that trains: nothing gets in, and training goes on.

After each attack the ranks must take more steps and hold as many descriptors and threads and as
much memory as before; at the end, the steps must all have had right results.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store
from victims import CONTROL, DATA, Session, Victim, eventually, receive, sampled, shown_out

import qcoll

MAX_GUESTS = 256  # docs/security.md
watch = contextlib.contextmanager(sampled)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(tmp_path_factory.mktemp("session"))
    yield session
    session.stop()


@pytest.fixture
def victim(session: Session) -> Iterator[Victim]:
    session.check_alive()
    yield session.victims[0]
    session.check_undisturbed()


def drop(peer: socket.socket) -> None:
    """Ends a connection with a reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_the_port_is_that_of_the_control_plane(victim: Victim) -> None:
    assert victim.port in victim.listening_ports()


def test_random_bytes(victim: Victim) -> None:
    chance = random.Random(1)
    for _ in range(300):
        with victim.connect() as peer, contextlib.suppress(OSError):
            peer.sendall(chance.randbytes(chance.randrange(1, 600)))
            if chance.random() < 0.3:
                peer.shutdown(socket.SHUT_WR)
    with victim.connect() as peer:
        peer.sendall(chance.randbytes(48))
        assert shown_out(peer)


def test_a_hello_with_random_changes(victim: Victim) -> None:
    chance = random.Random(2)
    for _ in range(300):
        with victim.connect() as peer, contextlib.suppress(ConnectionError):
            hello = bytearray(victim.hello(chance.choice([CONTROL, DATA])))
            for _ in range(chance.randrange(1, 4)):
                hello[chance.randrange(48)] = chance.randrange(256)
            peer.sendall(hello + chance.randbytes(32))


def test_a_port_scan(victim: Victim) -> None:
    for i in range(2000):
        peer = victim.connect()
        if i % 2:
            drop(peer)
        else:
            peer.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\nUser-Agent: curl/8\r\nAccept: */*\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(40),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # TLS ClientHello
        bytes(1 << 20),
    ],
    ids=["http", "ssh", "tls", "zeros"],
)
def test_other_protocols(victim: Victim, greeting: bytes) -> None:
    with victim.connect() as peer:
        with contextlib.suppress(ConnectionError):
            peer.sendall(greeting)
        assert shown_out(peer)


def test_one_byte_a_second(victim: Victim) -> None:
    """A hello that comes slowly is not waited for: ten seconds are for all of it."""
    peers = [victim.connect() for _ in range(20)]
    started = time.monotonic()
    gone = [False] * len(peers)
    for byte in victim.hello():
        for i, peer in enumerate(peers):
            if not gone[i]:
                try:
                    peer.sendall(bytes([byte]))
                    peer.settimeout(0)
                    gone[i] = peer.recv(1) == b""
                except BlockingIOError:
                    pass
                except ConnectionError:
                    gone[i] = True
        if all(gone):
            break
        time.sleep(1)
    assert all(gone), "a slow hello was accepted"
    assert time.monotonic() - started > 5, "they were not even given a moment"
    for peer in peers:
        peer.close()


def test_a_thousand_idle_connections(victim: Victim) -> None:
    before = victim.descriptors()
    with watch(victim.descriptors) as descriptors:
        peers = [victim.connect() for _ in range(1000)]
        # Those that came too many were shown out, the longest silent first.
        assert eventually(lambda: victim.descriptors() <= before + MAX_GUESTS)
        assert shown_out(peers[0])
    # New groups form on both sides of the accept that this sampling may see half done.
    assert max(descriptors) <= before + MAX_GUESTS + 2
    assert all(shown_out(peer) for peer in peers), "a silent connection stays"
    for peer in peers:
        peer.close()


def test_a_recorded_handshake(victim: Victim) -> None:
    """What a peer sent once, proof included, opens nothing a second time."""
    recorded = victim.hello(CONTROL)
    with victim.connect() as peer:
        nonce = victim.challenge(peer, recorded)
        recorded += victim.mac(b"D", recorded, nonce)
    for pieces in ([recorded], [recorded[:48], recorded[48:]]):
        with victim.connect() as peer:
            for piece in pieces:
                peer.sendall(piece)
            assert receive(peer, 48)[:16] != nonce
            assert shown_out(peer)


def test_a_wrong_secret(victim: Victim) -> None:
    for purpose in (CONTROL, DATA):
        for proof in (bytes(32), None, b"L"):
            with victim.connect() as peer:
                hello = victim.hello(purpose)
                nonce = victim.challenge(peer, hello)
                if proof is None:  # right but for one bit
                    right = victim.mac(b"D", hello, nonce)
                    proof = right[:-1] + bytes([right[-1] ^ 1])
                elif proof == b"L":  # the listener's own proof, sent back
                    proof = victim.mac(b"L", hello, nonce)
                peer.sendall(proof)
                assert shown_out(peer)


def test_other_groups_and_ranks(victim: Victim) -> None:
    """None of these is even challenged."""
    hellos = [
        victim.hello(group=victim.group ^ 1),
        victim.hello(to=victim.rank + 1),
        victim.hello(to=0xFFFFFFFF),
        victim.hello(purpose=3),
        victim.hello()[:4] + b"\2" + victim.hello()[5:],  # another version
    ]
    for hello in hellos:
        with victim.connect() as peer:
            peer.sendall(hello)
            assert shown_out(peer)


@pytest.mark.parametrize("sender", [0, 3, 4000, 0xFFFFFFFF], ids=str)
def test_right_proofs_of_ranks_that_there_are_not(victim: Victim, sender: int) -> None:
    """The listener itself, and ranks outside the world."""
    for purpose in (CONTROL, DATA):
        with victim.connect() as peer:
            hello = victim.hello(purpose, sender)
            nonce = victim.challenge(peer, hello)
            peer.sendall(victim.mac(b"D", hello, nonce))
            assert shown_out(peer)


def test_a_second_control_link_of_a_live_rank(victim: Victim) -> None:
    """Even with the secret: the first link stays, so nobody can speak for a rank that is there."""
    with victim.connect() as peer:
        hello = victim.hello(CONTROL)
        nonce = victim.challenge(peer, hello)
        peer.sendall(victim.mac(b"D", hello, nonce))
        abort = struct.pack("<IBq", 8 + 5, 2, -1) + b"lies!"
        with contextlib.suppress(ConnectionError):
            peer.sendall(abort)
        assert shown_out(peer)


def test_a_peer_among_strangers(victim: Victim) -> None:
    """A rank that dials while more strangers than the listener keeps are in its queue is heard, and
    stays when more of them come before it has proven itself."""
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        peer = victim.connect()
        peer.sendall(victim.hello())
        strangers = [victim.connect() for _ in range(MAX_GUESTS + 50)]
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert len(receive(peer, 48)) == 48
    strangers += [victim.connect() for _ in range(MAX_GUESTS + 50)]
    assert shown_out(strangers[0])
    assert not shown_out(peer, 0.5)
    for stranger in (peer, *strangers):
        drop(stranger)


@pytest.mark.usefixtures("victim")
def test_strangers_while_groups_form(session: Session) -> None:
    """Connections without end, more at a time than the listener keeps, while ranks shake hands."""
    stop = threading.Event()
    made = [0]

    def flood(target: Victim) -> None:
        peers: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                peers.append(target.connect(2.0))
                made[0] += 1
            if len(peers) > MAX_GUESTS + 50:
                drop(peers.pop(0))
        for peer in peers:
            drop(peer)

    threads = [threading.Thread(target=flood, args=(v,)) for v in session.victims]
    target = session.steps() + 20
    for thread in threads:
        thread.start()
    (session.folder / "groups").touch()
    try:
        enough = lambda: session.steps() >= target and made[0] > 10 * MAX_GUESTS  # noqa: E731
        assert eventually(lambda: enough() or not session.alive(), 120)
    finally:
        (session.folder / "groups").unlink()
        stop.set()
        for thread in threads:
            thread.join()
    session.check_alive()


def test_no_descriptors_are_left(session: Session, victim: Victim) -> None:
    """The rank has no descriptor for those who knock: its control thread must not spin, and the
    collectives on the connections that it has go on."""
    limits = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    used_numbers = {int(fd.name) for fd in Path(f"/proc/{victim.pid}/fd").iterdir()}
    lowest_free = next(n for n in itertools.count() if n not in used_numbers)
    peers: list[socket.socket] = []
    try:
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        peers = [victim.connect() for _ in range(50)]
        time.sleep(0.5)
        used, steps = victim.control_thread_seconds(), session.steps()
        time.sleep(5)
        used = victim.control_thread_seconds() - used
        assert used < 0.25, f"the control thread computed for {used} of 5 s"
        assert session.steps() > steps
    finally:
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, limits)
        for peer in peers:
            peer.close()
    # Descriptors are back: the listener takes callers again.
    with victim.connect() as peer:
        assert victim.challenge(peer, victim.hello())


def test_all_steps_had_right_results_and_nothing_was_said(session: Session) -> None:
    outcomes = session.stop()
    assert [outcome.error for outcome in outcomes] == [None] * session.WORLD
    assert len({outcome.value for outcome in outcomes}) == 1
    assert outcomes[0].value > 50
    assert [outcome.output for outcome in outcomes] == [""] * session.WORLD


# ---- on the same host ---------------------------------------------------------------------------

NOBODY = 65534


def as_nobody(paths: list[str]) -> list[str]:
    """Those of the paths that a process of another user can open."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        opened = []
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for path in paths:
                with contextlib.suppress(OSError):
                    os.close(os.open(path, os.O_RDONLY))
                    opened.append(path)
            os.write(writer, "\n".join(opened).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        opened = answers.read().split()
    os.waitpid(child, 0)
    return opened


class LateStore(Store):
    """Holds back what rank 1 says of its memory, so that rank 0 waits with its own open."""

    def __init__(self) -> None:
        super().__init__()
        self.values = HashStore()
        self.held = threading.Event()
        self.go_on = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/memory/1"):
            self.held.set()
            assert self.go_on.wait(60)
        self.values.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.values.check(keys)

    def get(self, key: str) -> bytes:
        return self.values.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self.values.wait(keys, timeout)


def memory_descriptors() -> list[str]:
    """Of groups' shared memory, in this process."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:qcoll" in str(link.readlink()):
                found.append(f"/proc/{os.getpid()}/fd/{link.name}")
    return found


def test_shared_memory_is_for_its_owner_alone() -> None:
    """It has no name, is closed to other users while the group forms, and then cannot be opened by
    anybody, for no descriptor of it is left."""
    store = LateStore()
    outcomes: list[object] = []

    def rank_main(rank: int) -> None:
        try:
            with qcoll.Communicator(store, rank, 2, timeout=timedelta(seconds=60)) as comm:
                x = torch.ones(100)
                comm.all_reduce(x)
                assert x.equal(torch.full((100,), 2.0))
                formed.wait(60)
                looked.wait(60)
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    formed, looked = threading.Barrier(3), threading.Barrier(3)
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    assert store.held.wait(60)
    assert eventually(lambda: len(memory_descriptors()) == 2)  # one of each rank
    try:
        for path in memory_descriptors():
            status = os.stat(path)  # noqa: PTH116
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_nlink == 0
            assert status.st_uid == os.geteuid()
        if os.geteuid() == 0:
            assert as_nobody(["/proc/self/status"]) == ["/proc/self/status"]
            assert as_nobody([*memory_descriptors(), f"/proc/{os.getpid()}/mem"]) == []
    finally:
        store.go_on.set()
    formed.wait(60)
    maps = [m for m in Path("/proc/self/maps").read_text().splitlines() if "memfd:qcoll" in m]
    assert len(maps) == 4  # each rank's memory, in both ranks
    assert memory_descriptors() == []
    if os.geteuid() == 0:
        ranges = [m.split()[0] for m in maps]
        assert as_nobody([f"/proc/{os.getpid()}/map_files/{r}" for r in ranges]) == []
    looked.wait(60)
    for thread in threads:
        thread.join()
    assert outcomes == [None, None]
