"""A rank dies while a group is being formed: formings.py. `python -m tests.faults.forming`."""

from __future__ import annotations

import pytest
from formings import Case, every_case, try_case

INIT, NEW = "init_process_group", "new_group"
# Each instant once; a death that nobody can know of costs the group's timeout.
FEW = [
    Case("TCP, 2 ranks", INIT, "before hello", 1),
    Case("shared memory, 2 ranks", INIT, "before secret", 0),
    Case("shared memory, 3 ranks", NEW, "before identity", 2),
    Case("TCP, 3 ranks", NEW, "after identity", 0),
    Case("TCP, 3 ranks", INIT, "after identity", 2),
    Case("shared memory, 3 ranks", INIT, "before dialling", 0),
    Case("both, 4 ranks", NEW, "before dialling", 1),
    Case("both, 3 ranks", INIT, "before memory", 2),
    Case("switched off, 3 ranks", INIT, "before mapped", 1),
    Case("shared memory, 3 ranks", NEW, "after mapped", 0),
    Case("both, 4 ranks", INIT, "before gloo", 3),
    Case("TCP, 3 ranks", NEW, "in gloo", 2),
    Case("shared memory, 2 ranks", INIT, "before gloo connects", 1),
]
SEEDS = range(100, 107)
CHUNK = 20
MANY = [range(first, first + CHUNK) for first in range(1000, 1100, CHUNK)]


def check(case: Case) -> None:
    verdict = try_case(case)
    assert not verdict.problems, "\n".join([str(case), *verdict.problems])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_death_at_this_instant(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_death_at_any_instant(seed: int) -> None:
    check(Case.draw(seed))


@pytest.mark.full
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_a_death_at_every_instant(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_deaths_at_many_instants(seeds: range) -> None:
    for seed in seeds:
        check(Case.draw(seed))
