"""What torch builds on functional collectives: DTensor's parallel styles, autograd, the compiler.

The reference is the same computation in one process, on the inputs of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from codec_reference import round_trip
from collective_cases import normal, same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import qcoll
from qcoll.testing import RankPool

WIDTH, LENGTH, CLASSES = 16, 8, 12


@pytest.fixture(scope="module", params=[[2, 2], [1, 1]], ids=["2+2", "1+1"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    # Ranks of its own: torch caches what it derives from meshes, with groups that may be gone.
    with RankPool(sum(request.param), request.param) as pool:
        yield pool


def run(pool: RankPool, function: Any) -> None:
    pool.run(function, backend="qcoll", timeout=120)


def inputs_of_all(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [normal(r, count, dtype, count) for r in range(dist.get_world_size())]


def functional_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    every = [x.view(world, 6) for x in inputs_of_all(6 * world)]
    mine, total = every[rank].clone(), torch.stack(every).double().sum(0)
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(functional.all_reduce(mine, "sum", group).double(), total, **close)
    mean = functional.all_reduce(mine, "avg", group).double()
    torch.testing.assert_close(mean, total / world, **close)
    assert torch.equal(functional.all_reduce(mine, "max", group), torch.stack(every).amax(0))
    assert torch.equal(functional.all_gather_single(mine, 0, group), torch.cat(every))
    assert torch.equal(functional.all_gather_single(mine, 1, group), torch.cat(every, 1))
    part = functional.reduce_scatter_single(mine, "sum", 0, group)
    torch.testing.assert_close(part.double(), total[rank : rank + 1], **close)
    assert torch.equal(functional.broadcast(mine, world - 1, group), every[-1])
    exchanged = functional.all_to_all_single(mine, None, None, group)
    assert torch.equal(exchanged, torch.stack([x[rank] for x in every]))
    sent = [1 + (rank + r) % 2 for r in range(world)]  # uneven, and symmetric
    uneven = functional.all_to_all_single(
        torch.full((sum(sent), 3), float(rank)), sent, sent, group
    )
    assert uneven[:, 0].tolist() == [r for r in range(world) for _ in range(sent[r])]
    shifted = functional.permute_tensor(
        mine.flatten(), [(r + 1) % world for r in range(world)], group
    )
    assert torch.equal(shifted, every[(rank - 1) % world].flatten())
    gathered = functional.all_gather_single_coalesced([mine, mine[0]], group)
    assert torch.equal(gathered[1], torch.cat([x[0] for x in every]))
    parts = functional.reduce_scatter_single_coalesced([mine, mine * 2], "sum", [0, 0], group)
    torch.testing.assert_close(parts[1].double(), 2 * total[rank : rank + 1], **close)
    for one, other in zip(
        functional.all_reduce_coalesced([mine, -mine], "sum", group), (total, -total), strict=True
    ):
        torch.testing.assert_close(one.double(), other, **close)
    assert torch.equal(mine, every[rank])  # none of them touched its input


def test_functional_collectives(pool: RankPool) -> None:
    run(pool, functional_collectives)


def functional_options() -> None:
    """Options reach them: a plain gather is coded, and so is one coalesced if they say so."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = inputs_of_all(5000, torch.bfloat16)
    coded = torch.cat([round_trip(x, "int8") for x in every])
    with qcoll.options(min_bytes=0, scope="all", all_gather="int8", coalesced=True):
        assert same_bits(
            functional.all_gather_single(every[rank], 0, dist.group.WORLD).clone(), coded
        )
    with qcoll.options(min_bytes=0, scope="all", all_gather="int8"):
        out = torch.empty(5000 * world, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(out, every[rank])
        assert same_bits(out, coded)
        with qcoll.exact():
            exact = functional.all_gather_single(every[rank], 0, dist.group.WORLD)
            assert same_bits(exact.clone(), torch.cat(every))


def test_options_reach_functional_collectives(pool: RankPool) -> None:
    run(pool, functional_options)


def differentiated() -> None:
    """The gradients of collectives are collectives: each rank's loss counts on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    every = inputs_of_all(4 * world)
    factors = [r + 1.0 for r in range(world)]  # the loss of rank r is its factor times its output

    x = every[rank].clone().requires_grad_()
    (functional.all_gather_single_autograd(x, 0, group).sum() * factors[rank]).backward()
    assert torch.allclose(x.grad, torch.full_like(x, sum(factors)))
    x = every[rank].clone().requires_grad_()
    (functional.reduce_scatter_single_autograd(x, "sum", 0, group).sum() * factors[rank]).backward()
    assert torch.allclose(x.grad, torch.tensor(factors).repeat_interleave(4))
    x = every[rank].clone().requires_grad_()
    (functional.all_to_all_single_autograd(x, None, None, group).sum() * factors[rank]).backward()
    assert torch.allclose(x.grad, torch.tensor(factors).repeat_interleave(4))


def test_gradients_of_functional_collectives(pool: RankPool) -> None:
    run(pool, differentiated)


class Layer(nn.Module):
    """Norm, a pair of projections and a loss's logits, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return self.logits(x + self.down(hidden))  # type: ignore[no-any-return]


PLANS: dict[str, dict[str, Any]] = {
    "rows and columns": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False
        ),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "logits": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    },
    "loss": {"logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
    "output": {
        "logits": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False
        )
    },
}


