"""A trajectory of 150 steps: each a command that reads and writes the state of one sandbox.

    python bench/peers/trajectory.py STEPS SEED

Three kinds: a plain child process for each step, without any sandbox; bubblewrap launched for each
step on the same folder; and a session of tangram_hpc, by `exec` and by a shell that lives on. The
order is drawn. Prints a JSON line: for each kind the seconds until the first step had ended, and
the seconds of each step. What "The rollout infrastructure tax" (arXiv 2607.01415) calls cold start
and step overhead of a substrate can be computed from it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

STEP = "read n < count || n=0; echo $((n + 1)) > count"
SHELL = ["/bin/sh", "-c", STEP]
Step = Callable[[], object]


def plain(stack: ExitStack) -> Step:
    """A child process in a folder."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "count").write_text("0\n")
    return lambda: subprocess.run(SHELL, cwd=folder, check=True, capture_output=True)


def bubblewrap(stack: ExitStack) -> Step:
    """bwrap for each step; only the folder is writable, and stays."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "count").write_text("0\n")
    argv = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", folder,
            folder, "--chdir", folder, "--unshare-all", "--die-with-parent", *SHELL]
    return lambda: subprocess.run(argv, check=True, capture_output=True)


def in_session(cluster: Any, backend: str) -> Callable[[ExitStack], Step]:
    """`exec` in a session."""
    def begin(stack: ExitStack) -> Step:
        session = stack.enter_context(cluster.session(backend=backend))
        session.write("count", "0\n").result()
        return lambda: session.exec(SHELL).result().check()
    return begin


def in_shell(cluster: Any, backend: str) -> Callable[[ExitStack], Step]:
    """A line for the session's shell, which lives on."""
    def begin(stack: ExitStack) -> Step:
        session = stack.enter_context(cluster.session(backend=backend))
        session.write("count", "0\n").result()
        shell = stack.enter_context(session.shell())
        return lambda: shell.run(STEP).result().check()
    return begin


def run(begin: Callable[[ExitStack], Step], steps: int) -> dict[str, Any]:
    """One trajectory."""
    took = []
    with ExitStack() as stack:
        began = time.perf_counter()
        step = begin(stack)
        step()
        cold_s = time.perf_counter() - began
        for _ in range(steps):
            began = time.perf_counter()
            step()
            took.append(time.perf_counter() - began)
    return {"cold_s": cold_s, "step_s": took}


def main() -> None:
    """Prints one line."""
    from tangram_hpc import LocalCluster
    from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES

    steps, seed = int(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(LocalCluster(cpus=2, home=home))
        kinds: dict[str, Callable[[ExitStack], Step]] = {"plain process": plain}
        if shutil.which("bwrap"):
            kinds["bwrap for each step"] = bubblewrap
        with cluster.session() as first:  # the worker's first one waits until its pools are warm
            first.opened.result()
        for backend in cluster.ask("nodes")["nodes"][0]["untrusted"]:
            if backend in RUNTIMES and RUNTIMES[backend].needs_image:
                continue  # podman is offered where it is installed, and there is no image here
            kinds[f"tangram_hpc, exec ({backend})"] = in_session(cluster, backend)
            kinds[f"tangram_hpc, shell ({backend})"] = in_shell(cluster, backend)
        order = list(kinds)
        random.Random(seed).shuffle(order)
        told = {kind: run(kinds[kind], steps) for kind in order}
    print(json.dumps({"what": "trajectory", "value": {kind: told[kind] for kind in kinds}}),
          file=answers, flush=True)


if __name__ == "__main__":
    main()
