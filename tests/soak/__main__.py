"""Random checked collectives on four processes, with a death now and then, for many minutes.

    python -m tests.soak --minutes 20 --seed 1 --kill-every 60

Exits with 1 on any fault, and tells how to repeat the round. What a round does: plan.py beside
this file; what is asked of the survivors of a death: lanes.py; what is flat: report.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from tests.soak.launcher import Launcher
from tests.soak.plan import Round
from tests.soak.report import Totals, lives_that_grew, table

_PROGRESS_SECONDS = 10.0
#: After as many the soak ends early.
_MOST_FAULTS = 20


def soak(arguments: argparse.Namespace) -> int:
    totals = Totals()
    started = shown = time.monotonic()
    end = started + 60 * arguments.minutes
    killing = arguments.kill_every > 0 and arguments.round is None
    next_kill = started + arguments.kill_every if killing else math.inf
    number = arguments.round or 0
    with Launcher() as launcher:
        # However slow the machine, no kill that was due is left out.
        while min(time.monotonic(), next_kill) < end and totals.faults < _MOST_FAULTS:
            due = time.monotonic() > next_kill
            if due:
                next_kill += arguments.kill_every
            plan = Round.draw(arguments.seed, number, due or arguments.deadly)
            outcome = launcher.play(plan)
            totals.add(outcome)
            if outcome.problems:
                print(f"FAULT in {plan}; to repeat it: {repeat(plan)}", end="\n  ")
                print(*outcome.problems, sep="\n  ", flush=True)
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"{shown - started:6.0f} s: {totals}", flush=True)
            number += arguments.round is None
        grown = list(lives_that_grew(launcher.lives))
    print(f"seed {arguments.seed}, {(time.monotonic() - started) / 60:.1f} minutes")
    print(table(totals, launcher.lives, grown), flush=True)
    return int(bool(totals.faults or grown))


def repeat(plan: Round) -> str:
    deadly = " --deadly" if plan.deadly else ""
    return f"python -m tests.soak --seed {plan.seed} --round {plan.number}{deadly}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds; 0: never")
    parser.add_argument("--round", type=int, help="play this round only, again and again")
    parser.add_argument("--deadly", action="store_true", help="kill a rank in every round")
    return soak(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
