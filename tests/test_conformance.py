"""torch's own suite for backends, DistributedTest, against qcoll with everything exact.

One case for each of its tests that runs on CPU tensors, in worlds of 2 and 3; more in the long run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.driver import Driver
from qcoll.testing import RanksFailed

FOLDER = Path(__file__).parent / "conformance"
SECONDS = 120.0


def _lines(file: str) -> list[str]:
    lines = (FOLDER / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _tests_of_world(world: int) -> list[str]:
    rows = [line.split() for line in _lines("tests.txt")]
    return [test for test, worlds in rows if str(world) in worlds.split(",")]


CLOSED = dict(line.split(": ") for line in _lines("closed.txt"))
WORLDS = [
    pytest.param(2, "OFF", id="world2"),
    pytest.param(3, "OFF", id="world3"),
    pytest.param(4, "OFF", id="world4", marks=pytest.mark.full),
    pytest.param(2, "DETAIL", id="world2-debug", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def driver_of() -> Iterator[Callable[[int, str], Driver]]:
    """Gives the driver of a world, one for all tests: it takes seconds to import the suite."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def driver_of(world: int, debug: str) -> Driver:
            return stack.enter_context(contextlib.closing(Driver(world, debug)))

        yield driver_of


@pytest.mark.parametrize(("world", "debug"), WORLDS)
def test_the_list_names_every_test_that_this_world_runs(
    world: int, debug: str, driver_of: Callable[[int, str], Driver]
) -> None:
    assert sorted(driver_of(world, debug).tests()) == _tests_of_world(world)


CASES = [
    pytest.param(*world.values, test, marks=world.marks, id=f"{world.id}-{test[5:]}")
    for world in WORLDS
    for test in _tests_of_world(world.values[0])
]


@pytest.mark.parametrize(("world", "debug", "test"), CASES)
def test_torch(world: int, debug: str, test: str, driver_of: Callable[[int, str], Driver]) -> None:
    driver = driver_of(world, debug)
    outcomes = driver.run(test, timeout=SECONDS, grace=0.2 if test in CLOSED else 5.0)
    failed = RanksFailed(test, outcomes)
    if test in CLOSED:
        assert any(CLOSED[test] in (outcome.error or "") for outcome in outcomes), failed
    elif any(outcome.error is not None for outcome in outcomes):
        raise failed
