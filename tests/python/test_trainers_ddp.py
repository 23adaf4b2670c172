"""DDP trains through qcoll as through gloo: plain, with its features, with torch's comm hooks.

World 2 must give the same bits; four ranks may add gradients in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from toy_training import Run, Toy, loss_of, same_bits, same_but_for_order, train

import qcoll
from qcoll.testing import shared_pool

LAYOUTS = [[1, 1], [2, 2]]
# Not torch's quantization hooks and batched PowerSGD: they fail on gloo too, by themselves.
HOOKS = ("allreduce", "fp16", "power_sgd", "builtin_allreduce", "builtin_fp16")


class Sparing(Toy):
    """Uses one of its blocks only in every second step."""

    step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for block in self.blocks[: 1 + self.step % 2]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def add_hook(model: DistributedDataParallel, name: str) -> None:
    if name == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "builtin_fp16":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif name == "builtin_allreduce":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ddp(feature: str = "", hook: str = "", steps: int = 5) -> Run:
    torch.manual_seed(3)
    model = DistributedDataParallel(
        Sparing() if feature == "unused" else Toy(),
        # Several buckets in flight, but for PowerSGD: its callbacks make collectives, whose order
        # would depend on which bucket's callback runs first.
        bucket_cap_mb=25 if hook == "power_sgd" else 0.25,
        find_unused_parameters=feature == "unused",
        static_graph=feature == "static",
        gradient_as_bucket_view=feature == "views",
    )
    if hook:
        add_hook(model, hook)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if feature == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns a lot

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)

    def step_of(step: int) -> float:
        if feature == "no_sync":
            with model.no_sync():
                loss_of(model, step, micro=0).backward()
        loss = loss_of(model, step, micro=1)
        loss.backward()
        return loss.item()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()

    if feature != "join":
        return train(optimizer, step_of, steps, weights)
    with model.join():  # rank 0 ends early and shadows the calls of the others
        return only_weights(model, optimizer, step_of, steps - 2 * (dist.get_rank() == 0))
    raise AssertionError("join() swallowed an exception")


def only_weights(model: Any, optimizer: Any, step_of: Any, steps: int) -> Run:
    """Without collectives of its own: not every rank makes every step."""
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        run.losses.append(step_of(step))
        optimizer.step()
    run.weights = {name: w.detach().clone() for name, w in model.named_parameters()}
    return run


def compare(layout: list[int], *case: Any) -> list[Run]:
    pool = shared_pool(sum(layout), layout)
    theirs = pool.run(ddp, case, backend="gloo", timeout=100)
    ours: list[Run] = pool.run(ddp, case, backend="qcoll", timeout=100)
    for one, other in zip(ours, theirs, strict=True):
        if sum(layout) == 2:
            same_bits(one, other)
        else:
            same_but_for_order(one, other, 2**-9 if "fp16" in case[-1] else 1e-6)
        for name, weight in one.weights.items():  # DDP's promise: replicas stay equal
            assert torch.equal(weight, ours[0].weights[name]), name
    return ours


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("feature", ["", "no_sync", "unused", "static", "views", "zero"])
def test_training_equals_gloos(feature: str, layout: list[int]) -> None:
    for run in compare(layout, feature):
        assert run.stats["all_reduce"]["calls"] > 5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_comm_hooks_equal_gloos(hook: str, layout: list[int]) -> None:
    """PowerSGD waits for further collectives inside the callbacks of the first."""
    compare(layout, "", hook)


def test_uneven_inputs_join() -> None:
    pool = shared_pool(2, [1, 1])
    theirs = pool.run(ddp, ("join",), backend="gloo", timeout=100)
    ours = pool.run(ddp, ("join",), backend="qcoll", timeout=100)
    for one, other in zip(ours, theirs, strict=True):
        same_bits(one, other)
    assert len(ours[0].losses) == len(ours[1].losses) - 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("codec", ["int8:256", "int8:256/int4:128"])
def test_encoded_gradients_train_as_well(codec: str, layout: list[int]) -> None:
    pool = shared_pool(sum(layout), layout)
    options = {"all_reduce": codec}
    exact = pool.run(ddp, ("", "", 20), backend="gloo", timeout=100)
    coded = pool.run(ddp, ("", "", 20), backend="qcoll", pg_options=options, timeout=100)
    for one, other in zip(coded, exact, strict=True):
        assert one.losses != other.losses
        assert other.losses[-1] < 0.6 * other.losses[0]
        for mine, theirs in zip(one.losses, other.losses, strict=True):
            assert abs(mine - theirs) < 0.005 * theirs
        for name, weight in one.weights.items():
            assert torch.equal(weight, coded[0].weights[name]), name
        counted = one.stats["all_reduce"]
        payload, across = counted["payload_bytes"], counted["wire_bytes"]["across_nodes"]
        # Half of the payload crosses twice (scatter, gather), shared by the ranks of the node.
        nominal = payload / layout[0]
        bits = 8 if codec.endswith("int8:256") else 4
        assert across < nominal * (bits / 32) * 1.35
        assert across > nominal * (bits / 32)


def contexts_reach_ddp() -> None:
    """exact() around backward: the collectives that DDP makes there are exact."""
    model = DistributedDataParallel(Toy(), bucket_cap_mb=0.25)
    for _ in range(2):
        loss_of(model, 0).backward()
    qcoll.reset_stats()
    with qcoll.exact():
        loss_of(model, 1).backward()
    counted = qcoll.stats()["all_reduce"]
    assert counted["calls"] == counted["fallbacks"]["inside qcoll.exact()"] > 1
    qcoll.reset_stats()
    loss_of(model, 2).backward()
    counted = qcoll.stats()["all_reduce"]
    assert "inside qcoll.exact()" not in counted["fallbacks"]
    assert counted["calls"] > sum(counted["fallbacks"].values())


def test_contexts_reach_the_collectives_of_backward() -> None:
    options = {"all_reduce": "int8"}
    shared_pool(2, [1, 1]).run(contexts_reach_ddp, backend="qcoll", pg_options=options)
