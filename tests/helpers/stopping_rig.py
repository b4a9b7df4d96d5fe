"""Worlds of trainers and a gateway that is stopped at a chosen moment of its life, under any
launcher: for how long, and what became of the trainers and of their job step.

A moment is a note that the trainers leave (`tests/data/trainer_stops.py`), and a delay after it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TRAINER = Path(__file__).resolve().parent.parent / "data" / "trainer_stops.py"
ACTIONS = 40
# The notes and how many ranks must have left one; 0 for all.
MOMENTS = {"before the first hello": ("begun", 1), "while ranks connect": ("connecting", 0),
           "as the first client is welcome": ("connected", 1), "under load": ("half20", 1),
           "while ranks close": ("closing", 1), "while one rank is closed": ("closed", 1),
           "while all are closed": ("closed", 0), "while ranks leave": ("leaving", 1),
           "when all leave": ("leaving", 0)}
# `mpiexec` ends such a world with status 9, when its ranks have waited for long enough
BEFORE_IT_BEGINS = "before its program begins"


@dataclass(frozen=True)
class Stop:
    """When and for how long the gateway is stopped.

    Attributes:
        moment: a key of MOMENTS.
        delay_s: how long after it.
        for_s: how long it is stopped; 0 for ever.
    """

    moment: str
    delay_s: float
    for_s: float


def stops(seed: int) -> list[Stop]:
    """Every moment with every duration, at a random instant within the next tenths of a second."""
    rng = random.Random(seed)
    return [Stop(moment, rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.5))), for_s)
            for moment in MOMENTS for for_s in (2.0, 8.0, 0.0)]


def gateway_of(mark: str, has_begun: bool = True) -> int:
    """The pid of the gateway whose environment has this mark; 0 while there is none, or its program
    has not begun: it begins by starting a child process."""
    told = subprocess.run(["pgrep", "-f", "tangram(_hpc)? gateway$"], capture_output=True,
                          text=True, check=False)
    for pid in map(int, told.stdout.split()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        # the launcher has the same words in its command line
        if f"STOPS={mark}".encode() in environ and b"python" in words[0]:
            begun = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=False)
            return 0 if begun.returncode and has_begun else pid
    return 0


def stop_gateway(stop: Stop, folder: Path, ranks: int, mark: str,
                 world: subprocess.Popen[str]) -> str:
    """Stops the gateway; returns what the trainers had noted when it stopped."""
    where, count = MOMENTS.get(stop.moment, ("begun", 1))
    deadline = time.monotonic() + 90
    while len(list(folder.glob(f"{where}.*"))) < (count or ranks) or not (
            gateway := gateway_of(mark, stop.moment != BEFORE_IT_BEGINS)):
        if world.poll() is not None or time.monotonic() > deadline:
            return "nothing, as it was over"
        time.sleep(0.002)
    time.sleep(stop.delay_s)
    try:
        os.kill(gateway, signal.SIGSTOP)
        seen = Counter(path.name.partition(".")[0] for path in folder.glob("*.*"))
        if stop.for_s:
            time.sleep(stop.for_s)
            os.kill(gateway, signal.SIGCONT)
    except ProcessLookupError:
        return "nothing, as it was gone"
    return str(dict(seen))


def check(stop: Stop, folder: Path, ranks: int, said: str, status: int, why: str) -> str:
    """Asserts that every trainer had all of its results, that nothing ran twice, and that the step
    ended with 0; returns by which ways the trainers had them.
    """
    told = sorted(line.split(", by ") for line in said.splitlines() if line.startswith("rank "))
    assert [line[0] for line in told] == [f"rank {r}: {ACTIONS} of {ACTIONS} right"
                                          for r in range(ranks)], (stop, said, why)
    effects = Counter((folder / "effects").read_text().split())
    assert effects == Counter({f"{r}.{n}": 1 for r in range(ranks) for n in range(ACTIONS)}), stop
    assert status == 0, (stop, status, said, why)
    return "+".join(line[1] for line in told)
