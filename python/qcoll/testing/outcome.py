"""What became of each rank, and the error that says it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TAIL_LINES = 60


@dataclass
class RankOutcome:
    """How one rank fared."""

    rank: int
    node: str
    value: Any = None
    """What the function returned on this rank; None for programs."""
    error: str | None = None
    """None when all went well, else a traceback or how the process ended."""
    exit_status: int | None = None
    """Exit status of the process, negative for a signal; None while it lives."""
    ended_by_launcher: bool = False
    """The rank did not end in time, or outlived another rank's failure, and was ended."""
    output: str = ""
    """What the rank wrote to standard output and standard error."""


class RanksFailed(RuntimeError):
    """At least one rank failed; the text holds every rank's error and the tail of its output.

    ``outcomes`` has one entry per rank, in rank order.
    """

    def __init__(self, what: str, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        # The cause first: ranks that failed by themselves, then those ended for it, then the rest.
        order = sorted(outcomes, key=lambda o: (o.error is None, o.ended_by_launcher, o.rank))
        guilty = [o.rank for o in outcomes if o.error is not None and not o.ended_by_launcher]
        guilty = guilty or [o.rank for o in outcomes if o.error is not None]
        ranks = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
        head = f"{ranks} of {len(outcomes)} failed in {what}"
        super().__init__("\n".join([head, *map(_describe, order)]))


def _describe(outcome: RankOutcome) -> str:
    """One rank's part of the message: error, then the last lines of output."""
    lines = [f"=== rank {outcome.rank} on {outcome.node} ==="]
    lines.append(outcome.error.rstrip() if outcome.error else "no error")
    output = outcome.output.rstrip()
    # A program that dies of an exception prints the traceback that is also its error.
    if output and output != (outcome.error or "").strip():
        tail = output.splitlines()[-_TAIL_LINES:]
        lines += [f"--- last {len(tail)} lines of its output ---", *tail]
    return "\n".join(lines)


def describe_exit(status: int) -> str:
    """An exit status in words: "exited with 3", "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
