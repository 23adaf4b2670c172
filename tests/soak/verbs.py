"""Random collectives whose results are known: what the calls of a lane are.

Every rank draws the same calls and derives the inputs of all ranks from the seed. Exact sums are
of whole numbers so small that every order of adding them gives the same bits in every type.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from collective_cases import FLOATS, Names
from tests.soak.checks import check_all_reduce, check_copy, check_scatter, must_be
from torch.distributed.distributed_c10d import _coalescing_manager

import qcoll

#: Elements of the largest tensor of a call.
LARGEST = 1 << 20
_SHIFTS = 1000
#: Whole numbers up to this: their sums over a few ranks are exact in bfloat16.
_WHOLE = 8
MOVED = (*FLOATS, torch.float64, torch.uint8, torch.int64, torch.bool)
MOVING_CODECS = ("exact", "int8", "int4:64", "bf16", "int8:32", "int8/int4")
SUMMING_CODECS = ("exact", "int8", "int4", "bf16", "int8/int4", "int8:64")
CODED_COALESCED = {
    "all_gather": "int8:64",
    "all_gather_dtypes": "fp32,bf16,fp16",
    "scope": "all",
    "min_bytes": 0,
    "coalesced": True,
}

Works = list[dist.Work]


class Numbers:
    """Stretches of these are the inputs of all calls; made once for each process."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.normal, self.whole = [], []
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            size = LARGEST + _SHIFTS
            self.normal.append(torch.randn(size, generator=generator))
            whole = torch.randint(-_WHOLE, _WHOLE + 1, (size,), generator=generator)
            self.whole.append(whole.float())


@dataclass
class Call:
    """One call: how it is made, and what must have come of it."""

    verb: str
    size: int
    """Bytes of this rank's input."""
    issue: Callable[[bool], Works]
    check: Callable[[], None]
    same: Sequence[torch.Tensor] = field(default_factory=list)
    """Results that must be the same on all ranks, bit for bit."""
    has_future: bool = True
    lazy: bool = False
    """gloo's sends and receives are seen to have ended only by a wait."""

    def digest(self) -> int:
        value = 0
        for tensor in self.same:
            if tensor.numel():
                value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), value)
        return value


def _works(work: dist.Work | None) -> Works:
    return [] if work is None else [work]


