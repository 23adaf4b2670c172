"""The rendezvous of ranks that mpirun started: MPI carries a store's address and nothing else."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

from qcoll import _native


def store_over_mpi(comm: Any, timeout: datetime.timedelta) -> TCPStore:
    """A store that rank 0 of ``comm`` opens. Collective over ``comm``, an mpi4py communicator.

    Raises:
        ValueError: ``QCOLL_SOCKET_IFNAME`` names no interface of rank 0.
        ConnectionError: rank 0's store answers at none of its addresses; with what was tried.
    """
    size = comm.Get_size()
    if comm.Get_rank() == 0:
        failure = ""
        addresses: list[str] = []
        try:
            addresses = _native.load().local_addresses()
        except ValueError as error:
            failure = str(error)  # the others wait to hear of it
        store = TCPStore("0.0.0.0", 0, size, True, timeout, wait_for_workers=False)
        comm.bcast((socket.gethostname(), addresses, store.port, failure), root=0)
        if failure:
            raise ValueError(failure)
        return store
    host, addresses, port, failure = comm.bcast(None, root=0)
    if failure:
        raise ConnectionError(f"qcoll: rank 0 on {host} has no address to offer: {failure}")
    if host == socket.gethostname():
        addresses = ["127.0.0.1", *addresses]
    return _first_that_answers(host, addresses, port, size, timeout)


def _first_that_answers(
    host: str, addresses: Sequence[str], port: int, size: int, timeout: datetime.timedelta
) -> TCPStore:
    errors = []
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        return TCPStore(address, port, size, False, timeout, wait_for_workers=False)
    raise ConnectionError(
        f"qcoll: the store of rank 0 on {host} does not answer on port {port} "
        f"({'; '.join(errors)}); set QCOLL_SOCKET_IFNAME to the interface that the hosts share"
    )
