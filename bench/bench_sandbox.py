"""Measures the cost of a sandbox and of a runner, as four ratios; both sides of each take turns.

`function_over_pool`: a burst of no-op functions, one Future each, against ProcessPoolExecutor(2)
with chunksize 1. `true_over_spawn`: /bin/true through 64 warm sessions kept busy, against a bare
posix_spawn loop with captured output, two in flight. `bwrap_over_launch`: the same through warm
`bwrap` sessions, against launching bwrap for each. `shell_over_swerex`: a no-op shell action in a
warm session, one at a time, against SWE-ReX's local bash session. All on two CPUs; the median of
the rounds' ratios counts. A ratio whose program is not installed is skipped, and the line says why
(`pip install .[bench]`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

import common

from tangram_hpc import LocalCluster
from tangram_hpc.errors import TangramError

SESSIONS = 64
TRUE = "/bin/true"
Round = Callable[[], float]  # one measurement: how many a second


class UsersCluster(LocalCluster):
    """A cluster whose worker offers `process` sandboxes to untrusted code even if it runs as root.
    Without this, only the worker of an ordinary user does, and these sandboxes are measured
    here."""

    _program = ("-c", "import sys; from tangram_hpc.sandbox.manager import backends; "
                "backends.is_root = lambda: False; from tangram_hpc.cli import main; "
                "sys.exit(main())")


def noop() -> None:
    """Nothing."""


def burst(submit: Callable[[Any], Any], count: int) -> float:
    """Functions per second, first submit to last result."""
    began = time.perf_counter()
    for future in [submit(noop) for _ in range(count)]:
        future.result()
    return count / (time.perf_counter() - began)


def spawn_loop(argv: Sequence[str], count: int) -> float:
    """Programs per second by a bare loop: two in flight, their output captured."""
    began, left, pipes = time.perf_counter(), count, dict[int, tuple[int, int]]()
    environ = {"PATH": os.environ.get("PATH", os.defpath)}
    while left or pipes:
        while left and len(pipes) < 2:
            out, err = os.pipe(), os.pipe()
            pid = os.posix_spawn(argv[0], argv, environ, file_actions=[
                (os.POSIX_SPAWN_DUP2, out[1], 1), (os.POSIX_SPAWN_DUP2, err[1], 2)])
            os.close(out[1])
            os.close(err[1])
            pipes[pid], left = (out[0], err[0]), left - 1
        pid, status = os.wait()
        assert status == 0, f"{argv} ended with {status}"
        for fd in pipes.pop(pid):
            while os.read(fd, 1 << 16):
                pass
            os.close(fd)
    return count / (time.perf_counter() - began)


class Warm:
    """Open sessions of one backend."""

    def __init__(self, cluster: LocalCluster, backend: str, sessions: int) -> None:
        self._sessions = [cluster.session(backend=backend) for _ in range(sessions)]
        for session in self._sessions:
            session.opened.result(60)

    def busy(self, count: int) -> float:
        """/bin/true actions per second when every session always has one to run."""
        began, sessions = time.perf_counter(), self._sessions
        futures = [sessions[i % len(sessions)].exec([TRUE]) for i in range(count)]
        for future in futures:
            assert future.result().ok
        return count / (time.perf_counter() - began)

    def shell(self, count: int) -> float:
        """No-op shell actions per second, one at a time in one session."""
        began = time.perf_counter()
        for _ in range(count):
            assert self._sessions[0].exec(":").result().ok
        return count / (time.perf_counter() - began)

    def close(self) -> None:
        """Closes them and waits until they are down."""
        for session in self._sessions:
            session.close()
        for session in self._sessions:
            session.closed.result(60)


class SweRex:
    """SWE-ReX's local runtime with one bash session."""

    def __init__(self) -> None:
        import logging

        os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "ERROR")
        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime

        logging.disable(logging.INFO)
        self._loop = asyncio.new_event_loop()
        self._runtime, self._action = LocalRuntime(), BashAction(command=":")
        self._loop.run_until_complete(self._runtime.create_session(CreateBashSessionRequest()))

    def shell(self, count: int) -> float:
        """No-op shell actions per second."""
        began = time.perf_counter()
        for _ in range(count):
            self._loop.run_until_complete(self._runtime.run_in_session(self._action))
        return count / (time.perf_counter() - began)

    def close(self) -> None:
        """Ends its shell."""
        self._loop.run_until_complete(self._runtime.close())
        self._loop.close()


def bwrap_line() -> list[str]:
    """Returns a command that runs /bin/true in bwrap with the options of our sandboxes."""
    return [shutil.which("bwrap") or "", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
            "--unshare-all", "--die-with-parent", TRUE]


def pairs(stack: ExitStack, cluster: LocalCluster, count: dict[str, int]
          ) -> tuple[dict[str, tuple[Round, Round]], dict[str, str]]:
    """Returns the pairs of measurements, (ours, theirs), and those skipped, with the reason."""
    pool = stack.enter_context(ProcessPoolExecutor(2))
    warm = Warm(cluster, "process", SESSIONS)
    stack.callback(warm.close)
    found: dict[str, tuple[Round, Round]] = {
        "function_over_pool": (lambda: burst(cluster.submit, count["functions"]),
                               lambda: burst(pool.submit, count["functions"])),
        "true_over_spawn": (lambda: warm.busy(count["programs"]),
                            lambda: spawn_loop([TRUE], count["programs"]))}
    skipped = {}
    try:
        spawn_loop(bwrap_line(), 1)
        walled = Warm(cluster, "bwrap", SESSIONS)
        stack.callback(walled.close)
        found["bwrap_over_launch"] = (lambda: walled.busy(count["programs"]),
                                      lambda: spawn_loop(bwrap_line(), count["launches"]))
    except (OSError, AssertionError, TypeError, TangramError) as error:
        skipped["bwrap_over_launch"] = f"no bwrap sessions here: {error}"
    if importlib.util.find_spec("swerex") is not None:
        rex = SweRex()
        stack.callback(rex.close)
        found["shell_over_swerex"] = (lambda: warm.shell(count["shells"]),
                                      lambda: rex.shell(count["rex_shells"]))
    else:
        skipped["shell_over_swerex"] = "swe-rex is not installed"
    return found, skipped


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    rounds = 1 if tiny else 5
    count = {"functions": 60 if tiny else 50000, "programs": 16 if tiny else 4000,
             "launches": 2 if tiny else 400, "shells": 2 if tiny else 300,
             "rex_shells": 1 if tiny else 10}
    rates: dict[str, list[tuple[float, float]]] = {}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(UsersCluster(cpus=2, home=home))
        measured, skipped = pairs(stack, cluster, count)
        for number in range(0 if tiny else -1, rounds):  # round -1 warms up
            for name, (ours, theirs) in measured.items():
                pair = (ours(), theirs())
                if number >= 0:
                    rates.setdefault(name, []).append(pair)
                print(name, *map(round, pair), file=sys.stderr, flush=True)
    common.line("sandbox", {**count, "rounds": rounds, "sessions": SESSIONS, "cpus": 2}, {
        **{name: round(statistics.median(a / b for a, b in each), 3)
           for name, each in rates.items()},
        **{f"{name}_per_s": [round(statistics.median(side)) for side in zip(*each, strict=True)]
           for name, each in rates.items()},
        "skipped": skipped})


if __name__ == "__main__":
    main()
