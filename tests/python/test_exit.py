"""How a process group ends: at the interpreter's exit, in forked children, by death and abort."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import pool_of
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, Dataset

import qcoll
from qcoll.testing import Nodes, RankOutcome, RankPool, run_ranks
from qcoll.testing.layout import SINGLE_THREADED, import_path

LAYOUTS = [
    pytest.param([2, 2], id="2+2"),
    pytest.param([3], id="3"),
    pytest.param([1, 1], id="1+1"),
]
#: Separates "woke at once" from "waited for the timeout", which is 60 s.
AT_ONCE = 10.0


@pytest.fixture(scope="module", params=LAYOUTS)
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


# Exit without destroy_process_group. What the programs find: exit_driver.py.

_DRIVER = Path(__file__).with_name("exit_driver.py")

PROGRAMS = {
    "at once": "",
    "after calls": "dist.all_reduce(x)\ndist.barrier()\n",
    "with finished works": """
works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
works += [dist.broadcast(x, 0, async_op=True)]
futures = [w.get_future().then(lambda f: f.value()[0].sum()) for w in works]
[w.wait() for w in works]
""",
    "with unfinished works": """
works = [qcoll.all_reduce(torch.ones(200_000), codec="int8", async_op=True) for _ in range(20)]
futures = [w.get_future().then(lambda f: f.value()[0].sum()) for w in works]
""",
    "with dropped works": """
for _ in range(20):
    dist.all_reduce(torch.ones(200_000), async_op=True)
    dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX, async_op=True)
""",
    "with works that cannot finish": """
if rank == 0:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    futures = [w.get_future().then(lambda f: f.value()) for w in works]
else:
    time.sleep(0.3)
""",
    "with a delegated work that cannot finish": """
if rank == 0:
    works = [dist.all_reduce(torch.ones(1000), op=dist.ReduceOp.MAX, async_op=True)]
else:
    time.sleep(0.3)
""",
    "with a waiting callback": """
def callback(future):
    dist.all_reduce(torch.ones(1000))
    return future.value()[0].sum()
futures = [dist.all_reduce(x, async_op=True).get_future().then(callback)]
""",
    "with waiting threads": """
import threading
groups = [dist.new_group() for _ in range(6)]
def wait(group):
    try:
        dist.all_reduce(x, group=group)
    except qcoll.TransportError:
        pass
if rank == 0:
    for group in groups:
        threading.Thread(target=wait, args=(group,), daemon=True).start()
time.sleep(0.2)
""",
    "with groups": """
groups = [dist.new_group() for _ in range(3)]
for g in groups:
    dist.all_reduce(x, group=g)
dist.destroy_process_group(groups[1])
""",
    "by sys.exit": "dist.all_reduce(x, async_op=True)\nsys.exit(0)\n",
    "after destroy": "dist.all_reduce(x)\ndist.destroy_process_group()\n",
}


class Driver:
    """The process that runs the programs."""

    def __init__(self) -> None:
        environment = {**os.environ, **SINGLE_THREADED, **import_path()}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(_DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, program: str, names: list[str]) -> dict[str, list[Any]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"program": program, "names": names}) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@pytest.mark.parametrize("what", PROGRAMS)
def test_exit_is_quiet(driver: Driver, what: str) -> None:
    check_quiet(driver, PROGRAMS[what], ["a", "b"])


@pytest.mark.full
@pytest.mark.parametrize("what", PROGRAMS)
def test_exit_is_quiet_every_time(driver: Driver, what: str) -> None:
    # An abort at exit is a race: it gets more chances.
    check_quiet(driver, PROGRAMS[what], *(5 * [["a", "a", "a"], ["a", "b"], ["a", "b", "a"]]))


def check_quiet(driver: Driver, program: str, *layouts: list[str]) -> None:
    for names in layouts:
        ended = driver.run(program, names)
        assert ended["statuses"] == [0] * len(names), ended
        assert ended["outputs"] == [""] * len(names)


def test_an_error_still_shows(driver: Driver) -> None:
    """Ending the groups at exit hides neither an exception nor its status."""
    ended = driver.run("dist.all_reduce(x, async_op=True)\n1 / 0\n", ["a", "b"])
    assert ended["statuses"] == [1, 1]
    for output in ended["outputs"]:
        assert output.endswith("ZeroDivisionError: division by zero\n")
        assert "abort" not in output.lower()


def test_a_program_from_scratch() -> None:
    """The same without the driver, whose interpreter is slower to end: waiting threads that wake
    up at exit must not ask for an interpreter that is being taken down."""
    program = "import time, torch, torch.distributed as dist, qcoll\n"
    program += "dist.init_process_group('qcoll')\nx, rank = torch.ones(1000), dist.get_rank()\n"
    program += PROGRAMS["with waiting threads"] + "dist.all_reduce(torch.ones(9), async_op=True)\n"
    for nodes in ([2], [1, 1]):
        outcomes = run_ranks(["-W", "ignore", "-c", program], 2, nodes=nodes, timeout=60)
        assert [(o.exit_status, o.output) for o in outcomes] == [(0, "")] * 2


# Forked children.


def check_all_reduce(group: dist.ProcessGroup | None = None) -> None:
    for verb in (dist.all_reduce, lambda x, group: qcoll.all_reduce(x, codec="int8", group=group)):
        x = torch.ones(50_000)
        verb(x, group=group)
        assert torch.equal(x, torch.full_like(x, float(dist.get_world_size(group))))


class Squares(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


def child(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "compute":
        assert torch.ones(1000).sum() == 1000
    if how == "destroy":
        dist.destroy_process_group()


def forks() -> None:
    """Children that do what children do, while calls are in flight and while none are."""
    context = multiprocessing.get_context("fork")
    extra = dist.new_group()
    for how in ("return", "exit", "compute", "destroy"):
        check_all_reduce()
        work = dist.all_reduce(torch.ones(300_000), async_op=True)
        process = context.Process(target=child, args=(how,))
        process.start()
        work.wait()
        process.join(AT_ONCE)
        assert process.exitcode == 0, how
        check_all_reduce()
        check_all_reduce(extra)
        dist.barrier()
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        total = 0
        for batch in loader:
            check_all_reduce()
            total += int(batch.sum())
        assert total == sum(i**2 for i in range(40))
    check_all_reduce()


def test_fork_after_init() -> None:
    # Ranks of its own: gloo groups that others left behind could not be destroyed in a child.
    for nodes in ([2, 1], [1, 1]):
        with RankPool(sum(nodes), nodes) as pool:
            pool.run(forks, backend="qcoll")


def call_in_child() -> None:
    """A child that calls by mistake gets an error; its parent's group is not touched."""
    check_all_reduce()

    def child_calls(pipe: object) -> None:
        try:
            dist.all_reduce(torch.ones(10))
        except RuntimeError as error:
            pipe.send(str(error))  # type: ignore[attr-defined]
        else:
            pipe.send("")  # type: ignore[attr-defined]

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=child_calls, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(AT_ONCE), "the child hangs"
    text = ours.recv()
    assert "fork" in text, text
    process.join(AT_ONCE)
    check_all_reduce()


