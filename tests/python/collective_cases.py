"""Layouts, inputs, expected results and their tolerances for the tests of collectives.

Every rank makes the inputs of all ranks from seeds and computes what must come out by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from codec_reference import ROUNDOFF, SUBNORMAL, Codec, block_maxima, error_bound, window_maxima

from qcoll.testing import Layout, Nodes, RankPool, shared_pool

Doubles = npt.NDArray[np.float64]
Names = tuple[str, ...]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOVED = (
    *FLOATS,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
)
EXACT = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), "exact")

# One node (shared memory alone), one rank for each node (TCP alone), both, uneven, interleaved.
_LAYOUTS: tuple[list[int] | list[str], ...] = (
    [1],
    [2],
    [1, 1],
    [3],
    [2, 1],
    [2, 2],
    [3, 1],
    ["a", "b", "a", "b"],
    [2, 3],
    [2, 2, 2],
    [2, 1, 3],
    [3, 4],
    [4, 4],
)
_MORE_LAYOUTS: tuple[list[int] | list[str], ...] = (
    [1, 1, 1],
    [4],
    ["b", "a", "a", "b"],
    [5],
    [2, 2, 2, 2],
)
#: The second level of the tree is a rack.
_RACKS = ["r/a", "r/a", "r/b", "r/b", "s/c", "s/c", "s/d", "s/d"]


def _name(nodes: Sequence[int] | Sequence[str]) -> str:
    return ("" if isinstance(nodes[0], str) else "+").join(str(n) for n in nodes)


LAYOUTS = [pytest.param(nodes, id=_name(nodes)) for nodes in _LAYOUTS]
LAYOUTS += [pytest.param(n, id=_name(n), marks=[pytest.mark.full]) for n in _MORE_LAYOUTS]
RACKS = pytest.param(_RACKS, id="racks")
FEW_LAYOUTS = [p for p in LAYOUTS if p.id in ("3", "1+1", "2+2", "abab", "2+1+3")]


def pool_of(nodes: Nodes) -> RankPool:
    assert nodes is not None
    world = len(nodes) if isinstance(nodes[0], str) else sum(map(int, nodes))
    return shared_pool(world, nodes)


def names_of(nodes: Nodes) -> Names:
    return Layout.of(pool_of(nodes).layout.world, nodes).names


# Inputs.


def normal(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What ``rank`` passes: normally distributed, different for each rank and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    return torch.randn(count, generator=generator).to(dtype)


def raw(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns, NaN with all payloads too; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    width = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (count * width,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


class Guarded:
    """An output of ``count`` elements that begins ``offset`` elements into its storage and is
    filled with garbage; whoever writes outside of it is found out."""

    def __init__(self, count: int, dtype: torch.dtype, offset: int = 0) -> None:
        width = torch.empty(0, dtype=dtype).element_size()
        self._begin, self._end = offset * width, (offset + count) * width
        self._storage = torch.full((self._end + 64 * width,), 1, dtype=torch.uint8)
        self.tensor = self._storage.view(dtype)[offset : offset + count]

    def check(self) -> torch.Tensor:
        """The output, after a look at what lies around it."""
        assert (self._storage[: self._begin] == 1).all(), "written before the output's begin"
        assert (self._storage[self._end :] == 1).all(), "written beyond the output's end"
        return self.tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in type, size and every bit."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    if a.numel() == 0:
        return True
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))


def digest(*tensors: torch.Tensor) -> str:
    """A fingerprint of all bits, to compare across ranks."""
    summary = hashlib.sha256()
    for tensor in tensors:
        summary.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def finish(work: dist.Work | None, async_op: bool) -> None:
    """Waits for an asynchronous call; a synchronous one must have returned no work."""
    assert (work is not None) == async_op
    if work is not None:
        work.wait()


def doubles(tensor: torch.Tensor) -> Doubles:
    return tensor.double().reshape(-1).numpy()


# Expected sums and how far from them a result may be.


def expected_sum(parts: Sequence[torch.Tensor], op: str, factor: float = 1.0) -> Doubles:
    total = np.sum([doubles(part) for part in parts], axis=0)
    return total / len(parts) if op == "avg" else total * np.float64(np.float32(factor))


def _levels(names: Names) -> list[list[list[int]]]:
    """The units of each level, innermost (single ranks) first; each a list of ranks.

    The units of a level are joined by the enclosing group: ranks by node, nodes by rack, and all.
    Uneven units make one flat level.
    """
    units = [[rank] for rank in range(len(names))]
    levels = [units]
    for depth in range(max(name.count("/") for name in names) + 1, -1, -1):
        joined: dict[str, list[int]] = {}
        for unit in units:
            parent = "/".join(names[unit[0]].split("/")[:depth])
            joined.setdefault(parent, []).extend(unit)
        units = list(joined.values())
        if len({len(unit) for unit in units}) > 1:
            return [levels[0], [list(range(len(names)))]]
        levels.append(units)
    return levels


def _hop_error(
    values: Doubles, text: str, dtype: torch.dtype, aligned: bool, partial: bool
) -> Doubles:
    """What one encoding for the wire may change. Exact bf16 sums travel as bf16, so that "exact"
    moves the bytes of the tensor's own type."""
    if text == "exact":
        narrow = partial and dtype == torch.bfloat16
        return np.abs(values) * (ROUNDOFF[dtype] if narrow else 0.0)
    block = Codec.of(text).block or 1
    largest = (block_maxima if aligned else window_maxima)(values, block)
    return error_bound(largest, text, torch.float32)


