"""DDP beyond plain training: rebuilt buckets, all of torch's hooks, optimizers beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from toy_training import Toy, loss_of

from qcoll.testing import RankPool, shared_pool

LAYOUTS = [[1, 1], [2, 2]]
Weights = dict[str, torch.Tensor]


def model_of(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Toy(), **options)


def weights_of(model: DistributedDataParallel) -> Weights:
    return {name: w.detach().clone() for name, w in model.module.named_parameters()}


def train(model: Any, optimizer: Any = None, steps: int = 4) -> Weights:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return weights_of(model)


def compare(layout: list[int], function: Callable[..., Weights], *args: Any) -> list[Weights]:
    """The weights of qcoll's ranks, after comparing them with gloo's."""
    pool = shared_pool(sum(layout), layout)
    theirs = pool.run(function, args, backend="gloo", timeout=100)
    ours: list[Weights] = pool.run(function, args, backend="qcoll", timeout=100)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, weight in one.items():
            if sum(layout) == 2:
                assert torch.equal(weight, other[name]), name
            else:  # sums of four may be added in another order
                torch.testing.assert_close(weight, other[name], rtol=1e-3, atol=1e-3)
    return ours


def replicas_are_equal(ranks: list[Weights]) -> None:
    for rank in ranks[1:]:
        for name, weight in rank.items():
            assert torch.equal(weight, ranks[0][name]), name


def rebuilt() -> Weights:
    """After the first step DDP lays its buckets out anew, in the order of the gradients."""
    model = model_of(bucket_cap_mb=0.25)
    weights = train(model)
    data = model._get_ddp_logging_data()
    assert data["has_rebuilt_buckets"]
    assert data["rebuilt_bucket_sizes"] != data["bucket_sizes"]
    return weights


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rebuilt_buckets(layout: list[int]) -> None:
    replicas_are_equal(compare(layout, rebuilt))


def bf16_hook(group, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations, not as text
    """Under another name: DDP takes torch's own only from builds with NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def hooked(name: str, steps: int = 5) -> Weights:
    # One bucket for PowerSGD: its callbacks make collectives, in an order that several would mix.
    model = model_of(bucket_cap_mb=25 if "power" in name else 0.25)
    state: Any = None
    hook: Any
    power = functools.partial(powerSGD_hook.PowerSGDState, None, start_powerSGD_iter=2)
    if name == "fp16 of power":
        state = power(matrix_approximation_rank=2)
        hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    elif name == "power":
        state = power(matrix_approximation_rank=1, use_error_feedback=False)
        hook = powerSGD_hook.powerSGD_hook
    elif name == "local SGD":
        subgroup, _ = dist.new_subgroups(dist.get_world_size() // 2)
        state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
        hook = post_localSGD_hook.post_localSGD_hook
    elif name == "none":
        hook = debugging_hooks.noop_hook
    else:
        hook = bf16_hook
    model.register_comm_hook(state, hook)
    if name != "local SGD":
        return train(model, steps=steps)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return weights_of(model)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["bf16", "power", "fp16 of power", "local SGD", "none"])
def test_comm_hooks(name: str, layout: list[int]) -> None:
    ranks = compare(layout, hooked, name)
    if name != "none":
        replicas_are_equal(ranks)


def attempted(name: str) -> str | Weights:
    """The weights, or the error that the hook ends with."""
    model = model_of()
    if name == "batched power":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    else:
        hook = getattr(quantization_hooks, f"quantization_{name}_hook")
        model.register_comm_hook(dist.group.WORLD, hook)
    try:
        return train(model, steps=3)
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@pytest.mark.parametrize("name", ["batched power", "pertensor", "perchannel"])
def test_hooks_that_torch_breaks_on_the_cpu(name: str) -> None:
    """They fail with gloo, by errors of indexing and shape of their own, so also with qcoll: at
    once, and by the same error. Where a later torch mends one, the weights are compared."""
    with RankPool(2, [1, 1]) as pool:
        theirs = pool.run(attempted, (name,), backend="gloo", fresh=True)
    with RankPool(2, [1, 1]) as pool:
        ours = pool.run(attempted, (name,), backend="qcoll", fresh=True)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(one, str):
            assert one == other
            assert "Error" in one
        else:
            for weight, expected in zip(one.values(), other.values(), strict=True):
                torch.testing.assert_close(weight, expected)


def with_zero(how: str) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns a lot

    model = model_of()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=1e-2, parameters_as_bucket_view=True
    )
    if how == "join":
        steps = 3 + dist.get_rank() % 2
        with Join([model, optimizer]):
            train(model, optimizer, steps)
        return weights_of(model)
    weights = train(model, optimizer)
    optimizer.consolidate_state_dict(to=dist.get_world_size() - 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        for index, state in optimizer.state_dict()["state"].items():
            weights[f"average {index}"] = state["exp_avg"]
    return weights


@pytest.mark.parametrize("how", ["consolidate", "join"])
def test_zero_redundancy(how: str) -> None:
    ranks = compare([1, 1], with_zero, how)
    for name, weight in ranks[0].items():
        assert torch.equal(weight, ranks[1][name]), name
    assert (len(ranks[1]) > len(ranks[0])) == (how == "consolidate")


def overlapped(shard_buckets: bool) -> tuple[Weights, Weights]:
    """Each bucket's owner steps in the callback of its all-reduce, and broadcasts."""
    # Their import warns a lot.
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = model_of(bucket_cap_mb=0.25)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=1e-2, overlap_with_ddp=True
    )
    hook = ddp_zero_hook.hook_with_zero_step(
        default_hooks.allreduce_hook, model, optimizer, shard_buckets=shard_buckets
    )
    model.register_comm_hook(None, hook)
    plain = Toy()
    plain.load_state_dict(model.module.state_dict())
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for number in range(6):
        before = weights_of(model)
        model.zero_grad()
        loss_of(model, number).backward()
        if all(torch.equal(before[name], w) for name, w in weights_of(model).items()):
            continue  # the first backward passes only lay out the buckets
        reference.zero_grad()
        loss_of(plain, number).backward()
        for parameter in plain.parameters():
            gradients: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gradients, parameter.grad)
            parameter.grad = torch.stack(gradients).mean(0)
        reference.step()
    return weights_of(model), {n: w.detach().clone() for n, w in plain.named_parameters()}


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_zero_overlapped_with_ddp(shard_buckets: bool) -> None:
    """torch refuses this to gloo, which may hang in it."""
    ranks = shared_pool(2, [1, 1]).run(overlapped, (shard_buckets,), backend="qcoll", timeout=100)
    replicas_are_equal([weights for weights, _ in ranks])
    initial = Toy().state_dict()
    for weights, reference in ranks:
        for name, weight in weights.items():
            assert not torch.equal(weight, initial[name]), name
            torch.testing.assert_close(weight, reference[name], rtol=1e-4, atol=1e-5)
