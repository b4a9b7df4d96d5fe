"""What every adapter of a trainer or an evaluation promises, as a class of tests.

A test module of an adapter subclasses `AdapterBehaviours`, says how its framework starts a
trajectory, calls a tool and ends a trajectory, and pytest runs every behaviour for it against a
real broker. The adapter finds the broker as a trainer's process does, by `TANGRAM_ACCESS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.cluster_parts import kill_broker
from tangram_hpc import LocalCluster
from tangram_hpc.hooks.process_client import use_client

LIMIT_S = 3.0  # the time limit of tools in these tests, in which a busy machine starts a command
TOO_MUCH_MIB = 1 << 30  # no node has so much memory


@pytest.fixture(scope="module", name="cluster")
def adapters_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Yields a broker that all tests of a module share; the module must import this fixture."""
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), grace_s=2) as running:
        yield running
        use_client(None)


def sessions_open(cluster: LocalCluster) -> int:
    """Returns how many sessions the broker has."""
    return int(cluster.ask("info")["sessions"])


def eventually(holds: Callable[[], bool], longest_s: float = 60.0) -> bool:
    """Waits until a condition holds; returns False if it never did."""
    until = time.monotonic() + longest_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class AdapterBehaviours:
    """The behaviours. A subclass gives the methods that raise NotImplementedError.

    A trajectory is whatever `begin` returns. `options` are arguments of `Client.session` that the
    adapter is configured with.
    """

    def begin(self, **options: Any) -> Any:
        """Starts a trajectory as the framework does."""
        raise NotImplementedError

    def call(self, trajectory: Any, line: str) -> str:
        """Makes the policy's call of a shell command, with the time limit `LIMIT_S`, and returns
        the answer as the policy sees it. An error that the framework itself turns into an answer is
        returned as a text."""
        raise NotImplementedError

    def end(self, trajectory: Any) -> None:
        """Ends a trajectory as the framework does, at the latest when it forgets it."""
        raise NotImplementedError

    def tells_the_time_limit(self, answer: str) -> bool:
        """Returns whether an answer is the framework's way to say that a call took too long."""
        return "timed out" in answer

    def lose(self, trajectory: Any) -> None:
        """Ends the trajectory's sandbox behind the adapter's back."""
        raise NotImplementedError

    def test_a_call_runs_in_a_session(self, cluster: LocalCluster) -> None:
        trajectory = self.begin()
        assert self.call(trajectory, "echo $((6 * 7))").strip() == "42"
        assert eventually(lambda: sessions_open(cluster) == 1)
        self.end(trajectory)

    def test_state_is_kept_between_turns(self, cluster: LocalCluster) -> None:
        trajectory = self.begin()
        self.call(trajectory, "echo kept > file")
        assert self.call(trajectory, "cat file").strip() == "kept"
        self.end(trajectory)

    def test_two_trajectories_never_see_each_other(self, cluster: LocalCluster) -> None:
        one, other = self.begin(), self.begin()
        self.call(one, "echo mine > file")
        assert "mine" not in self.call(other, "cat file")
        assert self.call(one, "cat file").strip() == "mine"
        self.end(one)
        self.end(other)

    def test_a_command_that_fails_is_an_answer(self, cluster: LocalCluster) -> None:
        trajectory = self.begin()
        answer = self.call(trajectory, "echo out; echo err >&2; exit 3")
        assert "out" in answer and "err" in answer and "3" in answer
        self.end(trajectory)

    def test_a_command_that_is_no_utf_8_is_an_answer(self, cluster: LocalCluster) -> None:
        """The JSON of a tool call can hold half of a surrogate pair."""
        trajectory = self.begin()
        assert "UTF-8" in self.call(trajectory, "echo '\ud83d'")
        assert self.call(trajectory, "echo on").strip() == "on"
        self.end(trajectory)

    def test_the_time_limit_is_told_and_the_next_call_works(self, cluster: LocalCluster) -> None:
        trajectory = self.begin()
        assert self.tells_the_time_limit(self.call(trajectory, "sleep 60"))
        assert self.call(trajectory, "echo on").strip() == "on"
        self.end(trajectory)

    def test_a_lost_sandbox_is_an_answer(self, cluster: LocalCluster) -> None:
        lost, other = self.begin(), self.begin()
        self.call(lost, "true")
        self.call(other, "echo here > file")
        self.lose(lost)
        assert "session" in self.call(lost, "echo on")
        assert self.call(other, "cat file").strip() == "here"
        self.end(lost)
        self.end(other)

    def test_nothing_is_left_after_the_end(self, cluster: LocalCluster) -> None:
        trajectories = [self.begin() for _ in range(3)]
        for trajectory in trajectories:
            self.call(trajectory, "true")
        while trajectories:
            self.end(trajectories.pop())
        del trajectory
        assert eventually(lambda: sessions_open(cluster) == 0)

    def test_a_refused_session_is_told_with_its_reason(self, cluster: LocalCluster) -> None:
        trajectory = self.begin(mem=TOO_MUCH_MIB)
        assert "mem" in self.call(trajectory, "echo on")
        self.end(trajectory)


@contextmanager
def memory_taken(cluster: LocalCluster, but_mib: int = 512) -> Iterator[int]:
    """Holds the memory of the only node but for some; yields an amount in MiB that cannot be had
    for as long."""
    taken = int(cluster.ask("info")["mem_mib_free"]) - but_mib
    with cluster.client.session(mem=taken):
        yield 2 * but_mib


def check_restart(adapter: AdapterBehaviours, home: Path) -> None:
    """Kills the broker under a trajectory and goes on with the job's next one: the call under it is
    answered, and the next trajectory works."""
    use_client(None)
    first = LocalCluster(cpus=2, home=home, grace_s=1).start()
    try:
        lost = adapter.begin()
        assert adapter.call(lost, "echo before").strip() == "before"
        kill_broker(first)
        assert "after" not in adapter.call(lost, "echo after").splitlines()
        second = next_broker(home, first.job)
        try:
            trajectory = adapter.begin()
            assert adapter.call(trajectory, "echo again").strip() == "again"
            adapter.end(trajectory)
            adapter.end(lost)
        finally:
            use_client(None)
            second.close()
    finally:
        first.close()


def next_broker(home: Path, job: str) -> LocalCluster:
    """Starts a broker for a job whose former one was killed."""
    return LocalCluster(cpus=2, home=home, job=job, grace_s=2).start()


__all__ = ["LIMIT_S", "AdapterBehaviours", "adapters_cluster", "check_restart", "eventually",
           "kill_broker", "memory_taken", "next_broker", "sessions_open"]
