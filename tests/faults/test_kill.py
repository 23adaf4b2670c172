"""A rank is killed at any instant: deaths.py. `python -m tests.faults.kill` shows the times."""

from __future__ import annotations

import pytest
from deaths import COLLECTIVES, Case, Verdict, try_case

#: Separates "woke at once" from "waited for the timeout", which is 60 s.
AT_ONCE = 10.0

# As many as there are collectives: each once, and all transports.
FEW = range(len(COLLECTIVES))
CHUNK = 20
MANY = [range(first, first + CHUNK) for first in range(1000, 1200, CHUNK)]


def check(verdict: Verdict) -> None:
    problems = verdict.problems
    # gloo's wait for a send that was begun as its connection ended is woken by nothing but its own
    # timeout (docs/reliability.md): then, and only then, gloo's threads and the group stay.
    if any("left behind: thread pt_gloo_runloop" in problem for problem in problems):
        problems = [problem for problem in problems if "left behind" not in problem]
    assert not problems, "\n".join([str(verdict.case), *problems])
    assert verdict.seconds


@pytest.mark.parametrize("seed", FEW)
def test_the_survivors_of_a_kill(seed: int) -> None:
    check(try_case(Case.draw(seed), AT_ONCE))


@pytest.mark.full
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_the_survivors_of_many_kills(seeds: range) -> None:
    for seed in seeds:
        check(try_case(Case.draw(seed), AT_ONCE))
