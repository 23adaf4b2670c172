"""What a call really did: runs it, and checks statistics, plan and data against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import qcoll

#: Elements of the gathered, unreduced, reduced or exchanged tensor: above min_bytes in any dtype.
NUMEL = 1 << 16

#: verb of the explicit interface -> key of the options
OPTION_OF = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
#: What the calls get without any setting, on two nodes of one rank.
DEFAULT_OF = {
    "all_gather_into_tensor": "int8:256",
    "reduce_scatter_tensor": "int4:128",
    "all_reduce": "exact",
    "all_to_all_single": "exact",
}


def data_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of ``rank``, which every rank can make."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2, (numel,), generator=generator).to(dtype)


def _call(
    verb: str, numel: int, dtype: torch.dtype, group: Any, codec: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the call; (result, what an exact call gives)."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = numel // world * world
    part = whole // world
    explicit = {} if codec is None else {"codec": codec}
    place: Any = qcoll if codec is not None else dist
    if verb == "all_gather_into_tensor":
        out = torch.empty(whole, dtype=dtype)
        place.all_gather_into_tensor(out, data_of(rank, part, dtype), group=group, **explicit)
        return out, torch.cat([data_of(r, part, dtype) for r in range(world)])
    inputs = [data_of(r, whole, dtype) for r in range(world)]
    if verb == "reduce_scatter_tensor":
        out = torch.empty(part, dtype=dtype)
        place.reduce_scatter_tensor(out, inputs[rank], group=group, **explicit)
        return out, _sum(inputs)[rank * part : (rank + 1) * part]
    if verb == "all_reduce":
        out = inputs[rank].clone()
        place.all_reduce(out, group=group, **explicit)
        return out, _sum(inputs)
    assert verb == "all_to_all_single", verb
    out = torch.empty(whole, dtype=dtype)
    place.all_to_all_single(out, inputs[rank], group=group, **explicit)
    return out, torch.cat([x[rank * part : (rank + 1) * part] for x in inputs])


def _sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack([x.double() for x in inputs]).sum(0)
    return total.to(inputs[0].dtype)


def observe(
    verb: str,
    *,
    numel: int = NUMEL,
    dtype: torch.dtype = torch.bfloat16,
    group: Any = None,
    codec: str | None = None,
) -> tuple[str, str]:
    """Makes one call; ("int8:256/int4:128", "") or ("exact", the reason).

    The plan must tell what the statistics count, and the data must have gone through a codec when
    they say so and not otherwise.
    """
    world = dist.get_world_size(group)
    qcoll.reset_stats(group)
    result, exactly = _call(verb, numel, dtype, group, codec)
    plan = qcoll.explain(verb, numel // world * world, dtype, group, codec=codec)
    counted = qcoll.stats(group)[verb]
    assert counted["calls"] == 1
    assert counted["wire_bytes"] == plan["wire_bytes"]
    payload = numel // world * world * dtype.itemsize
    assert counted["payload_bytes"] == plan["payload_bytes"] == payload
    because = plan["exact_because"]
    assert counted["fallbacks"] == ({because: 1} if because else {})
    codecs = "/".join(hop["codec"] for hop in plan["hops"])
    # Sums of more than two values depend on the order; two have one correctly rounded sum.
    close = torch.allclose(result.double(), exactly.double(), rtol=2**-7, atol=2**-20)
    same = torch.equal(result, exactly) if world <= 2 or "reduce" not in verb else close
    assert same == bool(because), f"{verb} {codecs} {because!r}: exact result is {same}"
    return ("exact" if because else codecs), because


def choices(**how: Any) -> dict[str, str]:
    """The codec that each verb gets."""
    return {verb: observe(verb, **how)[0] for verb in OPTION_OF}


def expect_error(
    call: Callable[[], object], *parts: str, kind: type[Exception] = ValueError
) -> str:
    """``call`` must raise ``kind`` with all ``parts`` in its text; the text."""
    try:
        call()
    except kind as error:
        text = str(error)
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in: {text}"
        return text
    raise AssertionError(f"no {kind.__name__} was raised (expected one with {parts})")
