"""The ways in which programs make groups: one after another, subgroups, meshes, device strings."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from codec_reference import round_trip
from collective_cases import normal, pool_of, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import qcoll
from qcoll.testing import Nodes


@pytest.fixture(scope="module", params=[[2, 2], [4], [1, 1]], ids=["2+2", "4", "1+1"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(
    nodes: Nodes, function: object, *args: object, backend: str | None = "qcoll"
) -> list[object]:
    return pool_of(nodes).run(function, args=args, backend=backend)


def check_group(group: dist.ProcessGroup | None, ranks: list[int]) -> None:
    """Native and delegated verbs in a group whose members are the global ``ranks``."""
    me, size = ranks.index(dist.get_rank()), len(ranks)
    inputs = [normal(r, 1000 * size, torch.bfloat16) for r in ranks]
    total = torch.stack(inputs).double().sum(0)
    shard = inputs[me][:1000].contiguous()
    gathered = torch.empty(1000 * size, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, shard, group=group)
    assert same_bits(gathered, torch.cat([i[:1000] for i in inputs]))
    qcoll.all_gather_into_tensor(gathered, shard, codec="int8", group=group)
    decoded = [i[:1000] if size == 1 else round_trip(i[:1000], "int8") for i in inputs]
    assert same_bits(gathered, torch.cat(decoded))
    part = torch.empty(1000, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, inputs[me], group=group)
    expected = total.split(1000)[me]
    assert torch.allclose(part.double(), expected, rtol=2**-7, atol=2**-5)
    largest = inputs[me].clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, torch.stack(inputs).amax(0))
    from_last = torch.full((3,), float(me))
    dist.broadcast(from_last, src=ranks[-1], group=group)
    assert torch.equal(from_last, torch.full((3,), size - 1.0))


def in_succession() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*master, is_master=False)
    for turn in range(5):
        dist.init_process_group(
            "qcoll", store=dist.PrefixStore(f"turn {turn}", store), rank=rank, world_size=world
        )
        assert dist.get_backend() == "qcoll"
        check_group(None, list(range(world)))
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_default_groups_in_succession(nodes: Nodes) -> None:
    run(nodes, in_succession, backend=None)


def subgroups() -> None:
    world = dist.get_world_size()
    everyone = list(range(world))
    cases = [everyone, everyone[::-1], *([r] for r in everyone), everyone[::2], everyone[1:]]
    for ranks in cases:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            check_group(group, sorted(ranks))
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    check_group(None, everyone)


def test_subgroups(nodes: Nodes) -> None:
    run(nodes, subgroups)


def foreign_subgroups() -> None:
    """Groups of other backends beside, groups with options and a timeout of their own."""
    everyone = list(range(dist.get_world_size()))
    gloo = dist.new_group(everyone, backend="gloo")
    assert dist.get_backend(gloo) == "gloo"
    x = torch.ones(4)
    dist.all_reduce(x, group=gloo)
    assert x[0] == len(everyone)
    with pytest.raises(ValueError, match="gloo"):
        qcoll.stats(gloo)
    options = qcoll.Options(all_gather="int4", scope="all", min_bytes=0)
    for _ in range(2):  # one object may serve several groups
        coded = dist.new_group(
            everyone, backend="qcoll", pg_options=options, timeout=timedelta(seconds=20)
        )
        inputs = [normal(r, 500, torch.bfloat16) for r in everyone]
        out = torch.empty(500 * len(everyone), dtype=torch.bfloat16)
        dist.all_gather_into_tensor(out, inputs[dist.get_rank()], group=coded)
        assert same_bits(out, torch.cat([round_trip(i, "int4") for i in inputs]))
    check_group(None, everyone)
    dist.destroy_process_group(gloo)


def test_groups_of_other_kinds(nodes: Nodes) -> None:
    run(nodes, foreign_subgroups)


def destroyed_subgroups() -> None:
    everyone = list(range(dist.get_world_size()))
    for _ in range(10):
        group = dist.new_group(everyone)
        check_group(group, everyone)
        dist.destroy_process_group(group)
    check_group(None, everyone)


def test_groups_that_are_made_and_destroyed(nodes: Nodes) -> None:
    run(nodes, destroyed_subgroups)


def splits_of_torch() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    half = world // 2
    group, _ = dist.new_subgroups(half)
    first = rank // half * half
    check_group(group, list(range(first, first + half)))
    pairs = [[r, r + half] for r in range(half)]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    check_group(group, pairs[rank % half])


def test_subgroups_as_torch_enumerates_them(nodes: Nodes) -> None:
    run(nodes, splits_of_torch)


def meshes() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    first = rank // 2 * 2
    check_group(mesh.get_group("inner"), [first, first + 1])
    check_group(mesh.get_group("outer"), list(range(rank % 2, world, 2)))
    assert dist.get_backend(mesh.get_group("inner")) == "qcoll"
    # Odd sizes, far above min_bytes: what DTensor gathers is exact, for it reads state dicts.
    full = torch.randn(337, 129, generator=torch.Generator().manual_seed(1)).bfloat16()
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
        distributed = distribute_tensor(full, mesh, placements)
        assert torch.equal(distributed.full_tensor(), full)
        moved = distributed.redistribute(mesh, [Shard(1), Shard(0)])
        assert torch.equal(moved.full_tensor(), full)
    partial = DTensor.from_local(torch.full((6, 4), rank + 1.0), mesh["inner"], [Shard(0)])
    mean = partial.mean().full_tensor()
    assert mean.item() == (2 * first + 3) / 2


def test_device_meshes(nodes: Nodes) -> None:
    run(nodes, meshes)


def is_qcoll(group: dist.ProcessGroup | None, device: str) -> bool:
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(torch.device(device)).name() == "qcoll"


def one_backend_for_both_devices() -> None:
    assert is_qcoll(None, "cpu")
    check_group(None, list(range(dist.get_world_size())))
    check_group(dist.new_group(), list(range(dist.get_world_size())))


def gloo_for_the_cpu() -> None:
    assert not is_qcoll(None, "cpu")
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == dist.get_world_size()
    dist.barrier()


@pytest.mark.parametrize("backend", ["cpu:qcoll,cuda:qcoll", "cpu:qcoll", "cpu:qcoll,cuda:gloo"])
def test_a_backend_for_each_device(nodes: Nodes, backend: str) -> None:
    run(nodes, one_backend_for_both_devices, backend=backend)


def test_gloo_for_the_cpu_and_qcoll_for_cuda(nodes: Nodes) -> None:
    run(nodes, gloo_for_the_cpu, backend="cpu:gloo,cuda:qcoll")


def wrapped() -> None:
    check_group(None, list(range(dist.get_world_size())))
    assert "all_gather_into_tensor" in qcoll.stats()


def test_torchs_debug_wrapper(nodes: Nodes) -> None:
    pool = pool_of(nodes)
    pool.run(wrapped, backend="qcoll", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
