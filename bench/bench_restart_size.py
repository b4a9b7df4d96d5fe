"""Measures how long a broker with a long history and many open actions takes to be ready again.

A job's folder is made as a broker leaves it that is killed: short actions make a history of events,
then sessions open, and more actions wait than run. The events pass through the real scheduler,
journal and checkpoints. Then a real `tangram broker` starts on that folder, and is ready when its
access file is there; its CPU time until then is told. The same is measured without the checkpoint,
if its replay is not too long.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import line

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage import checkpoint
from tangram_hpc.storage.folder_lock import FileLock, FolderLock
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import JobJournal, begin_next, journals

MS = 10**6
JOB = "restart-size"


class PlayedBroker:
    """Handles events as a broker does: journal, scheduler, plan, commit, checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.scheduler, self.now = Scheduler(make_placer("elastic")), time.time_ns()
        self.lock = FolderLock(folder, FileLock(folder))
        head = JobJournal(folder).next_head(self.lock.epoch)
        self.journal = FileJournal(begin_next(folder, head), "none", lambda call: call())
        self.checkpoints = checkpoint.Checkpoints(folder, self.journal, head)
        self.count, self.pauses_s = 0, [0.0]
        self.handle(ev.BrokerStarted(self.now, JOB, "elastic", "none"))
        self.handle(ev.ClientJoined(self.now, 1, "c", "rank-0", 0, 1, "socket"))

    def handle(self, *events: ev.Event) -> None:
        for event in events:
            self.journal.append([event])
            self.scheduler.handle(event)
            self.count += 1

    def cycle(self) -> list[ev.LeaseGranted]:
        """Plans, commits, and returns what was granted."""
        granted = []
        while events := self.scheduler.plan(self.now):
            self.handle(*events)
            granted += [e for e in events if isinstance(e, ev.LeaseGranted)]
        self.journal.commit(lambda: None)
        began = time.process_time()
        if self.checkpoints.look(self.scheduler.ledger):
            self.pauses_s.append(time.process_time() - began)
        return granted


def history(broker: PlayedBroker, events: int) -> int:
    """Short actions until there are so many events; returns how many actions that were."""
    number = 0
    while broker.count < events:
        broker.now += 10 * MS
        ids = [mint(1, number + n + 1) for n in range(100)]
        number += len(ids)
        broker.handle(*[ev.ActionSubmitted(broker.now, Action(i, f"tool {i % 40}")) for i in ids])
        while granted := broker.cycle():
            for grant in granted:
                broker.handle(ev.LeaseStarted(broker.now, grant.lease))
                broker.handle(ev.LeaseFinished(broker.now + 5 * MS, grant.lease, Outcome(
                    ActionState.COMPLETED, exec_ns=5 * MS), True))
        broker.handle(ev.ActionAcknowledged(broker.now + 6 * MS, tuple(ids)))
    return number


def make(folder: Path, args: argparse.Namespace) -> PlayedBroker:
    """Makes the job's folder, as it is when the broker is killed."""
    broker = PlayedBroker(folder)
    for n in range(10):
        broker.handle(ev.NodeJoined(broker.now, n + 1, NodeSpec(
            f"n{n}", f"n{n}", tuple(range(-(-args.running // 10))), 1 << 20, backends=("bwrap",),
            untrusted=("bwrap",)), f"w{n}"))
    number = history(broker, args.events)
    first = mint(1, number + 1)
    sessions = range(first, first + args.sessions)
    broker.handle(*[ev.SessionRequested(broker.now, SessionSpec(s, mem_mib=1)) for s in sessions])
    broker.cycle()
    broker.handle(*[ev.SessionReady(broker.now, s) for s in sessions])
    broker.handle(*[ev.ActionSubmitted(broker.now, Action(
        first + args.sessions + n, f"tool {n % 40}", session=sessions[n % len(sessions)] if n % 4
        else 0)) for n in range(args.queued + args.running)])
    for _ in range(100):
        for grant in broker.cycle():
            broker.handle(ev.LeaseStarted(broker.now, grant.lease))
        broker.now += 100 * MS
    broker.checkpoints.close()
    broker.journal.close()
    return broker


def ready(home: Path, lock: FolderLock) -> tuple[float, float]:
    """Starts a broker; returns its CPU and wall seconds until it is ready, and kills it."""
    access = home / "jobs" / JOB / "access.json"
    access.unlink(missing_ok=True)
    lock.heartbeat()
    lock.file_lock.release()
    began = time.monotonic()
    broker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "broker", "--job", JOB,
                               "--nodes", "10"], env={**os.environ, "TANGRAM_HOME": str(home)})
    try:
        while not access.exists():
            if broker.poll() is not None:
                raise SystemExit(f"the broker ended with {broker.returncode}")
            time.sleep(0.005)
        wall = time.monotonic() - began
        spent = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK"), wall
    finally:
        broker.send_signal(signal.SIGKILL)
        broker.wait()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    p.add_argument("--events", type=int, default=10_000_000, help="of history")
    p.add_argument("--queued", type=int, default=100_000)
    p.add_argument("--sessions", type=int, default=10_000)
    p.add_argument("--running", type=int, default=1000)
    p.add_argument("--whole", action="store_true", help="also replay all events")
    args = p.parse_args()
    if args.tiny:
        args.events, args.queued, args.sessions, args.running = 3000, 100, 20, 10
        checkpoint.EVENTS_MIN = 1000
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        folder = home / "jobs" / JOB
        folder.mkdir(parents=True, mode=0o700)
        broker = make(folder, args)
        ledger, kept = broker.scheduler.ledger, (folder / checkpoint.NAME).stat().st_size
        bytes_each = sum(path.stat().st_size for path in journals(folder)) / broker.count
        cpu_s, wall_s = ready(home, broker.lock)
        figures = {
            "events": broker.count, "open_actions": len(ledger.actions),
            "sessions": len(ledger.sessions), "leases": len(ledger.leases),
            "ready_cpu_s": round(cpu_s, 2), "ready_wall_s": round(wall_s, 2),
            "checkpoint_bytes": kept, "checkpoints": len(broker.pauses_s) - 1,
            "longest_pause_cpu_s": round(max(broker.pauses_s), 3),
            "journal_bytes_each_event": round(bytes_each, 1), "segments": len(journals(folder))}
        if args.whole or args.tiny:
            (folder / checkpoint.NAME).unlink()
            figures["replay_cpu_s"] = round(ready(home, broker.lock)[0], 2)
        line("restart_size", {**vars(args), "tiny": args.tiny}, figures)


if __name__ == "__main__":
    main()
