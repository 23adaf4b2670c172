"""The codec alone: what travels, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcoll import _native


def encode(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    """Encodes ``tensor`` as one chunk; the bytes are those of docs/wire_format.md.

    Args:
        tensor: float32, bfloat16 or float16 of any shape; any dtype for ``"exact"``.
        codec: ``"int8[:block]"``, ``"int4[:block]"``, ``"bf16"`` or ``"exact"``.

    Returns:
        A flat uint8 tensor.

    Raises:
        ValueError: unknown codec or unsuitable dtype.
    """
    encoded: torch.Tensor = _native.load().encode(tensor, codec)
    return encoded


def decode(
    encoded: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, codec: str
) -> torch.Tensor:
    """The inverse of :func:`encode`: a tensor of ``shape`` and ``dtype``. ``dtype`` may differ from
    the encoded tensor's for the lossy codecs.

    Raises:
        ValueError: the bytes are not as many as shape and codec ask for.
    """
    decoded: torch.Tensor = _native.load().decode(encoded, list(shape), dtype, codec)
    return decoded
