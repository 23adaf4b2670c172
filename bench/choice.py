"""How good the automatic choice between exact and coded is.

    python bench/choice.py [--link 1gbit] [--rounds 9] [--json FILE]

Tunes two hosts of one rank each (``qcoll tune``, in network namespaces, root), then lets three ways
take turns at each size: exact, int8, and the choice by the file that was just measured. A round
gives the time of the choice over the better of the other two; chance alone makes some rounds worse
and some better.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import Hosts, RankPool

SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))
CODEC = "int8:256"
CALLS_UP_TO = 1 << 18  # smaller ones are repeated within a time
CALLS = 20

Times = dict[str, list[float]]


def measure(tuning: str, rounds: int) -> dict[int, tuple[Times, bool]]:
    """By size: seconds of each way by round on this rank, and whether the choice is exact."""
    options = qcoll.Options(all_gather=CODEC, all_gather_dtypes="fp32", min_bytes=0, tuning=tuning)
    chosen = dist.new_group(backend="qcoll", pg_options=options)
    assert isinstance(chosen, dist.ProcessGroup)
    found = {}
    for size in SIZES:
        whole = torch.empty(size // 4)
        mine = torch.randn(size // 4 // dist.get_world_size())
        ways = {
            "exact": lambda w=whole, m=mine: qcoll.all_gather_into_tensor(
                w, m, group=chosen, codec="exact"
            ),
            "coded": lambda w=whole, m=mine: qcoll.all_gather_into_tensor(
                w, m, group=chosen, codec=CODEC
            ),
            "choice": lambda w=whole, m=mine: qcoll.all_gather_into_tensor(w, m, group=chosen),
        }
        calls = CALLS if size <= CALLS_UP_TO else 1
        times: Times = {way: [] for way in ways}
        for number in range(rounds + 2):
            order = list(ways) if number % 2 == 0 else list(reversed(ways))
            for way in order:
                dist.all_reduce(torch.ones(1), group=chosen)
                begin = time.perf_counter()
                for _ in range(calls):
                    ways[way]()
                times[way].append((time.perf_counter() - begin) / calls)
        plan = qcoll.explain("all_gather_into_tensor", size // 4, torch.float32, chosen)
        found[size] = (
            {way: values[2:] for way, values in times.items()},
            bool(plan["exact_because"]),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--link", default="1gbit", help="rate, or none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tuning = str(Path(folder, "tuning.txt"))
        command = [sys.executable, "-m", "qcoll.cli", "tune", "-o", tuning, "--ranks", "2"]
        command += ["--nodes", "2", "--link", arguments.link, "-b", "1K", "-e", "16M"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        rate = None if arguments.link == "none" else arguments.link
        with Hosts(2, rate=rate) as hosts, RankPool(2, [1, 1], hosts=hosts) as pool:
            ranks = pool.run(measure, args=(tuning, arguments.rounds), backend="qcoll", timeout=600)
    rows = []
    print("bytes      exact us   coded us  choice us  chosen  choice over the better (least..most)")
    for size in SIZES:
        _, is_exact = ranks[0][size]
        slowest = {
            way: [max(rank[size][0][way][i] for rank in ranks) for i in range(arguments.rounds)]
            for way in ("exact", "coded", "choice")
        }
        middle = {way: statistics.median(values) for way, values in slowest.items()}
        ratios = [
            slowest["choice"][i] / min(slowest["exact"][i], slowest["coded"][i])
            for i in range(arguments.rounds)
        ]
        over = middle["choice"] / min(middle["exact"], middle["coded"])
        chosen = "exact" if is_exact else "coded"
        rows.append({"size": size, "seconds": middle, "chosen": chosen, "over": over})
        print(
            f"{size:9} {middle['exact'] * 1e6:10.1f} {middle['coded'] * 1e6:10.1f} "
            f"{middle['choice'] * 1e6:10.1f}  {chosen:6}  {over:.3f} "
            f"({min(ratios):.3f}..{max(ratios):.3f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
