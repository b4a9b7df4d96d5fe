"""Reports of a simulated RL run: metrics for programs, tables for people, and curves.

Invariants: all metrics come from the records of the steps. Ratios are between runs of one scenario
and seed. The text says that every number is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...simulator.pictures.curve_svg import Panel, PolicyCurve
from .rl_pipeline import Played
from .rl_systems import ABLATION, BASELINES, LIBRA

NOTE = "simulated: every figure is of a model, see docs/LIBRA.md"


def told(runs: Sequence[Played]) -> dict[str, Any]:
    """The whole report, for JSON."""
    return {"simulated": True, "systems": [_system(run) for run in runs], "ratios": ratios(runs)}


def ratios(runs: Sequence[Played]) -> dict[str, float]:
    """Throughput of all of Libra over that of each other system that was simulated."""
    of = {run.system.name: run.tokens_per_s for run in runs}
    whole = of.get(LIBRA.name)
    if whole is None:
        return {}
    return {name: round(whole / speed, 3) for name, speed in of.items() if name != LIBRA.name}


def table(runs: Sequence[Played]) -> list[str]:
    """Returns lines for people: the systems, the ratios to baselines, and the steps of the
    ablation.
    """
    slowest = min(run.tokens_per_s for run in runs)
    lines = [f"{'system':<18}{'tokens/s':>9}{'':>2}{'of the slowest':>15}{'hours':>7}{'busy':>6}"
             f"{'moved':>7}{'again':>7}  what"]
    for run in runs:
        speed = run.tokens_per_s
        lines.append(f"{run.system.name:<18}{speed:>9.0f}{'':>2}{speed / slowest:>14.2f}x"
                     f"{run.hours:>7.2f}{run.gpu_busy:>6.2f}{run.moved_share:>7.2f}"
                     f"{run.again_share:>7.2f}  {run.system.about}")
    found = ratios(runs)
    for one in BASELINES:
        if one.name in found:
            lines.append(f"all of Libra over {one.name}: {found[one.name]:.2f}x")
    speeds = {run.system.name: run.tokens_per_s for run in runs}
    steps = [s.name for s in ABLATION if s.name in speeds]
    for before, after in pairwise(steps):
        lines.append(f"{before} -> {after}: {speeds[after] - speeds[before]:+.0f} tokens/s "
                     f"({speeds[after] / speeds[before] - 1:+.1%})")
    return [*lines, NOTE]


def steps_table(run: Played) -> list[str]:
    """Returns lines for people about the steps of one run."""
    lines = [f"{'batch':>5}{'mean tok':>9}{'train':>6}{'roll':>5}{'rollout s':>10}{'p90':>6}"
             f"{'train s':>8}{'lent GPU s':>11}{'trained at':>11}  degrees"]
    for s in run.steps:
        lines.append(
            f"{s.batch:>5}{s.mean_tokens:>9.0f}{s.train_gpus:>6}{s.rollout_gpus:>5}"
            f"{s.rollout_s:>10.0f}{s.p90_share:>6.2f}{s.train_s:>8.0f}{s.lent_gpu_s:>11.0f}"
            f"{s.trained_at_s:>11.0f}  {s.degrees}{'; another split next' if s.switched else ''}")
    return lines


def panels(runs: Sequence[Played], name: str) -> list[Panel]:
    """The panels: each batch's throughput, and the time at which it was trained, over batches."""
    speed, when = [], []
    for run in runs:
        title = f"{run.system.name}: {run.tokens_per_s:.0f} tokens/s"
        rates, ends, before = [], [], 0.0
        for s in run.steps:
            at = s.batch + 1.0
            if s.batch >= run.warmup:
                rates.append((at, s.generated / (s.trained_at_s - before)))
            ends.append((at, s.trained_at_s / 3600))
            before = s.trained_at_s
        speed.append(PolicyCurve(run.system.name, title, rates))
        when.append(PolicyCurve(run.system.name, title, ends))
    return [Panel(f"Throughput, {name}, simulated", "batch", "generated tokens a second", speed),
            Panel(f"Trained, {name}, simulated", "batch", "hours", when)]


def _system(run: Played) -> dict[str, Any]:
    return {"name": run.system.name, "about": run.system.about,
            "tokens_per_s": round(run.tokens_per_s, 1), "hours": round(run.hours, 4),
            "gpu_busy": round(run.gpu_busy, 4), "moved_share": round(run.moved_share, 4),
            "again_share": round(run.again_share, 4),
            "steps": [{k: round(v, 3) if isinstance(v, float) else v
                       for k, v in vars(s).items()} for s in run.steps]}
