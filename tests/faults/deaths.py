"""A rank dies at a random instant of a random collective; what its survivors must do.

A seed draws the transport, the collective, its size, whether it is asynchronous, the rank that dies
and when. Ranks make the call over and over; SIGKILL comes from a process beside the victim, so
it can hit any instruction. Every survivor must raise a TransportError that names the dead rank, the
collective and the cause, and fail what is queued with that cause; refuse the next call with it;
leave nothing behind once the group is destroyed; and form a new group with the other survivors.
"""

from __future__ import annotations

import collections
import os
import random
import re
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from belongings import Belongings
from fault_ranks import works

import qcoll
from qcoll.testing import RankOutcome, shared_pool

LAYOUTS = {"shared memory": [3], "TCP": [1, 1, 1], "both": [2, 2]}
#: Of the groups; no survivor may come near it.
GROUP_TIMEOUT = 60.0
#: What the library promises. Tests on a busy machine allow more.
PROMISED_SECONDS = 1.0
# The kill comes at most this long after the first call.
_LATEST_KILL = 0.06
_QUEUE_DEPTH = 3

Start = Callable[[int, int, bool], Sequence[dist.Work | None]]


def _gather(codec: str | None) -> Start:
    def start(count: int, _: int, async_op: bool) -> Sequence[dist.Work | None]:
        whole = torch.empty(count * dist.get_world_size())
        mine = torch.ones(count)
        return [qcoll.all_gather_into_tensor(whole, mine, codec=codec, async_op=async_op)]

    return start


def _scatter(codec: str | None) -> Start:
    def start(count: int, _: int, async_op: bool) -> Sequence[dist.Work | None]:
        whole = torch.ones(count * dist.get_world_size())
        part = torch.empty(count)
        return [qcoll.reduce_scatter_tensor(part, whole, codec=codec, async_op=async_op)]

    return start


def _reduce(codec: str | None) -> Start:
    def start(count: int, _: int, async_op: bool) -> Sequence[dist.Work | None]:
        return [qcoll.all_reduce(torch.ones(count), codec=codec, async_op=async_op)]

    return start


def _exchange(codec: str | None) -> Start:
    def start(count: int, _: int, async_op: bool) -> Sequence[dist.Work | None]:
        rows = torch.ones(count * dist.get_world_size())
        out = torch.empty_like(rows)
        return [qcoll.all_to_all_single(out, rows, codec=codec, async_op=async_op)]

    return start


def _collect(count: int, root: int, async_op: bool) -> Sequence[dist.Work | None]:
    mine = torch.ones(count)
    ranks = range(dist.get_world_size())
    parts = [torch.empty(count) for _ in ranks] if dist.get_rank() == root else None
    return [dist.gather(mine, parts, root, async_op=async_op)]


