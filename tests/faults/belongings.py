"""What a process holds that a process group may leave behind: threads, descriptors, mappings."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: Ends of threads and connections that others close are seen a moment later than they happen.
_SETTLE_SECONDS = 5.0


def _threads() -> dict[int, str]:
    """By number: a thread has its name only a moment after its start."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path would not show its own
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _mappings() -> collections.Counter[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return collections.Counter(line.split()[5] for line in lines if "memfd:" in line)


@dataclass
class Belongings:
    """A look at this process."""

    threads: dict[int, str] = field(default_factory=_threads)
    descriptors: dict[int, str] = field(default_factory=_descriptors)
    mappings: collections.Counter[str] = field(default_factory=_mappings)

    def added_by(self, later: Belongings) -> list[str]:
        """What ``later`` has and this has not, in words."""
        new = [f"thread {name}" for tid, name in later.threads.items() if tid not in self.threads]
        new += [f"{n} mapping of {name}" for name, n in (later.mappings - self.mappings).items()]
        new += [
            f"descriptor {fd}: {target}"
            for fd, target in later.descriptors.items()
            if self.descriptors.get(fd) != target
        ]
        return sorted(new)

    def left_behind(self, is_ours: Callable[[str], bool] = lambda _: True) -> list[str]:
        """What this process has now on top of then, once it has had a moment to go away."""
        gc.collect()  # a traceback that was kept holds the groups of its frames
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            new = [what for what in self.added_by(Belongings()) if is_ours(what)]
            if not new or time.monotonic() > deadline:
                return new
            time.sleep(0.02)
