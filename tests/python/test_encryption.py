"""Groups that encrypt (``QCOLL_ENCRYPT``): the same results, and nothing passes unencrypted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import normal, pool_of
from torch.nn.parallel import DistributedDataParallel

import qcoll
from qcoll.testing import Nodes, RanksFailed

ALL = {"QCOLL_ENCRYPT": "1", "QCOLL_SHM": "0"}  # every byte goes over TCP
NATIVE = {"QCOLL_ENCRYPT": "native"}
LAYOUTS: list[Nodes] = [[1, 1], [2, 2], [2, 1]]


@pytest.fixture(params=LAYOUTS, ids=["1+1", "2+2", "2+1"])
def nodes(request: pytest.FixtureRequest) -> Nodes:
    return request.param


def run(nodes: Nodes, function: Any, *args: Any, env: Mapping[str, str] = ALL) -> list[Any]:
    return pool_of(nodes).run(function, args=args, backend="qcoll", env=env, fresh=True)


def native_verbs() -> None:
    """Exact verbs against gloo, encoded ones against the codec."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for count in (1, 1000, 300_000):
        mine = normal(rank, count, torch.float32)
        for codec in ("exact", "int8:256", "int4:128"):
            whole = torch.empty(count * world)
            qcoll.all_gather_into_tensor(whole, mine, codec=codec)
            for r, part in enumerate(whole.split(count)):
                theirs = normal(r, count, torch.float32)
                same = qcoll.decode(qcoll.encode(theirs, codec), [count], torch.float32, codec)
                assert torch.equal(part, same)
        total = mine.clone()
        dist.all_reduce(total)
        expected = sum(normal(r, count, torch.float32).double() for r in range(world))
        torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-5)


def test_native_verbs(nodes: Nodes) -> None:
    run(nodes, native_verbs)


def test_native_verbs_beside_a_delegate_in_the_clear(nodes: Nodes) -> None:
    run(nodes, native_verbs, env=NATIVE)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.complex64)


def rooted_verbs() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        parts = [(normal(r, 37, torch.float32) * 9).to(dtype) for r in range(world)]
        for root in range(world):
            for async_op in (False, True):

                def done(work: Any) -> None:
                    if work is not None:
                        work.wait()

                x = parts[rank].clone()
                done(dist.broadcast(x, src=root, async_op=async_op))
                assert torch.equal(x, parts[root])
                columns = torch.zeros(37, 2, dtype=dtype)  # not contiguous
                columns[:, 0] = parts[rank]
                done(dist.broadcast(columns[:, 0], src=root, async_op=async_op))
                assert torch.equal(columns[:, 0], parts[root])
                assert not columns[:, 1].any()

                outs = [torch.empty_like(x) for _ in range(world)] if rank == root else None
                done(dist.gather(parts[rank], outs, dst=root, async_op=async_op))
                assert outs is None or all(map(torch.equal, outs, parts))

                out = torch.empty_like(x)
                done(dist.scatter(out, parts if rank == root else None, src=root))
                assert torch.equal(out, parts[rank])

                x = parts[rank].clone()
                done(dist.reduce(x, dst=root, async_op=async_op))
                expected = torch.stack(parts).sum(0).to(dtype) if rank == root else parts[rank]
                torch.testing.assert_close(
                    x,
                    expected,
                    atol=0.2 if dtype.itemsize == 2 else 1e-4,
                    rtol=1e-2 if dtype.itemsize == 2 else 1e-5,
                )
        dist.barrier()


def test_rooted_verbs_of_a_group_without_a_delegate(nodes: Nodes) -> None:
    run(nodes, rooted_verbs)


def other_reductions() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
            if dtype.is_floating_point and name.startswith("B"):
                continue
            if dtype is torch.bool and name in ("SUM", "PRODUCT", "AVG"):
                continue  # gloo refuses them
            x = (normal(rank, 4 * world, torch.float32) * 5).abs().to(dtype)
            op = getattr(dist.ReduceOp, name)
            if name == "AVG":
                if not dtype.is_floating_point:
                    with pytest.raises(ValueError, match=r"no avg of .*\[\d+\]"):
                        dist.all_reduce(x.clone(), op=op)
                    continue
                expected = x.clone()
                dist.all_reduce(expected, group=gloo)
                expected /= world
            else:
                expected = x.clone()
                dist.all_reduce(expected, op=op, group=gloo)
            got = x.clone()
            dist.all_reduce(got, op=op)
            torch.testing.assert_close(got, expected)


def test_reductions_that_the_engine_does_not_compute(nodes: Nodes) -> None:
    run(nodes, other_reductions)


def objects() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    things = [{"rank": rank}, "text" * 5000] if rank == 1 else [None, None]
    dist.broadcast_object_list(things, src=1)
    assert things == [{"rank": 1}, "text" * 5000]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, "x" * 10 * rank)
    assert every == ["x" * 10 * r for r in range(world)]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world)], src=0)
    assert got == [f"for {rank}"]
    some: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(("from", rank), some, dst=0)
    assert some is None or some == [("from", r) for r in range(world)]


def test_objects(nodes: Nodes) -> None:
    run(nodes, objects)


def ddp() -> list[float]:
    torch.manual_seed(dist.get_rank())  # DDP broadcasts rank 0's weights
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = normal(dist.get_rank(), 500, torch.float32).view(10, 50)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ddp_trains_as_without_encryption() -> None:
    for encrypted, plain in zip(
        run([2, 2], ddp), run([2, 2], ddp, env={"QCOLL_SHM": "0"}), strict=True
    ):
        assert encrypted == pytest.approx(plain, abs=1e-6)
        assert encrypted[-1] < encrypted[0]


def what_has_no_encrypted_way() -> None:
    rank = dist.get_rank()
    x = torch.ones(4)
    calls = {
        "send": lambda: dist.send(x, 1 - rank),
        "recv": lambda: dist.recv(x, 1 - rank),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            torch.ones(2, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
        ),
        "all_reduce": lambda: dist.all_reduce(torch.eye(3).to_sparse()),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}.*QCOLL_ENCRYPT=native"):
            call()
    native_verbs()  # the group lives


def test_what_has_no_encrypted_way_is_refused() -> None:
    run([1, 1], what_has_no_encrypted_way)


def delegated_in_the_clear() -> None:
    rank = dist.get_rank()
    x = torch.full((4,), float(rank))
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    assert torch.equal(x, torch.zeros(4))


def test_native_leaves_the_delegate() -> None:
    run([1, 1], delegated_in_the_clear, env=NATIVE)


def test_other_values_are_refused() -> None:
    with pytest.raises(RanksFailed, match=r"ValueError: .*QCOLL_ENCRYPT=\"yes\".*0, 1"):
        run([1, 1], native_verbs, env={"QCOLL_ENCRYPT": "yes"})


def disagreeing() -> str:
    import os

    os.environ["QCOLL_ENCRYPT"] = "01"[int(os.environ["RANK"])]
    try:
        dist.init_process_group("qcoll")
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["QCOLL_ENCRYPT"]
    return "no error"


def test_ranks_that_disagree_are_told() -> None:
    for text in pool_of([1, 1]).run(disagreeing, backend=None):
        assert re.search(r"QCOLL_ENCRYPT", text), text
        assert "rank 0" in text
        assert "rank 1" in text