def styles() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    x = normal(0, LENGTH * WIDTH, torch.float32).view(LENGTH, WIDTH)
    target = torch.arange(LENGTH) % CLASSES
    for name, plan in PLANS.items():
        torch.manual_seed(5)
        plain = Layer()
        torch.manual_seed(5)
        parallel = parallelize_module(Layer(), mesh, plan)
        expected = nn.functional.cross_entropy(plain(x), target)
        expected.backward()
        logits = parallel(x)
        if name == "output":
            logits = logits.full_tensor()
        if name == "loss":
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits, target)
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(logits, target)
            loss.backward()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        for (key, one), other in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            gradient = one.grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            assert torch.allclose(gradient, other.grad, rtol=1e-4, atol=1e-6), f"{name}: {key}"


def test_parallel_styles(pool: RankPool) -> None:
    run(pool, styles)


def redistributions() -> None:
    """Every way from one placement to another, on sizes that do not divide evenly."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("line",))
    full = torch.randn(7, 5, generator=torch.Generator().manual_seed(2))
    share = DTensor.from_local(full * (rank + 1), mesh, [Partial()])
    total = full.double() * (world * (world + 1) / 2)
    for target in (Replicate(), Shard(0), Shard(1)):
        got = share.redistribute(mesh, [target]).full_tensor()
        torch.testing.assert_close(got.double(), total, rtol=1e-6, atol=1e-6)
    for source in (Replicate(), Shard(0), Shard(1)):
        distributed = distribute_tensor(full, mesh, [source])
        for target in (Replicate(), Shard(0), Shard(1)):
            assert torch.equal(distributed.redistribute(mesh, [target]).full_tensor(), full)
    product = distribute_tensor(full, mesh, [Shard(1)]) @ distribute_tensor(
        full.t(), mesh, [Shard(0)]
    )
    torch.testing.assert_close(product.full_tensor(), full @ full.t())


def test_placements(pool: RankPool) -> None:
    run(pool, redistributions)


def compiled() -> None:
    """Collectives inside a compiled function, and around a compiled model's graph breaks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD

    def function(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", group)
        z = functional.all_gather_single(y + rank, 0, group)
        return functional.reduce_scatter_single(z, "avg", 0, group) - y

    def with_plain_verbs(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        out = torch.empty(world * y.numel())
        dist.all_gather_into_tensor(out, y)
        return out + 1

    x = inputs_of_all(6)[rank]
    for each in (function, with_plain_verbs):
        fast = torch.compile(each, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert torch.equal(fast(x), each(x))


def test_compiled_collectives(pool: RankPool) -> None:
    run(pool, compiled)
