"""A rank dies while a group is being formed; what its survivors must do.

A case names an instant by what the victim has just said to the rendezvous store, or is about to.
It dies there, or, in the cases that a seed draws, up to 20 ms later, by SIGKILL from a process
beside it, which can hit any instruction: dialling and gloo's connections too. Until it has
published its identity nobody can know of the death: the survivors time out and name it. From then
on its listener and its links tell, and they must raise at once. Nothing of the group may be left, a
new group of the survivors must work, and so must one that the dead rank was never in.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from belongings import Belongings
from deaths import join, start_killer
from fault_ranks import works

import qcoll
from qcoll.testing import RankOutcome, shared_pool

#: name -> (layout, shared memory)
WORLDS: dict[str, tuple[list[int], bool]] = {
    "shared memory, 2 ranks": ([2], True),
    "TCP, 2 ranks": ([1, 1], True),
    "shared memory, 3 ranks": ([3], True),
    "TCP, 3 ranks": ([1, 1, 1], True),
    "switched off, 3 ranks": ([3], False),
    "both, 4 ranks": ([2, 2], True),
    "both, 3 ranks": ([1, 2], True),
}
HOWS = ("init_process_group", "new_group")
#: In the order in which a rank passes them; what each is: DyingStore.
POINTS = (
    "before hello",
    "before secret",
    "before identity",
    "after identity",
    "before dialling",
    "before memory",
    "before mapped",
    "after mapped",
    "before gloo",
    "in gloo",
    "before gloo connects",
)
FIRST_KNOWN = POINTS.index("after identity")
#: Rank 0's secret may be that of an earlier group until it has let the others in.
FIRST_KNOWN_OF_RANK_0 = POINTS.index("before dialling")
_OF_ONE_NODE = ("before memory", "before mapped", "after mapped")
#: Of the group that is being formed: when a death cannot be known, and when it can.
SHORT_TIMEOUT = 2.0
LONG_TIMEOUT = 20.0
#: Separates "at once" from the long timeout.
AT_ONCE = 10.0
_LATEST_KILL = 0.02


@dataclass(frozen=True)
class Case:
    """One death."""

    world_name: str
    how: str
    point: str
    victim: int
    delay: float | None = None
    """Seconds after the point; None: exactly there."""
    seed: int | None = None

    @property
    def layout(self) -> list[int]:
        return WORLDS[self.world_name][0]

    @property
    def world(self) -> int:
        return sum(self.layout)

    @property
    def timeout(self) -> float:
        known = self.known_after(POINTS.index(self.point)) or self.delay is not None
        return LONG_TIMEOUT if known else SHORT_TIMEOUT

    def known_after(self, passed: int) -> bool:
        """Whether the survivors can know of the death when the victim has passed that point."""
        return passed >= (FIRST_KNOWN_OF_RANK_0 if self.victim == 0 else FIRST_KNOWN)

    @property
    def possible(self) -> bool:
        """Memory is offered only to ranks of the same node."""
        node = next(
            n for n, end in enumerate(itertools.accumulate(self.layout)) if self.victim < end
        )
        return self.layout[node] > 1 or self.point not in _OF_ONE_NODE

    @classmethod
    def draw(cls, seed: int) -> Case:
        # Worlds and points in turn, so that a few seeds have all of them.
        names = list(WORLDS)
        draw = random.Random(seed)
        name = names[seed % len(names)]
        how = draw.choice(HOWS)
        victim = draw.randrange(sum(WORLDS[name][0]))
        delay = draw.uniform(0, _LATEST_KILL)
        case = cls(name, how, POINTS[seed % len(POINTS)], victim, delay, seed)
        return case if case.possible else cls(name, how, "before dialling", victim, delay, seed)

    def __str__(self) -> str:
        seed = "" if self.seed is None else f"seed {self.seed}: "
        later = "" if self.delay is None else f", {self.delay * 1e3:.1f} ms later"
        return f"{seed}{self.how}, {self.world_name}, rank {self.victim} dies {self.point}{later}"


class DyingStore(dist.Store):
    """The victim's rendezvous store: it knows how far the forming is, and ends it."""

    def __init__(self, store: dist.Store, rank: int, world: int, case: Case, folder: str) -> None:
        super().__init__()
        self._store = store
        self._case = case
        self._rank = rank
        self._last = world - 1
        self._passed: set[str] = set()
        self._progress = os.open(Path(folder, "passed"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self._killer = -1
        self.armed = False

    def kill_later_through(self, killer: int) -> None:
        self._killer = killer

    def set(self, key: str, value: str) -> None:
        entry = "secret" if self._rank == 0 else f"hello/{self._rank}"
        before = {
            rf"qcoll/{entry}$": "before hello",
            r"qcoll/\w+/rank/": "before identity",
            r"qcoll/\w+/memory/": "before memory",
            r"qcoll/\w+/mapped/": "before mapped",
            r"qcoll-delegate/": "before gloo",
        }
        after = {
            rf"qcoll/{entry}$": "before secret",
            r"qcoll/\w+/rank/": "after identity",
            r"qcoll/\w+/mapped/": "after mapped",
            r"qcoll-delegate/": "in gloo",
        }
        self._pass(key, before)
        self._store.set(key, value)
        self._pass(key, after)

    def get(self, key: str) -> Any:
        value = self._store.get(key)
        last_other = self._last - (self._rank == self._last)
        self._pass(
            key,
            {
                rf"qcoll/\w+/rank/{last_other}$": "before dialling",
                rf"qcoll-delegate/.*/{self._last}$": "before gloo connects",
            },
        )
        return value

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def _pass(self, key: str, points: dict[str, str]) -> None:
        if not self.armed:
            return
        for pattern, point in points.items():
            if point in self._passed or not re.search(pattern, key):
                continue
            self._passed.add(point)
            os.pwrite(self._progress, bytes([POINTS.index(point)]), 0)
            if point != self._case.point:
                continue
            if self._case.delay is not None:
                os.write(self._killer, struct.pack("d", self._case.delay))
                continue
            Path(self._note()).write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{self._progress}")).with_name("killed")  # noqa: PTH115


@dataclass
class Sight:
    """What one survivor saw."""

    text: str
    peer: int
    raised_at: float
    formed: bool
    """The group was formed; its first call failed."""
    left_to_gloo: bool = False
    """gloo was connecting, in a thread that nothing interrupts: it stays until gloo's timeout."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What became of one case."""

    case: Case
    known: bool = False
    """The survivors can know: the victim had published its identity, and as rank 0 the others'."""
    formed: int = 0
    seconds: list[float] = field(default_factory=list)
    """From the kill to the error, of each survivor, if the death could be known."""
    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def survive(case: Case, port: int, folder: str) -> Sight:
    """One rank of a case; the victim does not return."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dies = rank == case.victim
    survivors = [r for r in range(world) if r != case.victim]
    killer = start_killer(Path(folder, "killed")) if dies and case.delay is not None else -1
    before = Belongings()
    store: Any = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    if dies:
        store = DyingStore(store, rank, world, case, folder)
        store.kill_later_through(killer)
    beside = None
    if case.how == "new_group":
        join(store, "parent", rank, world)
        if len(survivors) > 1:
            beside = dist.new_group(survivors, backend="qcoll")
        dist.barrier()
    if dies:
        store.armed = True
    sight = form(case, store, rank, world)
    if dies:
        time.sleep(60)  # the killer is on its way
    if beside is not None:
        works(beside)
        del beside
    if dist.is_initialized():
        dist.destroy_process_group()
    del store
    sight.problems += [f"left behind: {what}" for what in before.left_behind()]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    join(store, "again", survivors.index(rank), len(survivors), 20)
    works()
    dist.destroy_process_group()
    del store
    sight.problems += [f"left behind the second time: {what}" for what in before.left_behind()]
    return sight


def form(case: Case, store: dist.Store, rank: int, world: int) -> Sight:
    """Form the group, and call until that fails if it could still be formed."""
    formed = False
    try:
        group = None
        if case.how == "new_group":
            group = dist.new_group(backend="qcoll", timeout=timedelta(seconds=case.timeout))
        else:
            join(store, "first", rank, world, case.timeout)
        formed = True
        while True:
            dist.barrier(group)
    except Exception as error:
        sight = Sight(str(error), getattr(error, "peer", -1), time.monotonic(), formed)
        sight.left_to_gloo = any(t.name == "qcoll_gloo" for t in threading.enumerate())
        if not isinstance(error, qcoll.TransportError):
            sight.problems.append(f"{type(error).__name__} is not a TransportError")
    if dist.is_initialized() and case.how == "init_process_group" and not formed:
        sight.problems.append("torch takes the group that failed for initialised")
    return sight


def try_case(case: Case) -> Verdict:
    """Plays a case."""
    _, share = WORLDS[case.world_name]
    pool = shared_pool(case.world, case.layout)
    # Lives here, so that any rank can die without taking it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = pool.outcomes(
            survive,
            (case, store.port, folder),
            backend=None,
            env={"QCOLL_SHM": str(int(share))},
            timeout=LONG_TIMEOUT + 25,
        )
        note = Path(folder, "killed")
        deadline = time.monotonic() + 5  # the killer itself may be slow to be scheduled again
        while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        killed_at = float(note.read_text()) if note.exists() else None
        progress = Path(folder, "passed")
        passed = progress.read_bytes() if progress.exists() else b""
    return judge(case, outcomes, killed_at, passed[0] if passed else -1)


def judge(
    case: Case, outcomes: Sequence[RankOutcome], killed_at: float | None, passed: int
) -> Verdict:
    verdict = Verdict(case, known=case.known_after(passed))
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
            verdict.formed += sight.formed
            verdict.texts.append(f"{name} after {seconds:.2f} s: {sight.text}")
            if verdict.known:
                verdict.seconds.append(seconds)
            verdict.problems += [
                f"{name}: {problem}"
                for problem in sight.problems
                if not (sight.left_to_gloo and "left behind" in problem)
            ]
            verdict.problems += [f"{name}: {p}" for p in problems_of(verdict, sight, seconds)]
            # torch's store logs each wait that ends in vain, gloo each connection that fails.
            printed = [
                line
                for line in outcome.output.splitlines()
                if not re.search(r"waitForInput|connectFullMesh failed|/gloo/transport/", line)
            ]
            if printed:
                verdict.problems.append(f"{name} printed: {printed}")
    return verdict


def problems_of(verdict: Verdict, sight: Sight, seconds: float) -> Iterator[str]:
    case = verdict.case
    if sight.peer != case.victim:
        yield f"blames rank {sight.peer}: {sight.text}"
    elif not re.search(rf"\brank {case.victim}\b", sight.text):
        yield f"the text does not name rank {case.victim}: {sight.text}"
    if verdict.known and seconds > AT_ONCE:
        yield f"raised after {seconds:.2f} s: {sight.text}"
    if seconds > case.timeout + AT_ONCE:
        yield f"raised {seconds:.2f} s after the death, timeout {case.timeout} s: {sight.text}"


def every_case(worlds: Sequence[str] = tuple(WORLDS)) -> Iterator[Case]:
    """Each instant, exactly, for the first rank and the last."""
    for name, how, point in itertools.product(worlds, HOWS, POINTS):
        for victim in (0, sum(WORLDS[name][0]) - 1):
            case = Case(name, how, point, victim)
            if case.possible:
                yield case
