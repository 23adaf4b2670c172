"""From the times of all ranks to what is reported. All definitions of bandwidth are nccl-tests'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Times of one rank: for each round, the seconds of its iterations.
Rounds = Sequence[Sequence[float]]


def bus_factor(verb: str, world: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the share of the tensor that each rank must send."""
    return (2.0 if verb == "all_reduce" else 1.0) * (world - 1) / world


def slowest(ranks: Sequence[Rounds]) -> list[list[float]]:
    """For each round and iteration, the time of the slowest rank in it."""
    return [
        [max(times) for times in zip(*same_round, strict=True)]
        for same_round in zip(*ranks, strict=True)
    ]


def summary(rounds: Rounds) -> dict[str, float]:
    """Median, 10th and 90th percentile over all iterations, in microseconds."""
    times = np.concatenate([np.asarray(times) for times in rounds]) * 1e6
    low, median, high = np.percentile(times, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def round_medians(rounds: Rounds) -> list[float]:
    """The median of each round, in microseconds."""
    return [float(np.median(times)) * 1e6 for times in rounds]


def versus(own: Sequence[float], peer: Sequence[float]) -> dict[str, object]:
    """How many times faster than a peer: per round, with median and range over rounds."""
    ratios = [theirs / mine for mine, theirs in zip(own, peer, strict=True)]
    return {
        "median": float(np.median(ratios)),
        "min": min(ratios),
        "max": max(ratios),
        "rounds": ratios,
    }
