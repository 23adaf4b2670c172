"""The codecs in numpy, written from the rules (docs/numerics.md, docs/wire_format.md) alone.

It shares no code with the package and is vectorised only so that tests stay short. Values are fp32
arrays and results are bit patterns, so that NaN and signed zeros can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = {torch.float32: 0x7F7FFFFF, torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}
CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
#: Relative rounding error of a cast to the type, and the spacing of its subnormals.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUBNORMAL = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@dataclass(frozen=True)
class Codec:
    """A codec's name taken apart; ``bits`` and ``block`` are 0 for "bf16" and "exact"."""

    kind: str
    bits: int = 0
    block: int = 0

    @classmethod
    def of(cls, text: str) -> Codec:
        name, _, block = text.partition(":")
        if name in ("bf16", "exact"):
            return cls(name)
        default = {"int8": "256", "int4": "128"}[name]
        return cls("int", int(name[3:]), int(block or default))


def as_float32(tensor: torch.Tensor) -> Floats:
    """The elements, flat, widened exactly."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        high = flat.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (high << 16).view(np.float32)
    return flat.numpy().astype(np.float32)


def bits_of(tensor: torch.Tensor) -> Bits:
    """The elements' bit patterns, flat."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.element_size() == 4:
        return flat.view(torch.int32).numpy().view(np.uint32)
    return flat.view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """The flat tensor with these bit patterns."""
    signed = np.ascontiguousarray(bits).view(np.int32 if bits.dtype.itemsize == 4 else np.int16)
    return torch.from_numpy(signed.copy()).view(dtype)


def _to_bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Nearest even; not for NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _quiet_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), (bits >> 16) | 0x40, _to_bf16_bits(values)).astype(np.uint16)


def _saturate(values: Floats, dtype: torch.dtype) -> Floats:
    """Finite values at most the type's largest; Inf and NaN pass."""
    limit = np.array(LARGEST[dtype], np.uint32).view(np.float32)
    return np.where(np.isfinite(values), np.clip(values, -limit, limit), values)


