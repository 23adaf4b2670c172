"""The part that runs on every rank: checks each channel once, then times them in turns."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from qcoll._groups import backend_of
from qcoll.bench import statistics
from qcoll.bench.channels import Channel, gloo_channel, mpi_channel, mpi_dtype, qcoll_channel
from qcoll.bench.check import check
from qcoll.bench.config import BenchError, Config, Listener, silent
from qcoll.bench.data import Buffers, Problem
from qcoll.bench.rendezvous import World

Row = dict[str, Any]


def measure(
    config: Config,
    world: World,
    interface: str | None = None,
    listener: Listener = silent,
) -> list[Row]:
    """Measures all that ``config`` names. Collective; the rows, on every rank.

    Args:
        interface: a network interface that carries nothing but these ranks' traffic between nodes;
            its counters tell the bytes of peers, which have none of their own.
        listener: called on rank 0.
    """
    config.check_world(world.size)
    if "mpi" in config.peers and world.mpi is None:
        raise BenchError("mpi can be compared only where mpirun started the ranks; use mpirun")
    gloo = world.peer_group() if "gloo" in config.peers else None
    names = world.gather(os.environ.get("QCOLL_NODE") or socket.gethostname())
    steps = [(verb, size) for verb in config.verbs for size in config.sizes]
    rows: list[Row] = []
    for done, (verb, size) in enumerate(steps):
        if world.rank == 0:
            listener(done, len(steps), f"{verb} {size}")
        channels = _channels(config, verb, size, world, gloo)
        checked = [check(channel, world, names, interface) for channel in channels]
        times = _time_in_turns(config, channels, world)
        rows += _rows(channels, checked, times, config, world)
    if world.rank == 0:
        listener(len(steps), len(steps), "done")
    return rows


def measure_all(
    configs: Sequence[Config],
    world: World,
    interface: str | None = None,
    listener: Listener = silent,
) -> dict[str, Any]:
    """Several measurements one after the other. Collective; ``rows``, a list for each, and
    ``layout``, the cost model's name for where these ranks live."""
    steps = [len(config.verbs) * len(config.sizes) for config in configs]
    rows = []
    for index, config in enumerate(configs):
        before = sum(steps[:index])

        def told(done: int, _: int, label: str, before: int = before) -> None:
            listener(before + done, sum(steps), label)

        rows.append(measure(config, world, interface, told))
    return {"rows": rows, "layout": backend_of(None).describe()["layout"]}


def _channels(config: Config, verb: str, size: int, world: World, gloo: Any) -> list[Channel]:
    shared: dict[tuple[torch.dtype, bool], Buffers] = {}

    def buffers(dtype: torch.dtype, in_place: bool = config.in_place) -> Buffers:
        key = (dtype, in_place)
        if key not in shared:
            count = config.count(size, world.size)
            place = (world.rank, world.size)
            shared[key] = Buffers(Problem(verb, count, dtype, *place, config.seed, in_place))
        return shared[key]

    dtype = config.torch_dtype
    channels = [qcoll_channel(codec, buffers(dtype)) for codec in config.codecs]
    if gloo is not None:
        channels.append(gloo_channel(gloo, buffers(dtype)))
    if "mpi" in config.peers:
        # MPI's in-place reduce-scatter leaves the result in another place than torch's.
        in_place = config.in_place and verb != "reduce_scatter"
        memory = buffers(mpi_dtype(verb, dtype), in_place)
        channels.append(mpi_channel(world.mpi.COMM_WORLD, world.mpi.IN_PLACE, memory))
    return channels


def _time_in_turns(
    config: Config, channels: list[Channel], world: World
) -> list[list[list[float]]]:
    """For each channel and round, the slowest rank's seconds per call in each iteration."""
    shares = []
    for channel in channels:
        # One more than asked for, because the number of iterations depends on its time.
        warm = [_iteration(channel, config.calls, world) for _ in range(config.warmup + 1)]
        last = max(world.gather(warm[-1])) * config.calls
        iters = max(config.iters, math.ceil(config.min_seconds / last))
        shares.append(math.ceil(iters / config.rounds))
    own: list[list[list[float]]] = [[] for _ in channels]
    for turn in range(config.rounds):
        order = list(range(len(channels)))
        # Back and forth, so that no channel always follows the same other one.
        for index in order if turn % 2 == 0 else reversed(order):
            times = [_iteration(channels[index], config.calls, world) for _ in range(shares[index])]
            own[index].append(times)
    everyone = world.gather(own)
    return [
        statistics.slowest([rank[index] for rank in everyone]) for index in range(len(channels))
    ]


def _iteration(channel: Channel, calls: int, world: World) -> float:
    """Seconds per call."""
    channel.buffers.restore()
    call = channel.call
    world.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def _rows(
    channels: list[Channel],
    checked: list[Row],
    times: list[list[list[float]]],
    config: Config,
    world: World,
) -> list[Row]:
    medians = [statistics.round_medians(rounds) for rounds in times]
    peers = {c.name: m for c, m in zip(channels, medians, strict=True) if c.library != "qcoll"}
    rows = []
    for channel, found, rounds, own in zip(channels, checked, times, medians, strict=True):
        problem = channel.problem
        size = problem.count * problem.dtype.itemsize
        time_us = statistics.summary(rounds)
        algorithm = size / time_us["median"] / 1e3
        factor = statistics.bus_factor(problem.verb, world.size)
        rows.append(
            {
                "verb": problem.verb,
                "size": size,
                "count": problem.count,
                "dtype": str(problem.dtype).removeprefix("torch."),
                "channel": channel.name,
                "library": channel.library,
                "codec": channel.codec,
                "in_place": problem.in_place or problem.verb == "all_reduce",
                "iterations": sum(map(len, rounds)),
                "calls_per_iteration": config.calls,
                "time_us": time_us,
                "round_medians_us": own,
                "algbw_GBps": algorithm,
                "busbw_GBps": algorithm * factor,
                **found,
                "versus": {
                    name: statistics.versus(own, peer)
                    for name, peer in peers.items()
                    if channel.library == "qcoll"
                },
            }
        )
    return rows