def sum_bound(
    parts: Sequence[torch.Tensor],
    dest: int,
    names: Names,
    codec: str,
    dtype: torch.dtype,
    aligned: bool = True,
) -> Doubles:
    """How far the fp32 sum that rank ``dest`` computes may be from the true one.

    docs/design.md: at each level the rank at the place of ``dest`` takes the sums of its peers
    encoded, its own as it is; inside nodes in the first codec, across nodes in the last one.
    ``aligned``: the slice begins a block; otherwise blocks may lie anywhere.
    """
    levels = _levels(names)
    within = len(levels) > 2 or len(set(names)) == 1
    units = [([rank], doubles(part), np.zeros(part.numel())) for rank, part in enumerate(parts)]
    for depth, joined in enumerate(levels[1:]):
        text = codec.split("/")[0 if depth == 0 and within else -1]
        place = next(unit.index(dest) for unit in joined if dest in unit)
        merged = []
        for unit in joined:
            inner = [u for u in units if u[0][0] in unit]
            error = np.sum([u[2] for u in inner], axis=0)
            for ranks, value, before in inner:
                if unit[place] not in ranks:
                    reach = np.abs(value) + before
                    error = error + _hop_error(reach, text, dtype, aligned, partial=depth > 0)
            error += _fp32_error([u[1] for u in inner], error)
            merged.append((unit, np.sum([u[1] for u in inner], axis=0), error))
        units = merged
    return units[0][2]


def _fp32_error(terms: Sequence[Doubles], error: Doubles) -> Doubles:
    """Rounding of a sum of fp32 numbers, one rounding for each addition."""
    return len(terms) * 2.0**-24 * (np.sum(np.abs(terms), axis=0) + error)


def result_bound(bound: Doubles, expected: Doubles, dtype: torch.dtype, scale: float) -> Doubles:
    """The bound of a stored result: the sum's bound times ``scale`` (1 / world for a mean, the
    factor of a premultiplied sum), the rounding of that and of the cast."""
    reach = np.abs(expected) + bound * abs(scale)
    fp32 = reach * 2.0**-23 + SUBNORMAL[torch.float32]
    return bound * abs(scale) + fp32 + reach * ROUNDOFF[dtype] + SUBNORMAL[dtype] / 2


def assert_within(result: torch.Tensor, expected: Doubles, bound: Doubles, what: str) -> None:
    """Every element is within its bound; the message shows the worst."""
    got = doubles(result)
    assert got.shape == expected.shape
    excess = np.abs(got - expected) - bound
    wrong = ~(excess <= 0)  # NaN is wrong
    if wrong.any():
        at = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
        raise AssertionError(
            f"{what}: {wrong.sum()} of {len(got)} elements are out of bounds; element {at} is "
            f"{got[at]!r}, expected {expected[at]!r} within {bound[at]!r}"
        )
