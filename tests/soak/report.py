"""What a soak adds up to: totals, whether what processes hold is flat, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.soak.lanes import MOST_PENDING, Tally
from tests.soak.launcher import Outcome
from tests.soak.plan import MOST_LANES, VETERANS
from tests.soak.ranks import Sample

#: With fewer samples a process has not had all sizes of all calls in it, and still grows.
FEWEST_FOR_MEMORY = 60
FEWEST_FOR_COUNTS = 4
#: What the median resident size may grow by over the last two thirds of a process's life.
MEMORY_BOUND = 4 << 20
#: As many callbacks as can be pending at once: those of the calls of all lanes.
MOST_CALLBACK_THREADS = MOST_LANES * MOST_PENDING


@dataclass
class Totals:
    """Of all rounds so far."""

    rounds: int = 0
    kills: int = 0
    faults: int = 0
    tally: Tally = field(default_factory=Tally)
    detections: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.rounds += 1
        self.kills += outcome.round.deadly
        self.faults += bool(outcome.problems)
        self.tally.add(outcome.tally)
        self.detections += outcome.detections

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.tally.calls.total()} calls, "
            f"{self.tally.bytes.total() / 1e9:.2f} GB, {self.tally.checks.total()} checks, "
            f"{self.kills} kills, {self.faults} faults"
        )


def growth_of(samples: Sequence[Sample]) -> Iterator[str]:
    """In which respects the life of a process was not flat.

    The first third of its samples is warm-up. After that descriptors and threads (those for
    callbacks, which stay a few seconds, aside) are the same at every quiet point, and the median of
    the resident size over the last third of what is left is less than MEMORY_BOUND above that over
    the first third.
    """
    rest = samples[len(samples) // 3 :]
    if len(samples) >= FEWEST_FOR_COUNTS:
        for what in ("descriptors", "threads"):
            counts = {getattr(sample, what) for sample in rest}
            if len(counts) > 1:
                most = max(rest, key=lambda sample: getattr(sample, what))
                who = ", ".join(most.thread_names)
                yield f"{what} are not flat: {min(counts)} to {max(counts)}; threads then: {who}"
    most = max((sample.callback_threads for sample in samples), default=0)
    if most > MOST_CALLBACK_THREADS:
        yield f"{most} threads for callbacks"
    if len(samples) >= FEWEST_FOR_MEMORY:
        grown = memory_growth(samples)
        if grown >= MEMORY_BOUND:
            yield f"the resident size grew by {grown / 1e6:.1f} MB"


def memory_growth(samples: Sequence[Sample]) -> float:
    rest = samples[len(samples) // 3 :]
    third = max(1, len(rest) // 3)
    first = statistics.median(sample.resident for sample in rest[:third])
    return statistics.median(sample.resident for sample in rest[-third:]) - first


def lives_that_grew(lives: dict[int, list[list[Sample]]]) -> Iterator[str]:
    for slot, processes in lives.items():
        for number, samples in enumerate(processes):
            for what in growth_of(samples):
                yield f"process {number} of slot {slot}, {len(samples)} rounds: {what}"


def table(totals: Totals, lives: dict[int, list[list[Sample]]], problems: Sequence[str]) -> str:
    tally = totals.tally
    lines = [f"{'collective':26}{'calls':>10}{'MB':>12}{'checks':>10}"]
    lines += [
        f"{verb:26}{tally.calls[verb]:10}{tally.bytes[verb] / 1e6:12.1f}{tally.checks[verb]:10}"
        for verb in sorted(tally.calls)
    ]
    lines.append(
        f"{'all':26}{tally.calls.total():10}{tally.bytes.total() / 1e6:12.1f}"
        f"{tally.checks.total():10}"
    )
    lines += ["calls and bytes of the inputs are those of all ranks together", ""]
    lines.append(f"rounds {totals.rounds}, callbacks {tally.callbacks}, kills {totals.kills}")
    if totals.detections:
        times = sorted(totals.detections)
        figures = (statistics.median(times), times[int(0.99 * (len(times) - 1))], times[-1])
        lines.append(
            "from the kill to the error, ms: median {:.1f}, p99 {:.1f}, max {:.1f} ".format(
                *(1e3 * figure for figure in figures)
            )
            + f"({len(times)} lanes that waited; {tally.refused} were told by their next call)"
        )
        lines.append(f"pending calls that failed with it: {tally.failed_with_it}")
    lines += ["", f"{'process':18}{'rounds':>8}{'RSS, MB':>24}{'descriptors':>16}{'threads':>14}"]
    for slot, processes in lives.items():
        samples = max(processes, key=len, default=[])
        if samples:
            name = f"{slot}, never killed" if slot in VETERANS else f"{slot}, longest life"
            lines.append(f"{name:18}{len(samples):8}{_course(samples)}")
    lines += ["at the end of the warm-up third and at the end; RSS: medians of thirds of the rest"]
    lines += ["", f"faults: {totals.faults + len(problems)}"]
    return "\n".join([*lines, *problems])


def _course(samples: Sequence[Sample]) -> str:
    rest = samples[len(samples) // 3 :]
    third = max(1, len(rest) // 3)
    resident = [
        statistics.median(sample.resident for sample in part) / 1e6
        for part in (rest[:third], rest[-third:])
    ]
    start, end = rest[0], rest[-1]
    memory = f"{resident[0]:.1f} -> {resident[1]:.1f} ({resident[1] - resident[0]:+.1f})"
    return (
        f"{memory:>24}{f'{start.descriptors} -> {end.descriptors}':>16}"
        f"{f'{start.threads} -> {end.threads}':>14}"
    )
