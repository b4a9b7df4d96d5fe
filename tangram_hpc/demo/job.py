"""The main job: one RL step under three placers, with the same seeds.

The default placer is compared with one static reservation per trajectory (`static:1`, which is what
a job holds without a broker) and with `fcfs:1` (one core per action in the order of arrival,
without reservations). Each run has an embedded cluster and an MPI world of its own (2 trainer ranks
and a gateway); the runs differ only in the placer. The two short runs are made before and after the
long one, so that a change in the machine's speed meanwhile affects all placers alike.
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
from ..start_module import module_command
from ..storage.journal_segments import read_journals
from ..transport.mpi.launcher import mpiexec
from . import conditions
from .demo_isolation import isolation_options
from .policy import GROUP
from .report import PhaseMetrics, mean, metrics

TRAINERS = 2
RANK = f"{__package__}.demo_rank"  # the module that each trainer rank runs
OURS, STATIC, PLAIN = str(Config.model_fields["placer"].default), "static:1", "fcfs:1"
ORDER = (OURS, PLAIN, STATIC, PLAIN, OURS)
SESSION_ROOM_MIB = 64


@dataclass(frozen=True)
class DemoPlan:
    """The size of a demo.

    Attributes:
        problems: Number of problems; each has `GROUP` trajectories.
        seed: Seed of the choice of problems and of all trajectories.
        scale: Factor on the measured policy latencies.
        cpus: CPUs that the embedded cluster holds.
        home: Folder of the run's files; None for the default.
    """

    problems: int
    seed: int
    scale: float
    cpus: int
    home: str | None = None


Progress = Callable[[str, float], None]


def run_all(plan: DemoPlan, progress: Progress) -> tuple[PhaseMetrics, PhaseMetrics, PhaseMetrics]:
    """Returns the metrics of the default placer, of `static:1` and of `fcfs:1`, each over its runs.

    Raises:
        TangramError: A trainer rank failed; the message holds the end of its output.
    """
    runs: dict[str, list[PhaseMetrics]] = {}
    for number, placer in enumerate(ORDER, 1):
        def report(name: str, share: float, number: int = number) -> None:
            progress(f"{number}/{len(ORDER)} {name}", share)

        runs.setdefault(placer, []).append(run_phase(plan, placer, report))
    return mean(runs[OURS]), mean(runs[STATIC]), mean(runs[PLAIN])


def run_phase(plan: DemoPlan, placer: str, progress: Progress) -> PhaseMetrics:
    """Runs one RL step under one placer and returns its metrics.

    Raises:
        TangramError: A trainer rank failed; the message holds the end of its output.
    """
    total = plan.problems * GROUP
    room = max(1024, total * SESSION_ROOM_MIB)
    cpus = affinity.usable()
    begin = conditions.now(cpus)
    with LocalCluster(plan.cpus, placer=placer, home=plan.home, mem_mib=room) as cluster:
        warm(cluster, plan.cpus)
        summary = run_ranks(plan, cluster, RANK, lambda share: progress(placer, share))
        folder, job = cluster.folder, cluster.job
    other_load = conditions.between(begin, conditions.now(cpus), len(cpus))
    progress(placer, 1.0)
    usage = fold(read_journals(folder)).usage
    return metrics(summary, usage, plan.cpus, placer, job, other_load)


def run_ranks(plan: DemoPlan, cluster: LocalCluster, program: str,
              progress: Callable[[float], None], *more: str) -> dict[str, Any]:
    """Runs the module `program` in all trainer ranks, and returns the summary that rank 0 wrote.

    Raises:
        TangramError: A trainer rank failed; the message holds the end of its output.
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
        raise TangramError(f"the demo's trainer ranks failed (exit status {world.returncode}): "
                           f"{tail}")
    summary: dict[str, Any] = json.loads(out.read_text())
    return summary


def warm(cluster: LocalCluster, cpus: int) -> None:
    """Reads the interpreter from disk before anything is timed, so that no phase pays for it."""
    trusted = isolation_options(cluster)["trusted"]
    argv = [sys.executable, "-I", "-S", "-B", "-c", "import typing, math, collections, random"]
    for future in [cluster.submit(argv, name="warm", trusted=trusted) for _ in range(4 * cpus)]:
        future.result()


def _launch(plan: DemoPlan, access: Path, out: Path, log: Path, program: str, *more: str
            ) -> subprocess.Popen[bytes]:
    rank = module_command(program, "--problems", str(plan.problems), "--seed", str(plan.seed),
                          "--scale", str(plan.scale), "--out", str(out), *more)
    command = [mpiexec(), "-n", str(TRAINERS), *rank,
               ":", "-n", "1", *module_command("tangram_hpc", "gateway")]
    environ = {**os.environ, "TANGRAM_ACCESS": str(access), "TANGRAM_GATEWAY": "1",
               "TANGRAM_WORLD_SIZE": str(TRAINERS + 1)}
    with open(log, "wb") as file:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file,
                                stderr=file)
