"""tangram_hpc itself, as a user starts it: `LocalCluster` with its settings as shipped."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import work
from adapter import Peer, done
from work import CORES_MAX, Task

SESSIONS = 16


class Ours(Peer):
    """`LocalCluster`, one Future for each action. Commands run untrusted, so each has the isolation
    that the machine allows; `sandboxed` are commands in 16 sessions that stay open."""

    name = "tangram_hpc"
    packages = ("tangram-hpc",)
    lacks = {"chunks": "every function is an action of its own, also in `Client.map`"}

    def start(self) -> None:
        """Starts broker, worker and client."""
        from tangram_hpc import LocalCluster
        self.stack = ExitStack()
        self.cluster: Any = self.stack.enter_context(LocalCluster(cpus=self.cores,
                                                                  home=self.folder))

    def stop(self) -> None:
        """Ends all of it."""
        self.stack.close()

    def functions(self, count: int) -> None:
        """One action each."""
        done(self.cluster.submit(work.noop, i) for i in range(count))

    def commands(self, count: int) -> None:
        """One action each, without a session."""
        done(self.cluster.submit([work.TRUE]) for _ in range(count))

    def sandboxed(self, count: int) -> None:
        """One action each, in sessions."""
        if not hasattr(self, "sessions"):
            self.sessions = [self.stack.enter_context(self.cluster.session())
                             for _ in range(SESSIONS)]
            done(session.opened for session in self.sessions)
        done(self.sessions[i % SESSIONS].exec([work.TRUE]) for i in range(count))

    def one(self) -> None:
        """One function."""
        self.cluster.submit(work.noop, 1).result()

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """A rigid command; the broker is not told how long it takes."""
        self.cluster.submit(["/bin/sleep", str(task.seconds)], cpus=task.cores, resizable=False
                            ).add_done_callback(ended)


class OursTls(Ours):
    """The client reaches the broker over TCP with TLS 1.3, as between two nodes."""

    name = "tangram_hpc, TCP and TLS"
    measured = ("functions", "idle")
    lacks: dict[str, str] = {}

    @classmethod
    def missing(cls) -> str:
        """It needs an address besides the loopback."""
        from tangram_hpc.transport.socket.address import addresses
        only = addresses("").listen.startswith("127.")
        return "this machine has no address besides the loopback" if only else ""

    def start(self) -> None:
        """Starts broker and worker, and connects a client over TCP."""
        import tangram_hpc
        from tangram_hpc.storage.access import read_access
        from tangram_hpc.transport.socket.address import addresses
        self.stack = ExitStack()
        cluster = self.stack.enter_context(tangram_hpc.LocalCluster(
            cpus=self.cores, home=self.folder, bind=addresses("").listen))
        (tcp,) = (a for a in read_access(cluster.access).addresses if not a.startswith("unix:"))
        address = f"tcp:{tcp.partition(':')[2].partition('#')[0]}"
        self.cluster = self.stack.enter_context(
            tangram_hpc.connect(cluster.access, address=address))


class OursDirect(Ours):
    """One function after the other by `Client.direct`: an action holds a CPU for all of them. The
    cold start is that of the first one. The process that serves them is on this host, so they are
    not encrypted."""

    name = "tangram_hpc, direct calls"
    measured = ("idle",)
    lacks: dict[str, str] = {}

    def start(self) -> None:
        """Starts broker, worker and client."""
        super().start()
        self.direct = self.stack.enter_context(self.cluster.direct())

    def one(self) -> None:
        """One function."""
        self.direct.call(work.noop, 1)
        assert self.direct.via == "node"


class OursDirectTls(OursTls):
    """The same over TCP with TLS 1.3, as between two nodes: a long name of the folder of temporary
    files leaves no room for a Unix socket."""

    name = "tangram_hpc, direct calls, TLS"
    measured = ("idle",)
    one = OursDirect.one

    def start(self) -> None:
        """Starts broker and worker, and connects a client over TCP."""
        super().start()
        long = self.folder / ("x" * 110)
        long.mkdir()
        tempfile.tempdir = str(long)
        self.direct = self.stack.enter_context(self.cluster.direct())


class OursTold(Ours):
    """The mixed tasks with `profile`: the broker is told how long each one takes."""

    name = "tangram_hpc, told times"
    measured = ("mixed",)
    lacks: dict[str, str] = {}

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """A rigid command with its time."""
        from tangram_hpc import Profile
        work_ns = round(task.seconds * task.cores * 1e9)
        self.cluster.submit(["/bin/sleep", str(task.seconds)], cpus=task.cores, resizable=False,
                            profile=Profile(work_ns)).add_done_callback(ended)


# Counts core-seconds down as `tangram_hpc.simulator.replay.countdown` does, but in Perl: a start of
# Python takes several times the CPU time, and 50 starts a second would take a core.
COUNTDOWN = r"""
my ($left, $work, $since, $units) = (1, $ARGV[0], 0, 0);
while (1) {
    open(my $told, "<", $ENV{TANGRAM_CPUS_FILE}) or die;
    my $at = (stat($told))[9]; my $now = <$told>; close($told);
    if ($at != $since) {
        $left -= ($at - $since) * $units / $work if $units;
        ($since, $units) = ($at, int($now));
    }
    my $rest = $units ? $since + $left * $work / $units - time : 1;
    last if $rest <= 0;
    sleep($rest < 0.008 ? $rest : 0.008);
}
"""


class OursResizable(Ours):
    """The mixed tasks on 1 to 4 cores each, as the broker chooses and changes it while they run.
    Each is a program that counts its core-seconds down at the rate of the cores that it has: twice
    the cores, half the time. The broker is told the core-seconds."""

    name = "tangram_hpc, resizable"
    programs = ("perl",)
    measured = ("mixed",)
    lacks: dict[str, str] = {}

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """The time since the number of cores was written counts, the start of Perl included."""
        from tangram_hpc import Profile
        work_s = task.seconds * task.cores
        self.cluster.submit(
            ["perl", "-MTime::HiRes=time,stat,sleep", "-e", COUNTDOWN, str(work_s)],
            cpus=(1, CORES_MAX), profile=Profile(round(work_s * 1e9))).add_done_callback(ended)
