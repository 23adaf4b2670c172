"""What a round of the soak does: drawn from the seed and the round's number alone.

A round is one life of a default process group. It has phases; in each, several lanes at once make
random calls, every lane a thread with a group of its own. Groups are made before a phase and some
are destroyed after it. In a deadly round the last phase goes on until a rank is killed in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Processes of a soak. Layouts with fewer ranks leave some idle for a round.
SLOTS = 4
#: The processes that are never killed: with what they hold at the end, a leak would show.
VETERANS = (0, 1)
#: At once; each is a thread.
MOST_LANES = 3

_LAYOUTS = {
    ("a", "a", "b", "b"): 10,
    ("a", "b", "a", "b"): 2,
    ("a", "a", "a", "a"): 2,
    ("a", "b", "c", "d"): 2,
    ("a", "a", "a", "b"): 2,
    ("a", "a", "a"): 1,
    ("a", "b", "b"): 1,
    ("a", "b", "c"): 1,
    ("a", "a"): 1,
    ("a", "b"): 1,
}
#: The longest that a kill waits after the last phase has begun on all ranks.
LATEST_KILL = 2.0


@dataclass(frozen=True)
class Lane:
    """Calls on one group; all of its ranks draw the same ones."""

    number: int
    ranks: tuple[int, ...]
    """Of the default group; the lane's group is the default one for lane 0."""
    calls: int


@dataclass(frozen=True)
class Round:
    """One round, as every rank and the launcher know it."""

    seed: int
    number: int
    names: tuple[str, ...]
    """The node of each rank."""
    slots: tuple[int, ...]
    """The process that plays each rank: any rank can be the one that dies."""
    phases: tuple[tuple[Lane, ...], ...]
    victim: int
    """The rank that dies, or -1."""
    delay: float
    """Of the kill."""

    @classmethod
    def draw(cls, seed: int, number: int, deadly: bool) -> Round:
        source = random.Random(f"{seed} {number}")
        names = source.choices(list(_LAYOUTS), list(_LAYOUTS.values()))[0]
        slots = tuple(source.sample(range(SLOTS), len(names)))
        if all(slot in VETERANS for slot in slots):  # somebody must be there to be killed
            slots = (slots[0], SLOTS - 1)
        phases = []
        first = 1
        for _ in range(source.randint(1, 3)):
            everyone = tuple(range(len(names)))
            lanes = [Lane(0, everyone, source.randint(20, 80))]
            for _ in range(source.randint(0, MOST_LANES - 1)):
                size = source.randint(2, len(names))
                ranks = everyone if source.random() < 0.5 else source.sample(everyone, size)
                lanes.append(Lane(first, tuple(sorted(ranks)), source.randint(20, 80)))
                first += 1
            phases.append(tuple(lanes))
        mortal = [rank for rank, slot in enumerate(slots) if slot not in VETERANS]
        victim, delay = source.choice(mortal), source.uniform(0, LATEST_KILL)
        return cls(seed, number, names, slots, tuple(phases), victim if deadly else -1, delay)

    @property
    def world(self) -> int:
        return len(self.names)

    @property
    def deadly(self) -> bool:
        return self.victim >= 0

    def endless(self, phase: int, lane: Lane) -> bool:
        """Whether the lane goes on until the victim's death ends it."""
        return phase == len(self.phases) - 1 and self.victim in lane.ranks

    def __str__(self) -> str:
        deadly = f", rank {self.victim} dies" if self.deadly else ""
        return f"round {self.number} ({''.join(self.names)}{deadly})"


@dataclass(frozen=True)
class Part:
    """What one process is told: its rank in a round, and where the round's store is."""

    round: Round
    rank: int
    port: int
    victim_pid: int
