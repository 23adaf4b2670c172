"""How soon abort() wakes ranks that wait, here and elsewhere; pytest -s shows the figures."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
import torch.distributed as dist
from fault_ranks import AT_ONCE, KINDS, error_of, new_group

from qcoll.testing import shared_pool

TIMES = 20
LAYOUTS = {"shared memory": [3], "TCP": [1, 1, 1], "both": [2, 2]}


def aborts(kind: str) -> list[tuple[float, float]]:
    """(when rank 0 aborted, when this rank's blocked call raised), several times.

    The last rank makes no call, so that the others can only wait.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    seen = []
    for attempt in range(TIMES):
        group = new_group(60.0)
        aborted: list[float] = []

        def abort(group: dist.ProcessGroup = group, aborted: list[float] = aborted) -> None:
            aborted.append(time.monotonic())
            group.abort()

        if rank == 0:
            timer = threading.Timer(0.05, abort)
            timer.start()
        if rank == last:
            store.wait([f"raised/{attempt}/0"])
        error, _ = error_of(lambda group=group: KINDS[kind](group))  # type: ignore[misc]
        raised = time.monotonic()
        assert "rank 0 called abort()" in str(error)
        if rank == 0:
            timer.join()
            store.set(f"aborted/{attempt}", repr(aborted[0]))
            store.set(f"raised/{attempt}/0", "")
        seen.append((float(store.get(f"aborted/{attempt}")), raised))
        dist.destroy_process_group(group)
        dist.barrier()
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", LAYOUTS)
def test_abort_wakes_blocked_ranks(transport: str, kind: str) -> None:
    layout = LAYOUTS[transport]
    ranks = shared_pool(sum(layout), layout).run(aborts, (kind,), backend="gloo", fresh=True)
    # The last rank called afterwards: its error is no wake-up.
    for who, some in (("the rank that aborts", ranks[:1]), ("the others", ranks[1:-1])):
        seconds = sorted(raised - aborted for rank in some for aborted, raised in rank)
        assert seconds[0] > 0
        assert seconds[-1] < AT_ONCE
        print(
            f"\n{transport}, {kind}, {who}: median {1e3 * statistics.median(seconds):.1f} ms, "
            f"max {1e3 * seconds[-1]:.1f} ms"
        )
