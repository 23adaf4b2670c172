"""Several calls as one: torch's coalescing manager and batches of sends and receives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from codec_reference import round_trip
from collective_cases import normal, pool_of, same_bits
from torch.distributed.distributed_c10d import _coalescing_manager

from qcoll.testing import Nodes


@pytest.fixture(scope="module", params=[[2, 2], [3]], ids=["2+2", "3"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: object, *args: object, **options: object) -> list[object]:
    return pool_of(nodes).run(function, args=args, backend="qcoll", pg_options=options)


def coalesced(device: bool, async_ops: bool, codec: str) -> None:
    """torch's coalescing manager in its form with a device and without."""
    world, rank = dist.get_world_size(), dist.get_rank()
    # Tensors of different magnitude side by side: each has blocks of its own.
    counts, scales = (100, 333, 70_000, 1), (1.0, 1e5, 1e-5, 1.0)

    def tensors(r: int, times: int) -> list[torch.Tensor]:
        pairs = zip(counts, scales, strict=True)
        return [(normal(r, n * times, torch.float32) * s).bfloat16() for n, s in pairs]

    def manager() -> object:
        where = torch.device("cpu") if device else None
        return _coalescing_manager(device=where, async_ops=async_ops)

    everyone = [tensors(r, 1) for r in range(world)]
    outs = [torch.empty(n * world, dtype=torch.bfloat16) for n in counts]
    with manager() as cm:
        for out, x in zip(outs, everyone[rank], strict=True):
            dist.all_gather_into_tensor(out, x)
    if async_ops:
        cm.wait()
    for i, out in enumerate(outs):
        assert same_bits(out, torch.cat([round_trip(t[i], codec) for t in everyone])), i

    sums = [x.clone() for x in everyone[rank]]
    with manager() as cm:
        for x in sums:
            dist.all_reduce(x)
    if async_ops:
        cm.wait()
    for i, x in enumerate(sums):
        expected = torch.stack([t[i] for t in everyone]).double().sum(0)
        assert torch.allclose(x.double(), expected, rtol=0.02, atol=0.05 * scales[i])

    wide = [tensors(r, world) for r in range(world)]
    parts = [torch.empty(n, dtype=torch.bfloat16) for n in counts]
    with manager() as cm:
        for part, x in zip(parts, wide[rank], strict=True):
            dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.AVG)
    if async_ops:
        cm.wait()
    for i, part in enumerate(parts):
        expected = torch.stack([t[i] for t in wide]).double().mean(0).split(counts[i])[rank]
        assert torch.allclose(part.double(), expected, rtol=0.02, atol=0.05 * scales[i])


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("device", [False, True], ids=["without-device", "with-device"])
def test_coalescing_manager(nodes: Nodes, device: bool, async_ops: bool) -> None:
    run(nodes, coalesced, device, async_ops, "exact", scope="all", min_bytes=0)
    coding = {"all_gather": "int8:64", "reduce_scatter": "int8", "coalesced": True}
    run(nodes, coalesced, device, async_ops, "int8:64", scope="all", min_bytes=0, **coding)


def coalesced_mixture() -> None:
    """The form with a device takes verbs that have no coalesced virtual, too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, y = torch.full((100,), float(rank)), torch.arange(3.0 * world)
    out = torch.empty(3 * world)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as cm:
        dist.broadcast(x, src=world - 1)
        dist.all_to_all_single(out, y)
    cm.wait()
    assert torch.equal(x, torch.full((100,), world - 1.0))
    assert torch.equal(out, torch.arange(3.0).add(3 * rank).repeat(world))


def test_coalescing_of_other_verbs(nodes: Nodes) -> None:
    run(nodes, coalesced_mixture)


def ring_of_sends() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [torch.full((50,), 10.0 * rank + i) for i in range(3)]
    got = [torch.empty(50) for _ in range(3)]
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in mine]
    operations += [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in got]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [x[0].item() for x in got] == [10.0 * ((rank - 1) % world) + i for i in range(3)]


def test_batches_of_sends_and_receives(nodes: Nodes) -> None:
    run(nodes, ring_of_sends)
