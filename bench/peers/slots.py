"""One peer's process in one round, watched by the driver: it ends, whatever the peer left behind.

Peers start daemons, and some of these leave their process group. So the driver makes itself the
subreaper of all its descendants, and calls `end_descendants` after each process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVCLUSTER = HERE.parents[1] / "slurm" / "devcluster" / "devcluster"
SLOT_S = 150.0  # the longest time of one process
_PR_SET_CHILD_SUBREAPER = 36


class SlotFailed(Exception):
    """A peer's process failed or took too long; the text has its last line."""


def become_subreaper() -> None:
    """Makes this process the parent of all orphans below it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kills and reaps every process below this one."""
    while children := _children(os.getpid()):
        for child in children:
            for pid in (*_below(child), child):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def _below(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (*_below(child), child)]


def run_slot(argv: list[str], environ: dict[str, str], measurements: list[str]
             ) -> dict[str, Any]:
    """Runs one process; returns its measurements, and as `cold_s` the time from the start of the
    process to its first line.

    Raises:
        SlotFailed: the process failed, or gave not all of its measurements in time.
    """
    told: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, env=environ,
                                       stdin=subprocess.DEVNULL, cwd=tempfile.gettempdir())
        except OSError as error:
            raise SlotFailed(f"{argv[0]}: {error.strerror}") from None
        try:
            for line in _lines(process, began + SLOT_S):
                answer = json.loads(line)
                if answer["what"] == "cold":
                    told["cold_s"] = time.perf_counter() - began
                else:
                    told[answer["what"]] = answer["value"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            process.kill()  # what it leaves behind is for `end_descendants`
            process.wait()
        missed = [each for each in measurements if each not in told]
        if missed:
            log.seek(0)
            last = [line for line in log.read().splitlines() if line.strip()][-1:]
            raise SlotFailed(f"{missed[0]}: {(last or ['it took too long'])[0][:200]}")
    return told


def _lines(process: subprocess.Popen[bytes], until: float) -> Iterator[bytes]:
    """The lines of a process's output until it closes it, or the time is over."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.perf_counter())):
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


@contextlib.contextmanager
def slurm(cpus: int) -> Iterator[dict[str, str]]:
    """Boots a Slurm of one node on this machine; yields the environment of its commands."""
    name = f"peers{os.getpid()}"
    up = subprocess.run(
        [DEVCLUSTER, "up", "--no-dbd", "--name", name, "--cpu-nodes", "1", "--gpu-nodes", "0",
         "--trainer-nodes", "0", "--cpus-per-node", str(cpus)], text=True, capture_output=True,
        check=False)
    if up.returncode:
        raise SlotFailed(f"no Slurm: {(up.stderr.strip().splitlines() or ['?'])[-1]:.200}")
    try:
        yield {"SLURM_CONF": json.loads(up.stdout.splitlines()[-1])["conf"]}
    finally:
        subprocess.run([DEVCLUSTER, "down", "--name", name], check=False, capture_output=True)


def no_slurm() -> str:
    """Why no Slurm can be booted here; empty if it can."""
    if os.getuid():
        return "a dev cluster needs root"
    return "" if shutil.which("slurmctld") else "Slurm is not installed: `make system`"


def environment() -> dict[str, str]:
    """What every peer's process gets: its programs are found, and its workers find `work`."""
    environ = dict(os.environ)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}"
    environ["PYTHONPATH"] = str(HERE)
    # where bytecode may not be kept, every start of a Python compiles the peer's modules anew
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return environ
