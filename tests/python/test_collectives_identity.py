"""The same bits on all ranks, in every run, over every transport and instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from codec_reference import hostile_values
from collective_cases import FLOATS, LAYOUTS, RACKS, digest, normal, pool_of

import qcoll
from qcoll.testing import Layout, Nodes, RankPool

CODECS = ("int8", "int8:256/int4:128", "int4:32", "bf16", "exact")
TRANSPORT_LAYOUTS = [p for p in LAYOUTS if p.id in ("3", "2+2", "3+1", "abab", "2+1+3")]


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs of ``rank``; the lengths are no multiples of a block or of the world."""
    spread = torch.randperm(5003, generator=torch.Generator().manual_seed(rank))
    wide = (normal(rank, 5003, torch.float32) * 10.0 ** (spread % 60 - 30)).to(dtype)
    hostile = list(hostile_values(dtype, torch.Generator().manual_seed(rank)))
    return [normal(rank, 20011, dtype), wide, torch.cat(hostile[rank:] + hostile[:rank])]


def fingerprints() -> tuple[list[str], list[str]]:
    """Digests of what all ranks must agree on, and of what is this rank's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    common, own = [], []
    for dtype in FLOATS:
        for x in tensors(rank, dtype):
            for codec in CODECS:
                gathered = torch.empty(len(x) * world, dtype=dtype)
                qcoll.all_gather_into_tensor(gathered, x, codec=codec)
                total = x.clone()
                qcoll.all_reduce(total, op="avg", codec=codec)
                common.append(digest(gathered, total))
                part = torch.empty(len(x) // world, dtype=dtype)
                qcoll.reduce_scatter_tensor(part, x[: len(part) * world], codec=codec)
                parts = torch.empty(len(part) * world, dtype=dtype)
                qcoll.all_to_all_single(parts, x[: len(parts)], codec=codec)
                own.append(digest(part, parts))
    return common, own


def isa_and_fingerprints() -> tuple[str, tuple[list[str], list[str]]]:
    prints = fingerprints()
    return qcoll._native.load().isa(), prints


def unshared() -> int:
    """Ranks of this node that this rank does not share memory with."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return len(backend.describe()["not_in_shared_memory"])


@pytest.mark.parametrize("nodes", [*LAYOUTS, RACKS])
def test_all_ranks_hold_the_same_and_runs_repeat(nodes: Nodes) -> None:
    pool = pool_of(nodes)
    first = pool.run(fingerprints, backend="qcoll")
    assert all(common == first[0][0] for common, _ in first)
    assert pool.run(fingerprints, backend="qcoll", fresh=True) == first


@pytest.mark.parametrize("nodes", TRANSPORT_LAYOUTS)
def test_sockets_and_shared_memory_give_the_same(nodes: Nodes) -> None:
    pool = pool_of(nodes)
    names = Layout.of(pool.layout.world, nodes).names
    assert pool.run(unshared, backend="qcoll") == [0] * len(names)
    expected = pool.run(fingerprints, backend="qcoll")
    with RankPool(len(names), nodes, env={"QCOLL_SHM": "0"}) as sockets:
        mates = [names.count(name) - 1 for name in names]
        assert sockets.run(unshared, backend="qcoll") == mates
        assert sockets.run(fingerprints, backend="qcoll") == expected


def test_every_instruction_set_gives_the_same() -> None:
    rows = qcoll._native.load().isa_rows()
    assert "reference" in rows or len(rows) > 1
    results = {}
    for row in rows:
        with RankPool(4, [2, 2], env={"QCOLL_FORCE_ISA": row}) as pool:
            outcomes = pool.run(isa_and_fingerprints, backend="qcoll")
        assert [isa for isa, _ in outcomes] == [row] * 4
        results[row] = [prints for _, prints in outcomes]
    assert all(result == results[rows[0]] for result in results.values())
