"""``QCOLL_THREADS``: threads that share a rank's encoding change no result; ranks may differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_cases import digest, normal, pool_of

import qcoll
from qcoll.testing import RanksFailed


def codec_threads() -> int:
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return names.count("qcoll_codec\n")


def results(threads: list[int]) -> tuple[str, int]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["QCOLL_THREADS"] = str(threads[rank])
    try:
        dist.init_process_group("qcoll")
    finally:
        del os.environ["QCOLL_THREADS"]
    found = []
    for codec in ("exact", "int8:256", "int8:256/int4:128"):
        mine = normal(rank, 200_003, torch.float32)
        whole = torch.empty(200_003 * world)
        qcoll.all_gather_into_tensor(whole, mine, codec=codec)
        qcoll.all_reduce(mine, op="avg", codec=codec)
        out = torch.empty(70_001)
        qcoll.reduce_scatter_tensor(out, whole[: 70_001 * world], codec=codec)
        found += [whole, mine, out]
    count = codec_threads()
    dist.destroy_process_group()
    return digest(*found), count


def test_results_and_threads() -> None:
    pool = pool_of([2, 1])
    alone = pool.run(results, args=([1, 1, 1],), backend=None)
    together = pool.run(results, args=([2, 4, 1],), backend=None)
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert [count for _, count in alone] == [0, 0, 0]
    assert [count for _, count in together] == [1, 3, 0]
    assert pool.run(codec_threads, backend=None) == [0, 0, 0]


@pytest.mark.parametrize("value", ["0", "65", "-1", "two", "2 ", "1.5"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(RanksFailed, match=r"ValueError: .*QCOLL_THREADS=.*from 1 to 64"):
        pool_of([2]).run(codec_threads, backend="qcoll", env={"QCOLL_THREADS": value}, fresh=True)
