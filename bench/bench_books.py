"""Measures the books: import of a million actions, and questions about them.

One job's journals are written as a broker with checkpoints leaves them: in compressed segments, and
with acknowledgements of results. Each command is a process of its own, with its seconds and its
peak memory: `tangram books`, which imports; the same when nothing has changed; `acct --books --by
name` and `-X`; and `acct` of the journal of a smaller job, as before there were books.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import line

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_format import SegmentHead, compressed
from tangram_hpc.storage.journal_segments import begin_next

MS = 10**6
CORES = 64
SEGMENT = 25_000  # actions of a segment: as many events as lie between two checkpoints


def write_job(folder: Path, actions: int) -> None:
    """Writes the journals of a job with so many short actions, 64 at a time."""
    folder.mkdir(parents=True)
    now, lease = time.time_ns() - actions * MS, 0
    events: list[ev.Event] = [
        ev.BrokerStarted(now, folder.name, "elastic", "none", "bench"),
        ev.ClientJoined(now, 1, "c", "rank-0", 0, 1, "socket"),
        ev.NodeJoined(now, 1, NodeSpec("n1", "n1", tuple(range(CORES)), 1 << 20, component="cpu",
                                       allocation=folder.name))]
    read: dict[str, int] = {}  # records of each segment so far
    for first in range(0, actions, SEGMENT):
        path = begin_next(folder, SegmentHead(1, dict(read)))
        journal = FileJournal(path, "none", lambda call: call())
        for at in range(first, min(first + SEGMENT, actions), CORES):
            now += 10 * MS
            ids = [mint(1, n + 1) for n in range(at, min(at + CORES, first + SEGMENT, actions))]
            events += [ev.ActionSubmitted(now, Action(
                i, f"tool {i % 40}", trajectory=f"t{i % 1000}")) for i in ids]
            for core, i in enumerate(ids):
                lease += 1
                events += [ev.LeaseGranted(now + MS, lease, i, 1, 1, (core,)),
                           ev.LeaseStarted(now + 2 * MS, lease),
                           ev.LeaseFinished(now + 7 * MS, lease, Outcome(
                               ActionState.COMPLETED, exec_ns=5 * MS, cpu_ns=4 * MS,
                               maxrss_kib=3000, isolation="process", enforcement="affinity"), True)]
            events.append(ev.ActionAcknowledged(now + 8 * MS, tuple(ids)))
            journal.append(events)
            journal.commit(lambda: None)
            events = []
        journal.close()
        read[path.name] = journal.records
        path.write_bytes(compressed(path.read_bytes()))


def tangram(home: Path, *words: str) -> dict[str, Any]:
    """Runs a verb; returns its seconds and peak memory, and how many lines it printed."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "tangram_hpc", *words], stdout=out,
                                   env={**os.environ, "TANGRAM_HOME": str(home)})
        _, status, used = os.wait4(process.pid, 0)
        took = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"tangram {' '.join(words)} ended with {process.returncode}")
        out.seek(0)
        return {"s": round(took, 2), "cpu_s": round(used.ru_utime + used.ru_stime, 2),
                "peak_mib": used.ru_maxrss // 1024, "lines": sum(1 for _ in out)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    p.add_argument("--actions", type=int, default=1_000_000, help="in the books")
    p.add_argument("--journal", type=int, default=125_000, help="of the job without books")
    args = p.parse_args()
    if args.tiny:
        args.actions, args.journal = 500, 200
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        write_job(home / "jobs" / "many", args.actions)
        figures: dict[str, Any] = {
            "import": tangram(home, "books"), "no change": tangram(home, "books"),
            "--by name": tangram(home, "acct", "--books", "-a", "--by", "name"),
            "-X": tangram(home, "acct", "--books", "-a", "-X")}
        figures["books_mib"] = (home / "books.sqlite").stat().st_size >> 20
        figures["journals_mib"] = sum(
            path.stat().st_size for path in (home / "jobs").glob("*/journal*")) >> 20
        if not args.tiny:
            figures["-P, all rows"] = tangram(home, "acct", "--books", "-a", "-P")
        other = home / "other"
        write_job(other / "jobs" / "one", args.journal)
        figures["acct of a journal"] = tangram(other, "acct", "-j", "one")
        if not args.tiny:
            figures["acct --by name of a journal"] = tangram(other, "acct", "--by", "name")
    line("books", {"actions": args.actions, "journal": args.journal}, figures)


if __name__ == "__main__":
    main()
