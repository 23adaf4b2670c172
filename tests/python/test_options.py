"""The options of a group: defaults, where they come from, which one wins, and what they apply to.

Every choice is read from a real call: plan, statistics and data must tell the same (policy_probe).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_probe import DEFAULT_OF, NUMEL, OPTION_OF, choices, observe

import qcoll
from qcoll.testing import shared_pool

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def two_nodes(function: Any, *args: Any, **how: Any) -> list[Any]:
    """``function`` on two nodes of one rank each, in a qcoll group."""
    return shared_pool(2, [1, 1]).run(function, args, backend="qcoll", **how)


def defaults() -> None:
    assert observe(GATHER, dtype=torch.bfloat16) == ("int8:256", "")
    assert observe(GATHER, dtype=torch.float16) == ("int8:256", "")
    codec, because = observe(GATHER, dtype=torch.float32)
    assert codec == "exact"
    assert "all_gather_dtypes" in because
    assert "float32" in because
    for dtype in FLOATS:
        assert observe(SCATTER, dtype=dtype) == ("int4:128", "")
        for verb in ("all_reduce", "all_to_all_single"):
            codec, because = observe(verb, dtype=dtype)
            assert codec == "exact"
            assert OPTION_OF[verb] in because
    for verb in OPTION_OF:
        others = (torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
        for dtype in others if "reduce" not in verb else ():
            codec, because = observe(verb, dtype=dtype)
            assert codec == "exact"
            assert str(dtype).removeprefix("torch.") in because
    assert observe(GATHER, numel=256)[1] == "smaller than option min_bytes=65536"


def test_defaults_are_the_zeropp_recipe_made_safe() -> None:
    two_nodes(defaults)


def on_two_by_two() -> None:
    assert observe(SCATTER) == ("int8:256/int4:128", "")
    # A gathered shard is encoded once, with the codec of the level that crosses nodes.
    assert observe(GATHER)[1] == ""
    assert observe(SCATTER, codec="bf16/int8:64") == ("bf16/int8:64", "")
    assert observe(SCATTER, codec="int8:64") == ("int8:64/int8:64", "")
    assert observe(SCATTER, codec="exact/int4:32") == ("exact/int4:32", "")
    assert observe(SCATTER, codec="int8:32/exact") == ("int8:32/exact", "")


def test_one_codec_for_each_level_inner_hop_first() -> None:
    shared_pool(4, [2, 2]).run(on_two_by_two, backend="qcoll")


def one_of_each_layer(expected_without_call: str) -> None:
    for verb, key in OPTION_OF.items():
        assert observe(verb)[0] == expected_without_call, verb
        assert observe(verb, codec="int4:32")[0] == "int4:32", verb
        with qcoll.options(**{key: "int4:64"}):
            assert observe(verb)[0] == "int4:64", verb
            assert observe(verb, codec="int4:32")[0] == "int4:32", verb
            with qcoll.exact():
                assert observe(verb) == ("exact", "inside qcoll.exact()"), verb
                assert observe(verb, codec="int4:32")[0] == "int4:32", verb
            assert observe(verb, codec="exact") == ("exact", 'codec="exact" in the call')
        assert observe(verb)[0] == expected_without_call, verb


ALL_INT8_64 = dict.fromkeys(OPTION_OF.values(), "int8:64")
ENVIRONMENT = {f"QCOLL_{key.upper()}": "int8:128" for key in OPTION_OF.values()}


def test_call_beats_context_beats_options_beats_environment() -> None:
    two_nodes(one_of_each_layer, "int8:64", pg_options=ALL_INT8_64, env=ENVIRONMENT)
    two_nodes(one_of_each_layer, "int8:128", env=ENVIRONMENT)
    two_nodes(one_of_each_layer, "int8:64", pg_options=ALL_INT8_64)


def untouched_keys_keep_their_source() -> None:
    expected = {**DEFAULT_OF, GATHER: "int8:32", "all_reduce": "int8:96"}
    assert choices() == expected
    with qcoll.options(all_to_all="int4:96"):
        assert choices() == {**expected, "all_to_all_single": "int4:96"}


def test_layers_combine_key_by_key() -> None:
    env = {"QCOLL_ALL_REDUCE": "int8:96", "QCOLL_ALL_GATHER": "int4"}
    two_nodes(untouched_keys_keep_their_source, pg_options={"all_gather": "int8:32"}, env=env)


def other_keys(layer: str) -> None:
    """The keys that no call argument has, given by ``layer`` or weaker; contexts beat them."""
    assert observe(GATHER, dtype=torch.float32)[0] == "int8:256"
    assert observe(GATHER, dtype=torch.float16)[0] == "exact"
    limit = {"options": 3000, "environment": 5000}[layer]
    for dtype in (torch.float32, torch.bfloat16):
        fits = limit // dtype.itemsize
        assert observe(SCATTER, numel=fits, dtype=dtype)[1] == ""
        assert observe(SCATTER, numel=fits - 2, dtype=dtype)[0] == "exact"
    with qcoll.options(all_gather_dtypes=("fp16", torch.bfloat16), min_bytes=0):
        assert observe(GATHER, dtype=torch.float32)[0] == "exact"
        assert observe(GATHER, dtype=torch.float16)[0] == "int8:256"
        assert observe(GATHER, numel=64)[1] == ""
    with qcoll.options(all_gather_dtypes=()):
        for dtype in FLOATS:
            assert observe(GATHER, dtype=dtype)[0] == "exact"


def test_dtypes_and_min_bytes_come_from_every_layer() -> None:
    env = {"QCOLL_ALL_GATHER_DTYPES": "fp32,bf16", "QCOLL_MIN_BYTES": "5000"}
    two_nodes(other_keys, "environment", env=env)
    options = {"all_gather_dtypes": (torch.float32,), "min_bytes": 3000}
    two_nodes(other_keys, "options", pg_options=options, env={"QCOLL_MIN_BYTES": "7"})


def boundary_of_min_bytes() -> None:
    # Counted on the gathered or unreduced tensor: 64 KiB are 32768 bf16 elements over both ranks.
    for verb in (GATHER, SCATTER):
        assert observe(verb, numel=32768)[1] == ""
        assert observe(verb, numel=32766)[1] == "smaller than option min_bytes=65536"
    with qcoll.options(all_reduce="int8", all_to_all="int8"):
        assert observe("all_reduce", numel=32768)[1] == ""
        assert observe("all_reduce", numel=32767 - 1)[1] == "smaller than option min_bytes=65536"
        # Splits may differ between ranks, so that sizes cannot decide.
        assert observe("all_to_all_single", numel=64)[1] == ""
    assert observe(SCATTER, numel=16384, dtype=torch.float32)[1] == ""
    assert observe(SCATTER, numel=16382, dtype=torch.float32)[0] == "exact"
    assert observe(GATHER, numel=64, codec="int8:32")[1] == ""


def test_min_bytes_counts_the_gathered_or_unreduced_tensor() -> None:
    two_nodes(boundary_of_min_bytes)


def inside_one_node(world: int) -> None:
    reason = "group inside one node (option scope=across_nodes)"
    for verb in (GATHER, SCATTER):
        assert observe(verb) == ("exact", reason)
        with qcoll.options(scope="all"):
            assert observe(verb)[0].startswith("int8")
        assert observe(verb, codec="int4:64") == ("int4:64", "")
    assert dist.get_world_size() == world


@pytest.mark.parametrize("world", [2, 3])
def test_groups_inside_one_node_are_exact_unless_scope_says_all(world: int) -> None:
    shared_pool(world, [world]).run(inside_one_node, (world,), backend="qcoll")


def scope_all() -> None:
    assert observe(SCATTER) == ("int8:256", "")
    with qcoll.options(scope="across_nodes"):
        assert observe(SCATTER)[0] == "exact"


@pytest.mark.parametrize("layer", ["options", "environment"])
def test_scope_comes_from_every_layer(layer: str) -> None:
    given: dict[str, Any] = (
        {"pg_options": {"scope": "all"}} if layer == "options" else {"env": {"QCOLL_SCOPE": "all"}}
    )
    shared_pool(2, [2]).run(scope_all, backend="qcoll", **given)


def subgroups_of_one_node_are_exact() -> None:
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1], backend="qcoll"), dist.new_group([2, 3], backend="qcoll")]
    across = [dist.new_group([0, 2], backend="qcoll"), dist.new_group([1, 3], backend="qcoll")]
    assert observe(GATHER, group=inside[rank // 2])[0] == "exact"
    assert observe(GATHER, group=across[rank % 2])[0] == "int8:256"


def test_scope_is_about_the_group_not_the_job() -> None:
    shared_pool(4, [2, 2]).run(subgroups_of_one_node_are_exact, backend="qcoll", fresh=True)


def list_and_coalesced_forms(coded: bool) -> None:
    world = dist.get_world_size()
    part = torch.randn(NUMEL).to(torch.bfloat16)
    whole = torch.randn(NUMEL * world).to(torch.bfloat16)

    def only(verb: str) -> list[str]:
        counted = qcoll.stats()
        assert set(counted) == {verb}, counted
        qcoll.reset_stats()
        return list(counted[verb]["fallbacks"])

    qcoll.reset_stats()
    dist.all_gather([torch.empty_like(part) for _ in range(world)], part)
    assert only("all_gather") == ["list form"]
    dist.reduce_scatter(torch.empty_like(part), list(whole.chunk(world)))
    assert only("reduce_scatter") == ["list form"]
    dist.all_to_all([torch.empty_like(part) for _ in range(world)], list(whole.chunk(world)))
    assert only("all_to_all") == ["list form"]
    why = [] if coded else ["coalesced verb (option coalesced is off)"]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(torch.empty_like(whole), part)
    manager.wait()
    assert only("all_gather_into_tensor_coalesced") == why
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_tensor(torch.empty_like(part), whole)
    manager.wait()
    assert only("reduce_scatter_tensor_coalesced") == why
    with qcoll.options(coalesced=not coded), dist._coalescing_manager():
        dist.all_gather_into_tensor(torch.empty_like(whole), part)
    assert bool(only("all_gather_into_tensor_coalesced")) == coded
    with qcoll.options(all_reduce="int8"), dist._coalescing_manager():
        dist.all_reduce(whole)
    assert only("all_reduce_coalesced") == why


def test_lists_and_coalesced_verbs_are_exact_unless_asked_for() -> None:
    two_nodes(list_and_coalesced_forms, False)
    two_nodes(list_and_coalesced_forms, True, pg_options={"coalesced": True})
    two_nodes(list_and_coalesced_forms, True, env={"QCOLL_COALESCED": "true"})


def groups_of_their_own() -> None:
    options = qcoll.Options(all_gather="int4:64")
    special = dist.new_group(backend="qcoll", pg_options=options)
    again = dist.new_group(backend="qcoll", pg_options=options)  # one object for several groups
    plain = dist.new_group(backend="qcoll")
    assert observe(GATHER, group=special)[0] == observe(GATHER, group=again)[0] == "int4:64"
    assert observe(GATHER, group=plain)[0] == "int8:256"  # torch: new_group inherits no options
    assert observe(GATHER)[0] == "int8:32"
    assert options.given == {"all_gather": "int4:64"}
    assert repr(options) == "qcoll.Options(all_gather='int4:64')"


def test_every_group_has_its_own_options() -> None:
    two_nodes(groups_of_their_own, pg_options={"all_gather": "int8:32"}, fresh=True)


def foreign_options() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = dist.new_group(backend="qcoll", pg_options=dist.ProcessGroupGloo._Options())
    texts = [str(w.message) for w in caught if "qcoll" in str(w.message)]
    assert len(texts) == 1, texts
    assert "_Options" in texts[0]
    assert "qcoll.Options" in texts[0]
    assert {verb: observe(verb, group=group)[0] for verb in OPTION_OF} == DEFAULT_OF


def test_options_of_another_backend_are_ignored_with_a_warning() -> None:
    two_nodes(foreign_options, fresh=True)


def empty_variables() -> None:
    assert os.environ["QCOLL_ALL_GATHER"] == ""
    assert choices() == DEFAULT_OF


def test_empty_variables_count_as_unset() -> None:
    names = [f"QCOLL_{key.upper()}" for key in (*OPTION_OF.values(), "min_bytes", "scope")]
    two_nodes(empty_variables, env=dict.fromkeys(names, ""))