def _pass_on(count: int, _: int, async_op: bool) -> Sequence[dist.Work | None]:
    """Round a ring: to the next rank, from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    if async_op:
        sent = dist.isend(torch.ones(count), after)
        return [sent, dist.irecv(torch.empty(count), before)]
    # Small messages of the even ranks first: nobody waits for its own neighbour to wait for it.
    for sends in (rank % 2 == 0, rank % 2 == 1):
        if sends:
            dist.send(torch.ones(count), after)
        else:
            dist.recv(torch.empty(count), before)
    return []


#: name -> (how a call is started, how the error names it)
COLLECTIVES: dict[str, tuple[Start, str]] = {
    "all_gather exact": (_gather("exact"), "all_gather_into_tensor"),
    "all_gather int8": (_gather("int8"), "all_gather_into_tensor"),
    "reduce_scatter exact": (_scatter("exact"), "reduce_scatter_tensor"),
    "reduce_scatter int8/int4": (_scatter("int8:256/int4:128"), "reduce_scatter_tensor"),
    "all_reduce exact": (_reduce("exact"), "all_reduce"),
    "all_reduce int8": (_reduce("int8"), "all_reduce"),
    "all_to_all exact": (_exchange("exact"), "all_to_all_single"),
    "all_to_all int8": (_exchange("int8"), "all_to_all_single"),
    "broadcast": (
        lambda n, root, a: [dist.broadcast(torch.ones(n), root, async_op=a)],
        "broadcast",
    ),
    "barrier": (lambda _, __, a: [dist.barrier(async_op=a)], "barrier"),
    "all_reduce max": (
        lambda n, _, a: [dist.all_reduce(torch.ones(n), dist.ReduceOp.MAX, async_op=a)],
        "all_reduce",
    ),
    "gather": (_collect, "gather"),
    "send and recv": (_pass_on, "(send|recv)"),
}


@dataclass(frozen=True)
class Case:
    """One death."""

    seed: int
    transport: str
    collective: str
    count: int
    root: int
    asynchronous: bool
    victim: int
    delay: float
    warm: bool
    """Whether all connections are open when the calls begin."""

    @classmethod
    def draw(cls, seed: int, collectives: Sequence[str] = tuple(COLLECTIVES)) -> Case:
        # Transports and collectives in turn, so that a few seeds have all of them.
        names = list(LAYOUTS)
        transport = names[seed % len(names)]
        world = sum(LAYOUTS[transport])
        draw = random.Random(seed)
        return cls(
            seed=seed,
            transport=transport,
            collective=collectives[seed % len(collectives)],
            count=int(10 ** draw.uniform(0, 6)),
            root=draw.randrange(world),
            asynchronous=draw.random() < 0.5,
            victim=draw.randrange(world),
            delay=draw.uniform(0, _LATEST_KILL),
            warm=draw.random() < 0.75,
        )

    def __str__(self) -> str:
        how = "async" if self.asynchronous else "sync"
        return (
            f"seed {self.seed}: {self.transport}, {self.collective} of {self.count} ({how}), "
            f"rank {self.victim} dies after {self.delay * 1e3:.1f} ms"
        )


@dataclass
class Sight:
    """What one survivor saw."""

    text: str
    peer: int
    raised_at: float
    calls: int
    """Ended without an error before."""
    refused: bool
    """The death was known before the call began, which was then refused."""
    failed_with_it: int
    """Queued calls that failed with the first one."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What became of one case."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    """From the kill to the error, of each survivor."""
    refused: int = 0
    queued: int = 0
    problems: list[str] = field(default_factory=list)


def start_killer(note: Path) -> int:
    """Fork a process that kills this one when told to; the descriptor that tells it how soon.

    It writes the time of the kill into ``note``. It is forked before the group exists, and so
    holds nothing of it.
    """
    reader, writer = os.pipe()
    victim = os.getpid()
    if os.fork() != 0:
        os.close(reader)
        return writer
    os.close(writer)
    order = os.read(reader, 8)
    if order:
        time.sleep(struct.unpack("d", order)[0])
        now = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        note.write_text(repr(now))
    os._exit(0)


def survive(case: Case, port: int, folder: str) -> Sight:
    """One rank of a case; the victim does not return."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    killer = start_killer(Path(folder, "killed")) if rank == case.victim else -1
    before = Belongings()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    join(store, "first", rank, world)
    if case.warm:
        call_each_once()
    dist.barrier()
    if rank == case.victim:
        os.write(killer, struct.pack("d", case.delay))
    sight = call_until_it_fails(case)
    refuses(sight)
    dist.destroy_process_group()
    del store
    sight.problems += [f"left behind: {what}" for what in before.left_behind()]
    survivors = [r for r in range(world) if r != case.victim]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    join(store, "again", survivors.index(rank), len(survivors))
    works()
    dist.destroy_process_group()
    del store
    sight.problems += [f"left behind the second time: {what}" for what in before.left_behind()]
    return sight


def join(
    store: dist.Store, prefix: str, rank: int, world: int, timeout: float = GROUP_TIMEOUT
) -> None:
    dist.init_process_group(
        "qcoll",
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def call_each_once() -> None:
    for start, _ in COLLECTIVES.values():
        for work in start(10, 0, True):
            work.wait()  # type: ignore[union-attr]


def call_until_it_fails(case: Case) -> Sight:
    """The calls of a rank, with pauses now and then, so that each may be the late one."""
    draw = random.Random(f"{case.seed} {dist.get_rank()}")
    start, _ = COLLECTIVES[case.collective]
    queue: collections.deque[dist.Work] = collections.deque()
    ended = 0
    started = False
    try:
        while True:
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, 0.003))
            started = False
            works = start(case.count, case.root, case.asynchronous)
            started = True
            queue += [work for work in works if work is not None]
            while len(queue) > (_QUEUE_DEPTH if case.asynchronous else 0):
                queue[0].wait()
                queue.popleft()
            ended += 1
    except Exception as error:
        sight = Sight(str(error), getattr(error, "peer", -1), time.monotonic(), ended, False, 0)
        sight.refused = not started and "failed earlier" in sight.text
        if not isinstance(error, qcoll.TransportError):
            sight.problems.append(f"{type(error).__name__} is not a TransportError")
    for work in queue:
        fails_with_it(work, sight)
    return sight


def fails_with_it(work: dist.Work, sight: Sight) -> None:
    """A call that was queued when the first one failed: it had ended, or fails for that cause."""
    begun = time.monotonic()
    try:
        work.wait()
    except qcoll.TransportError as error:
        sight.failed_with_it += 1
        if cause_of(str(error)) != cause_of(sight.text):
            sight.problems.append(f"queued: {error}, after {sight.text}")
        if error.peer != sight.peer:
            sight.problems.append(f"queued work blames {error.peer}, the first {sight.peer}")
    except Exception as error:
        sight.problems.append(f"queued: {type(error).__name__}: {error}")
    if not work.is_completed():
        sight.problems.append("a queued work has failed and is not completed")
    if time.monotonic() - begun > PROMISED_SECONDS:
        sight.problems.append(f"queued work failed after {time.monotonic() - begun:.1f} s")


def cause_of(text: str) -> str:
    """The innermost part of an error's text."""
    found = re.search(r"rank \d+ \([^)]*\) died.*?\)", text)
    return found[0] if found else text