def test_a_call_in_a_forked_child_is_an_error(nodes: Nodes) -> None:
    pool_of(nodes).run(call_in_child, backend="qcoll")


def forked_leftover(folder: str) -> None:
    """A child that outlives its parent must not make the parent look alive."""
    check_all_reduce()
    if dist.get_rank() == 1:
        pid = os.fork()
        if pid == 0:
            time.sleep(3 * AT_ONCE)
            os._exit(0)
        Path(folder, "child").write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    expect_death(lambda: dist.all_reduce(torch.ones(10)))
    store = _get_default_store()
    if store.add("survivors", 1) == dist.get_world_size() - 1:
        os.kill(int(Path(folder, "child").read_text()), signal.SIGKILL)


def test_a_child_does_not_keep_a_dead_rank_alive(nodes: Nodes, tmp_path: Path) -> None:
    outcomes = pool_of(nodes).outcomes(forked_leftover, args=(str(tmp_path),), backend="qcoll")
    check_survivors(outcomes)


# Death.


def expect_death(call: Callable[[], object]) -> None:
    """The call must fail at once, and blame rank 1."""
    started = time.monotonic()
    with pytest.raises(qcoll.TransportError, match="rank 1") as raised:
        call()
    assert raised.value.peer == 1, str(raised.value)
    assert time.monotonic() - started < AT_ONCE


def check_survivors(outcomes: list[RankOutcome]) -> None:
    for outcome in outcomes:
        if outcome.rank == 1:
            assert outcome.exit_status == -signal.SIGKILL
        else:
            assert outcome.error is None, outcome.error


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
    "coded all_reduce": lambda: qcoll.all_reduce(torch.ones(3_000_000), codec="int8"),
    "async all_reduce": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
    "all_gather": lambda: dist.all_gather_into_tensor(
        torch.empty(1000 * dist.get_world_size()), torch.ones(1000)
    ),
    "all_to_all": lambda: dist.all_to_all_single(
        torch.empty(10 * dist.get_world_size()), torch.ones(10 * dist.get_world_size())
    ),
    "delegated all_reduce": lambda: dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX),
    "delegated barrier": lambda: dist.barrier(),
    "delegated object": lambda: dist.all_gather_object([None] * dist.get_world_size(), "x"),
    "async delegated": lambda: dist.broadcast(torch.ones(10), src=1, async_op=True).wait(),
}


def death(what: str, before: bool) -> None:
    """Rank 1 is killed while the others wait for it (``before``: before they call)."""
    check_all_reduce()
    dist.barrier()
    store = _get_default_store()
    if dist.get_rank() == 1:
        if before:
            store.set("dying", "")
        else:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if before:
        store.wait(["dying"])
        time.sleep(0.2)
    expect_death(CALLS[what])
    for _ in range(2):  # the group stays unusable, and keeps saying why
        expect_death(lambda: dist.all_reduce(torch.ones(10)))
        expect_death(lambda: dist.barrier())


QUICK = ("large all_reduce", "coded all_reduce", "delegated all_reduce", "async delegated")


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[] if w in QUICK else [pytest.mark.full]) for w in CALLS]
)
def test_the_death_of_a_rank_wakes_the_others(nodes: Nodes, what: str) -> None:
    check_survivors(pool_of(nodes).outcomes(death, args=(what, False), backend="qcoll"))


@pytest.mark.parametrize("what", ["all_reduce", "delegated all_reduce"])
def test_a_call_after_the_death_of_a_rank(what: str) -> None:
    check_survivors(pool_of([2, 2]).outcomes(death, args=(what, True), backend="qcoll"))


def death_with_many_waiting() -> None:
    """All threads and all queued works of all groups are woken."""
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    for group in groups:
        check_all_reduce(group)
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [
        dist.all_reduce(torch.ones(1000), group=g, op=op, async_op=True)
        for g in groups
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM)
    ]
    errors: list[Exception] = []

    def wait(work: dist.Work) -> None:
        try:
            work.wait()
        except qcoll.TransportError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(w,)) for w in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AT_ONCE)
    assert len(errors) == len(works)
    assert all("rank 1" in str(error) for error in errors), errors
    assert all(w.is_completed() and not w.is_success() for w in works)


def test_a_death_wakes_all_that_wait(nodes: Nodes) -> None:
    check_survivors(pool_of(nodes).outcomes(death_with_many_waiting, backend="qcoll"))
