"""Ranks that do not make the same calls: an error on all of them, at once, that names both sides.

Each case lets the last rank differ. The timeout of the groups is far longer than the tests allow.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import shared_pool

GROUP_TIMEOUT = 60.0
# Stalled ranks ask the others where they are after a second; a busy machine may take some more.
AT_ONCE = 15.0
LAYOUTS = [[2, 2], [1, 1, 1], [2]]

Calls = Callable[[Any, bool], None]


def floats(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def gather(
    group: Any, count: int, dtype: torch.dtype = torch.float32, codec: str | None = None
) -> None:
    whole = floats(count * dist.get_world_size(group), dtype)
    qcoll.all_gather_into_tensor(whole, floats(count, dtype), group=group, codec=codec)


def scatter(group: Any, count: int, op: Any = "sum", codec: str | None = None) -> None:
    whole = floats(count * dist.get_world_size(group))
    qcoll.reduce_scatter_tensor(floats(count), whole, op=op, group=group, codec=codec)


def reduce(group: Any, count: int, op: Any = "sum", codec: str | None = None) -> None:
    qcoll.all_reduce(floats(count), op=op, group=group, codec=codec)


def premultiplied(factor: float) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(factor)


def gathers_in_order(group: Any, first: int, second: int) -> None:
    for count in (first, second):
        gather(group, count)


def in_order(group: Any, reduce_first: bool) -> None:
    for step in (reduce_first, not reduce_first):
        if step:
            reduce(group, 500)
        else:
            gather(group, 500)


def unequal_splits(group: Any, wrong: bool) -> None:
    """The last rank sends 5 rows to rank 0, which expects 4 unless it is wrong itself."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    to = [4] * world
    if wrong:
        to[0] = 5
    out = floats(4 * world)
    source = floats(sum(to))
    assert wrong == (rank == world - 1)
    dist.all_to_all_single(out, source, [4] * world, to, group=group)


def queued(group: Any, wrong: bool) -> None:
    """Asynchronous calls: the error comes from wait()."""
    x = [floats(1000 + 500 * (wrong and i == 2)) for i in range(5)]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in x]
    for work in works:
        work.wait()


#: name -> (what a rank calls, given its group and whether it is the one that differs; both sides)
CASES: dict[str, tuple[Calls, tuple[str, str]]] = {
    "numel of a gather": (lambda g, w: gather(g, 1500 if w else 1000), (r"\b1000\b", r"\b1500\b")),
    "numel of a scatter": (lambda g, w: scatter(g, 999 if w else 1000), (r"\b1000\b", r"\b999\b")),
    "numel of a reduction": (lambda g, w: reduce(g, 7 if w else 70_000), (r"\b70000\b", r"\b7\b")),
    "empty against full": (lambda g, w: gather(g, 0 if w else 1000), (r"\b1000\b", r"\b0\b")),
    "dtype": (
        lambda g, w: gather(g, 1000, torch.bfloat16 if w else torch.float32),
        (r"\b[Ff]loat(32)?\b", r"[Bb][Ff]loat16"),
    ),
    "op of a scatter": (lambda g, w: scatter(g, 800, "avg" if w else "sum"), ("sum", "avg")),
    "op of a reduction": (lambda g, w: reduce(g, 800, "avg" if w else "sum"), ("sum", "avg")),
    "native against delegated op": (
        lambda g, w: reduce(g, 800, dist.ReduceOp.MAX if w else "sum"),
        ("sum", "max"),
    ),
    "factor": (
        lambda g, w: reduce(g, 800, premultiplied(0.25 if w else 0.5)),
        (r"\b0\.50*\b", r"\b0\.250*\b"),
    ),
    "codec": (
        lambda g, w: gather(g, 70_000, codec="int4:128" if w else "int8:256"),
        ("int8:256", "int4:128"),
    ),
    "block": (
        lambda g, w: scatter(g, 70_000, codec="int8:64" if w else "int8:256"),
        ("int8:256", "int8:64"),
    ),
    "coded against exact": (
        lambda g, w: reduce(g, 70_000, codec="exact" if w else "int8:256"),
        ("int8:256", "exact"),
    ),
    "native verbs": (
        lambda g, w: scatter(g, 1000) if w else gather(g, 1000),
        ("all_gather", "reduce_scatter"),
    ),
    "single against list": (
        lambda g, w: (
            dist.all_gather([floats(9) for _ in range(dist.get_world_size(g))], floats(9), group=g)
            if w
            else scatter(g, 9)
        ),
        ("all_gather", "reduce_scatter"),
    ),
    "order": (in_order, ("all_gather", "all_reduce")),
    "order of sizes": (
        lambda g, w: gathers_in_order(g, 300 if w else 200, 200 if w else 300),
        (r"\b200\b", r"\b300\b"),
    ),
    "native against delegated verb": (
        lambda g, w: dist.broadcast(floats(1000), 0, group=g) if w else gather(g, 1000),
        ("all_gather", "broadcast"),
    ),
    "delegated against native verb": (
        lambda g, w: reduce(g, 1000) if w else dist.barrier(group=g),
        ("all_reduce", "barrier"),
    ),
    "delegated verbs": (
        lambda g, w: dist.broadcast(floats(8), 0, group=g) if w else dist.barrier(group=g),
        ("barrier", "broadcast"),
    ),
    "root": (
        lambda g, w: dist.broadcast(floats(8), int(w), group=g),
        ("from rank 0", "from rank 1"),
    ),
    "splits": (unequal_splits, (r"\b5\b", r"\b4\b")),
    "queued calls": (queued, (r"\b1000\b", r"\b1500\b")),
}


