"""The main job: one RL step under three placers, over the same seeds.

The default placer is compared with one static reservation per trajectory (`static:1`, what a job
holds without a broker) and with `fcfs:1` (one core for each action and no reservation, the fair
rule). Each run is a fresh embedded cluster and a fresh MPI world (2 trainer ranks and a gateway);
only the placer differs between them. The two short ones run before and after the long one, so that
a machine that becomes slower or faster meanwhile treats them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accounting.record import fold
from ..app.local import LocalCluster
from ..config.settings import Config
from ..errors import TangramError
from ..resources.cpu import affinity
from ..storage.journal import read_journals
from ..transport.mpi.launcher import mpiexec
from . import conditions
from .policy import GROUP
from .report import PhaseFigures, figures, mean
from .walls import isolation_options

TRAINERS = 2
OURS, STATIC, PLAIN = str(Config.model_fields["placer"].default), "static:1", "fcfs:1"
ORDER = (OURS, PLAIN, STATIC, PLAIN, OURS)
SESSION_ROOM_MIB = 64


@dataclass(frozen=True)
class DemoPlan:
    """What to run: how many problems, on how many CPUs, with thoughts scaled by `scale`."""

    problems: int
    seed: int
    scale: float
    cpus: int
    home: str | None = None


Progress = Callable[[str, float], None]


def run_all(plan: DemoPlan, progress: Progress) -> tuple[PhaseFigures, PhaseFigures, PhaseFigures]:
    """The figures of the default placer, of `static:1` and of `fcfs:1`, each a mean of its runs.

    Raises:
        TangramError: a rank failed; the message holds the end of its words.
    """
    runs: dict[str, list[PhaseFigures]] = {}
    for number, placer in enumerate(ORDER, 1):
        def tell(name: str, share: float, number: int = number) -> None:
            progress(f"{number}/{len(ORDER)} {name}", share)

        runs.setdefault(placer, []).append(run_phase(plan, placer, tell))
    return mean(runs[OURS]), mean(runs[STATIC]), mean(runs[PLAIN])


def run_phase(plan: DemoPlan, placer: str, progress: Progress) -> PhaseFigures:
    """One RL step under one placer.

    Raises:
        TangramError: a rank failed; the message holds the end of its words.
    """
    total = plan.problems * GROUP
    room = max(1024, total * SESSION_ROOM_MIB)
    cpus = affinity.usable()
    begin = conditions.now(cpus)
    with LocalCluster(plan.cpus, placer=placer, home=plan.home, mem_mib=room) as cluster:
        warm(cluster, plan.cpus)
        told = run_ranks(plan, cluster, "rank", lambda share: progress(placer, share))
        folder, job = cluster.folder, cluster.job
    others = conditions.between(begin, conditions.now(cpus), len(cpus))
    progress(placer, 1.0)
    usage = fold(read_journals(folder)).usage
    return figures(told, usage, plan.cpus, placer, job, others)


def run_ranks(plan: DemoPlan, cluster: LocalCluster, program: str,
              progress: Callable[[float], None], *more: str) -> dict[str, Any]:
    """What the trainer ranks of a world told, which run this program of this package.

    Raises:
        TangramError: a rank failed; the message holds the end of its words.
    """
    out, log = cluster.folder / "demo.json", cluster.folder / "ranks.log"
    world = _launch(plan, cluster.access, out, log, program, *more)
    try:
        while world.poll() is None:
            ended = cluster.ask("info")["sessions_ended"]
            progress(min(0.99, ended / (plan.problems * GROUP)))
            time.sleep(0.1)
    except BaseException:
        world.terminate()
        raise
    if world.returncode != 0 or not out.exists():
        tail = log.read_text(errors="replace").strip()[-600:]
        raise TangramError(f"the trainer ranks failed (status {world.returncode}): {tail}")
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def warm(cluster: LocalCluster, cpus: int) -> None:
    """Reads the interpreter from disk before anything is timed, so that no phase pays for it."""
    trusted = isolation_options(cluster)["trusted"]
    words = [sys.executable, "-I", "-S", "-B", "-c", "import typing, math, collections, random"]
    for future in [cluster.submit(words, name="warm", trusted=trusted) for _ in range(4 * cpus)]:
        future.result()


def _launch(plan: DemoPlan, access: Path, out: Path, log: Path, program: str, *more: str
            ) -> subprocess.Popen[bytes]:
    python = [sys.executable, "-m"]
    rank = [*python, f"tangram_hpc.demo.{program}", "--problems", str(plan.problems), "--seed",
            str(plan.seed), "--scale", str(plan.scale), "--out", str(out), *more]
    command = [mpiexec(), "-n", str(TRAINERS), *rank,
               ":", "-n", "1", *python, "tangram_hpc", "gateway"]
    environ = {**os.environ, "TANGRAM_ACCESS": str(access), "TANGRAM_GATEWAY": "1",
               "TANGRAM_WORLD_SIZE": str(TRAINERS + 1)}
    with open(log, "wb") as file:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file,
                                stderr=file)
