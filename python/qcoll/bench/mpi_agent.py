"""Stands in for ssh in mpirun: ``mpi_agent.py [options] ADDRESS COMMAND...`` runs the command in
the network namespace that the variable ``_QCOLL_BENCH_HOSTS`` (JSON) names for the address.

A file of its own that imports nothing but the standard library: mpirun starts it once per node.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

# Not QCOLL_...: qcoll refuses those that it does not know.
HOSTS = "_QCOLL_BENCH_HOSTS"
_CLONE_NEWUTS = 0x04000000


def main(arguments: list[str]) -> None:
    """Become the command; returns only by an exception."""
    while arguments[0].startswith("-"):
        arguments = arguments[1:]
    address, *command = arguments
    namespace = json.loads(os.environ[HOSTS])[address]
    # A host name of its own: MPI takes ranks of one name for ranks that share memory.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no host name of its own for {namespace}: {os.strerror(number)}")
    name = namespace.encode()
    libc.sethostname(name, len(name))
    # What mpirun hands to ssh is a line for a shell; what the launcher hands over is not.
    by_mpirun = any("prted" in word for word in command)
    words = ["sh", "-c", " ".join(command)] if by_mpirun else command
    os.execvp("ip", ["ip", "netns", "exec", namespace, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
