"""Computes the metrics and the table of the demo.

The input is the measurements of the ranks and the usage folded from the journal. A ratio compares
runs on the same CPUs. An ACT lasts from submission to result; the first ACT of a trajectory also
includes the wait for its session, because under `static:K` trajectories wait only for sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..accounting.roll_up import nearest_rank
from .conditions import OtherLoad, load_note


@dataclass(frozen=True)
class PhaseMetrics:
    """The metrics of one placer; times are in seconds, CPU time in CPU-seconds.

    Attributes:
        placer: Name of the placer.
        actions: Number of actions.
        act_mean: Mean ACT.
        act_p50: Median ACT, by nearest rank as the percentiles.
        act_p95: 95th percentile of the ACT.
        act_p99: 99th percentile of the ACT.
        queue: Mean waiting time of an action.
        exec: Mean run time of an action.
        system: Mean of the rest of the ACT.
        act_bare: Mean ACT without opening the session.
        step: Duration of the train step.
        latency: Policy latency of all trajectories together.
        held: CPU time that was reserved or lent to actions.
        used: CPU time that actions used.
        allocated: CPU time of the cluster during the step.
        passed: Trajectories with reward 1.
        expected: Trajectories whose drafts make reward 1 certain.
        trajectories: Number of trajectories.
        wrong: Trajectories whose reward is not the certain one.
        mixed_groups: Groups with passing and failing members.
        via: Transport of the frames between the ranks and the broker.
        job: Job id; several are separated by commas.
        other_load: CPU time that other work took meanwhile; of several runs, the largest.
        runs: Number of runs.
        spread: Longest train step of these runs less the shortest one.
    """

    placer: str
    actions: int
    act_mean: float
    act_p50: float
    act_p95: float
    act_p99: float
    queue: float
    exec: float
    system: float
    act_bare: float
    step: float
    latency: float
    held: float
    used: float
    allocated: float
    passed: int
    expected: int
    trajectories: int
    wrong: int
    mixed_groups: int
    via: str
    job: str
    other_load: OtherLoad
    runs: int = 1
    spread: float = 0.0

    @property
    def latency_share(self) -> float:
        """Returns the policy latency divided by the run time of all actions."""
        return self.latency / max(1e-9, self.exec * self.actions)


def metrics(summed: dict[str, Any], usage: Any, cpus: int, placer: str, job: str,
            other_load: OtherLoad) -> PhaseMetrics:
    """Returns the metrics of one run from the ranks' summary and the journal's usage."""
    ranks = summed["ranks"]
    rows = [row for rank in ranks for row in rank["rows"]]
    act = np.array([r["act_s"] for r in rows])
    queue = np.array([r["queue_s"] for r in rows])
    run = np.array([r["exec_s"] for r in rows])
    bare = act - np.array([r["opening_s"] for r in rows])
    p50, p95, p99 = (np.sort(act)[nearest_rank(len(act), percent)] for percent in (50, 95, 99))
    step = max(rank["step_s"] for rank in ranks)
    return PhaseMetrics(
        placer=placer, actions=len(rows), act_mean=float(act.mean()), act_p50=float(p50),
        act_p95=float(p95), act_p99=float(p99), queue=float(queue.mean()),
        exec=float(run.mean()), system=float((act - queue - run).mean()),
        act_bare=float(bare.mean()), step=step, latency=sum(rank["think_s"] for rank in ranks),
        held=(usage.reserved_ns or usage.lent_ns) / 1e9, used=usage.burnt_ns / 1e9,
        allocated=cpus * step, passed=sum(sum(rank["rewards"]) for rank in ranks),
        expected=sum(sum(rank["expected"]) for rank in ranks),
        trajectories=sum(len(rank["rewards"]) for rank in ranks),
        wrong=sum(len(rank["wrong"]) for rank in ranks),
        mixed_groups=summed["mixed_groups"], via=ranks[0]["via"], job=job, other_load=other_load)


def mean(runs: Sequence[PhaseMetrics]) -> PhaseMetrics:
    """Combines runs of one placer: times and CPU time are means, wrong rewards are summed."""
    first = runs[0]
    floats = {f.name: float(np.mean([getattr(r, f.name) for r in runs]))
              for f in fields(PhaseMetrics) if f.type == "float" and f.name != "spread"}
    worst = max((r.other_load for r in runs), key=lambda load: load.share)
    return replace(first, **floats, wrong=sum(r.wrong for r in runs),  # type: ignore[arg-type]
                   passed=min(r.passed for r in runs), job=", ".join(r.job for r in runs),
                   other_load=worst, runs=len(runs),
                   spread=max(r.step for r in runs) - min(r.step for r in runs))


def table(ours: PhaseMetrics, static: PhaseMetrics, plain: PhaseMetrics) -> str:
    """Returns a table with a column per placer, and the others' ratios to the default placer."""
    lines = [f"{'':<30}{ours.placer:>13}{plain.placer:>13}{static.placer:>13}"
             f"{plain.placer + ' x':>10}{static.placer + ' x':>12}"]

    def row(name: str, pick: Any, unit: str = "s", ratio: bool = True) -> None:
        values = [pick(f) for f in (ours, plain, static)]
        scaled = [v * 1e3 if unit == "ms" else v for v in values]
        tail = "".join(f"{value / max(values[0], 1e-9):>{width}.2f}x"
                       for value, width in zip(values[1:], (9, 11), strict=True))
        lines.append(f"{name:<30}" + "".join(f"{v:>10.2f} {unit:<2}" for v in scaled)
                     + (tail if ratio else ""))

    row("ACT mean", lambda f: f.act_mean, "ms")
    row("ACT p50", lambda f: f.act_p50, "ms")
    row("ACT p95", lambda f: f.act_p95, "ms")
    row("ACT p99", lambda f: f.act_p99, "ms")
    row("  of the mean: queue", lambda f: f.queue, "ms", False)
    row("  of the mean: execution", lambda f: f.exec, "ms", False)
    row("  of the mean: system", lambda f: f.system, "ms", False)
    row("ACT mean without admission", lambda f: f.act_bare, "ms")
    row("train step", lambda f: f.step)
    row("  longest less shortest run", lambda f: f.spread, ratio=False)
    row("CPU-seconds held by work", lambda f: f.held)
    row("CPU-seconds used by work", lambda f: f.used, ratio=False)
    row("CPU-seconds allocated", lambda f: f.allocated)
    row("CPU share of other work, %", lambda f: 100 * f.other_load.share, "", False)
    return "\n".join(lines)


