"""Asynchronous distributed checkpoints: a thread saves while training goes on, and reshards."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_training import Toy, loss_of

from qcoll.testing import shared_pool


def sharded(seed: int = 1) -> Any:
    model: Any = Toy(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def step(model: Any, number: int) -> None:
    loss_of(model, number).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
            parameter.grad = None


def save_while_training(folder: str) -> dict[str, torch.Tensor]:
    model = sharded()
    step(model, 0)
    saved = shards(model)
    group = dist.new_group(backend="cpu:qcoll")  # the thread's own: calls of a group have an order
    future = dcp.async_save(
        {"model": get_model_state_dict(model)}, checkpoint_id=folder, process_group=group
    )
    assert isinstance(future, Future)
    for number in range(1, 4):
        step(model, number)
    future.result(timeout=60)
    assert not torch.equal(shards(model)["head.weight"], saved["head.weight"])
    return saved


def load(folder: str) -> dict[str, torch.Tensor]:
    model = sharded(seed=7)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return shards(model)


@pytest.mark.parametrize("backend", ["qcoll", "cpu:qcoll,cuda:qcoll"])
def test_async_save(backend: str, tmp_path: Path) -> None:
    """What is loaded, by the same ranks or by more, is what was there when the save began."""
    folder = str(tmp_path / "checkpoint")
    two, four = shared_pool(2, [1, 1]), shared_pool(4, [2, 2])
    saved = two.run(save_while_training, (folder,), backend=backend, timeout=100)
    whole = {name: torch.cat([rank[name] for rank in saved]) for name in saved[0]}
    for pool in (two, four):
        ranks = pool.run(load, (folder,), backend="qcoll", timeout=100)
        for name, expected in whole.items():
            assert torch.equal(torch.cat([rank[name] for rank in ranks]), expected), name
