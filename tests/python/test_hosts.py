"""Network namespaces as hosts: counters count what was sent, links keep their rate, nothing stays.

Processes, pools and layouts of qcoll.testing that need no namespace are tested here too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qcoll.testing import (
    Hosts,
    Layout,
    RankPool,
    RanksFailed,
    available,
    run_function,
    run_ranks,
    shared_pool,
)
from qcoll.testing.hosts import HostsError, rate_bits

_CAN, _WHY_NOT = available()
needs_hosts = [
    pytest.mark.net,
    pytest.mark.skipif(not _CAN, reason=_WHY_NOT or "namespaces are available"),
]

# Sends argv[3] bytes to argv[1]:argv[2] and waits until the other side has read them all.
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as peer:
    peer.sendall(bytes(int(sys.argv[3])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
"""
# Prints its port, then reads one connection to its end; prints bytes and seconds.
_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    server.settimeout(20)
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    count, start = 0, time.perf_counter()
    while data := peer.recv(1 << 16):
        count += len(data)
    print(count, time.perf_counter() - start, flush=True)
"""


def transfer(hosts: Hosts, sender: int, receiver: int, size: int) -> tuple[int, float]:
    """Send ``size`` bytes from one host to another over TCP; (bytes, seconds) as received."""
    address = hosts.addresses[receiver]
    command = [*hosts.command_prefix(receiver), sys.executable, "-c", _RECEIVE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = [*hosts.command_prefix(sender), sys.executable, "-c", _SEND, address, port]
        subprocess.run([*client, str(size)], check=True, timeout=30)
        count, seconds = server.stdout.readline().split()
    return int(count), float(seconds)


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


class TestHosts:
    pytestmark = needs_hosts

    def test_counters_count_what_was_sent_and_nothing_else(self) -> None:
        with Hosts(3) as hosts:
            time.sleep(0.3)
            assert [hosts.interface_bytes(host) for host in range(3)] == [(0, 0)] * 3
            size = 4_000_000
            assert transfer(hosts, 0, 1, size)[0] == size
            received, sent = hosts.interface_bytes(0)
            assert size < sent < 1.06 * size  # headers
            assert received < 0.05 * size  # acknowledgements
            assert hosts.interface_bytes(1) == (sent, received)
            assert hosts.interface_bytes(2) == (0, 0)

    def test_a_link_keeps_its_rate_in_both_directions(self) -> None:
        with Hosts(2, rate="100mbit") as hosts:
            for sender in (0, 1):
                size, seconds = transfer(hosts, sender, 1 - sender, 5_000_000)
                # 95.6 % of the rate is payload; a bucket may give a little credit at the start.
                assert 0.80 < size * 8 / seconds / 100e6 < 1.0
            hosts.set_rate("400mbit")
            size, seconds = transfer(hosts, 0, 1, 10_000_000)
            assert 0.75 < size * 8 / seconds / 400e6 < 1.0
            hosts.set_rate(None)
            size, seconds = transfer(hosts, 0, 1, 50_000_000)
            assert size * 8 / seconds > 500e6

    def test_one_host_can_be_slower_than_the_others(self) -> None:
        with Hosts(3) as hosts:
            hosts.set_rate("50mbit", host=2)
            size, seconds = transfer(hosts, 0, 2, 2_000_000)
            assert size * 8 / seconds < 50e6 * 1.1
            size, seconds = transfer(hosts, 0, 1, 20_000_000)
            assert size * 8 / seconds > 200e6

    def test_a_pulled_cable_stops_traffic_until_it_is_back(self) -> None:
        with Hosts(2) as hosts:
            hosts.set_link(1, up=False)
            probe = "import socket, sys; socket.create_connection((sys.argv[1], 1), timeout=0.5)"
            command = [*hosts.command_prefix(0), sys.executable, "-c", probe, hosts.addresses[1]]
            cut = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "TimeoutError" in cut.stderr
            hosts.set_link(1, up=True)
            back = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "ConnectionRefusedError" in back.stderr  # somebody answers again

    def test_all_is_removed_also_after_an_exception(self) -> None:
        before = namespaces()
        hosts = Hosts(2, rate="1gbit")

        def fail_inside() -> None:
            with hosts:
                assert set(hosts.namespaces) < namespaces()
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            fail_inside()
        assert namespaces() == before

    def test_all_is_removed_when_the_program_ends_without_closing(self) -> None:
        before = namespaces()
        program = "from qcoll.testing import Hosts; print(Hosts(2).open().namespaces)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        assert b"host1" in done.stdout
        assert namespaces() == before

    def test_several_sets_live_side_by_side(self) -> None:
        with Hosts(2) as one, Hosts(2) as other:
            assert not set(one.namespaces) & set(other.namespaces)
            transfer(one, 0, 1, 100_000)
            assert other.interface_bytes(0) == (0, 0)

    def test_a_failure_says_which_command_failed(self) -> None:
        with Hosts(1) as hosts:
            twin = Hosts(1)
            twin._switch = hosts._switch
            with pytest.raises(HostsError, match=r"`ip netns add .*exists"):
                twin.open()

    def test_ranks_of_different_hosts_talk_over_the_wire(self) -> None:
        with Hosts(2) as hosts, RankPool(4, [2, 2], hosts=hosts) as pool:
            pool.run(gather, (1,))  # connects
            before = hosts.interface_bytes(0)
            assert pool.run(gather, (250_000,)) == [sum(range(4)) * 250_000.0] * 4
            after = hosts.interface_bytes(0)
            assert 2_000_000 < after[1] - before[1] < 6_000_000
            program = "import os; print(os.environ['QCOLL_NODE'], os.listdir('/sys/class/net'))"
            outcomes = run_ranks(["-c", program], 3, nodes=[2, 1], hosts=hosts)
            assert ["eth0" in outcome.output for outcome in outcomes] == [True] * 3
            assert [outcome.output.split()[0] for outcome in outcomes] == ["node0"] * 2 + ["node1"]


def gather(count: int) -> float:
    """The sum of all ranks' numbers, ``count`` times each."""
    mine = torch.full((count,), float(dist.get_rank()))
    everyone = torch.empty(count * dist.get_world_size())
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.sum().item()


