"""Whether results are right: bit for bit where there is one right answer, else within the bound.

Bounds of single elements and the codecs' reference are slow, so that of a large tensor a window,
another one every time, is held against them and the whole against the error of its norm.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from codec_reference import round_trip
from coded_checks import gathered_bound
from collective_cases import (
    Names,
    assert_within,
    expected_sum,
    result_bound,
    same_bits,
    sum_bound,
)

#: Windows begin at multiples of this, as blocks of all sizes do.
_WINDOW = 4096
#: What an element's bound may depend on to its left and right where blocks may lie anywhere.
_MARGIN = 1024


def must_be(result: torch.Tensor, expected: torch.Tensor) -> None:
    if same_bits(result, expected):
        return
    wrong = (result != expected).nonzero().reshape(-1)
    at = int(wrong[0]) if len(wrong) else 0
    raise AssertionError(
        f"{len(wrong)} of {len(expected)} elements of {expected.dtype} differ; element {at} is "
        f"{result[at].item()!r}, expected {expected[at].item()!r}"
    )


def _window(count: int) -> slice:
    begin = _WINDOW * random.randrange(max(1, -(-count // _WINDOW)))
    return slice(begin, min(count, begin + _WINDOW))


def check_copy(result: torch.Tensor, expected: torch.Tensor, codec: str) -> None:
    """A tensor that was encoded once, or not at all."""
    if codec == "exact":
        must_be(result, expected)
        return
    at = _window(len(expected))
    must_be(result[at], round_trip(expected[at], codec))
    _check_norm(result, expected.float(), codec)


def check_scatter(
    result: torch.Tensor,
    parts: Sequence[torch.Tensor],
    rank: int,
    names: Names,
    codec: str,
    op: str,
) -> None:
    """A sum that only this rank has."""
    scale = _scale(parts, op)
    if _check_if_exact(result, parts, codec, scale):
        return
    at = _window(len(result))
    windows = [part[at] for part in parts]
    expected = expected_sum(windows, op)
    bound = sum_bound(windows, rank, names, codec, result.dtype)
    allowed = result_bound(bound, expected, result.dtype, scale)
    assert_within(result[at], expected, allowed, f"{op} {codec} {result.dtype} {len(result)}")
    _check_norm(result, _sum(parts) * scale, codec)


def check_all_reduce(
    result: torch.Tensor, parts: Sequence[torch.Tensor], names: Names, codec: str, op: str
) -> None:
    """A sum that is encoded once more on its way to all ranks."""
    scale = _scale(parts, op)
    if _check_if_exact(result, parts, codec, scale):
        return
    at = _window(len(result))
    wide = slice(max(0, at.start - _MARGIN), min(len(result), at.stop + _MARGIN))
    inner = slice(at.start - wide.start, at.stop - wide.start)
    windows = [part[wide] for part in parts]
    expected = expected_sum(windows, op)
    # Which rank sums an element is the library's choice, and where its blocks begin.
    bounds = [
        sum_bound(windows, rank, names, codec, result.dtype, aligned=False)
        for rank in range(len(names))
    ]
    allowed = result_bound(np.max(bounds, axis=0), expected, result.dtype, scale)
    allowed = gathered_bound(allowed, expected, codec, names, result.dtype)
    what = f"{op} {codec} {result.dtype} {len(result)}"
    assert_within(result[at], expected[inner], allowed[inner], what)
    _check_norm(result, _sum(parts) * scale, codec)


def _scale(parts: Sequence[torch.Tensor], op: str) -> float:
    return 1 / len(parts) if op == "avg" else 1.0


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.float() for part in parts]).sum(0)


def _check_if_exact(
    result: torch.Tensor, parts: Sequence[torch.Tensor], codec: str, scale: float
) -> bool:
    """Checks an exact sum of whole numbers; its mean is rounded unless halving is enough."""
    if codec != "exact":
        return False
    expected = _sum(parts) * scale
    if scale in (1.0, 0.5, 0.25):
        must_be(result, expected.to(result.dtype))
    else:
        tolerance = 2.0**-7 * torch.maximum(expected.abs(), torch.tensor(2.0**-10))
        assert bool(((result.float() - expected).abs() <= tolerance).all()), f"mean of {scale}"
    return True


def _check_norm(result: torch.Tensor, expected: torch.Tensor, codec: str) -> None:
    """The error of the whole is that of the codec, not that of wrong data.

    On normally distributed data one encoding costs at most 0.11 (int4) and 0.007 (int8) of the
    norm, and there are at most three. In small tensors single elements weigh more.
    """
    if len(expected) < 64:
        return
    error = torch.linalg.vector_norm(result.float() - expected)
    tolerance = 0.01 if codec == "bf16" else 0.4 if "int4" in codec else 0.03
    assert error <= tolerance * torch.linalg.vector_norm(expected), (codec, len(expected), error)
