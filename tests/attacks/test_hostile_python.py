"""What Python hands to qcoll from outside: encoded bytes, shapes, codecs, options, variables.

Either the result is right, by a decoder written here from docs/wire_format.md, or the documented
exception is raised: ValueError for values, TypeError where Python's own types are wrong. Anything
else fails, and a crash ends the whole run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

import qcoll

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.float64, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool)
CODEC = re.compile(r"(int8|int4)(?::([0-9]+))?|bf16|exact")
KEYS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OTHER_KEYS = ("all_gather_dtypes", "min_bytes", "coalesced", "scope")
quick = settings(max_examples=400, deadline=None, derandomize=True)

# Any text, with what breaks parsers: separators, digits, zero bytes, and lone surrogates.
texts = st.text(
    st.one_of(st.sampled_from("int48bf16exact:/,= \n\0-+.0123456789"), st.characters()), max_size=24
) | st.text(st.characters(categories=["Cs", "Nd", "Lu"]), max_size=4)
spelled = st.sampled_from(["int8", "int4", "bf16", "exact", "INT8", "int8:", ""])
numbers = st.sampled_from([32, 64, 96, 256, 4064, 4096, 0, 31, 8192, -32, 2**64 + 32])
codecs = st.one_of(spelled, st.builds("{}:{}".format, spelled, numbers), texts)


def good(codec: str) -> bool:
    """Whether docs/wire_format.md has this codec."""
    match = CODEC.fullmatch(codec)
    if match is None:
        return False
    block = int(match[2]) if match[2] else 256
    # Leading zeros are read as C++ reads them.
    return 32 <= block <= 4096 and block % 32 == 0


def chunk_bytes(codec: str, count: int, element: int) -> int:
    """The length of a chunk, by the table in docs/wire_format.md."""
    name, _, digits = codec.partition(":")
    block = int(digits) if digits else {"int8": 256, "int4": 128}.get(name, 1)
    payload = {
        "exact": count * element,
        "bf16": 2 * count,
        "int8": count,
        "int4": 16 * math.ceil(count / 32),
    }[name]
    scales = math.ceil(count / block) if name.startswith("int") else 0
    return 16 * math.ceil(payload / 16) + 16 * math.ceil(2 * scales / 16)


def decoded(data: np.ndarray, codec: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a chunk, by docs/wire_format.md; NaN wherever its block is bad."""
    name, _, digits = codec.partition(":")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if name == "exact":
        raw = data[: count * dtype.itemsize].copy()
        return torch.from_numpy(raw).view(dtype)
    limit = torch.finfo(dtype).max
    if name == "bf16":
        values = torch.from_numpy(data[: 2 * count].copy()).view(torch.bfloat16).float()
        return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
    block = int(digits) if digits else {"int8": 256, "int4": 128}[name]
    blocks = math.ceil(count / block)
    if name == "int8":
        codes = data[:count].view(np.int8).astype(np.float32)
    else:
        groups = data[: 16 * math.ceil(count / 32)].reshape(-1, 16)
        nibbles = np.concatenate([groups & 15, groups >> 4], axis=1).reshape(-1)[:count]
        codes = np.where(nibbles < 8, nibbles, nibbles.astype(np.int32) - 16).astype(np.float32)
    at = chunk_bytes(codec, count, 1) - 16 * math.ceil(2 * blocks / 16)
    scales = torch.from_numpy(data[at : at + 2 * blocks].copy()).view(torch.bfloat16).float()
    each = scales.repeat_interleave(block)[:count]
    # In double precision: where the product leaves float32, it is clamped all the same.
    product = (torch.from_numpy(codes).double() * each.double()).clamp(-limit, limit)
    return torch.where(each.isfinite(), product, math.nan).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; any bit for types without arithmetic."""
    if a.dtype in FLOATS:
        return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
    return a.view(torch.uint8).equal(b.view(torch.uint8))


@st.composite
def chunks(draw: st.DrawFn) -> tuple[bytes, list[int], torch.dtype, str]:
    """Arguments of decode; half of the time the length is right."""
    codec = draw(codecs)
    dtype = draw(st.sampled_from((*FLOATS, *FLOATS, *OTHERS)))
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    length = draw(st.integers(0, 200))
    if draw(st.booleans()) and good(codec):
        length = chunk_bytes(codec, math.prod(shape), dtype.itemsize)
    if draw(st.integers(0, 9)) == 0:
        shape = draw(st.lists(st.integers(-(2**65), 2**65), min_size=1, max_size=3))
    pattern = draw(st.binary(min_size=1, max_size=64))
    return (pattern * (length // len(pattern) + 1))[:length], shape, dtype, codec


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def foreign(text: object) -> bool:
    """Whether Python itself cannot pass the text on: it has surrogates."""
    return any("\ud800" <= c <= "\udfff" for c in str(text))


@quick
@given(chunks())
def test_decode_of_anything(chunk: tuple[bytes, list[int], torch.dtype, str]) -> None:
    data, shape, dtype, codec = chunk
    array = np.frombuffer(bytearray(data), np.uint8) if data else np.empty(0, np.uint8)
    suits = good(codec) and (codec == "exact" or dtype in FLOATS) and min(shape, default=0) >= 0
    fits = suits and len(data) == chunk_bytes(codec, math.prod(shape), dtype.itemsize)
    result = outcome(lambda: qcoll.decode(torch.from_numpy(array), shape, dtype, codec))
    if isinstance(result, TypeError):
        assert foreign(codec) or any(not -(2**63) <= size < 2**63 for size in shape), result
    elif not fits:
        assert type(result) is ValueError, result
    else:
        assert isinstance(result, torch.Tensor), result
        assert (list(result.shape), result.dtype) == (shape, dtype)
        assert same(result.reshape(-1), decoded(array, codec, math.prod(shape), dtype))


@quick
@given(
    st.sampled_from(["exact", "int8", "int4:64", "bf16"]),
    st.sampled_from([*FLOATS, *OTHERS]),
    st.sampled_from([*FLOATS, *OTHERS]),
    st.integers(1, 3),
)
def test_decode_of_other_tensors(
    codec: str, given_dtype: torch.dtype, dtype: torch.dtype, dims: int
) -> None:
    """Bytes must be uint8, and none are taken for no elements."""
    data = torch.zeros([2] * dims, dtype=given_dtype).transpose(0, -1)
    with pytest.raises(ValueError, match="decode"):
        qcoll.decode(data, [0], dtype, codec)


@pytest.mark.parametrize("data", [None, b"bytes", [1, 2], np.zeros(16, np.uint8), "text", 7])
def test_decode_of_no_tensor(data: Any) -> None:
    with pytest.raises(TypeError):
        qcoll.decode(data, [16], torch.float32, "int8")


@pytest.mark.parametrize("shape", [None, 7, "16", [1.5], [None], [[16]], {"a": 1}])
def test_decode_to_no_shape(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        qcoll.decode(torch.zeros(32, dtype=torch.uint8), shape, torch.float32, "int8")


def enter(**given_options: Any) -> None:
    with qcoll.options(**given_options):
        pass


@pytest.mark.parametrize("setter", [qcoll.Options, enter])
@quick
@given(st.sampled_from(KEYS), st.lists(codecs, min_size=1, max_size=4))
def test_any_codec_list(setter: Callable[..., Any], key: str, entries: Sequence[str]) -> None:
    text = "/".join(entries)
    result = outcome(lambda: setter(**{key: text}))
    if isinstance(result, TypeError):
        assert foreign(text), result
    elif isinstance(result, Exception):
        assert type(result) is ValueError, result
        assert key in str(result)
        # Blocks without a common multiple that fits a chunk are refused as well.
        blocks = [int(item.partition(":")[2] or "32") for item in text.split("/") if good(item)]
        assert len(blocks) < len(text.split("/")) or math.lcm(*blocks) > 4096
    else:
        assert all(map(good, text.split("/")))


values = st.one_of(
    texts,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
    st.lists(st.sampled_from(["bf16", "fp16", "fp32", "fp64", torch.bfloat16, torch.int8, 3])),
)


@quick
@given(st.dictionaries(st.sampled_from([*KEYS, *OTHER_KEYS, "nonsense"]), values, max_size=3))
def test_any_option(options: dict[str, Any]) -> None:
    result = outcome(lambda: qcoll.Options(**options))
    if isinstance(result, TypeError):
        assert any(map(foreign, options.values())), result
    elif isinstance(result, Exception):
        assert type(result) is ValueError, result
        assert any(key in str(result) for key in options)


def form_group() -> qcoll.Communicator:
    """A world of one, which reads the environment as every group does."""
    return qcoll.Communicator(HashStore(), 0, 1, timeout=timedelta(seconds=20))


VARIABLES = [f"QCOLL_{key.upper()}".encode() for key in (*KEYS, *OTHER_KEYS)]
VARIABLES += [b"QCOLL_NODE", b"QCOLL_SHM", b"QCOLL_SOCKET_IFNAME", b"QCOLL_NOSUCH", b"QCOLL_\xff"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(VARIABLES),
    st.one_of(
        codecs.map(lambda text: text.encode(errors="surrogatepass")),
        st.binary(max_size=12),
        st.sampled_from([b"1", b"0", b"all", b"bf16,fp16", b"65536", b"lo", b"a/b", b"/" * 5000]),
    ),
)
def test_any_variable(name: bytes, value: bytes) -> None:
    value = value.replace(b"\0", b"")  # which no environment holds
    before = os.environb.get(name)
    os.environb[name] = value
    try:
        result = outcome(form_group)
    finally:
        if before is None:
            del os.environb[name]
        else:
            os.environb[name] = before
    if isinstance(result, Exception):
        # A UnicodeDecodeError would be one too, but it names nothing.
        assert type(result) is ValueError, result
        key = name.removeprefix(b"QCOLL_").decode(errors="backslashreplace").lower()
        assert key in str(result).lower()
    del result
    form_group()  # the next one does not suffer
