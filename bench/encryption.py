"""What encryption costs: the same all-gather through a plain group and one with QCOLL_ENCRYPT=1.

    python bench/encryption.py [--mebibytes 64] [--rounds 15] [--json FILE]

Two hosts of one rank each, in network namespaces (root), at several line rates. Both groups live in
the same processes and take turns, round by round; a round gives one ratio of times. CPU seconds are
those of the whole process, the worker and control threads included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qcoll
from qcoll.testing import Hosts, RankPool

RATES = ("200mbit", "1gbit", "5gbit", None)
CODECS = ("exact", "int8:256")


def _group(encrypt: str) -> dist.ProcessGroup:
    os.environ["QCOLL_ENCRYPT"] = encrypt
    group = dist.new_group(backend="qcoll")
    del os.environ["QCOLL_ENCRYPT"]
    assert isinstance(group, dist.ProcessGroup)
    return group


def measure(mebibytes: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Per codec, one entry a round: seconds and CPU seconds, plain and encrypted, of this rank."""
    groups = {"plain": _group("0"), "encrypted": _group("1")}
    count = mebibytes * 2**20 // 4 // dist.get_world_size()
    mine = torch.randn(count)
    whole = torch.empty(count * dist.get_world_size())
    results: dict[str, list[dict[str, float]]] = {}
    for codec in CODECS:
        entries = []
        for number in range(rounds + 1):
            entry = {}
            for kind, group in sorted(groups.items(), reverse=bool(number % 2)):
                dist.all_reduce(torch.ones(1), group=group)  # a start together
                wall, cpu = time.perf_counter(), time.process_time()
                qcoll.all_gather_into_tensor(whole, mine, group=group, codec=codec)
                entry[kind] = time.perf_counter() - wall
                entry[f"{kind} cpu"] = time.process_time() - cpu
            entries.append(entry)
        results[codec] = entries[1:]  # the first one connects
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table: list[dict[str, Any]] = []
    print("link     codec     plain ms  encrypted ms  ratio (min..max)   CPU s, plain  encrypted")
    for rate in RATES:
        mebibytes = arguments.mebibytes // (4 if rate == "200mbit" else 1)
        mtu = 9000 if rate == "5gbit" else 1500
        with Hosts(2, rate=rate, mtu=mtu) as hosts, RankPool(2, [1, 1], hosts=hosts) as pool:
            ranks = pool.run(
                measure, args=(mebibytes, arguments.rounds), backend="qcoll", timeout=600
            )
        for codec in CODECS:
            # The slower rank of each round.
            rounds = [
                {key: max(rank[codec][i][key] for rank in ranks) for key in ranks[0][codec][i]}
                for i in range(arguments.rounds)
            ]
            ratios = [entry["encrypted"] / entry["plain"] for entry in rounds]
            middle = {key: statistics.median(entry[key] for entry in rounds) for key in rounds[0]}
            row = {
                "link": rate or "no cap",
                "mtu": mtu,
                "codec": codec,
                "mebibytes": mebibytes,
                "median": middle,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
            table.append(row)
            print(
                f"{row['link']:8} {codec:9} {middle['plain'] * 1e3:8.1f} "
                f"{middle['encrypted'] * 1e3:13.1f}  {row['ratio']:.3f} "
                f"({min(ratios):.3f}..{max(ratios):.3f})  "
                f"{middle['plain cpu']:12.4f} {middle['encrypted cpu']:10.4f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
