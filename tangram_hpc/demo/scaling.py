"""The demo's second part: actions that run faster on more cores, under three placers.

The programs of the first part take some 20 ms on one core, so there is nothing to resize. Here the
first trajectories of the shipped workload `coding-200` are replayed: builds and test suites of
seconds to minutes, and the policy's thinking between them, ten times as fast. CPUs are virtual, one
for each trajectory and at least four: a broker lends them, and each action is a real process that
waits for as long as its work would take on the CPUs that it is lent. Beside the default placer run
`static:4`, which reserves 4 CPUs for each trajectory, and `fcfs:4`, which lends 4 CPUs to each
action in the order of arrival. In simulations with these trajectories and CPUs `fcfs:4` has the
lowest mean ACT and step of its kind. `elastic` is told how long each action takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.settings import Config
from ..resources.cpu import affinity
from ..simulator.replay.replay_run import first, replay
from ..simulator.workload import Cluster, read_workload
from . import conditions
from .conditions import OtherLoad

WORKLOAD = "coding-200"
TRAJECTORIES = 24  # by default
SCALE = 0.1  # seconds here for one second of the workload
CPUS_MIN = 4  # static:4 needs as many
ORDER = (str(Config.model_fields["placer"].default), "fcfs:4", "static:4")


@dataclass(frozen=True)
class ScalingRun:
    """One placer's run.

    Attributes:
        placer: name of the placer.
        figures: figures of the live run, as `RunRecords.figures`, in seconds of the workload.
        simulated: the same figures of the simulated run.
        other_load: CPU time that other work took meanwhile.
    """

    placer: str
    figures: dict[str, Any]
    simulated: dict[str, Any]
    other_load: OtherLoad


def run_scaling(trajectories: int, seed: int, progress: Callable[[str, float], None]
                ) -> list[ScalingRun]:
    """Replays the workload under each placer, one after the other.

    Args:
        trajectories: how many trajectories of the workload; there are as many virtual CPUs, and at
            least `CPUS_MIN`.
        seed: seed of the simulated runs.
        progress: is told the placer, and 0.0 at the beginning and 1.0 at the end of its run.

    Raises:
        InvalidInput: `trajectories` is below 1.
    """
    work = first(read_workload(Path(WORKLOAD)), trajectories)
    mem_mib = sum(each.session.mem_mib for each in work.trajectories)
    cluster = Cluster.model_validate({"nodes": [
        {"name": "n", "cpus": max(CPUS_MIN, len(work.trajectories)), "mem_mib": max(1, mem_mib)}]})
    cpus, runs = affinity.usable(), []
    for number, placer in enumerate(ORDER, 1):
        name = f"{number}/{len(ORDER)} scaling, {placer}"
        progress(name, 0.0)
        begin = conditions.now(cpus)
        run = replay(work, cluster, placer, SCALE, seed)
        load = conditions.between(begin, conditions.now(cpus), len(cpus))
        runs.append(ScalingRun(placer, run.live.figures(), run.simulated.figures(), load))
        progress(name, 1.0)
    return runs


def introduction(trajectories: int) -> str:
    """Returns what is run, for people who read the table."""
    count = "1 trajectory" if trajectories == 1 else f"{trajectories} trajectories"
    return (f"Actions that scale: {count} of {WORKLOAD} (builds and test "
            f"suites, with the policy's thinking\nbetween them) on {max(CPUS_MIN, trajectories)} "
            f"virtual CPUs, {1 / SCALE:g} times as fast. The broker is told how long\n"
            "each action takes. Times below are those of the workload.")


def table(runs: Sequence[ScalingRun]) -> str:
    """Returns a table with a column per placer, and the others' ratios to the first."""
    lines = [f"{'':<30}" + "".join(f"{run.placer:>13}" for run in runs)
             + "".join(f"{run.placer + ' x':>11}" for run in runs[1:])]

    def row(name: str, values: Sequence[float], unit: str = "s", ratio: bool = True) -> None:
        tail = "".join(f"{value / max(values[0], 1e-9):>10.2f}x" for value in values[1:])
        lines.append(f"{name:<30}" + "".join(f"{v:>10.2f} {unit:<2}" for v in values)
                     + (tail if ratio else ""))

    for name, key in (("ACT mean", "mean_act_s"), ("ACT p50", "p50_act_s"),
                      ("ACT p99", "p99_act_s"), ("step", "step_s")):
        row(name, [run.figures[key] for run in runs])
    row("ACT mean, simulated", [run.simulated["mean_act_s"] for run in runs])
    row("CPU share of other work, %", [100 * run.other_load.share for run in runs], "", False)
    return "\n".join([*lines, conditions.load_note([(r.placer, r.other_load) for r in runs])])


def summary(runs: Sequence[ScalingRun]) -> dict[str, Any]:
    """Returns the figures as the demo's last line has them, under `scaling`."""
    ours = runs[0].figures
    return {
        "workload": WORKLOAD, "scale": SCALE, "actions": ours["actions"],
        "act_s": {run.placer: round(run.figures["mean_act_s"], 3) for run in runs},
        "simulated_act_s": {run.placer: round(run.simulated["mean_act_s"], 3) for run in runs},
        "step_s": {run.placer: round(run.figures["step_s"], 2) for run in runs},
        "other_work_share": {run.placer: round(run.other_load.share, 3) for run in runs},
    }
