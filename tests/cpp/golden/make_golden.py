"""Writes the golden vectors of the block codecs, from the text of docs/numerics.md alone.

    python make_golden.py

Uses numpy and nothing of qcoll. Every file holds one chunk for each of several inputs, as lines

    codec dtype count input-hex chunk-hex decoded-hex

where a hex string is the bytes in memory order, little endian, and the decoded elements have the
type of the input. The files are part of the wire format's definition: a change of them is a new
version of the format.
"""

from pathlib import Path

import numpy as np

F32, BF16, F16 = "float32", "bfloat16", "float16"
LARGEST = {F32: 3.4028234663852886e38, BF16: 3.3895313892515355e38, F16: 65504.0}
CANONICAL_NAN = {F32: 0x7FC00000, BF16: 0x7FC0, F16: 0x7E00}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Nearest even, for finite values."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values_of(dtype: str, bits: np.ndarray) -> np.ndarray:
    if dtype == F32:
        return bits.view(np.float32)
    if dtype == BF16:
        return bf16_values(bits)
    return bits.view(np.float16).astype(np.float32)


def bits_of(dtype: str, values: np.ndarray) -> np.ndarray:
    """Values as bits of a type; float64 to fp16 directly would round once, as it must."""
    if dtype == F32:
        return values.astype(np.float32).view(np.uint32)
    if dtype == BF16:
        return bf16_bits(values)
    return values.astype(np.float32).astype(np.float16).view(np.uint16)


def encode_block(width: int, x: np.ndarray) -> tuple[int, np.ndarray]:
    """The scale as bf16 bits, and the codes."""
    zeros = np.zeros(len(x), np.int64)
    if not np.all(np.isfinite(x)):
        return 0x7FC0, zeros
    wide = x.astype(np.float64)
    top = np.max(np.abs(wide))
    m = top if np.any(wide == top) else -top
    if top < 2.0 ** (width - 126):
        return 0, zeros
    scale_bits = bf16_bits(np.array([m / -(2.0 ** (width - 1))]))
    scale = bf16_values(scale_bits)[0]
    reciprocal = np.float32(1) / scale
    codes = np.rint(x * reciprocal).astype(np.int64)
    return int(scale_bits[0]), np.clip(codes, -(2 ** (width - 1)), 2 ** (width - 1) - 1)


def pack(width: int, codes: np.ndarray) -> bytes:
    if width == 8:
        return codes.astype(np.int8).tobytes()
    padded = np.zeros(-(-len(codes) // 32) * 32, np.int64)
    padded[: len(codes)] = codes
    groups = padded.reshape(-1, 2, 16) & 15
    return (groups[:, 0] | groups[:, 1] << 4).astype(np.uint8).tobytes()


def align(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def chunk_and_decoded(width: int, block: int, dtype: str, bits: np.ndarray) -> tuple[bytes, bytes]:
    x = values_of(dtype, bits)
    scales, codes, decoded = [], [], []
    for begin in range(0, len(x), block):
        scale_bits, q = encode_block(width, x[begin : begin + block])
        scales.append(scale_bits)
        codes.append(q)
        if scale_bits == 0x7FC0:
            out = np.full(len(q), CANONICAL_NAN[dtype], bits.dtype)
        else:
            scale = float(bf16_values(np.array([scale_bits], np.uint16))[0])
            exact = np.where(q == 0, 0.0, q.astype(np.float64) * scale)
            out = bits_of(dtype, np.clip(exact, -LARGEST[dtype], LARGEST[dtype]))
        decoded.append(out.astype(bits.dtype))
    payload = pack(width, np.concatenate(codes)) if codes else b""
    chunk = align(payload) + align(np.array(scales, np.uint16).tobytes())
    return chunk, np.concatenate(decoded).tobytes() if decoded else b""


def inputs(dtype: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Bits of elements: ordinary data, every special value, ragged ends."""
    kind = np.uint32 if dtype == F32 else np.uint16
    limit = 2**32 if dtype == F32 else 2**16
    smallest = np.array([1], kind)
    infinite = {F32: 0x7F800000, BF16: 0x7F80, F16: 0x7C00}[dtype]
    sign = limit // 2

    def gaussian(n: int, magnitude: float) -> np.ndarray:
        return bits_of(dtype, (rng.standard_normal(n) * magnitude).astype(np.float32))

    one = bits_of(dtype, np.ones(40, np.float32))
    both = gaussian(64, 0.1)
    both[[3, 40]] = bits_of(dtype, np.array([-1.5, 1.5], np.float32))
    with_nan = gaussian(96, 1.0)
    with_nan[50] = infinite + 1
    with_inf = gaussian(96, 1.0)
    with_inf[[10, 70]] = [infinite, sign + infinite]
    top = np.full(33, infinite - 1, kind)
    top[::3] += np.array(sign, kind)
    tiny = np.array([2.0**-118, -(2.0**-118), 2.0**-119, 2.0**-122, 2.0**-123, 0.0], np.float32)
    steps = np.arange(-8, 8, dtype=np.float32) + np.float32(0.5)
    ties = np.concatenate([steps, np.array([-8.0], np.float32), steps * 16, [-128.0]])
    return [
        one[:1],
        one,
        gaussian(1, 1.0),
        gaussian(31, 0.02),
        gaussian(32, 30.0),
        gaussian(300, 1e-3),
        both,
        with_nan,
        with_inf,
        top,
        np.resize(smallest, 5),
        np.array([0, sign, 1, sign + 1], kind),
        bits_of(dtype, np.repeat(tiny, 32)),
        bits_of(dtype, ties.astype(np.float32)),
        rng.integers(0, limit, 200).astype(kind),
    ]


def main() -> None:
    for width in (8, 4):
        for dtype in (F32, BF16, F16):
            rng = np.random.default_rng(width * 100 + len(dtype))
            lines = []
            for bits in inputs(dtype, rng):
                for block in (32, 128):
                    chunk, decoded = chunk_and_decoded(width, block, dtype, bits)
                    fields = (bits.tobytes().hex(), chunk.hex(), decoded.hex())
                    lines.append(f"int{width}:{block} {dtype} {len(bits)} " + " ".join(fields))
            path = Path(__file__).with_name(f"int{width}_{dtype}.txt")
            path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
