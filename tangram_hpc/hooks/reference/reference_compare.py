"""Compares four runs of the reference trainer: hybrid pool and router on and off, with one seed.

The four runs follow each other on one cluster, begin with the same untrained weights and differ in
nothing else. The measurements are reported as they are, without averages over seeds. Even two runs
with the same settings differ, because turns end in another order, and because the first run has to
load the services.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .reference_run import RunPlan, cluster_of, run_on

STEPS = 10
_KINDS = ((False, False), (False, True), (True, False), (True, True))  # (router on, pool on)
_SHOWN = ("reward_first", "reward_last", "solved_last", "step_s", "train_s", "rollout_s")


def compare(plan: RunPlan) -> dict[str, Any]:
    """Runs the plan with both off, the pool on, the router on, and both on.

    Args:
        plan: the plan; its `folder`, `router`, `lend` and `base` are replaced for each run.

    Returns:
        The seed, the steps, the seconds in all (`wall_s`), and each run's metrics (`runs`).

    Raises:
        TangramError: a run failed; see `run_on`.
    """
    began, told = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        plan = replace(plan, folder=folder, served=folder)
        # all plans are made before the first run, so that a wrong one is refused at once
        plans = [replace(plan, folder=str(Path(folder, f"run-{number}")), router=router,
                         lend=(1, max(2, plan.steps * 3 // 4)) if pool else (),
                         base=number * (plan.steps + 2))
                 for number, (router, pool) in enumerate(_KINDS)]
        with cluster_of(plan) as cluster:
            for (router, pool), one in zip(_KINDS, plans, strict=True):
                told.append(run_on(cluster, one))
                print(f"pool {_word(pool)}, router {_word(router)}: done after "
                      f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return {"seed": plan.seed, "steps": plan.steps, "wall_s": round(time.monotonic() - began, 1),
            "runs": told}


def table(told: dict[str, Any]) -> str:
    """Returns the result of `compare` as a table to print."""
    lines = [f"seed {told['seed']}, {told['steps']} steps each, {told['wall_s']:.0f} s in all; "
             "times are medians",
             "pool router | reward, first and last quarter   right | train_step s  training  "
             "rollouts | replica steps | right bucket (always the likelier)"]
    for one in told["runs"]:
        first, last, solved, step, train, rollout = (one[name] for name in _SHOWN)
        routed = one.get("router")
        bucket = (f"{routed['accuracy_after_returns']:.2f} ({routed['base_rate']:.2f})"
                  if routed and routed["after_returns"] else "-")
        lines.append(f"{_word(one['pool']):>4} {_word(one['routed']):>6} | {first:14.3f} -> "
                     f"{last:.3f}        {solved:9.2f} | {step:12.2f} {train:9.2f} {rollout:9.2f} |"
                     f" {one['steps_with_a_replica']:13d} | {bucket}")
    return "\n".join(lines)


def _word(on: bool) -> str:
    return "on" if on else "off"