def load_line(ours: PhaseMetrics, static: PhaseMetrics, plain: PhaseMetrics) -> str:
    """Returns the line about other work that belongs beside the ratios."""
    return load_note([(f.placer, f.other_load) for f in (ours, plain, static)])


def summary(ours: PhaseMetrics, static: PhaseMetrics, plain: PhaseMetrics) -> dict[str, Any]:
    """Returns the object that the demo prints as its last line."""
    runs = (ours, static, plain)
    return {
        "act_ratio": round(static.act_mean / ours.act_mean, 2),
        "step_ratio": round(static.step / ours.step, 2),
        "rewards_ok": all(f.wrong == 0 and f.passed == f.expected for f in runs),
        "actions": ours.actions,
        "act_ratio_without_admission": round(static.act_bare / ours.act_bare, 2),
        "act_ratio_fcfs1": round(plain.act_mean / ours.act_mean, 2),
        "step_ratio_fcfs1": round(plain.step / ours.step, 2),
        "placer": ours.placer,
        "other_work_share": {f.placer: round(f.other_load.share, 3) for f in runs},
        "system_share": round(ours.system / ours.act_mean, 4),
        "act_ms": round(ours.act_mean * 1e3, 2),
        "step_s": round(ours.step, 2),
        "think_per_execution": round(min(f.latency_share for f in runs), 1),
        "pass_rate": round(ours.passed / max(1, ours.trajectories), 4),
        "trajectories": ours.trajectories,
    }
