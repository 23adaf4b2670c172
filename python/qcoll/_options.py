"""Options of a group, and the context managers that override them for a stretch of code.

Order: argument of the call > context manager > options of the group > environment > default.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from qcoll import _native

if TYPE_CHECKING:
    from qcoll import _C

    _NativeOptions = _C.Options
else:
    _NativeOptions = _native.load().Options

_Value = str | int | bool | torch.dtype | Sequence[str | torch.dtype]
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _spell(key: str, value: object) -> str:
    """A setting as the core spells it; the core checks it."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    items = value if isinstance(value, (tuple, list, set, frozenset)) else [value]
    names = [
        _DTYPE_NAMES.get(item, item) if isinstance(item, torch.dtype) else item for item in items
    ]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"qcoll option {key}={value!r} is not understood; accepted: a string, an int, a bool, "
            "or a list of dtypes out of fp32, bf16, fp16"
        )
    return ",".join(map(str, names))


def _spell_all(settings: Mapping[str, object]) -> dict[str, str]:
    return {key: _spell(key, value) for key, value in settings.items() if value is not None}


class Options(_NativeOptions):
    """Pass to ``init_process_group("qcoll", pg_options=...)`` or ``new_group``.

    A setting that is left out comes from the environment (``QCOLL_ALL_GATHER``, ...) or is the
    default. All ranks of a group must have the same.

    Args:
        all_gather, reduce_scatter, all_reduce, all_to_all: a codec, ``"int8[:block]"``,
            ``"int4[:block]"``, ``"bf16"`` or ``"exact"``, or one for each level with the inner hop
            first, ``"int8:256/int4:128"``. Defaults: ``"int8:256"``, ``"int8:256/int4:128"``,
            ``"exact"``, ``"exact"``.
        all_gather_dtypes: the dtypes whose gathers are encoded; default ``("bf16", "fp16")``.
            float32 gathers also read full state dicts and gather master weights, so they are
            exact unless named here.
        min_bytes: smaller tensors (gathered or unreduced) stay exact; default 65536. Does not
            apply to all-to-all, where sizes differ between ranks.
        coalesced: apply the options to the coalesced verbs too; default False.
        scope: ``"across_nodes"`` (default: groups inside one node stay exact) or ``"all"``.
        tuning: a file that ``qcoll tune`` wrote for these nodes: calls stay exact where it says
            that their codec would take longer. The same on all ranks, which compare its contents;
            ``""``: none, whatever the environment says. Not for :func:`qcoll.options`.

    Raises:
        ValueError: names the key, the value and what is accepted.
    """

    def __init__(
        self,
        *,
        all_gather: str | None = None,
        reduce_scatter: str | None = None,
        all_reduce: str | None = None,
        all_to_all: str | None = None,
        all_gather_dtypes: str | torch.dtype | Sequence[str | torch.dtype] | None = None,
        min_bytes: int | None = None,
        coalesced: bool | None = None,
        scope: str | None = None,
        tuning: str | os.PathLike[str] | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        settings: dict[str, object] = {
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_reduce": all_reduce,
            "all_to_all": all_to_all,
            "all_gather_dtypes": all_gather_dtypes,
            "min_bytes": min_bytes,
            "coalesced": coalesced,
            "scope": scope,
            "tuning": tuning,
            **unknown,  # refused below, with the list of those that exist
        }
        for key, value in _spell_all(settings).items():
            self.set(key, value)

    def __repr__(self) -> str:
        return f"qcoll.Options({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"


@contextlib.contextmanager
def _policy(policy: _C.ThreadPolicy) -> Iterator[None]:
    before = _native.load().ThreadPolicy.current()
    policy.apply()
    try:
        yield
    finally:
        before.apply()


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Calls of this thread, and of the backward passes that it starts, are exact whatever the
    options say. Only a ``codec=`` in the call itself is stronger."""
    with _policy(_native.load().ThreadPolicy.current().with_exact()):
        yield


@contextlib.contextmanager
def options(**settings: _Value) -> Iterator[None]:
    """Overrides options for calls of this thread, and of the backward passes that it starts:
    ``with qcoll.options(all_gather="int4:128"): ...``. Keys and values are those of
    :class:`Options`. All ranks must use the same at the same calls.

    Raises:
        ValueError: names the key, the value and what is accepted.
    """
    with _policy(_native.load().ThreadPolicy.current().with_settings(_spell_all(settings))):
        yield
