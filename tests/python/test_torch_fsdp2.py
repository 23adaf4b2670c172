"""FSDP2's extension points: custom communication, memory from the process group, two dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from toy_training import Run, Toy, batch, same_bits, same_but_for_order, train

import qcoll
from qcoll.testing import RankPool, shared_pool

# By environment: the groups of a mesh's dimensions do not inherit the default group's options.
EXACT = dict.fromkeys(("QCOLL_ALL_GATHER", "QCOLL_REDUCE_SCATTER"), "exact")
LAYOUTS = [[1, 1], [2, 2]]
RECIPE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Buffers:
    """Hands out one buffer for each size, again and again; counts the calls that use them."""

    def __init__(self, codec: str | None = None) -> None:
        self.codec, self.calls = codec, 0
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (*map(int, size), dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(*size, dtype=dtype, device=device)
        return self._buffers[key]


class OwnAllGather(Buffers, AllGather):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        if self.codec is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return qcoll.all_gather_into_tensor(
            output_tensor, input_tensor, codec=self.codec, group=group, async_op=async_op
        )


class OwnReduceScatter(Buffers, ReduceScatter):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        if self.codec is None:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return qcoll.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, codec=self.codec, group=group, async_op=async_op
        )


def sharded(mesh: Any) -> Any:
    model: Any = Toy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=RECIPE)
    return fully_shard(model, mesh=mesh, mp_policy=RECIPE)


def trained(
    model: Any, steps: int, groups: Sequence[Any] = (None,), data_rank: int | None = None
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data_rank = dist.get_rank() if data_rank is None else data_rank

    def step_of(step: int) -> float:
        x, target = batch(step, data_rank)
        loss = torch.nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        return loss.item()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter

    return train(optimizer, step_of, steps, weights, groups)


def custom(codec: str | None, steps: int = 4) -> Run:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(mesh)
    gathers, scatters = OwnAllGather(codec), OwnReduceScatter(codec)
    for module in (*model.blocks, model):
        module.set_custom_all_gather(gathers)
        module.set_custom_reduce_scatter(scatters)
    run = trained(model, steps, mesh.get_all_groups())
    assert gathers.calls >= scatters.calls == 3 * steps  # two blocks and the rest
    if run.stats:  # all went through the custom calls
        assert run.stats["all_gather_into_tensor"]["calls"] == gathers.calls
        assert run.stats["reduce_scatter_tensor"]["calls"] == scatters.calls
    return run


def compare(pool: RankPool, function: Any, *args: Any) -> list[Run]:
    """The runs of an exact qcoll, after comparing each rank's with gloo's."""
    theirs = pool.run(function, args, backend="gloo", env=EXACT, timeout=100)
    ours: list[Run] = pool.run(function, args, backend="qcoll", env=EXACT, timeout=100)
    for one, other in zip(ours, theirs, strict=True):
        if len(ours) == 2:
            same_bits(one, other)
        else:
            same_but_for_order(one, other)
    return ours


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_custom_communication_equals_gloos(layout: list[int]) -> None:
    compare(shared_pool(sum(layout), layout), custom, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_custom_communication_can_name_a_codec(layout: list[int]) -> None:
    """A codec for one module's collectives, where the options say exact."""
    pool = shared_pool(sum(layout), layout)
    exact = pool.run(custom, (None, 20), backend="gloo", timeout=100)
    coded = pool.run(custom, ("int8", 20), backend="qcoll", env=EXACT, timeout=100)
    for one, other in zip(coded, exact, strict=True):
        for verb in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            assert one.stats[verb]["fallbacks"] == {}
        assert one.losses != other.losses
        assert other.losses[-1] < 0.6 * other.losses[0]
        for mine, theirs in zip(one.losses, other.losses, strict=True):
            assert abs(mine - theirs) < 0.005 * theirs


def from_the_group(device: str = "cpu") -> Run:
    """FSDP2 asks the backend for memory, if it has some to give."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = mesh.get_group()._get_backend(torch.device(device))
    model = sharded(mesh)
    for module in (*model.blocks, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    if backend.supports_tensor_alloc(torch.device(device)):
        x = backend.allocate_tensor(1000, dtype=torch.bfloat16, device=torch.device(device))
        assert x.shape == (1000,)
        assert x.dtype == torch.bfloat16
    else:
        with pytest.raises(RuntimeError, match="alloc"):
            backend.allocate_tensor(1000, dtype=torch.bfloat16, device=torch.device(device))
    return trained(model, 4, mesh.get_all_groups())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_memory_from_the_process_group(layout: list[int]) -> None:
    for run in compare(shared_pool(sum(layout), layout), from_the_group):
        assert run.stats["all_gather_into_tensor"]["calls"] > 0


def all_reduce_hook(steps: int = 3) -> Run:
    """The hook that FSDP2 calls on reduced gradients: here it sums them over the other dimension,
    as HSDP would."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("out", "in"))
    model = sharded(mesh["in"])
    calls = []

    def reduce(gradient: torch.Tensor) -> None:
        calls.append(gradient.numel())
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=mesh.get_group("out"))

    for module in (*model.blocks, model):
        module.set_all_reduce_hook(reduce)
    run = trained(model, steps, mesh.get_all_groups())
    assert len(calls) == 3 * steps
    return run


def hsdp(steps: int = 3) -> Run:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("out", "in"))
    return trained(sharded(mesh), steps, mesh.get_all_groups())


def test_an_all_reduce_hook_replaces_hsdp() -> None:
    pool = shared_pool(4, [2, 2])
    hooked = pool.run(all_reduce_hook, backend="qcoll", env=EXACT, timeout=100)
    usual = pool.run(hsdp, backend="gloo", timeout=100)
    for one, other in zip(hooked, usual, strict=True):
        same_but_for_order(one, other)


def two_dimensions(steps: int = 3) -> Run:
    """Tensor parallel inside a node, FSDP2 across: weights sharded both ways."""
    # Names of its own: torch caches what it derives from a mesh, with groups that may be gone.
    names = (f"data of {dist.get_backend()}", f"tensor of {dist.get_backend()}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model: Any = Toy()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh[names[1]], plan)
        fully_shard(block, mesh=mesh[names[0]])
    fully_shard(model, mesh=mesh[names[0]])
    run = trained(model, steps, mesh.get_all_groups(), mesh.get_local_rank(names[0]))
    assert model.blocks[0].up.weight.to_local().shape == (96, 96)
    return run


def test_tensor_parallel_and_fsdp2_together() -> None:
    with RankPool(4, [2, 2]) as pool:
        for run in compare(pool, two_dimensions):
            assert run.stats["all_gather_into_tensor"]["calls"] > 0
            assert run.stats["all_reduce"]["calls"] > 0
