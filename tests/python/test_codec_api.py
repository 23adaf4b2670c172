"""qcoll.encode and qcoll.decode against the rules in numpy, and the errors of a caller."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_reference import (
    FLOATS,
    Codec,
    as_float32,
    bits_of,
    blocks_of,
    decode,
    encode,
    from_bits,
    hostile_values,
    scales,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import qcoll

BLOCK_CODECS = ("int8:32", "int8", "int8:4096", "int4:32", "int4:96", "int4", "int4:4096")
CODECS = (*BLOCK_CODECS, "bf16", "exact")
LENGTHS = (*range(71), 127, 128, 129, 255, 256, 257, 511, 2305, 4095, 4096, 4097, 12289)


def check(tensor: torch.Tensor, codec: str) -> None:
    """Bytes and decoded elements equal the reference's, for every type of output."""
    values = as_float32(tensor)
    expected = encode(values, codec, tensor.dtype)
    encoded = qcoll.encode(tensor, codec)
    assert encoded.dtype == torch.uint8
    assert encoded.dim() == 1
    np.testing.assert_array_equal(encoded.numpy(), expected, err_msg=f"{codec} {tensor.dtype}")
    for dtype in (tensor.dtype,) if codec == "exact" else FLOATS:
        decoded = qcoll.decode(encoded, tensor.shape, dtype, codec)
        assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
        bits = decode(expected, tensor.numel(), dtype, codec)
        np.testing.assert_array_equal(bits_of(decoded), bits, err_msg=f"{codec} to {dtype}")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_length(dtype: torch.dtype, codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        check(torch.randn(length, generator=generator).to(dtype), codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hostile_values(dtype: torch.dtype, codec: str) -> None:
    for tensor in hostile_values(dtype, torch.Generator().manual_seed(2)):
        check(tensor, codec)


@pytest.mark.parametrize("codec", ["int8:32", "int4:32"])
def test_values_halfway_between_codes(codec: str) -> None:
    bits = Codec.of(codec).bits
    steps = torch.arange(-(2**bits), 2**bits + 1) / 2
    for scale in (1.0, 0.75, 3.0, 2.0**-100, 1.0 / 3):
        for chunk in steps.split(31):  # the first element of each block is the extreme
            check(torch.cat([torch.tensor([-(2.0 ** (bits - 1))]), chunk]) * scale, codec)


@st.composite
def arbitrary_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit patterns of any float type, most of them within a few powers of two of each other."""
    dtype = draw(st.sampled_from(FLOATS))
    width = 32 if dtype == torch.float32 else 16
    count = draw(st.integers(0, 200))
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(0, 2**width, count, dtype=np.uint64)
    mantissa = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[dtype]
    exponents = draw(st.integers(1, 6))
    top = draw(st.integers(0, (1 << (width - 1 - mantissa)) - 1))
    near = (top + (bits >> mantissa) % exponents) % (1 << (width - 1 - mantissa))
    sign_and_mantissa = bits & ((1 << (width - 1)) | ((1 << mantissa) - 1))
    unsigned = np.uint32 if width == 32 else np.uint16
    return from_bits((sign_and_mantissa | (near << mantissa)).astype(unsigned), dtype)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(arbitrary_tensors(), st.sampled_from(["int8", "int4"]), st.integers(1, 8))
def test_any_values(tensor: torch.Tensor, name: str, block: int) -> None:
    check(tensor, f"{name}:{32 * block}")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(CODECS), st.integers(0, 5))
def test_any_shape_and_storage_offset(shape: list[int], codec: str, offset: int) -> None:
    numel = int(np.prod(shape, dtype=int))
    generator = torch.Generator().manual_seed(numel)
    flat = torch.randn(numel + offset, generator=generator).to(torch.bfloat16)
    check(flat[offset:].reshape(shape), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_views_that_are_not_contiguous(codec: str) -> None:
    matrix = torch.randn(65, 34, generator=torch.Generator().manual_seed(3))
    for view in (matrix.t(), matrix[:, ::2], matrix[1:, 3:], matrix[0, 0]):
        check(view, codec)


def test_encoded_bytes_may_lie_anywhere() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    for codec in CODECS:
        encoded = qcoll.encode(tensor, codec)
        expected = bits_of(qcoll.decode(encoded, [1000], torch.float32, codec))
        shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), encoded])[3:]
        strided = torch.stack([encoded, encoded], 1)[:, 0]
        for place in (shifted, strided):
            decoded = qcoll.decode(place, [1000], torch.float32, codec)
            np.testing.assert_array_equal(bits_of(decoded), expected)


# docs/numerics.md, the promises, checked without the reference's arithmetic.


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_errors_stay_within_the_bound(dtype: torch.dtype, codec: str) -> None:
    spec = Codec.of(codec)
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    generator = torch.Generator().manual_seed(5)
    for scale in (1.0, 1e-3, 1e3):
        tensor = (torch.randn(9001, generator=generator) * scale).to(dtype)
        decoded = qcoll.decode(qcoll.encode(tensor, codec), [9001], dtype, codec)
        x = tensor.double().numpy()
        tops = np.repeat(np.abs(blocks_of(x, spec.block)).max(axis=1), spec.block)[:9001]
        s = tops / 2 ** (spec.bits - 1) * (1 + 2.0**-8)
        # What |x| rounds to above the largest positive code is clamped: the far end.
        far = np.abs(x) > (2 ** (spec.bits - 1) - 0.5) * s / (1 + 2.0**-7)
        allowed = np.where(far, 1 + 2.0 ** (spec.bits - 9), 0.5 + 2.0 ** (spec.bits - 24)) * s
        error = np.abs(decoded.double().numpy() - x)
        assert (error <= allowed + half_ulp * np.abs(x) + half_ulp * allowed + 2.0**-25).all()


@pytest.mark.parametrize(
    ("name", "block", "expected"),
    [
        ("int4", 64, 0.0949),
        ("int4", 128, 0.1031),
        ("int4", 256, 0.1108),
        ("int8", 64, 0.0059),
        ("int8", 128, 0.0064),
        ("int8", 256, 0.0069),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-30])
def test_relative_error_on_gaussian_data(
    name: str, block: int, expected: float, scale: float
) -> None:
    codec = f"{name}:{block}"
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(6)) * scale
    decoded = qcoll.decode(qcoll.encode(x, codec), x.shape, torch.float32, codec)
    difference = (decoded.double() - x.double()).norm() / x.double().norm()
    assert difference.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("codec", [*BLOCK_CODECS, "bf16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ones_and_powers_of_two_are_exact(dtype: torch.dtype, codec: str) -> None:
    for exponent in (-14, -3, 0, 1, 12):
        for sign in (1, -1):
            tensor = torch.full((777,), sign * 2.0**exponent, dtype=dtype)
            decoded = qcoll.decode(qcoll.encode(tensor, codec), [777], dtype, codec)
            assert torch.equal(decoded, tensor)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoding_what_was_decoded_changes_nothing(dtype: torch.dtype, codec: str) -> None:
    for tensor in hostile_values(dtype, torch.Generator().manual_seed(7)):
        encoded = qcoll.encode(tensor, codec)
        decoded = qcoll.decode(encoded, tensor.shape, dtype, codec)
        assert torch.equal(qcoll.encode(decoded, codec), encoded)


def test_a_bad_element_spoils_its_block_and_no_other() -> None:
    for codec in ("int8:64", "int4:64"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            tensor = torch.ones(192)
            tensor[100] = bad
            decoded = qcoll.decode(qcoll.encode(tensor, codec), [192], torch.float32, codec)
            assert decoded[64:128].isnan().all()
            assert torch.equal(decoded[:64], torch.ones(64))
            assert torch.equal(decoded[128:], torch.ones(64))


def test_a_finite_input_never_decodes_to_infinity() -> None:
    # The scale of these blocks rounds up, past the largest finite value of the output.
    for dtype in FLOATS:
        largest = torch.finfo(dtype).max
        for codec in BLOCK_CODECS:
            tensor = torch.full((100,), largest, dtype=dtype)
            decoded = qcoll.decode(qcoll.encode(tensor, codec), [100], dtype, codec)
            assert decoded.isfinite().all()
            narrow = qcoll.decode(qcoll.encode(tensor, codec), [100], torch.float16, codec)
            assert narrow.isfinite().all()


def test_blocks_below_the_limit_decode_to_positive_zero() -> None:
    for codec in ("int8:32", "int4:32"):
        limit = 2.0 ** (Codec.of(codec).bits - 126)
        below = torch.full((64,), -limit * 0.999)
        decoded = qcoll.decode(qcoll.encode(below, codec), [64], torch.float32, codec)
        assert (bits_of(decoded) == 0).all()
        at = qcoll.decode(
            qcoll.encode(torch.full((64,), -limit), codec), [64], torch.float32, codec
        )
        assert torch.equal(at, torch.full((64,), -limit))
        assert (scales(below.numpy(), Codec.of(codec)) == 0).all()


OTHERS = (torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.float64)


@pytest.mark.parametrize("dtype", [*OTHERS, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_exact_takes_every_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    raw = torch.randint(0, 2, (7, 3, 16), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)
    encoded = qcoll.encode(tensor, "exact")
    assert encoded[: raw.numel()].equal(raw.reshape(-1))
    assert not encoded[raw.numel() :].any()
    decoded = qcoll.decode(encoded, tensor.shape, dtype, "exact")
    assert decoded.dtype == dtype
    assert decoded.view(torch.uint8).equal(raw)


# Errors of the caller: the value, what was expected, the fix.


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        ("int7", "unknown codec"),
        ("", "unknown codec"),
        ("INT8", "unknown codec"),
        ("int8 ", "unknown codec"),
        ("int8:", "not a number"),
        ("int8:x", "not a number"),
        ("int8:0", "out of range"),
        ("int8:33", "out of range"),
        ("int4:4128", "out of range"),
        ("int4:99999999999", "not a number|out of range"),
        ("int4:-32", "not a number|out of range"),
        ("bf16:32", "takes no block"),
        ("exact:32", "takes no block"),
        ("int8/int4", "unknown codec|one codec|not a number"),
    ],
)
def test_a_codec_that_does_not_exist(codec: str, why: str) -> None:
    accepted = r"accepted: exact, bf16, int8\[:block\], int4\[:block\].*multiple of 32"
    for call in (
        lambda: qcoll.encode(torch.ones(4), codec),
        lambda: qcoll.decode(torch.zeros(32, dtype=torch.uint8), [4], torch.float32, codec),
    ):
        with pytest.raises(ValueError, match=f"(?s){why}") as raised:
            call()
        raised.match(f"(?s){accepted}")
        assert f'"{codec}"' in str(raised.value)


@pytest.mark.parametrize("codec", ["int8", "int4:64", "bf16"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.uint8, torch.bool], ids=str)
def test_a_dtype_that_the_codec_does_not_take(dtype: torch.dtype, codec: str) -> None:
    wanted = "float32, bfloat16 or float16"
    name = {torch.int32: "Int", torch.float64: "Double", torch.uint8: "Byte"}.get(dtype, "Bool")
    with pytest.raises(ValueError, match=wanted) as raised:
        qcoll.encode(torch.ones(4, dtype=dtype), codec)
    raised.match(name)
    raised.match(Codec.of(codec).kind)
    with pytest.raises(ValueError, match=wanted) as raised:
        qcoll.decode(torch.zeros(32, dtype=torch.uint8), [4], dtype, codec)
    raised.match(name)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_that_do_not_fit_the_shape(codec: str) -> None:
    encoded = qcoll.encode(torch.ones(100), codec)
    assert encoded.numel() % 16 == 0
    cases = [
        (encoded[:-1], [100]),
        (torch.cat([encoded, encoded[:16]]), [100]),
        (encoded, [4197]),
        (encoded, [50, 0]),
        (encoded[:0], [100]),
    ]
    for data, shape in cases:
        count = int(np.prod(shape))
        with pytest.raises(ValueError, match=f"{count} elements of Float") as raised:
            qcoll.decode(data, shape, torch.float32, codec)
        expected = len(encode(np.ones(count, np.float32), codec))
        raised.match(f"take {expected} bytes, got {data.numel()}")


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16", "exact"])
@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [2**62], [2**61, 2], [2**63 - 1], [2**32, 2**30], [2**63 - 1, 2]]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_shape_that_overflows(shape: list[int], dtype: torch.dtype, codec: str) -> None:
    for size in (0, 16):
        with pytest.raises(ValueError, match="elements"):
            qcoll.decode(torch.zeros(size, dtype=torch.uint8), shape, dtype, codec)


def test_a_shape_with_a_negative_size() -> None:
    with pytest.raises(ValueError, match="negative"):
        qcoll.decode(torch.zeros(32, dtype=torch.uint8), [-4, -1], torch.float32, "int8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
def test_encoded_bytes_of_another_type(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="uint8"):
        qcoll.decode(torch.zeros(32, dtype=dtype), [16], torch.float32, "int8")


def test_tensors_that_are_not_in_memory() -> None:
    with pytest.raises(ValueError, match="meta"):
        qcoll.encode(torch.ones(4, device="meta"), "int8")
    with pytest.raises(ValueError, match="sparse"):
        qcoll.encode(torch.eye(4).to_sparse(), "int8")
    with pytest.raises(ValueError, match="meta"):
        qcoll.decode(torch.zeros(32, dtype=torch.uint8, device="meta"), [4], torch.float32, "int8")
