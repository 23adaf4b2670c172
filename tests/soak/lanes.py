"""One thread's random calls on one group: issued, awaited in any order, checked.

What is called is drawn by all ranks alike; when, whether asynchronously and in which order calls
are awaited, each rank draws for itself.
"""

from __future__ import annotations

import collections
import random
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tests.soak.plan import Lane, Part
from tests.soak.verbs import Call, Calls, Numbers, Works

import qcoll

#: Calls of a lane that may be unfinished at once.
MOST_PENDING = 9
_MOST_PENDING_BYTES = 16 << 20
#: A lane that waits for a death gives up after this.
_PATIENCE = 30.0
#: Callbacks run on another thread, a moment later than the wait returns.
_CALLBACK_SECONDS = 10.0
_MOST_PROBLEMS = 5


@dataclass
class Tally:
    """What a lane did and saw."""

    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: collections.Counter[str] = field(default_factory=collections.Counter)
    checks: collections.Counter[str] = field(default_factory=collections.Counter)
    callbacks: int = 0
    digests: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By phase, lane and call: of results that are to be the same on all ranks."""
    raised_at: list[float] = field(default_factory=list)
    """When calls that waited were told of the death."""
    refused: int = 0
    """Lanes that were told by their next call, which was refused."""
    failed_with_it: int = 0
    """Further calls that were pending then."""
    problems: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for mine, theirs in (
            (self.calls, other.calls),
            (self.bytes, other.bytes),
            (self.checks, other.checks),
        ):
            mine.update(theirs)
        self.callbacks += other.callbacks
        self.digests.update(other.digests)
        self.raised_at += other.raised_at
        self.refused += other.refused
        self.failed_with_it += other.failed_with_it
        self.problems += other.problems


@dataclass
class _Pending:
    index: int
    call: Call
    works: Works


class LaneRun:
    """Plays one lane of a phase on this rank."""

    def __init__(
        self, part: Part, phase: int, lane: Lane, group: dist.ProcessGroup, numbers: Numbers
    ) -> None:
        plan = part.round
        key = f"{plan.seed} {plan.number} {phase} {lane.number}"
        names = tuple(plan.names[rank] for rank in lane.ranks)
        self._calls = Calls(random.Random(key), numbers, group, names)
        self._own = random.Random(f"{key} of rank {part.rank}")
        self._part, self._phase, self._lane, self._group = part, phase, lane, group
        self._endless = plan.endless(phase, lane)
        self._pending: list[_Pending] = []
        self._attached = 0
        self._ran: list[int] = []
        self._where = f"phase {phase} lane {lane.number} rank {part.rank}"
        self._doing = "nothing"
        self.tally = Tally()

    def run(self) -> None:
        """Never raises; problems are in the tally."""
        try:
            self._run()
        except Exception:
            self._problem(f"{self._doing}: {traceback.format_exc()}")
            self._group.abort()  # nobody shall wait for this rank
        deadline = time.monotonic() + _CALLBACK_SECONDS
        while len(self._ran) < self._attached and time.monotonic() < deadline:
            time.sleep(0.001)
        if sorted(self._ran) != list(range(self._attached)):
            self._problem(f"of {self._attached} callbacks {len(self._ran)} ran")
        self.tally.callbacks = self._attached
        self._pending.clear()

    def _run(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        index = 0
        issuing = False
        try:
            while self._endless or index < self._lane.calls:
                self._pause()
                issuing = True
                self._issue(index)
                issuing = False
                index += 1
                while len(self._pending) > self._own.randrange(MOST_PENDING) or self._too_big():
                    self._finish(self._own.randrange(len(self._pending)))
                if self._endless and time.monotonic() > deadline:
                    self._problem(f"no error {_PATIENCE} s long")
                    return
            while self._pending:
                self._finish(self._own.randrange(len(self._pending)))
        except qcoll.TransportError as error:
            if not self._endless:
                raise
            self._die(error, time.monotonic(), issuing)

    def _problem(self, text: str) -> None:
        if len(self.tally.problems) < _MOST_PROBLEMS:
            self.tally.problems.append(f"{self._where}: {text}")

    def _pause(self) -> None:
        """So that each rank is the late one at times."""
        if self._own.random() < 0.1:
            time.sleep(self._own.uniform(0, 0.003))

    def _too_big(self) -> bool:
        return sum(p.call.size for p in self._pending) > _MOST_PENDING_BYTES

    def _issue(self, index: int) -> None:
        call = self._calls.next()
        self._doing = f"call {index}, {call.verb} of {call.size} bytes"
        self.tally.calls[call.verb] += 1
        self.tally.bytes[call.verb] += call.size
        works = call.issue(self._own.random() < 0.6)
        if works:
            if call.has_future and self._own.random() < 0.3:
                self._attach(works[0])
            self._pending.append(_Pending(index, call, works))
        else:
            self._check(index, call)

    def _attach(self, work: dist.Work) -> None:
        number = self._attached
        self._attached += 1
        work.get_future().add_done_callback(lambda _: self._ran.append(number))

    def _finish(self, at: int) -> None:
        # It stays among the pending until it has ended well: an error is found for all of them.
        entry = self._pending[at]
        self._doing = f"waiting for call {entry.index}, {entry.call.verb}"
        self._await(entry)
        del self._pending[at]
        self._check(entry.index, entry.call)

    def _await(self, entry: _Pending) -> None:
        works = list(entry.works)
        self._own.shuffle(works)
        for work in works:
            how = self._own.random()
            if how < 0.15 and entry.call.has_future:
                work.get_future().wait()
            elif how < 0.25 and not entry.call.lazy:
                while not work.is_completed():
                    time.sleep(0.0005)
            work.wait()

    def _check(self, index: int, call: Call) -> None:
        self._doing = f"checking call {index}, {call.verb}"
        try:
            call.check()
        except AssertionError as error:
            self._problem(f"wrong result of call {index}, {call.verb}: {error}")
        self.tally.checks[call.verb] += 1
        if call.same:
            self.tally.digests[self._phase, self._lane.number, index] = call.digest()

    # After a death.

    def _die(self, error: qcoll.TransportError, raised_at: float, issuing: bool) -> None:
        text = str(error)
        if issuing and "failed earlier" in text:
            self.tally.refused += 1
        else:
            self.tally.raised_at.append(raised_at)
        self._blames_the_victim(error, "the first error")
        for entry in self._pending:
            self._ends(entry)
        self._is_refused(lambda: dist.all_reduce(torch.ones(10), group=self._group))
        self._is_refused(lambda: dist.barrier(self._group))

    def _blames_the_victim(self, error: qcoll.TransportError, what: str) -> None:
        victim = self._lane.ranks.index(self._part.round.victim)
        if error.peer != victim:
            self._problem(f"{what} blames rank {error.peer}, rank {victim} died: {error}")
        pattern = rf"\brank {victim} \([^)]*pid {self._part.victim_pid}\) died"
        if not re.search(pattern, str(error)):
            self._problem(f"{what} does not tell who died: {error}")

    def _ends(self, entry: _Pending) -> None:
        """A pending call: it had ended before, and well, or fails with the death."""
        begun = time.monotonic()
        what = f"pending call {entry.index}, {entry.call.verb}"
        try:
            for work in entry.works:
                work.wait()
        except qcoll.TransportError as error:
            self._blames_the_victim(error, what)
            self.tally.failed_with_it += 1
        except Exception:
            self._problem(f"{what}: {traceback.format_exc()}")
        else:
            self._check(entry.index, entry.call)
        if time.monotonic() - begun > 2:
            self._problem(f"{what} ended {time.monotonic() - begun:.1f} s after the first error")

    def _is_refused(self, call: Callable[[], object]) -> None:
        try:
            call()
        except qcoll.TransportError as error:
            self._blames_the_victim(error, "the next call")
        except Exception:
            self._problem(f"the next call: {traceback.format_exc()}")
        else:
            self._problem("the next call is not refused")
