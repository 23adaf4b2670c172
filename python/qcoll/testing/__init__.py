"""Several ranks, nodes and hosts on one machine, for tests, benchmarks and demonstrations."""

from qcoll.testing.hosts import Hosts, HostsError, available
from qcoll.testing.layout import Layout, Nodes
from qcoll.testing.outcome import RankOutcome, RanksFailed
from qcoll.testing.pool import RankPool, shared_pool
from qcoll.testing.spawn import run_function, run_ranks

__all__ = [
    "Hosts",
    "HostsError",
    "Layout",
    "Nodes",
    "RankOutcome",
    "RankPool",
    "RanksFailed",
    "available",
    "run_function",
    "run_ranks",
    "shared_pool",
]
