"""Several "hosts" on one machine: Linux network namespaces joined by a switch, with rate limits.

    with Hosts(2, rate="200mbit") as hosts:
        subprocess.run([*hosts.command_prefix(1), "ip", "addr"])
        received, sent = hosts.interface_bytes(0)

Each host is a network namespace with its own loopback and one interface, ``eth0``. The switch is a
bridge in a namespace of its own, so nothing is added to the machine's own network. A token bucket
(``tc tbf``) caps each link twice: on the host's ``eth0`` (what it sends) and on the switch's port
(what it receives), so a link is full duplex at ``rate`` each way. Traffic inside one host uses
``lo`` and has no cap.

The byte counters of ``eth0`` count what the processes sent and nothing else: IPv6 is off (no
duplicate-address or router probes), every MAC address is known beforehand to the hosts (no ARP)
and to the switch (no flooding).

Needs Linux, root (or CAP_SYS_ADMIN and CAP_NET_ADMIN), and iproute2; see :func:`available`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import re
import secrets
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmg]?bit)")
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# A bucket of what the link carries in 1 ms keeps short bursts honest; a bucket below 32 KiB would
# make the kernel cut every large segment, which costs CPU and changes nothing.
_MIN_BURST_BYTES = 32 * 1024
# How long a packet may wait in the bucket's queue before it is dropped.
_QUEUE_LATENCY = "25ms"


class HostsError(RuntimeError):
    """A command that builds, changes or reads the namespaces failed; the text says which."""


def rate_bits(rate: str) -> float:
    """Bits per second of a rate as ``tc`` writes it (``"200mbit"``, ``"1.5gbit"``).

    Raises ValueError when ``rate`` is not a positive number followed by bit, kbit, mbit or gbit.
    """
    match = _RATE.fullmatch(rate)
    bits = float(match["number"]) * _BITS[match["unit"]] if match else 0.0
    if bits <= 0:
        raise ValueError(f"rate {rate!r} is not like '200mbit' (bit, kbit, mbit or gbit, above 0)")
    return bits


class Hosts:
    """``count`` hosts joined by one switch; use as a context manager.

    Args:
        count: number of hosts, 1 to 250.
        rate: cap of every link in each direction, e.g. ``"200mbit"``; None for no cap.
        mtu: of every link, in bytes.

    Everything is removed when the context ends, also after an exception, and when the interpreter
    exits. Processes still running inside a host are not ended. Names and subnet are drawn at
    random, so that several sets of hosts, or what a killed program left behind, never collide.

    Raises HostsError when the namespaces cannot be made, ValueError for bad arguments.
    """

    def __init__(self, count: int, rate: str | None = None, *, mtu: int = 1500) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"count {count} is not in 1..250")
        if rate is not None:
            rate_bits(rate)
        self.count = count
        self.rate = rate
        self.mtu = mtu
        token = secrets.token_bytes(6)
        self._prefix = f"qcoll-{token[:4].hex()}"
        self._subnet = f"10.{token[4]}.{token[5]}"
        self._switch = f"{self._prefix}-switch"
        self._created: list[str] = []

    @property
    def addresses(self) -> list[str]:
        """The IPv4 address of each host's ``eth0``."""
        return [f"{self._subnet}.{host + 1}" for host in range(self.count)]

    @property
    def namespaces(self) -> list[str]:
        """The network namespace of each host, by the name that ``ip netns`` knows."""
        return [f"{self._prefix}-host{host}" for host in range(self.count)]

    def command_prefix(self, host: int) -> list[str]:
        """What to put before a command line to run it on ``host``."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def interface_bytes(self, host: int) -> tuple[int, int]:
        """Bytes that ``eth0`` of ``host`` received and sent since it was made (rx, tx).

        Link-level frames as the kernel counts them: payload, TCP/IP and Ethernet headers,
        acknowledgements; a large segment that the kernel never had to cut counts its headers once.
        """
        text = _ip("-n", self._namespace(host), "-json", "-statistics", "link", "show", "eth0")
        stats = json.loads(text)[0]["stats64"]
        return int(stats["rx"]["bytes"]), int(stats["tx"]["bytes"])

    def set_rate(self, rate: str | None, host: int | None = None) -> None:
        """Change the cap of the link of ``host``, or of all; None lifts it. Connections survive."""
        bits = None if rate is None else rate_bits(rate)
        for each in range(self.count) if host is None else [host]:
            for namespace, device in ((self._namespace(each), "eth0"), (self._switch, f"p{each}")):
                _limit(namespace, device, rate, bits)
        if host is None:
            self.rate = rate

    def set_link(self, host: int, up: bool) -> None:
        """Plug (``up``) or pull the cable of ``host`` at the switch.

        While it is out, packets to and from the host vanish without an error, as behind a dead
        switch. Addresses and open connections stay, and go on when the cable is back.
        """
        self._namespace(host)
        _ip("-n", self._switch, "link", "set", f"p{host}", "up" if up else "down")

    def open(self) -> Self:
        """Make the namespaces and links. A failure half way removes what was made."""
        if self._created:
            raise HostsError("these hosts are open already")
        atexit.register(self.close)
        try:
            self._build_switch()
            for host in range(self.count):
                self._build_host(host)
            self._introduce_hosts()
            if self.rate is not None:
                self.set_rate(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Remove all that was made; harmless when called twice."""
        atexit.unregister(self.close)
        # Links and their queues go with the namespace that holds them. The first failure is raised
        # when all the rest has been removed.
        with contextlib.ExitStack() as removals:
            for name in self._created:
                removals.callback(_ip, "netns", "delete", name)
            self._created = []

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _namespace(self, host: int) -> str:
        if not 0 <= host < self.count:
            raise ValueError(f"host {host} is not in 0..{self.count - 1}")
        return self.namespaces[host]

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._created.append(name)
        # Before any interface exists, so that none ever sends an IPv6 probe. A kernel without IPv6
        # has no such file, and nothing to turn off.
        off = "f=/proc/sys/net/ipv6/conf/{}/disable_ipv6; [ ! -e $f ] || echo 1 > $f"
        script = "; ".join(off.format(scope) for scope in ("all", "default"))
        _run(["ip", "netns", "exec", name, "sh", "-c", script])
        _ip("-n", name, "link", "set", "lo", "up")

    def _build_switch(self) -> None:
        self._add_namespace(self._switch)
        switch = ["-n", self._switch]
        _ip(
            *switch,
            *("link", "add", "br0", "mtu", str(self.mtu), "type", "bridge"),
            *("forward_delay", "0", "stp_state", "0", "mcast_snooping", "0"),
        )
        _ip(*switch, "link", "set", "br0", "up")

    def _build_host(self, host: int) -> None:
        name = self._namespace(host)
        port = f"p{host}"
        self._add_namespace(name)
        _ip(
            *("link", "add", "eth0", "address", _mac(host), "mtu", str(self.mtu), "netns", name),
            *("type", "veth", "peer", "name", port, "mtu", str(self.mtu), "netns", self._switch),
        )
        _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")

    def _introduce_hosts(self) -> None:
        """Tell every host the others' MAC addresses, and the switch the port of each."""
        for host, name in enumerate(self.namespaces):
            forward = ["fdb", "replace", _mac(host), "dev", f"p{host}", "master", "static"]
            _run(["bridge", "-n", self._switch, *forward])
            for other, address in enumerate(self.addresses):
                if other != host:
                    neighbour = [address, "lladdr", _mac(other), "dev", "eth0", "nud", "permanent"]
                    _ip("-n", name, "neighbour", "replace", *neighbour)


@functools.cache
def available() -> tuple[bool, str]:
    """Whether :class:`Hosts` works here, and if not, why. Found out by really making two hosts."""
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if missing:
        return False, f"iproute2 is not installed: no {', '.join(missing)} in PATH"
    try:
        with Hosts(2, rate="100mbit"):
            pass
    except (HostsError, OSError) as error:
        return False, f"network namespaces cannot be made here: {error}"
    return True, ""


def _mac(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"  # 02: locally administered


def _limit(namespace: str, device: str, rate: str | None, bits: float | None) -> None:
    """Replace the token bucket at the root of ``device``, or remove it."""
    tc = ["tc", "-n", namespace, "qdisc"]
    if rate is None or bits is None:
        if " tbf " in _run([*tc, "show", "dev", device]):
            _run([*tc, "delete", "dev", device, "root"])
        return
    burst = max(_MIN_BURST_BYTES, int(bits / 8000))
    bucket = ["tbf", "rate", rate, "burst", str(burst), "latency", _QUEUE_LATENCY]
    _run([*tc, "replace", "dev", device, "root", *bucket])


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    """Run a command to its end and return its standard output; HostsError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
        raise HostsError(f"`{' '.join(command)}` gave {done.returncode}: {reason}")
    return done.stdout