def variables() -> tuple[str | None, ...]:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "QCOLL_NODE", "QCOLL_TEST_SETTING")
    return tuple(os.environ.get(name) for name in names)


def own_group() -> float:
    dist.init_process_group("gloo")
    total = gather(3)
    dist.destroy_process_group()
    return total


def fail_on_one() -> None:
    print("before the failure")
    dist.barrier()  # nobody is ended before it has printed
    if dist.get_rank() == 1:
        raise ValueError("rank one will not")
    dist.barrier()


def die_on_zero() -> str:
    if dist.get_rank() == 0:
        os.abort()
    try:
        dist.barrier()
    except RuntimeError:
        return "told"
    return "not told"


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def late_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(2)
    else:
        dist.barrier()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, [2, 1]) as ranks:
        yield ranks


class TestPool:
    def test_every_rank_calls_and_returns(self, pool: RankPool) -> None:
        assert pool.run(gather, (5,)) == [15.0] * 3
        assert pool.run(f"{__file__}:gather", (7,)) == [21.0] * 3

    def test_ranks_are_told_their_node_and_the_calls_settings(self, pool: RankPool) -> None:
        expected = [("0", "0", "2", "node0"), ("1", "1", "2", "node0"), ("2", "0", "1", "node1")]
        seen = pool.run(variables, env={"QCOLL_TEST_SETTING": "on"})
        assert seen == [(*rank, "on") for rank in expected]
        assert pool.run(variables) == [(*rank, None) for rank in expected]

    def test_a_function_may_make_its_own_group(self, pool: RankPool) -> None:
        for _ in range(2):
            assert pool.run(own_group, backend=None) == [9.0] * 3

    def test_a_later_call_keeps_the_group_and_the_processes(self, pool: RankPool) -> None:
        pool.run(gather, (1,))
        pids = pool.pids
        start = time.monotonic()
        for _ in range(20):
            pool.run(gather, (1,))
        assert time.monotonic() - start < 2.0
        assert pool.pids == pids

    def test_a_failure_names_the_rank_and_the_pool_goes_on(self, pool: RankPool) -> None:
        with pytest.raises(RanksFailed, match="rank one will not") as failure:
            pool.run(fail_on_one, grace=0.5)
        first, second, third = failure.value.outcomes
        assert "rank 1 of 3 failed" in str(failure.value) or not first.ended_by_launcher
        assert second.error is not None
        assert "ValueError" in second.error
        assert "qcoll/testing" not in second.error  # only the caller's own frames
        assert third.output.startswith("before the failure")
        assert pool.run(gather, (5,)) == [15.0] * 3

    def test_a_dead_rank_is_an_outcome(self, pool: RankPool) -> None:
        first, *others = pool.outcomes(die_on_zero, timeout=20)
        assert first.error == "was killed by SIGABRT"
        assert first.exit_status == -6
        assert [outcome.value for outcome in others] == ["told"] * 2
        assert pool.run(gather, (5,)) == [15.0] * 3

    def test_a_hang_ends_at_the_timeout_with_stacks(self, pool: RankPool) -> None:
        start = time.monotonic()
        with pytest.raises(RanksFailed, match="hang_on_one") as failure:
            pool.run(hang_on_one, timeout=1)
        assert time.monotonic() - start < 6
        stuck = [outcome for outcome in failure.value.outcomes if outcome.ended_by_launcher]
        assert all("in hang_on_one" in outcome.output for outcome in stuck)
        assert 1 in [outcome.rank for outcome in stuck]

    def test_the_groups_own_timeout_comes_first_if_it_is_shorter(self, pool: RankPool) -> None:
        first, _, third = pool.outcomes(late_on_one, timeout=20, group_timeout=0.5)
        for outcome in (first, third):
            assert outcome.error is not None
            assert not outcome.ended_by_launcher
            assert "RuntimeError" in outcome.error

    def test_an_idle_rank_that_was_killed_is_replaced(self, pool: RankPool) -> None:
        os.kill(pool.pids[1], 9)
        time.sleep(0.1)
        assert pool.run(gather, (5,)) == [15.0] * 3

    def test_functions_that_ranks_cannot_import_are_refused(self, pool: RankPool) -> None:
        with pytest.raises(ValueError, match="local or a lambda"):
            pool.run(lambda: None)
        with pytest.raises(ValueError, match="not 'module:function'"):
            pool.run("gather")
        with pytest.raises(RanksFailed, match="not qcoll"):
            pool.run(gather, (1,), pg_options={"all_gather": "exact"})

    def test_pools_of_one_layout_are_shared(self) -> None:
        assert shared_pool(3, [2, 1]) is shared_pool(3, ["node0", "node0", "node1"])


