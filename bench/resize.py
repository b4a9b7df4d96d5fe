"""The program for `bench_resize.py`: two busy processes, moved between one core and two.

The scheduler moves it while it runs in a session; for comparison `taskset` moves the same two
processes outside of any session. The program measures itself: the work per second before and after
it reads its new size from a file. Both variants run the same text and read the same kind of file.
Nothing asks the scheduler for a resize: a second action comes and takes a core, or ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tangram_hpc import Client, Future

PAIR = r"""
import json, mmap, os, signal, struct, sys, time
span, page, told = float(sys.argv[1]), mmap.mmap(-1, 4096), os.environ["TANGRAM_CPUS_FILE"]

def work(at):
    done = 0
    while True:
        for _ in range(5000):
            pass
        done += 1
        struct.pack_into("q", page, at, done)

def fork(at):
    pid = os.fork()
    if pid == 0:
        work(at)
    return pid

def units():
    with open(told) as file:
        return int(file.readline() or 0)

def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

def done():
    return sum(struct.unpack_from("qq", page))

def phase():
    time.sleep(span / 4)
    cores = [sorted(os.sched_getaffinity(pid)) for pid in pids]
    before, used = time.monotonic(), sum(map(cpu_s, pids))
    began, first = time.monotonic(), done()
    time.sleep(span)
    ended, last = time.monotonic(), done()
    used = sum(map(cpu_s, pids)) - used
    return {"units": size, "rate": (last - first) / (ended - began), "cores": cores,
            "cpu": used / (time.monotonic() - before)}  # never more than it can have been

pids = [fork(0), fork(8)]
try:
    size = first = units()
    phases = [phase()]
    print("half", flush=True)
    while (size := units()) == first:
        time.sleep(0.005)
    phases.append(phase())
finally:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
print(json.dumps(phases))
"""


def gain(phases: Sequence[dict[str, Any]]) -> float:
    """Returns how much faster the program was in its second half than in its first."""
    return float(phases[1]["rate"] / phases[0]["rate"])


def bare(first: int, then: int, cores: Sequence[int], span_s: float) -> list[dict[str, Any]]:
    """Runs the two processes alone; `taskset` moves them from `first` cores to `then` cores."""
    def lists(units: int) -> str:
        return ",".join(map(str, cores[:units]))

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "cpus")
        told.write_text(f"{first}\n")
        run = subprocess.Popen(
            ["taskset", "-c", lists(first), sys.executable, "-c", PAIR, str(span_s)],
            env={**os.environ, "TANGRAM_CPUS_FILE": str(told)}, stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        listed = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        for pid in (str(run.pid), *listed):
            subprocess.run(["taskset", "-a", "-c", "-p", lists(then), pid], check=True,
                           capture_output=True)
        told.write_text(f"{then}\n")
        answer = run.stdout.readline()
        run.wait()
    return list(json.loads(answer))


def through_session(client: Client, first: int, then: int, span_s: float, **session: Any
                    ) -> tuple[list[dict[str, Any]], Future]:
    """Runs the two processes as an action of a session on a cluster of two units.

    The action gives one unit up when another action comes, or gets it when that action ends.
    Returns its phases, and its future.
    """
    heard, half = bytearray(), threading.Event()

    def hear(stream: int, data: bytes) -> None:
        heard.extend(data)
        half.set()  # its first half is over, or it failed

    with client.session(**session) as box:
        other = occupy(client) if first < then else None
        pair = box.exec([sys.executable, "-c", PAIR, str(span_s)], cpus=(1, 2), on_output=hear)
        try:
            while not half.wait(0.1) and not pair.done():
                pass
            if other is None:
                other = occupy(client)
            elif not pair.done():
                other.cancel()
            if not pair.result(span_s * 20 + 60).ok:
                raise RuntimeError(f"the pair failed: {bytes(heard).decode(errors='replace')}")
        finally:
            if other is not None:
                other.cancel()
    return list(json.loads(bytes(heard).split(b"\n")[1])), pair


def occupy(client: Client) -> Future:
    """An action that holds one unit, idles, and runs until it is cancelled."""
    runs = threading.Event()
    other = client.submit("echo up; exec sleep 600", trusted=True, resizable=False,
                          on_output=lambda stream, data: runs.set())
    while not runs.wait(0.1) and not other.done():
        pass
    return other


def held_ns(pair: Future) -> int:
    """Its CPUs times how long it had them, by the grants in its result."""
    details = pair.details
    assert details is not None
    ends = [*(at for at, _ in details.grants[1:]), round(details.held_s * 1e9)]
    return sum(units * (end - at) for (at, units), end in zip(details.grants, ends, strict=True))
