"""FSDP2 (fully_shard) trains through qcoll as through gloo when all is exact, and with the recipe.

World 2 has one correctly rounded sum of two gradients: the same bits after any number of steps.
Four ranks may add in another order: within 1e-6 after one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toy_training import Run, Toy, loss_of, same_bits, same_but_for_order, train

import qcoll
from qcoll.testing import shared_pool

EXACT = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), "exact")
LAYOUTS = [[1, 1], [2, 2]]
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}

# gloo adds in the type of the tensor: each of the sums of four gradients is rounded to it.
SUM_PRECISION = {"bf16 sums": 2**-7, "fp16": 2**-9}


def shard(model: Toy, policy: str, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICIES[policy])
    return fully_shard(model, mesh=mesh, mp_policy=POLICIES[policy])


def local_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.to_local()


def fsdp2(policy: str, feature: str = "", steps: int = 4) -> Run:
    """Trains a few steps with one feature of FSDP2 in use."""
    if feature == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Toy()
    if feature == "packed":  # frozen bf16 weights beside fp32 ones travel as one uint8 tensor
        for block in model.blocks:
            block.up.to(torch.bfloat16).requires_grad_(False)
            block.up.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
            block.up.register_forward_hook(lambda _, __, out: out.float())
    model = shard(model, policy, mesh)
    if feature == "factor":
        model.set_gradient_divide_factor(4.0)
    elif feature == "sum and factor":
        model.set_gradient_divide_factor(4.0)
        model.set_force_sum_reduction_for_comms(True)
    elif feature == "unsharded":
        model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)

    def step_of(step: int) -> float:
        if feature == "accumulate":
            model.set_requires_gradient_sync(False)
            loss_of(model, step, micro=0).backward()
            model.set_requires_gradient_sync(True)
        loss = loss_of(model, step, micro=1)
        loss.backward()
        if feature == "clip":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert float(norm.full_tensor()) > 0.05  # it clips
        return loss.item()

    groups = mesh.get_all_groups()
    return train(optimizer, step_of, steps, lambda: local_weights(model), groups)


def compare(layout: list[int], *case: Any, **env: Any) -> list[Run]:
    """The runs of an exact qcoll, after comparing each rank's with gloo's."""
    pool = shared_pool(sum(layout), layout)
    theirs = pool.run(fsdp2, case, backend="gloo", timeout=100)
    ours: list[Run] = pool.run(fsdp2, case, backend="qcoll", pg_options=EXACT, timeout=100, **env)
    for one, other in zip(ours, theirs, strict=True):
        if sum(layout) == 2:
            same_bits(one, other)
        else:
            same_but_for_order(one, other, SUM_PRECISION.get(case[0], 1e-6))
        assert one.stats["all_gather_into_tensor"]["calls"] > 0
        assert one.stats["reduce_scatter_tensor"]["calls"] > 0
    return ours


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_exact_training_equals_gloos(policy: str, layout: list[int]) -> None:
    compare(layout, policy)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("feature", ["clip", "accumulate", "packed", "sum and factor", "unsharded"])
def test_features_equal_gloos(feature: str, layout: list[int]) -> None:
    policy = "fp32" if feature == "packed" else "bf16"
    runs = compare(layout, policy, feature)
    if feature == "packed":
        reasons = runs[0].stats["all_gather_into_tensor"]["fallbacks"]
        assert any("uint8" in reason for reason in reasons), reasons
    if feature == "clip":
        assert runs[0].stats["all_reduce"]["calls"] > 0


def test_hsdp_equals_gloos() -> None:
    for run in compare([2, 2], "bf16", "hsdp"):
        assert run.stats["all_reduce"]["calls"] > 0  # between the replicas


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_divide_factor_reduces_by_premul_sum(layout: list[int]) -> None:
    """gloo has no PREMUL_SUM. A power of two makes it the same as dividing the sum."""
    pool = shared_pool(sum(layout), layout)
    premul = pool.run(fsdp2, ("fp32", "factor"), backend="qcoll", pg_options=EXACT, timeout=100)
    divided = pool.run(fsdp2, ("fp32", "sum and factor"), backend="gloo", timeout=100)
    for one, other in zip(premul, divided, strict=True):
        if sum(layout) == 2:
            same_bits(one, other)
        else:
            same_but_for_order(one, other)


def mixed_premul() -> None:
    with qcoll.options(min_bytes=0):
        model = shard(Toy(), "bf16", init_device_mesh("cpu", (dist.get_world_size(),)))
        model.set_gradient_divide_factor(3.0)
        qcoll.reset_stats()
        loss_of(model, 0).backward()
    counted = qcoll.stats()["reduce_scatter_tensor"]
    assert counted["fallbacks"] == {}
    assert all(p.grad.to_local().isfinite().all() for p in model.parameters())


def test_premul_sum_takes_the_coded_path() -> None:
    shared_pool(2, [1, 1]).run(mixed_premul, backend="qcoll")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_recipe_trains_as_well_as_gloo(layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    exact = pool.run(fsdp2, ("bf16", "", 20), backend="gloo", timeout=100)
    coded = pool.run(fsdp2, ("bf16", "", 20), backend="qcoll", timeout=100)
    for one, other in zip(coded, exact, strict=True):
        assert one.losses != other.losses
        assert other.losses[-1] < 0.6 * other.losses[0]  # there is something to lose
        for mine, theirs in zip(one.losses, other.losses, strict=True):
            # Rounding noise moves the loss by some 0.03 %; int4 weights would by 1 %.
            assert abs(mine - theirs) < 0.002 * theirs
        check_coded_path(one, sum(layout), layout)


def check_coded_path(run: Run, world: int, layout: list[int]) -> None:
    """The bytes that cross nodes are those of int8 weights and int4 gradients."""
    share = (len(layout) - 1) / len(layout) / layout[0]  # of the payload that a rank sends across
    gathers = run.stats["all_gather_into_tensor"]
    scatters = run.stats["reduce_scatter_tensor"]
    across = gathers["wire_bytes"]["across_nodes"] / (share * gathers["payload_bytes"])
    # The head is below min_bytes; blocks are int8 of bf16: (8 + 16 / 256) / 16 bits.
    assert 0.50 < across < 0.65, across
    across = scatters["wire_bytes"]["across_nodes"] / (share * scatters["payload_bytes"])
    assert 0.12 < across < 0.20, across  # int4 of fp32: (4 + 16 / 128) / 32 bits
    assert gathers["calls"] > sum(gathers["fallbacks"].values()) > 0
    assert world == sum(layout)