def refuses(sight: Sight) -> None:
    """The next calls, whatever they are, fail at once, with the first cause."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(10)),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(torch.ones(10), async_op=True),
        lambda: dist.send(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size()),
    ]
    for call in calls:
        is_refused(call, sight)


def is_refused(call: Callable[[], object], sight: Sight) -> None:
    try:
        call()
    except qcoll.TransportError as error:
        if "failed earlier" not in str(error) or cause_of(str(error)) not in sight.text:
            sight.problems.append(f"refused with {error}, after {sight.text}")
    except Exception as error:
        sight.problems.append(f"next call: {type(error).__name__}: {error}")
    else:
        sight.problems.append("the next call is not refused")


def try_case(case: Case, bound: float = PROMISED_SECONDS) -> Verdict:
    """Plays a case. ``bound``: seconds that a survivor may take to raise."""
    layout = LAYOUTS[case.transport]
    pool = shared_pool(sum(layout), layout)
    # Lives here, so that any rank can die without taking it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = pool.outcomes(
            survive, (case, store.port, folder), backend=None, timeout=GROUP_TIMEOUT + 30
        )
        note = Path(folder, "killed")
        deadline = time.monotonic() + 5  # the killer itself may be slow to be scheduled again
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        killed_at = float(note.read_text()) if note.exists() else None
    return judge(case, outcomes, killed_at, bound)


def judge(
    case: Case, outcomes: Sequence[RankOutcome], killed_at: float | None, bound: float
) -> Verdict:
    verdict = Verdict(case)
    if killed_at is None:
        verdict.problems.append("nobody was killed")
        killed_at = 0.0
    for outcome in outcomes:
        name = f"rank {outcome.rank}"
        if outcome.rank == case.victim:
            if outcome.exit_status != -signal.SIGKILL:
                verdict.problems.append(f"{name}, the victim: {outcome.error}")
        elif outcome.error is not None:
            verdict.problems.append(f"{name}: {outcome.error}\n{outcome.output}")
        else:
            sight: Sight = outcome.value
            seconds = sight.raised_at - killed_at
            verdict.seconds.append(seconds)
            verdict.refused += sight.refused
            verdict.queued += sight.failed_with_it
            verdict.problems += [f"{name}: {problem}" for problem in sight.problems]
            verdict.problems += [f"{name}: {p}" for p in problems_of(case, sight)]
            if seconds > bound:
                verdict.problems.append(f"{name} raised after {seconds:.2f} s: {sight.text}")
            if outcome.output:
                verdict.problems.append(f"{name} printed: {outcome.output}")
    return verdict


def problems_of(case: Case, sight: Sight) -> Iterator[str]:
    if sight.peer != case.victim:
        yield f"blames rank {sight.peer}: {sight.text}"
    if not re.search(rf"\brank {case.victim} \(.*pid \d+\) died", sight.text):
        yield f"the text does not tell who died: {sight.text}"
    # A call that came after the news was refused, and has not failed itself.
    if not sight.refused and not re.search(rf"\b{COLLECTIVES[case.collective][1]}\b", sight.text):
        yield f"the text does not name {case.collective}: {sight.text}"
