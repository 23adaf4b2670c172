"""Kills ranks while they form a group, and tells how the survivors fared.

    python -m tests.faults.forming --seeds 0:60

What a seed draws and what is asked of the survivors: formings.py beside this file.
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

from formings import WORLDS, Case, Verdict, every_case, try_case


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        f"{'world':24}{'deaths':>7}{'passes':>8}{'known':>7}{'formed':>8}{'median':>9}{'max':>9}"
    ]
    for name in [*WORLDS, "all"]:
        some = [v for v in verdicts if name in (v.case.world_name, "all")]
        seconds = [s for v in some for s in v.seconds]
        if some:
            lines.append(
                f"{name:24}{len(some):7}{sum(not v.problems for v in some):8}"
                f"{sum(v.known for v in some):7}{sum(v.formed for v in some):8}"
                + (f"{statistics.median(seconds):9.2f}{max(seconds):9.2f}" if seconds else "")
            )
    return "\n".join([*lines, "seconds from the kill to the error, where it could be known"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:60", help="first:end (default 0:60)")
    parser.add_argument("--exact", metavar="WORLD", help="instead: every instant in these worlds")
    parser.add_argument("--point", help="only those whose instant has this in it")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="all errors, not only wrong ones"
    )
    arguments = parser.parse_args()
    first, _, end = arguments.seeds.partition(":")
    if arguments.exact is not None:
        cases = [c for c in every_case() if arguments.exact in c.world_name]
    else:
        cases = [Case.draw(seed) for seed in range(int(first), int(end or int(first) + 1))]
    verdicts = []
    started = time.monotonic()
    for case in cases:
        if arguments.point and arguments.point not in case.point:
            continue
        verdicts.append(verdict := try_case(case))
        if verdict.problems or arguments.verbose:
            told = verdict.texts if arguments.verbose else []
            print(verdict.case, *told, *verdict.problems, sep="\n  ", flush=True)
    print(table(verdicts))
    print(f"{(time.monotonic() - started) / max(1, len(verdicts)):.2f} s for each death")
    return int(any(v.problems for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
