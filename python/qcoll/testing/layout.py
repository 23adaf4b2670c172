"""Which rank lives on which node, and the environment that tells each rank so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qcoll.testing.hosts import Hosts

#: Ranks per node (``[2, 2]``, ``[3, 1]``), or the node's name for every rank
#: (``["a", "b", "a", "b"]``), or None: all ranks on one node.
Nodes = Sequence[int] | Sequence[str] | None


@dataclass(frozen=True)
class Layout:
    """The node of each rank. Nodes are numbered by first appearance, from 0."""

    names: tuple[str, ...]
    """The node's name for every rank: what the rank sees as ``QCOLL_NODE``."""

    @classmethod
    def of(cls, world: int, nodes: Nodes = None) -> Layout:
        """The layout of ``world`` ranks; ValueError when ``nodes`` does not describe as many."""
        if world < 1:
            raise ValueError(f"world {world} is not at least 1")
        if nodes is None:
            nodes = [world]
        names: list[str] = []
        entries: list[int | str] = list(nodes)
        for index, entry in enumerate(entries):
            if isinstance(entry, str):
                names.append(entry)
            elif entry < 1:
                raise ValueError(f"nodes {entries}: a node needs at least 1 rank")
            else:
                names.extend([f"node{index}"] * entry)
        if len(names) != world:
            raise ValueError(f"nodes {entries} describe {len(names)} ranks, world is {world}")
        return cls(tuple(names))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.names)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The distinct node names; the index of one is the node's number, and its host's."""
        return tuple(dict.fromkeys(self.names))

    def node(self, rank: int) -> int:
        """The number of the node that ``rank`` lives on."""
        return self.nodes.index(self.names[rank])

    def check_hosts(self, hosts: Hosts | None) -> None:
        """ValueError unless there is a host for every node."""
        if hosts is not None and hosts.count < len(self.nodes):
            raise ValueError(f"{len(self.nodes)} nodes do not fit on {hosts.count} hosts")

    def environment(
        self, rank: int, master_port: int, hosts: Hosts | None = None
    ) -> dict[str, str]:
        """What ``rank`` finds in its environment: torchrun's variables, its node, its interface.

        With ``hosts``, node j is host j and traffic goes over ``eth0``; without, over ``lo``.
        """
        mates = [other for other, name in enumerate(self.names) if name == self.names[rank]]
        interface = "lo" if hosts is None else "eth0"
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(mates.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(mates)),
            "MASTER_ADDR": "127.0.0.1" if hosts is None else hosts.addresses[0],
            "MASTER_PORT": str(master_port),
            "QCOLL_NODE": self.names[rank],
            "QCOLL_SOCKET_IFNAME": interface,
            "GLOO_SOCKET_IFNAME": interface,
            **SINGLE_THREADED,
            **QUICK_RESOLVER,
            **import_path(),
        }


#: Ranks outnumber the cores of a test machine, so each computes on one thread; and a process that
#: is to be forked must not have started a thread pool.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

#: torch's TCPStore asks for the name of each peer's address when it connects. Where the answer is
#: not in /etc/hosts and a name server drops queries, each such start would stall for 5 s.
QUICK_RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


def import_path() -> dict[str, str]:
    """PYTHONPATH such that a child process finds the modules that this process finds."""
    return {"PYTHONPATH": ":".join(entry or "." for entry in sys.path)}