class Calls:
    """The endless sequence of calls of one lane, from this rank's point of view."""

    def __init__(
        self, source: random.Random, numbers: Numbers, group: dist.ProcessGroup, names: Names
    ) -> None:
        self._random, self._numbers, self._group, self._names = source, numbers, group, names
        self._rank, self._world = group.rank(), group.size()
        self._verbs = {
            self._gather: 20,
            self._gather_list: 4,
            self._gather_coalesced: 5,
            self._scatter: 18,
            self._scatter_list: 4,
            self._reduce: 16,
            self._reduce_coalesced: 5,
            self._maximum: 4,
            self._exchange: 14,
            self._exchange_list: 4,
            self._broadcast: 6,
            self._barrier: 3,
            self._pass_on: 7,
        }

    def next(self) -> Call:
        return self._random.choices(list(self._verbs), list(self._verbs.values()))[0]()

    def _size(self, share: int = 1) -> int:
        """Log-uniform, and 0 now and then."""
        if self._random.random() < 0.03:
            return 0
        return int(LARGEST ** self._random.random()) // share

    def _inputs(self, count: int, dtype: torch.dtype, whole: bool = False) -> list[torch.Tensor]:
        """What each rank of the group passes."""
        begin = self._random.randrange(_SHIFTS)
        numbers = self._numbers.whole if whole else self._numbers.normal
        pieces = [piece[begin : begin + count] for piece in numbers[: self._world]]
        if dtype in FLOATS or dtype == torch.float64:
            return [piece.to(dtype) for piece in pieces]
        return [(piece * 50).abs().to(dtype) for piece in pieces]

    def _mine(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy: whoever writes into an input spoils no other call."""
        return inputs[self._rank].clone()

    def _dtype_for(self, codec: str) -> torch.dtype:
        return self._random.choice(MOVED if codec == "exact" else FLOATS)

    def _outermost(self, codec: str) -> str:
        """The codec by which data goes to all ranks."""
        return codec.split("/")[0 if len(set(self._names)) == 1 else -1]

    def _gather(self) -> Call:
        codec = self._random.choice(MOVING_CODECS)
        dtype = self._dtype_for(codec)
        count = self._size(self._world)
        inputs = self._inputs(count, dtype)
        mine, out = self._mine(inputs), torch.empty(count * self._world, dtype=dtype)

        def issue(async_op: bool) -> Works:
            work = qcoll.all_gather_into_tensor(
                out, mine, codec=codec, group=self._group, async_op=async_op
            )
            return _works(work)

        def check() -> None:
            for part, expected in zip(out.split(max(count, 1)), inputs, strict=False):
                check_copy(part, expected, self._outermost(codec))

        return Call("all_gather", mine.nbytes, issue, check, [out])

    def _gather_list(self) -> Call:
        dtype, count = self._dtype_for("exact"), self._size(self._world)
        inputs = self._inputs(count, dtype)
        mine, parts = self._mine(inputs), [torch.empty(count, dtype=dtype) for _ in inputs]

        def issue(async_op: bool) -> Works:
            with qcoll.exact():
                return _works(dist.all_gather(parts, mine, group=self._group, async_op=async_op))

        def check() -> None:
            for part, expected in zip(parts, inputs, strict=True):
                check_copy(part, expected, "exact")

        return Call("all_gather (list)", mine.nbytes, issue, check, parts)

    def _gather_coalesced(self) -> Call:
        coded = self._random.random() < 0.5
        dtype = self._random.choice(FLOATS)
        counts = [self._size(4 * self._world) for _ in range(self._random.randint(2, 4))]
        inputs = [self._inputs(count, dtype) for count in counts]
        mine = [self._mine(i) for i in inputs]
        outs = [torch.empty(count * self._world, dtype=dtype) for count in counts]

        def issue(async_op: bool) -> Works:
            with self._policy(coded), self._coalescing(async_op) as manager:
                for out, one in zip(outs, mine, strict=True):
                    dist.all_gather_into_tensor(out, one, group=self._group)
            return list(manager.works) if async_op else []

        def check() -> None:
            for out, count, given in zip(outs, counts, inputs, strict=True):
                for part, expected in zip(out.split(max(count, 1)), given, strict=False):
                    check_copy(part, expected, "int8:64" if coded else "exact")

        size = sum(m.nbytes for m in mine)
        return Call("all_gather (coalesced)", size, issue, check, outs, has_future=False)

    def _coalescing(self, async_op: bool) -> Any:
        return _coalescing_manager(self._group, torch.device("cpu"), async_ops=async_op)

    def _policy(self, coded: bool) -> AbstractContextManager[None]:
        return qcoll.options(**CODED_COALESCED) if coded else qcoll.exact()

    def _scatter(self) -> Call:
        codec = self._random.choice(SUMMING_CODECS)
        op = self._random.choice(("sum", "avg"))
        dtype = self._random.choice(FLOATS)
        count = self._size(self._world)
        inputs = self._inputs(count * self._world, dtype, whole=codec == "exact")
        mine, out = self._mine(inputs), torch.empty(count, dtype=dtype)

        def issue(async_op: bool) -> Works:
            work = qcoll.reduce_scatter_tensor(
                out, mine, op=op, codec=codec, group=self._group, async_op=async_op
            )
            return _works(work)

        def check() -> None:
            slices = [i[self._rank * count : (self._rank + 1) * count] for i in inputs]
            check_scatter(out, slices, self._rank, self._names, codec, op)

        return Call("reduce_scatter", mine.nbytes, issue, check)

    def _scatter_list(self) -> Call:
        dtype = self._random.choice((*FLOATS, torch.int64))
        count = self._size(self._world)
        inputs = self._inputs(count * self._world, dtype, whole=True)
        mine, out = self._mine(inputs), torch.empty(count, dtype=dtype)

        def issue(async_op: bool) -> Works:
            parts = [mine[r * count : (r + 1) * count] for r in range(self._world)]
            with qcoll.exact():
                return _works(dist.reduce_scatter(out, parts, group=self._group, async_op=async_op))

        def check() -> None:
            slices = [i[self._rank * count : (self._rank + 1) * count] for i in inputs]
            must_be(out, sum(slices[1:], slices[0]))

        return Call("reduce_scatter (list)", mine.nbytes, issue, check)

    def _reduce(self) -> Call:
        codec = self._random.choice(SUMMING_CODECS)
        op = self._random.choice(("sum", "avg"))
        dtype = self._random.choice(FLOATS)
        inputs = self._inputs(self._size(), dtype, whole=codec == "exact")
        result = self._mine(inputs)

        def issue(async_op: bool) -> Works:
            work = qcoll.all_reduce(
                result, op=op, codec=codec, group=self._group, async_op=async_op
            )
            return _works(work)

        def check() -> None:
            check_all_reduce(result, inputs, self._names, codec, op)

        return Call("all_reduce", result.nbytes, issue, check, [result])

    def _reduce_coalesced(self) -> Call:
        dtype = self._random.choice(FLOATS)
        sizes = [self._size(4) for _ in range(self._random.randint(2, 4))]
        inputs = [self._inputs(size, dtype, whole=True) for size in sizes]
        results = [self._mine(i) for i in inputs]

        def issue(async_op: bool) -> Works:
            with qcoll.exact(), self._coalescing(async_op) as manager:
                for result in results:
                    dist.all_reduce(result, group=self._group)
            return list(manager.works) if async_op else []

        def check() -> None:
            for result, given in zip(results, inputs, strict=True):
                must_be(result, sum(given[1:], given[0]))

        size = sum(result.nbytes for result in results)
        return Call("all_reduce (coalesced)", size, issue, check, results, has_future=False)

    def _maximum(self) -> Call:
        dtype = self._random.choice((torch.float32, torch.float64, torch.int64))
        inputs = self._inputs(self._size(), dtype)
        result = self._mine(inputs)

        def issue(async_op: bool) -> Works:
            op = dist.ReduceOp.MAX
            return _works(dist.all_reduce(result, op, group=self._group, async_op=async_op))

        def check() -> None:
            must_be(result, torch.stack(inputs).amax(0))

        return Call("all_reduce (max)", result.nbytes, issue, check, [result])

    def _exchange(self) -> Call:
        codec = self._random.choice(("exact", "int8", "int4:64"))
        dtype = self._dtype_for(codec)
        count = self._size(self._world)
        equal = self._random.random() < 0.5
        sizes = [
            [count if equal else self._random.randint(0, count) for _ in range(self._world)]
            for _ in range(self._world)
        ]
        inputs = self._inputs(count * self._world, dtype)
        inputs = [i[: sum(row)] for i, row in zip(inputs, sizes, strict=True)]
        taken = [row[self._rank] for row in sizes]
        mine, out = self._mine(inputs), torch.empty(sum(taken), dtype=dtype)
        splits = () if equal else (taken, sizes[self._rank])

        def issue(async_op: bool) -> Works:
            work = qcoll.all_to_all_single(
                out, mine, *splits, codec=codec, group=self._group, async_op=async_op
            )
            return _works(work)

        def check() -> None:
            for r, part in enumerate(out.split(taken)):
                expected = inputs[r].split(sizes[r])[self._rank]
                check_copy(part, expected, "exact" if r == self._rank else codec)

        verb = "all_to_all (equal)" if equal else "all_to_all (unequal)"
        return Call(verb, mine.nbytes, issue, check)

    def _exchange_list(self) -> Call:
        dtype, count = self._dtype_for("exact"), self._size(self._world)
        inputs = self._inputs(count * self._world, dtype)
        mine = [part.clone() for part in self._parts(inputs[self._rank], count)]
        outs = [torch.empty(count, dtype=dtype) for _ in inputs]

        def issue(async_op: bool) -> Works:
            with qcoll.exact():
                return _works(dist.all_to_all(outs, mine, group=self._group, async_op=async_op))

        def check() -> None:
            for out, given in zip(outs, inputs, strict=True):
                must_be(out, self._parts(given, count)[self._rank])

        return Call("all_to_all (list)", sum(m.nbytes for m in mine), issue, check)

    def _parts(self, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [whole[r * count : (r + 1) * count] for r in range(self._world)]

    def _broadcast(self) -> Call:
        dtype, root = self._dtype_for("exact"), self._random.randrange(self._world)
        inputs = self._inputs(self._size(), dtype)
        result = self._mine(inputs)

        def issue(async_op: bool) -> Works:
            work = dist.broadcast(result, group=self._group, group_src=root, async_op=async_op)
            return _works(work)

        return Call(
            "broadcast", result.nbytes, issue, lambda: must_be(result, inputs[root]), [result]
        )

    def _barrier(self) -> Call:
        def issue(async_op: bool) -> Works:
            return _works(dist.barrier(self._group, async_op=async_op))

        return Call("barrier", 0, issue, lambda: None)

    def _pass_on(self) -> Call:
        """Round a ring: to the next rank, from the one before."""
        inputs = self._inputs(self._size(), self._random.choice((torch.float32, torch.uint8)))
        after, before = (self._rank + 1) % self._world, (self._rank - 1) % self._world
        mine, got = self._mine(inputs), torch.empty_like(inputs[0])
        # What one rank sends as a batch the others may take one by one.
        batch = self._random.random() < 0.3

        def issue(async_op: bool) -> Works:
            group = self._group
            if batch:
                pair = [
                    dist.P2POp(dist.isend, mine, group=group, group_peer=after),
                    dist.P2POp(dist.irecv, got, group=group, group_peer=before),
                ]
                works = dist.batch_isend_irecv(pair)
            else:
                works = [
                    dist.isend(mine, group=group, group_dst=after),
                    dist.irecv(got, group=group, group_src=before),
                ]
            if async_op:
                return [work for work in works if work is not None]
            for work in works:
                work.wait()
            return []

        def check() -> None:
            must_be(got, inputs[before])

        return Call("send and recv", mine.nbytes, issue, check, has_future=False, lazy=True)
