"""A process of the soak: plays its ranks of one round after another, and tells what it holds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import random
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from tests.soak.lanes import LaneRun, Tally
from tests.soak.plan import SLOTS, Part
from tests.soak.verbs import Numbers

from qcoll.testing.calls import attempt

#: Of the groups; nobody may come near it.
GROUP_TIMEOUT = 30.0
#: What a rank says when it enters the phase in which somebody dies.
READY = "ready"
#: Ends of threads and connections are seen a moment later than they happen.
_SETTLE_SECONDS = 3.0
_LIBC = ctypes.CDLL(None)


@dataclass
class Sample:
    """What a process holds when no group exists."""

    resident: int
    descriptors: int
    threads: int
    """Without those that run callbacks: they are as many as ran at once, and leave when idle."""
    callback_threads: int
    thread_names: tuple[str, ...] = ()

    @classmethod
    def now(cls) -> Sample:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                names.append((task / "comm").read_text().strip())
        callbacks = names.count("qcoll_callback")
        # One descriptor is that of the listing.
        descriptors = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208
        resident = int(status["VmRSS"].split()[0]) << 10
        count = len(names) - callbacks
        return cls(resident, descriptors, count, callbacks, tuple(sorted(names)))

    @classmethod
    def settled(cls, before: Sample) -> Sample:
        """Once no more is held than ``before``, or it has had time enough to go away.

        Memory that is free but kept by the allocator would hide what is not free.
        """
        gc.collect()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = cls.now()
            flat = now.descriptors <= before.descriptors and now.threads <= before.threads
            if flat or time.monotonic() > deadline:
                _LIBC.malloc_trim(0)
                now.resident = cls.now().resident
                return now
            time.sleep(0.01)


@dataclass
class Report:
    """What one rank brings back from a round."""

    sample: Sample
    tally: Tally = field(default_factory=Tally)


class Player:
    """This process's part in the soak."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers: Numbers | None = None
        self._before: Sample | None = None

    def play(self, part: Part) -> Report:
        if self._numbers is None:
            self._numbers = Numbers(part.round.seed, SLOTS)
        os.environ["QCOLL_NODE"] = part.round.names[part.rank]
        # What checks draw, the window of a large tensor, is the rank's own.
        random.seed(f"{part.round.seed} {part.round.number} {part.rank}")
        tally = Tally()
        try:
            self._phases(part, tally)
        except Exception:
            tally.problems.append(f"rank {part.rank}: {traceback.format_exc()}")
        if dist.is_initialized():
            dist.destroy_process_group()
        self._before = Sample.settled(self._before or Sample.now())
        return Report(self._before, tally)

    def _phases(self, part: Part, tally: Tally) -> None:
        plan = part.round
        store = dist.TCPStore(os.environ["MASTER_ADDR"], part.port, is_master=False)
        timeout = timedelta(seconds=GROUP_TIMEOUT)
        dist.init_process_group(
            "qcoll", store=store, rank=part.rank, world_size=plan.world, timeout=timeout
        )
        fate = random.Random(f"{plan.seed} {plan.number} groups")
        for phase, lanes in enumerate(plan.phases):
            groups = {0: dist.group.WORLD}
            for lane in lanes[1:]:
                groups[lane.number] = dist.new_group(
                    list(lane.ranks), timeout=timeout, backend="qcoll"
                )
            if plan.deadly and phase == len(plan.phases) - 1:
                self._connection.send_bytes(pickle.dumps((READY, None)))
            runs = [
                LaneRun(part, phase, lane, groups[lane.number], self._numbers)
                for lane in lanes
                if part.rank in lane.ranks
            ]
            threads = [threading.Thread(target=run.run) for run in runs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for run in runs:
                tally.add(run.tally)
            if tally.problems:
                return
            # Those that stay go with the default group.
            for lane in lanes[1:]:
                if fate.random() < 0.5 and part.rank in lane.ranks:
                    dist.destroy_process_group(groups[lane.number])


def work(connection: Connection) -> None:
    """Plays until the launcher goes away."""
    # torch renames verbs; whatever else a rank prints is a fault.
    warnings.filterwarnings("ignore", ".*is deprecated. Please use.*", FutureWarning)
    player = Player(connection)
    with contextlib.suppress(EOFError):
        while True:
            part = pickle.loads(connection.recv_bytes())
            reply = attempt(functools.partial(player.play, part))
            connection.send_bytes(reply)