def cast(values: Floats, dtype: torch.dtype) -> Bits:
    """Bit patterns of the values in ``dtype``, rounded to nearest even."""
    if dtype == torch.float32:
        return values.view(np.uint32)
    if dtype == torch.bfloat16:
        return _quiet_bf16(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _padded(data: Bytes) -> Bytes:
    return np.concatenate([data, np.zeros(-len(data) % 16, np.uint8)])


def blocks_of(values: npt.NDArray[np.generic], block: int) -> npt.NDArray[np.generic]:
    """One row for each block, the last one filled up with zeros."""
    return np.concatenate([values, np.zeros(-len(values) % block, values.dtype)]).reshape(-1, block)


def scales(values: Floats, codec: Codec) -> npt.NDArray[np.uint16]:
    """The bf16 scale of each block: 0 for tiny blocks, 0x7fc0 for blocks with NaN or Inf."""
    bits = blocks_of(values.view(np.uint32), codec.block)
    magnitude = bits & 0x7FFFFFFF
    top = magnitude.max(axis=1)
    has_plus = ((magnitude == top[:, None]) & (bits < 0x80000000)).any(axis=1)
    extreme = np.where(has_plus, top, top | 0x80000000).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        quotient = (extreme.astype(np.float64) / -(2.0 ** (codec.bits - 1))).astype(np.float32)
    finite = np.where(top < (codec.bits + 1) << 23, 0, _to_bf16_bits(quotient))
    return np.where(top >= 0x7F800000, 0x7FC0, finite).astype(np.uint16)


def _scale_values(scale_bits: npt.NDArray[np.uint16]) -> Floats:
    return (scale_bits.astype(np.uint32) << 16).view(np.float32)


def _codes(values: Floats, scale_bits: npt.NDArray[np.uint16], codec: Codec) -> Floats:
    s = _scale_values(scale_bits)[:, None]
    usable = np.isfinite(s) & (s != 0)
    low = -(2 ** (codec.bits - 1))
    with np.errstate(all="ignore"):
        reciprocal = np.float32(1) / np.where(usable, s, np.float32(1))
        product = np.where(usable, blocks_of(values, codec.block), np.float32(0)) * reciprocal
    assert product.dtype == np.float32
    return np.clip(np.rint(product), low, -low - 1).reshape(-1)[: len(values)]


def encode(values: Floats, text: str, dtype: torch.dtype = torch.float32) -> Bytes:
    """The chunk of ``values``; the type that they were widened from matters to "exact" alone."""
    codec = Codec.of(text)
    if codec.kind == "exact":
        return _padded(cast(values, dtype).view(np.uint8))
    if codec.kind == "bf16":
        bounded = _saturate(values, torch.bfloat16)
        return _padded(_quiet_bf16(bounded).view(np.uint8))
    scale_bits = scales(values, codec)
    codes = _codes(values, scale_bits, codec).astype(np.int8).view(np.uint8)
    if codec.bits == 4:
        groups = blocks_of(codes & 15, 32)
        codes = (groups[:, :16] | (groups[:, 16:] << 4)).reshape(-1)
    return np.concatenate([_padded(codes), _padded(scale_bits.view(np.uint8))])


def decode(chunk: Bytes, count: int, dtype: torch.dtype, text: str) -> Bits:
    """The bit patterns of ``count`` decoded elements of ``dtype``."""
    codec = Codec.of(text)
    if codec.kind == "exact":
        width = 4 if dtype == torch.float32 else 2
        return chunk[: count * width].view(np.uint32 if width == 4 else np.uint16)
    if codec.kind == "bf16":
        high = chunk[: 2 * count].view(np.uint16).astype(np.uint32)
        return cast(_saturate((high << 16).view(np.float32), dtype), dtype)
    if codec.bits == 4:
        size = -(-count // 32) * 16
        packed = chunk[:size].reshape(-1, 16)
        nibbles = np.concatenate([packed & 15, packed >> 4], axis=1).reshape(-1)[:count]
        codes = (nibbles.astype(np.int8) ^ 8) - 8
    else:
        size = count
        codes = chunk[:size].view(np.int8)
    number = -(-count // codec.block)
    at = -(-size // 16) * 16
    s = _scale_values(chunk[at : at + 2 * number].view(np.uint16))
    s = np.repeat(s, codec.block)[:count]
    with np.errstate(all="ignore"):
        values = np.where(codes == 0, np.float32(0), codes.astype(np.float32) * s)
    limit = np.array(LARGEST[dtype], np.uint32).view(np.float32)
    bits = cast(np.clip(values, -limit, limit).astype(np.float32), dtype)
    return np.where(np.isfinite(s), bits, CANONICAL_NAN[dtype]).astype(bits.dtype)


def round_trip(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """What a receiver sees of a tensor that is encoded as one run of blocks."""
    if text == "exact":
        return tensor.clone()
    values = as_float32(tensor)
    chunk = encode(values, text, tensor.dtype)
    bits = decode(chunk, len(values), tensor.dtype, text)
    return from_bits(bits, tensor.dtype).reshape(tensor.shape)


def error_bound(
    largest: npt.NDArray[np.float64], text: str, dtype: torch.dtype
) -> npt.NDArray[np.float64]:
    """How far one encoding may move an element whose block has ``largest`` as its greatest
    magnitude, stored as ``dtype``.

    docs/numerics.md: at most (1 + 2^(B-9))|s|, s being the largest magnitude / 2^(B-1) rounded to
    bf16; a block below 2^(B-126) decodes to zero; plus half an ulp of the output type.
    """
    codec = Codec.of(text)
    rounding = largest * ROUNDOFF[dtype] + SUBNORMAL[dtype] / 2
    if codec.kind == "exact":
        return np.zeros_like(largest)
    if codec.kind == "bf16":
        return largest * 2.0**-8 + SUBNORMAL[torch.bfloat16] / 2 + rounding
    s = largest / 2.0 ** (codec.bits - 1) * (1 + 2.0**-8)
    tiny = np.minimum(largest, 2.0 ** (codec.bits - 126))
    return np.maximum((1 + 2.0 ** (codec.bits - 9)) * s, tiny) + rounding


def block_maxima(values: npt.NDArray[np.float64], block: int) -> npt.NDArray[np.float64]:
    """For each element the greatest magnitude in its block, blocks counted from the start."""
    tops = np.abs(blocks_of(values, block)).max(axis=1)
    return np.repeat(tops, block)[: len(values)]


def window_maxima(values: npt.NDArray[np.float64], block: int) -> npt.NDArray[np.float64]:
    """For each element the greatest magnitude in any block that could hold it, wherever blocks
    begin."""
    if len(values) == 0:
        return values
    padded = np.pad(np.abs(values), block - 1)
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * block - 1).max(axis=1)


def hostile_values(dtype: torch.dtype, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """Tensors of a few blocks each that break careless codecs."""
    normal = torch.randn(700, generator=generator)
    spread = normal * torch.logspace(-38, 38, 700)
    nearly = torch.full((700,), 65504.0)
    lists = [normal, normal * 1e-5, normal * 1e-30, normal * 1e-40, spread, -nearly, nearly]
    for value in (1e30, 65520.0, 1e-3, 1e-5, 1e-40, 3e38, -3e38, 3.4028235e38, -0.0, 6e-8):
        lists.append(torch.tensor([value]).repeat(300))
        outlier = torch.ones(700)
        outlier[[0, 517]] = torch.tensor(value)
        lists.append(outlier)
    for value in (float("nan"), float("inf"), float("-inf")):
        poisoned = normal.clone()
        poisoned[[3, 260]] = value
        lists.append(poisoned)
    # The limits below which a block is zero, and both signs attaining the extreme.
    for bits in (4, 8):
        limit = 2.0 ** (bits - 126)
        lists += [torch.full((40,), limit), torch.full((40,), limit * (1 - 2.0**-24))]
    lists.append(torch.tensor([-1.0, 1.0, 0.5, -0.5] * 20))
    lists.append(torch.tensor([1.0, -1.0, 0.25, -0.25] * 20))
    return [values.to(dtype) for values in lists]
