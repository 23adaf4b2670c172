"""Ranks that disagree though they need not meet, and whoever it is that differs.

tests/python/test_disagreement.py lets the last rank differ in every way. Here any rank or two may
differ, also ones that exchange nothing in the algorithm: both sides are named on all ranks.
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
from fault_ranks import error_of, works

import qcoll
from qcoll.testing import shared_pool

GROUP_TIMEOUT = 60.0
# Stalled ranks ask the others where they are after a second; a busy machine may take some more.
AT_ONCE = 15.0

Side = Callable[[Any], object]


def gather(group: Any, count: int = 1000, dtype: torch.dtype = torch.float32) -> None:
    whole = torch.empty(count * dist.get_world_size(group), dtype=dtype)
    dist.all_gather_into_tensor(whole, torch.ones(count, dtype=dtype), group=group)


def scatter(group: Any, count: int = 1000, codec: str = "exact") -> None:
    whole = torch.ones(count * dist.get_world_size(group))
    qcoll.reduce_scatter_tensor(torch.empty(count), whole, codec=codec, group=group)


def reduce(group: Any, count: int = 1000, op: Any = "sum") -> None:
    qcoll.all_reduce(torch.ones(count), op=op, group=group)


def exchange(group: Any, count: int = 1000) -> None:
    rows = torch.ones(count * dist.get_world_size(group))
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)


def in_order(*calls: Side) -> Side:
    def both(group: Any) -> None:
        for call in calls:
            call(group)

    return both


#: name -> (what most ranks do, what those that differ do, how each side is named)
CASES: dict[str, tuple[Side, Side, str, str]] = {
    "size": (gather, lambda g: gather(g, 1500), r"\b1000\b", r"\b1500\b"),
    "size of an exchange": (exchange, lambda g: exchange(g, 1500), r"\b1000\b", r"\b1500\b"),
    "dtype": (
        gather,
        lambda g: gather(g, dtype=torch.bfloat16),
        r"\b[Ff]loat(32)?\b",
        "[Bb][Ff]loat16",
    ),
    "codec": (scatter, lambda g: scatter(g, codec="int8:64"), "exact", "int8:64"),
    "operation": (reduce, lambda g: reduce(g, op="avg"), "sum", "avg"),
    "collective": (gather, scatter, "all_gather", "reduce_scatter"),
    "order": (
        in_order(gather, reduce),
        in_order(reduce, gather),
        "all_gather",
        "all_reduce",
    ),
    "native against delegated": (
        gather,
        lambda g: dist.barrier(group=g),
        "all_gather",
        "barrier",
    ),
    "native against delegated reduction": (
        reduce,
        lambda g: dist.all_reduce(torch.ones(1000), dist.ReduceOp.MIN, group=g),
        "sum",
        "min",
    ),
    "delegated against native": (
        lambda g: dist.broadcast(torch.ones(8), 0, group=g),
        exchange,
        "broadcast",
        "all_to_all",
    ),
    "delegated": (
        lambda g: dist.broadcast(torch.ones(8), 0, group=g),
        lambda g: dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX, group=g),
        "broadcast",
        "all_reduce",
    ),
}
WHO = [(0,), (1,), (1, 2)]  # in [2, 2], ranks 1 and 2 exchange nothing
LAYOUTS = [[2, 2], [4], [1, 1, 1, 1], [1, 1, 1]]


def disagree(name: str, differing: tuple[int, ...]) -> str:
    """One case in a group of its own; the text of this rank's error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    group = dist.new_group(backend="qcoll", timeout=timeout)
    works(group)
    dist.barrier()  # in the default group: nobody may still be in those calls when others fail
    most, others, _, _ = CASES[name]
    call = others if rank in differing else most

    def call_and_meet() -> None:
        call(group)
        dist.barrier(group=group)  # who could end the call without the others hears of it here

    error, seconds = error_of(call_and_meet)
    assert seconds < AT_ONCE, str(error)
    assert -1 <= error.peer < world
    again, _ = error_of(lambda: gather(group))
    assert "failed earlier" in str(again)
    dist.destroy_process_group(group)
    return str(error)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_both_sides_are_named_on_all_ranks(name: str, layout: list[int]) -> None:
    world = sum(layout)
    _, _, ours, theirs = CASES[name]
    for differing in WHO:
        texts = shared_pool(world, layout).run(
            disagree, (name, differing), backend="gloo", timeout=GROUP_TIMEOUT, grace=AT_ONCE
        )
        for rank, text in enumerate(texts):
            where = f"rank {rank} when {differing} differ: {text}"
            assert re.search(ours, text), where
            assert re.search(theirs, text), where
            named = {int(number) for number in re.findall(r"\brank (\d+)", text)}
            assert named & set(differing), where
            assert named - set(differing), where


def form_with_options(name: str, differing: tuple[int, ...]) -> str:
    values: dict[str, tuple[Any, Any]] = {
        "all_gather": ("int8", "int4"),
        "min_bytes": (1 << 20, 1 << 10),
    }
    value = values[name][dist.get_rank() in differing]
    start = time.monotonic()
    with pytest.raises(ValueError, match=name) as caught:
        dist.new_group(backend="qcoll", pg_options=qcoll.Options(**{name: value}))
    assert time.monotonic() - start < AT_ONCE
    text = str(caught.value)
    assert all(str(each) in text for each in values[name]), text
    return text


@pytest.mark.parametrize("layout", [[2, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("name", ["all_gather", "min_bytes"])
def test_options_that_differ(name: str, layout: list[int]) -> None:
    for differing in WHO:
        texts = shared_pool(sum(layout), layout).run(
            form_with_options, (name, differing), backend="gloo", fresh=True
        )
        for text in texts:
            named = {int(number) for number in re.findall(r"\brank (\d+)", text)}
            assert named & set(differing), text
            assert named - set(differing), text
