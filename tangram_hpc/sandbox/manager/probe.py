"""Tests whether a container runtime works here, by building a tiny sandbox and entering it.

A process that has entered a sandbox cannot leave it. So a process of its own makes the test, and
never one that shall live on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from ...resources import process_tree
from ..files import scratch
from ..isolation import join
from ..isolation.container_runtimes import RUNTIMES, SESSION, ContainerSpec, Runtime, missing
from ..isolation.pause_process import PauseFailed, PauseProcess
from ..process import bootstrap


def probe(runtime: Runtime, image: str, read: Sequence[str], seconds: float) -> str:
    """Returns an empty string when the runtime works, else one line that says why not. Takes
    `seconds` and a little more.
    """
    if reason := missing(runtime):
        return reason
    if runtime.needs_image and not image:
        return f"{runtime.name} needs an image, and none was named to try it with"
    argv = [sys.executable, "-m", __name__, runtime.name, image, str(seconds), *read]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 5,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"{runtime.name} did not answer in {seconds:g} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"{runtime.name} does not work"


def main(name: str, image: str, seconds: float, read: Sequence[str]) -> int:
    """Runs in the process that makes the test; prints one line and returns a nonzero status when
    the test fails.
    """
    bootstrap.guard("tangram-probe", 9)
    runtime = RUNTIMES[name]
    with tempfile.TemporaryDirectory(prefix="tangram-probe-") as place:
        home = os.path.join(place, "home")
        scratch.make(home)
        box = ContainerSpec(home, image, read=read, name=f"tangram-probe-{os.getpid()}")
        child = os.fork()
        if child == 0:
            os._exit(_try(runtime, box, seconds))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        process_tree.end_beneath(2.0)
        if (command := runtime.clean_up(box.name)) and status:
            subprocess.run(command, capture_output=True, timeout=seconds)
    return status


def _try(runtime: Runtime, box: ContainerSpec, seconds: float) -> int:
    try:
        bootstrap.guard("tangram-probe", 9)
        pause = PauseProcess(runtime.argv(box), runtime.env(os.environ), seconds)
        try:
            join.enter(pause.inside, SESSION)
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", "echo x >probe"], {})
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            pause.end()
    except (OSError, PauseFailed) as error:
        print(f"{runtime.name}: {error}", flush=True)
        return 1
    if code:
        print(f"{runtime.name}: a test command ended with {code}", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