def disagree(name: str) -> str:
    """Runs a case in a group of its own; the text that this rank got."""
    rank, world = dist.get_rank(), dist.get_world_size()
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    group = dist.new_group(backend="qcoll", timeout=timeout)
    gather(group, 10)  # the group works
    dist.barrier()  # in the default group: nobody may still be in that call when others fail
    calls, sides = CASES[name]
    start = time.monotonic()
    try:
        calls(group, rank == world - 1)
        # Not a part of the calls above: a rank that could end them without the others hears of it
        # in its next call.
        dist.barrier(group=group)
    except qcoll.TransportError as error:
        text, peer = str(error), error.peer
    else:
        raise AssertionError(f"rank {rank} noticed nothing")
    assert time.monotonic() - start < AT_ONCE, text
    missing = [side for side in sides if not re.search(side, text)]
    assert not missing, f"{missing} not in: {text}"
    # The one that differs, and one that it differs from, by number.
    assert f"rank {world - 1}" in text, text
    assert re.search(rf"rank [0-{world - 2}]\b", text), text
    assert -1 <= peer < world
    refuses(group, text)
    dist.destroy_process_group(group)
    again = dist.new_group(backend="qcoll", timeout=timeout)
    gather(again, 1000)
    dist.barrier(group=again)
    dist.destroy_process_group(again)
    return text


def refuses(group: Any, first: str) -> None:
    """Every later call fails at once, with the first cause and what to do."""
    start = time.monotonic()
    cause = first.partition("s: ")[2].split(". The process group cannot")[0] or first
    for call in (
        lambda: gather(group, 10),
        lambda: reduce(group, 10),
        lambda: dist.barrier(group=group),
        lambda: dist.broadcast(floats(4), 0, group=group),
        lambda: dist.all_reduce(floats(4), group=group, async_op=True),
    ):
        with pytest.raises(qcoll.TransportError, match="failed earlier") as caught:
            call()
        text = str(caught.value)
        assert "destroy_process_group" in text
        assert cause[:60] in text, f"{cause!r} is not the cause in {text}"
    assert time.monotonic() - start < AT_ONCE
    qcoll.stats(group)  # what needs no peer still works
    qcoll.explain("all_reduce", 100, torch.float32, group)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_disagreement_is_named_on_all_ranks(name: str, layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    texts = pool.run(disagree, (name,), backend="gloo", timeout=GROUP_TIMEOUT, grace=AT_ONCE)
    assert all(len(text) > 40 for text in texts)


def leave_at_once(times: int) -> None:
    """The cause reaches all ranks also when those who know it destroy the group right away."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(times):
        group = dist.new_group(backend="qcoll")
        gather(group, 10)
        dist.barrier()
        with pytest.raises(qcoll.TransportError, match=r"\b1500\b") as caught:
            gathers_in_order(group, 1500 if rank == world - 1 else 1000, 10)
        dist.destroy_process_group(group)
        assert "1000" in str(caught.value)
        dist.barrier()


@pytest.mark.parametrize("layout", [[1, 1, 1], [2, 2]], ids=str)
def test_leaving_does_not_hide_the_cause(layout: list[int]) -> None:
    shared_pool(sum(layout), layout).run(leave_at_once, (40,), backend="gloo", timeout=60)
