"""What it costs to start a session from an image, as ratios of things measured in turn in one run.

A start is the time from `Client.session` to the first result of a command in it. Each round starts
one session after the other of each kind: with an image whose root it writes (`image`), with the
same image read-only (`image_read_only`), in plain bwrap (`bwrap`) and in `process`. `cold`: no
sandbox waits ready-made. `warm`: one does. `burst`: so many at once, cold. `command`: a plain
command in an open session. The median of the rounds' ratios to plain bwrap counts. The image holds
a shell and 2,000 small files; a start does not read them. What does not work here is left out.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from bench_sandbox import UsersCluster

from tangram_hpc import LocalCluster

KINDS: dict[str, dict[str, Any]] = {
    "image": {"backend": "bwrap", "writable": True},
    "image_read_only": {"backend": "bwrap", "writable": False},
    "bwrap": {"backend": "bwrap"},
    "process": {"backend": "process"},
}
BASE = "bwrap"
FILES = 2000


def make_image(folder: Path, files: int) -> str:
    """Makes a root file system of this machine's shell, with many small files."""
    for name in ("etc", "root", "bin", "data"):
        (folder / name).mkdir(parents=True)
    for path in ("/bin/sh", *_libraries("/bin/sh")):
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for number in range(files):
        (folder / f"data/{number}").write_text("x" * 100)
    return str(folder)


def _libraries(path: str) -> list[str]:
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    return [word for word in told.split() if word.startswith("/")]


def start(cluster: LocalCluster, spec: dict[str, Any]) -> tuple[float, str]:
    """Seconds from the request of a session to its first result, and what isolated it."""
    began = time.perf_counter()
    with cluster.session(**spec) as session:
        result = session.exec("true").result().check()
        return time.perf_counter() - began, result.isolation


def burst(cluster: LocalCluster, spec: dict[str, Any], count: int) -> float:
    """Seconds for so many sessions at once, to the first result of the last one."""
    began = time.perf_counter()
    sessions = [cluster.session(**spec) for _ in range(count)]
    for result in [session.exec("true") for session in sessions]:
        result.result().check()
    took = time.perf_counter() - began
    for session in sessions:
        session.close()
    for session in sessions:
        session.closed.result()
    return took


def command(cluster: LocalCluster, spec: dict[str, Any], count: int) -> float:
    """Seconds of a plain command in an open session."""
    with cluster.session(**spec) as session:
        session.exec("true").result().check()
        return statistics.median(common.timed(lambda: session.exec("true").result(), count))


def works(cluster: LocalCluster, specs: dict[str, dict[str, Any]]) -> tuple[dict[str, str], Any]:
    """What isolates each kind that works here, and why the others do not."""
    isolation, why_not = {}, {}
    for kind, spec in specs.items():
        try:
            isolation[kind] = start(cluster, spec)[1]
        except Exception as error:  # noqa: BLE001 - told in the bench's line
            why_not[kind] = str(error)[:200]
    return isolation, why_not


def ratios(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median over the rounds of each kind's ratio to plain bwrap."""
    return {kind: round(statistics.median(one[kind] / one[BASE] for one in rounds), 3)
            for kind in rounds[0] if kind != BASE}


def main() -> int:
    args = common.arguments(__doc__)
    count = {"rounds": 1, "files": 20, "burst": 2, "commands": 3} if args.tiny else {
        "rounds": 9, "files": FILES, "burst": 8, "commands": 100}
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-bench-")))
        image = make_image(top / "image", count["files"])
        specs = {kind: {**spec, **({"image": image} if "writable" in spec else {})}
                 for kind, spec in KINDS.items()}
        for warm in (0, 1):
            with UsersCluster(cpus=2, home=top / f"home-{warm}", warm=warm) as cluster:
                isolation, why_not = works(cluster, specs)
                if BASE not in isolation:
                    figures["skipped"] = why_not
                    break
                kinds = [kind for kind in specs if kind in isolation]
                figures |= {"isolation": isolation, "why_not": why_not}
                measures: dict[str, Callable[[str], float]] = {
                    "warm": lambda kind, c=cluster: _rested(c, specs[kind])} if warm else {
                    "cold": lambda kind, c=cluster: start(c, specs[kind])[0],
                    "burst": lambda kind, c=cluster: burst(c, specs[kind], count["burst"]),
                    "command": lambda kind, c=cluster: command(c, specs[kind], count["commands"])}
                for name, measure in measures.items():
                    rounds = [{kind: measure(kind) for kind in kinds}
                              for _ in range(count["rounds"])]
                    figures[f"{name}_over_bwrap"] = ratios(rounds)
                    figures[f"{name}_ms"] = {kind: round(1e3 * statistics.median(
                        one[kind] for one in rounds), 2) for kind in kinds}
    common.line("image_session", count, figures)
    return 0


def _rested(cluster: LocalCluster, spec: dict[str, Any]) -> float:
    """A start for which a sandbox waits: the pool had time to build one."""
    start(cluster, spec)
    time.sleep(0.3)
    return start(cluster, spec)[0]


if __name__ == "__main__":
    sys.exit(main())
