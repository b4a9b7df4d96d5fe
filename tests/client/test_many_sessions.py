"""As many sessions as a worker's memory holds, and actions through all of them: nothing grows, and
one more waits with the reason until another closes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, processes_of

from tangram_hpc import LocalCluster
from tangram_hpc.client.session import Session
from tangram_hpc.resources import process_tree

MEM_MIB = 32
_IN_FLIGHT = 64


def uses(cluster: LocalCluster) -> dict[str, tuple[int, int, int]]:
    """Processes, anonymous memory in KiB and open descriptors, by what they are."""
    found: dict[str, tuple[int, int, int]] = {}
    for child in processes_of(cluster):
        for pid in (child.pid, *process_tree.descendants(child.pid)):
            name = "broker" if child is broker_of(cluster) else (
                process_tree.read(f"/proc/{pid}/comm") or b"gone").decode().strip()
            if pid == child.pid and name != "broker":
                name = "worker"
            count, memory, fds = found.get(name, (0, 0, 0))
            try:
                here = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            found[name] = (count + 1, memory + anonymous_kib(pid), fds + here)
    return found


def anonymous_kib(pid: int) -> int:
    """The pages that this process has made, whoever shares them by now. Not the private ones: a
    page of the fork server becomes private to it when the last of its execution processes has
    written its own copy.
    """
    lines = (process_tree.read(f"/proc/{pid}/smaps_rollup") or b"").decode().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def run_all(sessions: list[Session], actions: int) -> None:
    flying = []
    for n in range(actions):
        flying.append((n, sessions[n % len(sessions)].exec(f"echo {n}; echo {n} >last")))
        if len(flying) >= _IN_FLIGHT:
            check(*flying.pop(0))
    for each in flying:
        check(*each)


def check(n: int, future) -> None:
    assert future.result(60).text == f"{n}\n"


def waits_for(cluster: LocalCluster, session: Session, reason: str) -> None:
    deadline = time.monotonic() + 20
    while (said := cluster.ask("explain", session.id)).get("reason") != reason:
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    assert not session.opened.done()


def many(count: int, actions: int, kib_each: int, home: Path) -> None:
    # the server from which the tests start Python processes comes with the first of them
    subprocess.run([sys.executable, "-m", "tangram_hpc", "--version"], check=True)
    before = set(process_tree.descendants(os.getpid()))
    with LocalCluster(cpus=2, mem_mib=MEM_MIB * count, warm=0, home=home) as cluster:
        sessions = [cluster.session(mem=MEM_MIB) for _ in range(count)]
        for session in sessions:
            session.opened.result(150)
        run_all(sessions, count)  # each has run something: its interpreter's first pages are there
        run_all(sessions, actions // 2)
        half = uses(cluster)
        run_all(sessions, actions - actions // 2)
        full = uses(cluster)
        assert half.keys() == full.keys(), (half, full)
        for name, (processes, memory, fds) in half.items():
            assert full[name][0] == processes and full[name][2] <= fds + 4, (name, half, full)
            # an allocator's arena is up to 1 MiB, and the broker remembers what ended lately
            room = kib_each * processes + {"broker": 2048 + actions, "worker": 2048}.get(name, 0)
            assert full[name][1] <= memory + room, (name, half, full)
        over = cluster.session(mem=MEM_MIB)
        waits_for(cluster, over, "Memory")
        sessions.pop().close()
        over.opened.result(60)
        assert over.exec("echo in").result(60).text == "in\n"
    assert set(process_tree.descendants(os.getpid())) <= before


def test_sixty_sessions_serve_actions_and_one_more_waits(tmp_path: Path) -> None:
    many(60, 600, 16, tmp_path)


def test_actions_leave_no_memory_in_their_init(tmp_path: Path) -> None:
    """150 more actions in each: 110 bytes that stayed of each would be seen."""
    many(8, 2400, 16, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_hundred_sessions_serve_five_thousand_actions(tmp_path: Path) -> None:
    many(500, 5000, 16, tmp_path)
