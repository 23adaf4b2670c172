"""The record of what a rank did and what it waits for, in the process and as a file."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_cases import pool_of
from torch.distributed.distributed_c10d import _get_default_store

import qcoll
from qcoll.testing import Nodes, RanksFailed, run_function

KEPT = 2000  # operations


@pytest.fixture(scope="module", params=[[2, 2], [1, 1, 1]], ids=["2+2", "1+1+1"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def some_calls() -> None:
    before = time.time()
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(10), src=0)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    record = qcoll.flight_record()
    after = time.time()
    assert (record["rank"], record["size"]) == (dist.get_rank(), dist.get_world_size())
    assert f"rank {dist.get_rank()} " in record["label"]
    assert str(os.getpid()) in record["label"]
    assert record["failure"] == record["waits_for"] == ""
    last = record["operations"][-3:]
    verbs = [entry["call"].split("(")[0] for entry in last]
    assert verbs == ["all_reduce", "broadcast", "all_reduce"]
    assert "delegate" in last[1]["call"]
    numbers = [entry["number"] for entry in record["operations"]]
    assert numbers == list(range(1, len(numbers) + 1))
    for entry in last:
        assert entry["state"] == "finished"
        assert entry["started"] is not None
        assert entry["ended"] is not None
        # Clocks are converted at the time of asking, so allow for the moment in between.
        assert before - 0.1 <= entry["queued"] <= entry["started"] + 0.1
        assert entry["started"] <= entry["ended"] + 0.1 <= after + 0.2


def test_calls_are_recorded_in_order(nodes: Nodes) -> None:
    pool_of(nodes).run(some_calls, backend="qcoll", fresh=True)


def sends_and_receives() -> None:
    rank = dist.get_rank()
    assert qcoll.flight_record()["messages"] == []
    for turn in range(2):
        x = torch.ones(10 + turn)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    x = torch.ones(4)
    works = dist.batch_isend_irecv([dist.P2POp([dist.isend, dist.irecv][rank], x, 1 - rank)])
    before = qcoll.flight_record()["messages"]
    assert [entry["state"] for entry in before] == ["finished", "finished", "running"]
    for work in works:
        work.wait()
    entries = qcoll.flight_record()["messages"]
    assert [entry["state"] for entry in entries] == ["finished"] * 3
    assert [entry["number"] for entry in entries] == [1, 2, 3]
    verb = "send(Float[11]) to rank 1" if rank == 0 else "recv(Float[11]) from rank 0"
    assert verb.split("(")[0] in entries[1]["call"]
    assert "[11]" in entries[1]["call"]
    assert qcoll.flight_record()["operations"] == []  # they are no collectives
    dist.barrier()
    if rank == 1:
        with pytest.raises(qcoll.TransportError):
            dist.recv(x, 0)
        assert qcoll.flight_record()["messages"][-1]["state"] == "failed"
    else:
        time.sleep(0.3)
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()


def test_sends_and_receives_are_recorded() -> None:
    pool_of([1, 1]).run(sends_and_receives, backend="qcoll", fresh=True)


def many_calls() -> None:
    for _ in range(KEPT + 50):
        dist.all_reduce(torch.ones(1))
    operations = qcoll.flight_record()["operations"]
    assert len(operations) == KEPT
    assert operations[-1]["number"] - operations[0]["number"] == KEPT - 1
    assert operations[-1]["number"] > KEPT + 49


def test_the_latest_are_kept() -> None:
    pool_of([2]).run(many_calls, backend="qcoll", fresh=True)


def waiting() -> None:
    """While a call waits, another thread sees for whom."""
    rank, store = dist.get_rank(), _get_default_store()
    dist.all_reduce(torch.ones(10))
    if rank == 0:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(100)))
        thread.start()
        deadline = time.monotonic() + 30
        while not (waits_for := qcoll.flight_record()["waits_for"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert re.match(r"rank [1-9] to .*, for [0-9.]+ s$", waits_for)
        assert qcoll.flight_record()["operations"][-1]["state"] == "running"
        store.set("seen", "")
        thread.join()
    else:
        store.wait(["seen"])
        dist.all_reduce(torch.ones(100))
    dist.barrier()
    assert qcoll.flight_record()["waits_for"] == ""


def test_it_tells_who_is_waited_for(nodes: Nodes) -> None:
    pool_of(nodes).run(waiting, backend="qcoll", fresh=True)


def late() -> None:
    rank, store = dist.get_rank(), _get_default_store()
    last = dist.get_world_size() - 1
    group = dist.new_group(timeout=timedelta(seconds=1), backend="qcoll")
    dist.all_reduce(torch.ones(10), group=group)
    if rank == last:
        store.wait([f"failed {other}" for other in range(last)])
    with pytest.raises(qcoll.TransportError):
        dist.all_reduce(torch.ones(1000), group=group)
    store.set(f"failed {rank}", "")
    record = qcoll.flight_record(group)
    assert "timed out" in record["failure"]
    if rank != last:
        assert record["operations"][-1]["state"] == "failed"
        assert f"rank {last} to " in record["waits_for"] or "rank" in record["waits_for"]
    for other in range(last + 1):  # nobody destroys before all have looked
        store.wait([f"failed {other}"])
    dist.destroy_process_group(group)


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_failure_is_dumped_by_every_rank(nodes: Nodes, tmp_path: Path) -> None:
    env = {"QCOLL_DUMP": str(tmp_path)}
    pool_of(nodes).run(late, backend="qcoll", fresh=True, env=env)
    world = sum(nodes)
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    failed = [text for text in texts if "timed out" in text]
    assert len(failed) == world
    for rank in range(world):
        (text,) = [text for text in failed if text.startswith(f"rank {rank} ")]
        assert f"of {world}" in text.splitlines()[0]
        assert "all_reduce(sum, 10 elements of Float, codec exact)" in text
        if rank != world - 1:
            assert re.search(r"^waits for: rank \d+ to .*, for [0-9.]+ s$", text, re.MULTILINE)
            assert re.search(r"running +all_reduce\(sum, 1000 elements", text)


def ends_well() -> None:
    dist.init_process_group("qcoll")
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def test_the_end_of_a_group_is_dumped(tmp_path: Path) -> None:
    run_function(ends_well, 2, backend=None, env={"QCOLL_DUMP": str(tmp_path)})
    assert len(files_in(tmp_path)) == 2
    for name in files_in(tmp_path):
        assert re.fullmatch(r"qcoll_[0-9a-f]{16}_rank[01]\.txt", name)
        text = (tmp_path / name).read_text()
        assert "failure:   none" in text
        assert re.search(r"finished +all_reduce\(sum, 10 elements", text)


def test_a_directory_that_does_not_exist_is_refused_at_init(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"QCOLL_DUMP=.*not a directory"):
        run_function(ends_well, 2, backend=None, env={"QCOLL_DUMP": str(tmp_path / "absent")})
