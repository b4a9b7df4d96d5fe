"""Kills the broker again and again under load, and checks that this costs nothing but a pause.

Clients run commands, functions and commands in sessions, one after another each, some of them with
a `once` name. Meanwhile the broker is killed (SIGKILL) or stopped for a while (SIGSTOP) at moments
chosen by a seed, and its supervisor starts it again. Every attempt writes a line into a file, so
that executions are counted where they happen. Checked are: each action is answered, with its own
result; each was executed once; no session was lost; accounting has one end for each action and
agrees with the clients.

`pause_s` is the time in which a client got no result around the death of a broker, as the clients
see it, less what one action takes without it. The status is 1 if anything was lost or repeated.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import common

import tangram_hpc
from tangram_hpc.accounting.record import fold
from tangram_hpc.domain.states import ActionState
from tangram_hpc.storage.access import read_access
from tangram_hpc.storage.journal_segments import read_journals

PROGRAM = [sys.executable, "-m", "tangram_hpc"]


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        ends: when results came, by client (epoch s).
        wrong: what was lost, repeated or wrong, in words.
        actions: the names of all actions that were answered.
    """

    ends: dict[int, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)


def noted(path: str, name: str) -> str:
    """What a function leaves in the world: one line, written atomically."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{name}\n".encode())
    os.close(fd)
    return name


def client(number: int, access: Path, effects: Path, over: threading.Event, tally: Tally,
           seed: int) -> None:
    """Runs actions one after another until `over` is set."""
    rng, count = random.Random(seed), 0
    ends = tally.ends.setdefault(number, [])
    with tangram_hpc.connect(access) as one:
        session = one.session(trusted=True)
        while not over.is_set():
            count += 1
            name = f"c{number}.{count}"
            line = f"echo {name} >> {effects}; echo {name}"
            kind, once = rng.random(), name if rng.random() < 0.2 else ""
            try:
                if kind < 0.4:
                    told = one.submit(line, trusted=True, once=once).result(120).text.strip()
                elif kind < 0.7:
                    told = one.submit(noted, str(effects), name, once=once).result(120)
                else:
                    told = session.exec(line).result(120).text.strip()
            except (tangram_hpc.TangramError, OSError, TimeoutError) as error:
                tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
                if isinstance(error, tangram_hpc.BrokerUnreachable):
                    return
                continue
            ends.append(time.time())
            tally.actions.append(name)
            if told != name:
                tally.wrong.append(f"{name}: it got the result {told!r:.60}")
        session.close()


@contextmanager
def processes(home: Path, workers: int, log: Path) -> Iterator[Path]:
    """A supervised broker and its workers; yields the access file."""
    environ = {**os.environ, "TANGRAM_HOME": str(home), "TANGRAM_BIND": "none",
               "TANGRAM_CPUS": "2", "TANGRAM_MEM_MIB": "2000"}
    access = home / "jobs" / "restarts" / "access.json"
    with ExitStack() as stack:
        out = stack.enter_context(open(log, "ab"))

        def start(*words: str, **more: str) -> subprocess.Popen[bytes]:
            child = subprocess.Popen([*PROGRAM, *words], env={**environ, **more}, stdout=out,
                                     stderr=out)
            stack.callback(child.wait)
            stack.callback(child.terminate)
            return child

        children = [start("broker", "--job", "restarts", "--nodes", str(workers),
                          "--restarts", "100000")]
        children += [start("worker", "--name", f"w{n}", TANGRAM_ACCESS=str(access))
                     for n in range(workers)]
        while not access.exists():
            if any(child.poll() is not None for child in children):
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.02)
        yield access


def disturb(access: Path, seconds: float, gap_s: float, pause_s: float, rng: random.Random
            ) -> tuple[list[float], int]:
    """Kills and stops the broker until the time is over; returns when it was killed, and how often
    it was stopped.
    """
    kills: list[float] = []
    stops, until = 0, time.time() + seconds
    while time.time() < until:
        time.sleep(rng.uniform(0.3, 1.7) * gap_s)
        broker = read_access(access).pid
        try:
            if rng.random() < 0.25:
                os.kill(broker, signal.SIGSTOP)
                stops += 1
                time.sleep(rng.uniform(0.2, 1.0) * pause_s)
                os.kill(broker, signal.SIGCONT)
            else:
                os.kill(broker, signal.SIGKILL)
                kills.append(time.time())
        except ProcessLookupError:
            continue  # its successor has not written the access file yet
    return kills, stops


def pauses(tally: Tally, kills: list[float]) -> list[float]:
    """For each kill and each client, the time without a result around it, less that client's usual
    time between two results.
    """
    found = []
    for ends in tally.ends.values():
        gaps = list(pairwise(ends))
        usual = statistics.median(b - a for a, b in gaps) if gaps else 0.0
        found += [b - a - usual for at in kills for a, b in gaps if a <= at < b]
    return found


def check(tally: Tally, effects: Path, folder: Path) -> None:
    """Adds what the files and the accounting say to what is wrong."""
    ran = Counter(effects.read_text().split())
    for name in tally.actions:
        if ran[name] != 1:
            tally.wrong.append(f"{name}: executed {ran[name]} times")
    rows = list(fold(read_journals(folder)).records.values())
    done = sum(row.state is ActionState.COMPLETED for row in rows)
    if done != len(tally.actions):
        tally.wrong.append(f"accounting has {done} completed actions, the clients "
                           f"{len(tally.actions)}")
    tally.wrong += [f"accounting: action {row.action.id} has no end" for row in rows
                    if not row.end_ns]


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="some seconds, for the tests")
    p.add_argument("--seconds", type=float, default=120.0, help="length of the run")
    p.add_argument("--gap", type=float, default=8.0, help="mean seconds between two disturbances")
    p.add_argument("--pause", type=float, default=20.0, help="longest stop of the broker, seconds")
    p.add_argument("--clients", type=int, default=4)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


def main() -> int:
    """Runs the benchmark and prints its result as one line of JSON."""
    args = arguments()
    if args.tiny:
        args.seconds, args.gap, args.pause, args.clients = 4.0, 2.0, 1.0, 2
    noted.__module__ = "__main__"
    tally, over = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as place:
        home, effects = Path(place), Path(place, "effects")
        effects.touch()
        with processes(home, args.workers, home / "log") as access:
            threads = [threading.Thread(target=client, args=(
                n, access, effects, over, tally, args.seed + n)) for n in range(args.clients)]
            _each(threads, threading.Thread.start)
            kills, stops = disturb(access, args.seconds, args.gap, args.pause,
                                   random.Random(args.seed))
            over.set()
            _each(threads, threading.Thread.join)
            with tangram_hpc.connect(access) as last:
                last.shutdown_broker("its run is over")
            folder = access.parent
            time.sleep(1.0)
        check(tally, effects, folder)
    took = sorted(pauses(tally, kills))
    for text in tally.wrong[:20]:
        print(text, file=sys.stderr)
    common.line("restarts", vars(args), {
        "actions": len(tally.actions), "kills": len(kills), "stops": stops,
        "wrong": len(tally.wrong),
        "pause_p50_s": round(took[len(took) // 2], 3) if took else None,
        "pause_max_s": round(took[-1], 3) if took else None})
    return 1 if tally.wrong else 0


def _each(threads: list[threading.Thread], call: Callable[[threading.Thread], Any]) -> None:
    for thread in threads:
        call(thread)


if __name__ == "__main__":
    sys.exit(main())