class TestProcesses:
    def test_a_function_runs_in_fresh_processes(self) -> None:
        assert run_function(gather, 2, nodes=[1, 1], args=(4,)) == [4.0] * 2

    def test_a_failing_function_raises_with_every_rank(self) -> None:
        with pytest.raises(RanksFailed, match="rank one will not") as failure:
            run_function(fail_on_one, 2, timeout=60)
        assert failure.value.outcomes[1].exit_status == 1

    def test_a_failing_program_ends_the_others(self) -> None:
        program = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(60)"
        start = time.monotonic()
        with pytest.raises(RanksFailed, match="exited with 3") as failure:
            run_ranks(["-c", program], 3, grace=0.2)
        assert time.monotonic() - start < 10
        assert [o.ended_by_launcher for o in failure.value.outcomes] == [True, False, True]

    def test_a_stuck_program_ends_with_all_that_it_started(self) -> None:
        program = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)"
        )
        with pytest.raises(RanksFailed, match=r"was ended after 1\.") as failure:
            run_ranks(["-c", program], 1, timeout=1)
        child = int(failure.value.outcomes[0].output.split()[0])
        deadline = time.monotonic() + 5
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()

    def test_lines_are_heard_as_they_come(self) -> None:
        heard: list[tuple[int, str]] = []
        program = "import os; print('rank', os.environ['RANK']); print('no end', end='')"
        run_ranks(["-c", program], 2, on_line=lambda rank, line: heard.append((rank, line)))
        assert sorted(heard) == [(0, "no end"), (0, "rank 0"), (1, "no end"), (1, "rank 1")]


class TestLayout:
    def test_nodes_by_size_and_by_name(self) -> None:
        assert Layout.of(4, [3, 1]).names == ("node0", "node0", "node0", "node1")
        assert Layout.of(2).nodes == ("node0",)
        mixed = Layout.of(3, ["b", "a", "b"])
        assert [mixed.node(rank) for rank in range(3)] == [0, 1, 0]
        assert mixed.environment(2, 1234)["LOCAL_RANK"] == "1"

    @pytest.mark.parametrize(
        ("world", "nodes"), [(3, [2, 2]), (2, [2, 0]), (0, None), (3, ["a", "b"])]
    )
    def test_what_does_not_add_up_is_refused(
        self, world: int, nodes: list[int] | list[str] | None
    ) -> None:
        with pytest.raises(ValueError, match=r"nodes|world"):
            Layout.of(world, nodes)

    def test_rates(self) -> None:
        assert rate_bits("1.5gbit") == 1.5e9
        for wrong in ("200", "0mbit", "200 mbit", "fast"):
            with pytest.raises(ValueError, match="200mbit"):
                rate_bits(wrong)
        with pytest.raises(ValueError, match="rate"):
            Hosts(2, rate="fast")
        with pytest.raises(ValueError, match=r"0\.\.1"):
            Hosts(2).command_prefix(2)
