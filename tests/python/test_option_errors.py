"""A setting that cannot be honoured is an error that names the key, the value and what is accepted.

From the environment and between ranks it comes at init, at once, on all ranks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_probe import expect_error, observe

import qcoll
from qcoll.testing import shared_pool
from qcoll.testing.calls import environment

CODECS = "exact, bf16, int8[:block], int4[:block]"
BLOCKS = "multiple of 32 from 32 to 4096"
KEYS = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    *("all_gather_dtypes", "min_bytes", "coalesced", "scope", "tuning"),
)
# Far below the 20 s that ranks would wait for each other.
AT_ONCE = 8.0

BAD_CODECS = (
    *("int3", "INT8", "int", "", "int8 ", "exact:32", "bf16:32", "8", "int8,int4", "int8//int4"),
    *("int8:", "int8:x", "int8:0", "int8:16", "int8:33", "int8:8192", "int8:-64", "int8:64:64"),
    *("int4:4128", "int8:99999999999999999999", "int8:256/int5", "/int8", "fp8"),
)
BAD_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "all_gather_dtypes": (
        ("fp64", "int8", ("bf16", "float64"), (torch.int8,), (torch.float64,), "bf16;fp16", 7),
        "16",  # bf16 and fp16, or torch's names of them
    ),
    "min_bytes": ((-1, "many", "64k", "", " 5", 2**70, "1e6", "-0"), "number of bytes"),
    "coalesced": (("maybe", 2, "yes", ""), "true"),
    "scope": (("node", "", "ALL", 1), "across_nodes"),
}
CODEC_KEYS = KEYS[:4]


def set_context(**settings: Any) -> None:
    with qcoll.options(**settings):
        pass


SETTERS = [qcoll.Options, set_context]


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("key", CODEC_KEYS)
@pytest.mark.parametrize("value", BAD_CODECS)
def test_bad_codecs_are_named(setter: Any, key: str, value: str) -> None:
    expect_error(lambda: setter(**{key: value}), key, f'"{value}"', CODECS, BLOCKS)


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (bad, _) in BAD_VALUES.items() for value in bad]
)
def test_bad_values_are_named(setter: Any, key: str, value: Any) -> None:
    first = value[-1] if isinstance(value, tuple) else value
    expect_error(lambda: setter(**{key: value}), key, str(first), BAD_VALUES[key][1])


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_bytes", 1.5),
        ("all_gather", b"int8"),
        ("all_gather", 8.0),
        ("all_gather_dtypes", ("bf16", 3)),
        ("all_gather_dtypes", object()),
        ("scope", ["all", 3]),
    ],
)
def test_values_of_a_wrong_type_are_named(setter: Any, key: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=key):
        setter(**{key: value})


@pytest.mark.parametrize("setter", SETTERS)
def test_blocks_that_no_chunk_can_hold_together_are_refused(setter: Any) -> None:
    text = expect_error(lambda: setter(reduce_scatter="int8:4064/int4:4096"), "reduce_scatter")
    assert "int8:4064/int4:4096" in text
    assert "32768" in text


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("key", ["allgather", "all_gather_", "ALL_GATHER", "broadcast", "codec"])
def test_unknown_keys_are_named_with_those_that_exist(setter: Any, key: str) -> None:
    expect_error(lambda: setter(**{key: "int8"}), f'"{key}"', *KEYS)


def test_good_values_are_taken() -> None:
    for codec in ("exact", "bf16", "int8", "int4", "int8:32", "int8:4096", "int4:96/int8:64"):
        for key in CODEC_KEYS:
            qcoll.Options(**{key: codec})
            set_context(**{key: codec})
    for dtypes in ("fp32", "float32,bf16", ("fp16", torch.float32), [], ("bfloat16",)):
        qcoll.Options(all_gather_dtypes=dtypes)
        set_context(all_gather_dtypes=dtypes)
    qcoll.Options(min_bytes=0, coalesced=True, scope="all")
    qcoll.Options(min_bytes=2**40, coalesced=False, scope="across_nodes")


def bad_variable_on(ranks: tuple[int, ...], name: str, value: str, parts: tuple[str, ...]) -> None:
    """Makes a group while some ranks have a bad variable; all ranks must hear of it at once."""
    start = time.monotonic()
    with environment({name: value} if dist.get_rank() in ranks else {}):
        expect_error(lambda: dist.new_group(backend="qcoll"), *parts)
    assert time.monotonic() - start < AT_ONCE
    assert observe("all_gather_into_tensor", group=dist.new_group(backend="qcoll"))[0] == "int8:256"


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0,), (2,)])
@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("QCOLL_ALL_GATHER", "int3", ("all_gather", '"int3"', CODECS)),
        ("QCOLL_REDUCE_SCATTER", "int8:100", ("reduce_scatter", "100", BLOCKS)),
        ("QCOLL_MIN_BYTES", "64k", ("min_bytes", '"64k"', "number of bytes")),
        ("QCOLL_SCOPE", "everywhere", ("scope", '"everywhere"', "across_nodes")),
        ("QCOLL_ALL_GATHER_DTYPES", "int8", ("all_gather_dtypes", '"int8"', "bf16")),
        ("QCOLL_COALESCED", "sometimes", ("coalesced", '"sometimes"', "true")),
        ("QCOLL_SOCKET_IFNAME", "nosuch7", ("QCOLL_SOCKET_IFNAME", "nosuch7", "lo")),
        ("QCOLL_NODE", "a=b", ("QCOLL_NODE", "'='")),
    ],
)
def test_a_bad_variable_fails_init_on_all_ranks(
    ranks: tuple[int, ...], name: str, value: str, parts: tuple[str, ...]
) -> None:
    pool = shared_pool(3, [2, 1])
    # Fresh: interfaces are chosen when a process makes the first of its groups.
    pool.run(bad_variable_on, (ranks, name, value, parts), backend="gloo", timeout=20, fresh=True)


def guilty_rank_is_named() -> None:
    guilty = 1
    with environment({"QCOLL_ALL_REDUCE": "int7"} if dist.get_rank() == guilty else {}):
        text = expect_error(lambda: dist.new_group(backend="qcoll"), "all_reduce", '"int7"')
    if dist.get_rank() != guilty:
        assert f"rank {guilty}" in text


def test_the_other_ranks_hear_which_rank_is_wrong() -> None:
    shared_pool(3, [2, 1]).run(guilty_rank_is_named, backend="gloo")


def misspelt_variable() -> None:
    with environment({"QCOLL_ALLGATHER": "int4"}):
        expect_error(lambda: dist.new_group(backend="qcoll"), "QCOLL_ALLGATHER", "QCOLL_ALL_GATHER")


def test_a_misspelt_variable_is_not_silently_ignored() -> None:
    shared_pool(3, [2, 1]).run(misspelt_variable, backend="gloo")


def init_with_bad_variable() -> None:
    start = time.monotonic()
    with environment({"QCOLL_ALL_TO_ALL": "int9"} if os.environ["RANK"] == "1" else {}):
        expect_error(lambda: dist.init_process_group("qcoll"), "all_to_all", '"int9"', CODECS)
    assert time.monotonic() - start < AT_ONCE


def test_init_process_group_itself_fails_on_all_ranks() -> None:
    shared_pool(2, [1, 1]).run(init_with_bad_variable, backend=None)


def different_options(key: str, values: tuple[Any, ...], spelled: tuple[str, ...]) -> None:
    start = time.monotonic()
    rank = dist.get_rank()
    own = qcoll.Options() if values[rank] is None else qcoll.Options(**{key: values[rank]})
    text = expect_error(
        lambda: dist.new_group(backend="qcoll", pg_options=own),
        *(key, "rank 0", "disagree", *(f'"{value}"' for value in spelled)),
    )
    other = next(r for r, value in enumerate(values) if value != values[0])
    assert f"rank {other}" in text
    assert time.monotonic() - start < AT_ONCE
    assert observe("all_gather_into_tensor", group=dist.new_group(backend="qcoll"))[0] == "int8:256"


@pytest.mark.parametrize(
    ("key", "values", "spelled"),
    [
        ("all_gather", ("int8:64", "int4:64", "int8:64"), ("int8:64", "int4:64")),
        ("reduce_scatter", (None, None, "int8:64"), ("int8:256/int4:128", "int8:64")),
        ("all_reduce", ("int8", None, None), ("int8:256", "exact")),
        ("all_to_all", (None, "bf16", None), ("exact", "bf16")),
        ("all_gather_dtypes", (None, "fp32,bf16", None), ("float32,bfloat16", "bfloat16,float16")),
        ("min_bytes", (1, 1, 2), ("1", "2")),
        ("coalesced", (True, None, True), ("1", "0")),
        ("scope", (None, None, "all"), ("across_nodes", "all")),
    ],
)
def test_different_options_are_named_on_all_ranks(
    key: str, values: tuple[Any, ...], spelled: tuple[str, ...]
) -> None:
    pool = shared_pool(3, [2, 1])
    pool.run(different_options, (key, values, spelled), backend="gloo", timeout=20)


def one_spelling_in_two_ways() -> None:
    """The same meaning, spelled and given in different ways: no disagreement."""
    rank = dist.get_rank()
    own = None if rank == 0 else qcoll.Options(all_gather=("int4:128", "int4")[rank - 1])
    with environment({"QCOLL_ALL_GATHER": "int4"} if rank == 0 else {}):
        group = dist.new_group(backend="qcoll", pg_options=own)
    assert observe("all_gather_into_tensor", group=group)[0] == "int4:128"


def test_equal_settings_of_different_origin_agree() -> None:
    shared_pool(3, [2, 1]).run(one_spelling_in_two_ways, backend="gloo")
