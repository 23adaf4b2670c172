"""Kills ranks at random instants of random collectives, and tells how the survivors fared.

    python -m tests.faults.kill --seeds 0:200

What a seed draws and what is asked of the survivors: deaths.py beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a module of the repository, this finds what lies beside it only so; and so do the ranks.
sys.path.insert(0, str(Path(__file__).parent))

from deaths import COLLECTIVES, LAYOUTS, Case, Verdict, try_case


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        f"{'transport':15}{'kills':>6}{'passes':>8}{'survivors':>11}{'refused':>9}{'queued':>8}"
        f"{'median':>10}{'p99':>9}{'max':>9}"
    ]
    for name in [*LAYOUTS, "all"]:
        some = [v for v in verdicts if name in (v.case.transport, "all")]
        seconds = sorted(s for v in some for s in v.seconds)
        if not seconds:
            continue
        figures = (statistics.median(seconds), seconds[int(0.99 * (len(seconds) - 1))], seconds[-1])
        lines.append(
            f"{name:15}{len(some):6}{sum(not v.problems for v in some):8}{len(seconds):11}"
            f"{sum(v.refused for v in some):9}{sum(v.queued for v in some):8}"
            + "".join(f"{1e3 * f:{w}.1f}" for f, w in zip(figures, (10, 9, 9), strict=True))
        )
    return "\n".join([*lines, "seconds from the kill to the error, in ms"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:200", help="first:end (default 0:200)")
    parser.add_argument("--collective", help="only those whose name has this in it")
    parser.add_argument("--without", help="none whose name has this in it")
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    names = [
        name
        for name in COLLECTIVES
        if (arguments.collective or "") in name
        and not (arguments.without and arguments.without in name)
    ]
    verdicts = []
    started = time.monotonic()
    for seed in range(int(first), int(end or int(first) + 1)):
        verdicts.append(try_case(Case.draw(seed, names)))
        verdict = verdicts[-1]
        if verdict.problems:
            print(verdict.case, *verdict.problems, sep="\n  ", flush=True)
    print(table(verdicts))
    print(f"{(time.monotonic() - started) / len(verdicts):.2f} s for each kill")
    return int(any(v.problems for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
