"""Checkpoints are exact under the default recipe, bit for bit, whatever reads them.

The reference is put together from the local shards, without a collective of qcoll: ranks return
them, or pickle them through gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from toy_training import Toy, loss_of

import qcoll
from qcoll.testing import shared_pool

LAYOUTS = [[1, 1], [2, 2]]
RECIPE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[Any, Any]:
    """A model after a few steps of coded training, and its optimizer."""
    model: Any = Toy().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=RECIPE)
    fully_shard(model, mesh=mesh, mp_policy=RECIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    qcoll.reset_stats()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    if steps:
        for verb in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            counted = qcoll.stats()[verb]
            assert counted["calls"] > sum(counted["fallbacks"].values()), f"{verb} was not coded"
    return model, optimizer


def whole(tensor: DTensor) -> torch.Tensor:
    """A sharded tensor from its shards, pickled over gloo."""
    gloo = dist.new_group(backend="gloo")
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, tensor.to_local().detach().clone(), group=gloo)
    dist.destroy_process_group(gloo)
    return torch.cat([shard for shard in shards if shard.numel()])


def full_state_dicts(dtype: torch.dtype) -> None:
    model, optimizer = trained(dtype)
    expected = {name: whole(p) for name, p in model.named_parameters()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    on_cpu = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    for name, parameter in model.named_parameters():
        assert full[name].dtype == dtype
        assert torch.equal(full[name], expected[name]), name
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        if dist.get_rank() == 0:  # the only one that gets it
            assert torch.equal(on_cpu[name], expected[name]), name
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name][key], whole(optimizer.state[parameter][key])), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_state_dicts_are_exact(dtype: torch.dtype, layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    pool.run(full_state_dicts, (dtype,), backend="qcoll", timeout=100)


def full_state_dict_in_exact() -> None:
    """With coalesced verbs encoded too (Megatron), exact() keeps a bf16 consolidation exact."""
    model, _ = trained(torch.bfloat16)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("up.weight"))
    expected = whole(parameter)
    assert not torch.equal(parameter.full_tensor(), expected)  # what exact() is for
    with qcoll.exact():
        assert torch.equal(parameter.full_tensor(), expected)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(full[name], expected)


def test_exact_guards_consolidation_where_coalesced_verbs_are_encoded() -> None:
    options = {"coalesced": True, "min_bytes": 0}
    shared_pool(2, [1, 1]).run(full_state_dict_in_exact, backend="qcoll", pg_options=options)


def save_and_load(folder: str) -> dict[str, torch.Tensor]:
    """Saves, loads into another model, and returns this rank's shards."""
    model, optimizer = trained()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    shards = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    other, _ = trained(steps=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    target = {"model": get_model_state_dict(other)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(other, target["model"])
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.to_local(), shards[name]), name
    return shards


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is the intent
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_distributed_checkpoints_are_exact(layout: list[int], tmp_path: Path) -> None:
    pool = shared_pool(sum(layout), layout)
    folder = str(tmp_path / "checkpoint")
    ranks = pool.run(save_and_load, (folder,), backend="qcoll", timeout=100)
    model = Toy()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)  # in this process alone, without a group
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, torch.cat([rank[name] for rank in ranks])), name


def load_full() -> None:
    """Rank 0's full state dict reaches all shards exactly (broadcast)."""
    model, _ = trained(steps=0)
    full = {name: torch.randn(p.shape) for name, p in Toy(seed=9).named_parameters()}
    shared: list[Any] = [full]
    dist.broadcast_object_list(shared, 0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = dict(shared[0]) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=options)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), shared[0][name]), name


def test_loading_a_full_state_dict_is_exact() -> None:
    shared_pool(4, [2, 2]).run(load_full, backend="qcoll", timeout=100)


def masters_in_place(codec: str) -> None:
    """fp32 masters gathered in place: the own slice stays exact, however often it is gathered."""
    rank, world = dist.get_rank(), dist.get_world_size()
    masters = torch.randn(world, 50_000, generator=torch.Generator().manual_seed(5))
    buffer = torch.zeros_like(masters)
    buffer[rank] = masters[rank]
    with qcoll.options(all_gather=codec, all_gather_dtypes=("fp32",)):
        for _ in range(20):
            dist.all_gather_into_tensor(buffer.view(-1), buffer[rank])
            assert torch.equal(buffer[rank], masters[rank])
    counted = qcoll.stats()["all_gather_into_tensor"]
    assert counted["fallbacks"] == {}
    bits = 8 if codec == "int8" else 4
    for other in set(range(world)) - {rank}:
        assert not torch.equal(buffer[other], masters[other])
        # A block's scale is at most its extreme / 2^(bits-1); see docs/numerics.md for the bound.
        error = (buffer[other] - masters[other]).abs().max()
        assert error <= masters[other].abs().max() / 2 ** (bits - 1) * 1.1


@pytest.mark.parametrize("layout", [[1, 1], [2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_masters_gathered_in_place_stay_exact(codec: str, layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    pool.run(masters_in_place, (codec,), backend="qcoll", fresh=True)
