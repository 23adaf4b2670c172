"""stats() counts what explain() predicts, and both are what the documents say (wire_bytes_formula).

Interface counters say the same from outside: tests/net/test_wire_bytes.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_probe import expect_error, observe
from wire_bytes_formula import Case, encoded_bytes

import qcoll
from qcoll.testing import shared_pool

VERBS = (
    *("all_gather_into_tensor", "all_gather", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_tensor_coalesced"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all_single", "all_to_all"),
)
LAYOUTS = [(2, 2), (1, 1), (3,), (3, 1), (2, 2, 2)]
# Of one rank: nothing, one, short of a block, a few chunks with a ragged tail.
LENGTHS = (0, 1, 100, 5000, 300_001)
CODECS = (("int8:256", "int4:128"), ("int4:32", "int8:4096"), ("bf16", "int8:96"))


def make(verb: str, length: int, dtype: torch.dtype) -> None:
    """Calls ``verb`` with slices of ``length``."""
    world = dist.get_world_size()
    part, whole = torch.ones(length, dtype=dtype), torch.ones(length * world, dtype=dtype)
    parts = list(whole.clone().chunk(world)) if length else [part.clone() for _ in range(world)]
    if verb.endswith("coalesced"):
        with dist._coalescing_manager():
            _single(verb.removesuffix("_coalesced"), part, whole)
    elif verb == "all_gather":
        dist.all_gather(parts, part)
    elif verb == "reduce_scatter":
        dist.reduce_scatter(part, parts)
    elif verb == "all_to_all":
        dist.all_to_all(parts, list(whole.chunk(world)) if length else [part] * world)
    else:
        _single(verb, part, whole)


def _single(verb: str, part: torch.Tensor, whole: torch.Tensor) -> None:
    if verb == "all_gather_into_tensor":
        dist.all_gather_into_tensor(whole, part)
    elif verb == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(part, whole)
    elif verb == "all_reduce":
        dist.all_reduce(whole)
    else:
        assert verb == "all_to_all_single", verb
        dist.all_to_all_single(torch.empty_like(whole), whole)


def check_bytes(sizes: tuple[int, ...]) -> None:
    """Every verb: counters equal plan equals formula, on this rank and summed over its node."""
    world, rank = sum(sizes), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for codecs in (("exact", "exact"), *CODECS):
            text = "/".join(codecs)
            settings: dict[str, Any] = dict.fromkeys(
                ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), text
            )
            settings |= {"all_gather_dtypes": ("fp32", "bf16", "fp16"), "scope": "all"}
            settings |= {"min_bytes": 0, "coalesced": True}
            lengths = LENGTHS if dtype is torch.bfloat16 and codecs in CODECS[:1] else (5000,)
            with qcoll.options(**settings):
                for verb in VERBS:
                    for length in lengths:
                        check_one(verb, sizes, codecs, length * world, dtype, rank)


def check_one(
    verb: str,
    sizes: tuple[int, ...],
    codecs: tuple[str, str],
    numel: int,
    dtype: torch.dtype,
    rank: int,
) -> None:
    qcoll.reset_stats()
    make(verb, numel // sum(sizes), dtype)
    counted = qcoll.stats()[verb]
    plan = qcoll.explain(verb, numel, dtype)
    coded = codecs[0] != "exact" and verb not in ("all_gather", "reduce_scatter", "all_to_all")
    if not coded:
        codecs = ("exact", "exact")
    # An exact sum between the hops has the tensor's width; one of fp16 may pass 65504 and is fp32.
    between = 2 if dtype is torch.bfloat16 else 4
    case = Case(sizes, codecs, dtype.itemsize, plan["chunk_elements"], between)
    what = f"{verb} {codecs} {numel} {dtype} {sizes}"
    within, across = case.sent(verb, rank, numel)
    assert plan["wire_bytes"] == {"within_node": within, "across_nodes": across}, what
    assert counted["wire_bytes"] == plan["wire_bytes"], what
    assert counted["payload_bytes"] == plan["payload_bytes"] == numel * dtype.itemsize, what
    assert counted["calls"] == 1, what
    assert counted["fallbacks"] == ({} if coded else {plan["exact_because"]: 1}), what
    assert bool(plan["exact_because"]) != coded, what
    mates = [r for r in range(sum(sizes)) if case.place(r)[0] == case.place(rank)[0]]
    node_bytes = sum(case.sent(verb, mate, numel)[1] for mate in mates)
    assert plan["node_across_nodes_bytes"] == node_bytes, what


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_counters_equal_plan_equals_formula(sizes: tuple[int, ...]) -> None:
    pool = shared_pool(sum(sizes), list(sizes))
    pool.run(check_bytes, (sizes,), backend="qcoll", timeout=120)


def slow_link_volume(sizes: tuple[int, ...]) -> None:
    """A node sends (N-1)/N of the payload, shrunk by the crossing codec, apart from headers."""
    nodes, size = len(sizes), sizes[0]
    numel = 96 * 4096 * nodes * size  # no padding anywhere
    for codec, bits in (("int8:256", 8 + 16 / 256), ("int4:128", 4 + 16 / 128), ("exact", None)):
        for dtype in (torch.float32, torch.bfloat16):
            for verb in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                plan = qcoll.explain(verb, numel, dtype, codec=f"bf16/{codec}")
                per_element = (bits or dtype.itemsize * 8) / 8
                messages = -(-numel // (nodes * size) // plan["chunk_elements"])
                expected = numel * per_element * (nodes - 1) / nodes
                # Rails: each rank of the node sends N-1 slices, each in `messages` messages.
                headers = size * (nodes - 1) * messages * 64
                assert plan["node_across_nodes_bytes"] == expected + headers


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1), (2, 2, 2), (1, 1, 1)])
def test_slow_link_volume_is_the_contracts(sizes: tuple[int, ...]) -> None:
    shared_pool(sum(sizes), list(sizes)).run(slow_link_volume, (sizes,), backend="qcoll")


def reasons_and_sums() -> None:
    qcoll.reset_stats()
    assert qcoll.stats() == {}
    big, small = torch.ones(1 << 16, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    double = torch.ones(1 << 14, dtype=torch.float64)
    for x in (big, big, small, double, big.float()):
        dist.all_gather_into_tensor(torch.empty(2 * x.numel(), dtype=x.dtype), x)
    with qcoll.exact():
        dist.all_gather_into_tensor(torch.empty(2 << 16, dtype=torch.bfloat16), big)
    dist.all_gather_single(torch.empty(2 << 16, dtype=torch.bfloat16), big)
    counted = qcoll.stats()
    assert set(counted) == {"all_gather_into_tensor"}
    counters = counted["all_gather_into_tensor"]
    assert counters["calls"] == 7
    assert sum(counters["fallbacks"].values()) == 4
    assert counters["fallbacks"]["inside qcoll.exact()"] == 1
    assert counters["fallbacks"]["smaller than option min_bytes=65536"] == 1
    assert any("float64" in why for why in counters["fallbacks"])
    assert any("float32" in why and "all_gather_dtypes" in why for why in counters["fallbacks"])
    payload = 2 * (4 * (2 << 16) + 16 + (8 << 14) + (4 << 16))
    assert counters["payload_bytes"] == payload
    shard = encoded_bytes("int8:256", 2, 1 << 16) + 64  # in one chunk
    exact = (2 << 16) + 16 + (8 << 14) + (4 << 16)
    assert 3 * shard + exact < counters["wire_bytes"]["across_nodes"] < 3 * shard + exact + 64 * 16
    for key in ("encode_seconds", "decode_seconds", "wait_seconds"):
        assert 0 < counters[key] < 30
    other = dist.new_group(backend="qcoll")
    assert qcoll.stats(other) == {}
    assert qcoll.stats() == counted
    qcoll.reset_stats(other)
    assert qcoll.stats() == counted


def test_counters_add_up_and_name_each_reason() -> None:
    shared_pool(2, [1, 1]).run(reasons_and_sums, backend="qcoll", fresh=True)


def nonfinite() -> None:
    qcoll.reset_stats()
    x = torch.ones(1 << 16, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        x[3] = float("nan")
        x[5] = float("inf")  # the same block of 256
        x[256 * 7] = float("-inf")
        x[-1] = float("nan")
    out = torch.empty(2 << 16, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(out, x)
    assert qcoll.stats()["all_gather_into_tensor"]["nonfinite_blocks"] == 3 * (dist.get_rank() == 0)
    assert out.isnan().sum() == 3 * 256
    # On its way from rank 0 to rank 1, and only there: the own part is not encoded.
    whole = torch.zeros(1 << 17)
    if dist.get_rank() == 0:
        whole[1 << 16] = float("nan")
        whole[0] = float("nan")
    dist.reduce_scatter_tensor(torch.empty(1 << 16), whole)
    assert qcoll.stats()["reduce_scatter_tensor"]["nonfinite_blocks"] == (dist.get_rank() == 0)


def test_nonfinite_blocks_are_counted_where_they_are_encoded() -> None:
    shared_pool(2, [1, 1]).run(nonfinite, backend="qcoll")


def delegated() -> None:
    qcoll.reset_stats()
    x = torch.ones(1000)
    dist.broadcast(x, 0)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.reduce_scatter_tensor(torch.empty(500), x, op=dist.ReduceOp.MIN)
    dist.barrier()
    counted = qcoll.stats()
    expected = {"broadcast": 4000, "all_reduce": 4000, "reduce_scatter_tensor": 4000, "barrier": 0}
    assert {verb: c["payload_bytes"] for verb, c in counted.items()} == expected
    for counters in counted.values():
        assert counters["fallbacks"] == {"delegated to gloo": 1}
        assert counters["wire_bytes"] == {"within_node": 0, "across_nodes": 0}


def test_delegated_verbs_are_counted_as_such() -> None:
    shared_pool(2, [1, 1]).run(delegated, backend="qcoll")


def plans() -> None:
    if dist.get_rank() == 1:  # a plan needs nobody else
        plan = qcoll.explain("reduce_scatter_tensor", 1 << 20, torch.float32)
        assert plan["topology"] == "2 nodes x 2 ranks"
        assert [hop["level"] for hop in plan["hops"]] == ["within node", "across nodes"]
        assert [hop["codec"] for hop in plan["hops"]] == ["int8:256", "int4:128"]
        assert [hop["ranks"] for hop in plan["hops"]] == [2, 2]
        assert plan["algorithm"]
        assert plan["chunk_elements"] % 256 == 0
        assert plan["slots"] >= 2
        assert plan["exact_because"] == ""
        with qcoll.exact():
            plan = qcoll.explain("reduce_scatter_single", 1 << 20, torch.float32)
        assert plan["exact_because"] == "inside qcoll.exact()"
        assert {hop["codec"] for hop in plan["hops"]} == {"exact"}
        expect_error(
            lambda: qcoll.explain("broadcast", 8, torch.float32), '"broadcast"', "all_reduce"
        )
        expect_error(
            lambda: qcoll.explain("all_reduce", 8, torch.float32, codec="int3"), "int3", "int8"
        )
        expect_error(
            lambda: qcoll.explain("all_reduce", 8, torch.int32, codec="int8"), "int32", "float32"
        )


def test_plans_need_no_communication_and_follow_contexts() -> None:
    shared_pool(4, [2, 2]).run(plans, backend="qcoll")


def alone() -> None:
    for verb in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        codec, _ = observe(verb, dtype=torch.float32)
        assert codec == "exact"
        assert qcoll.stats()[verb]["wire_bytes"] == {"within_node": 0, "across_nodes": 0}
    plan = qcoll.explain("all_reduce", 100, torch.float32)
    assert plan["hops"] == []
    assert "world of one" in plan["algorithm"]


def test_a_world_of_one_sends_nothing() -> None:
    shared_pool(1, [1]).run(alone, backend="qcoll")
