"""Compares runs of `run.py`: rewards step by step, the tools' share of a rollout phase, leftovers.

    python bench/trl_run/summary.py RUN.json ...

The tools' part of a rollout phase is its tool loop without generation, and the scoring. If the
tools took no time at all, the phase would still take its other parts: that quotient is the bound
of Amdahl's law for a faster tool machinery. This module needs no TRL.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]
_TAIL = 3  # for this many steps at each end of a run the mean reward is printed


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads the files of runs.

    Raises:
        ValueError: a file was not written by run.py.
    """
    runs = [json.loads(path.read_text()) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not isinstance(run, dict) or run.get("format") != "trl-run/1":
            raise ValueError(f"{path}: not a file of run.py; its format must be trl-run/1")
    return runs


def title(run: Run) -> str:
    """Returns the name of a run: its mode, and the CPUs of a tool call if they are not 1."""
    return run["mode"] + ("" if run["tool_cpus"] == "1" else f" {run['tool_cpus']}")


def rewards(run: Run) -> list[float]:
    """Returns the mean reward of each step."""
    return [step["reward"] for step in run["steps_done"]]


def ends(run: Run) -> tuple[float, float]:
    """Returns the mean rewards of the first and of the last three steps."""
    found = rewards(run)
    return statistics.fmean(found[:_TAIL]), statistics.fmean(found[-_TAIL:])


def first_difference(one: Run, other: Run) -> int | None:
    """Returns the first step whose rewards differ, from 0; None if all common steps are equal."""
    pairs = zip(rewards(one), rewards(other), strict=False)
    return next((step for step, (left, right) in enumerate(pairs) if left != right), None)


def times(run: Run) -> dict[str, float]:
    """Returns the median seconds of a step's parts. The first step is left out: it warms up.

    `tools_s` is the tools' part of the rollout phase; `others_s` is the rest of it.
    """
    steps = run["steps_done"][1:] or run["steps_done"]
    tools = [step["tool_loop_s"] + step["reward_s"] for step in steps]
    others = [step["rollout_s"] - part for step, part in zip(steps, tools, strict=True)]
    return {"step_s": statistics.median(step["step_s"] for step in steps),
            "rollout_s": statistics.median(step["rollout_s"] for step in steps),
            "tool_loop_s": statistics.median(step["tool_loop_s"] for step in steps),
            "tools_s": statistics.median(tools), "others_s": statistics.median(others)}


def amdahl_bound(serial: Mapping[str, float]) -> float:
    """Returns how many times shorter the rollout phase would be if the tools took no time.

    Args:
        serial: `times` of the run whose tools run one after another.
    """
    return (serial["tools_s"] + serial["others_s"]) / serial["others_s"]


def speedup_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns a row for each kind of run: its times and, if there is a run of mode `local`, how
    many times shorter they are than the times of that run."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(title(run), []).append(run)
    measured = {name: _median([times(run) for run in group]) for name, group in kinds.items()}
    base = measured.get("local")
    rows = []
    for name, found in measured.items():
        row: dict[str, Any] = {"kind": name, "runs": len(kinds[name]), **found}
        if base is not None:
            row |= {"tools_shorter": base["tools_s"] / found["tools_s"],
                    "rollout_shorter": base["rollout_s"] / found["rollout_s"],
                    "amdahl_bound": amdahl_bound(base)}
        rows.append(row)
    return rows


def _median(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def differences(runs: Sequence[Run]) -> list[str]:
    """Returns a line for each pair of runs with the same seed: how many steps have equal rewards,
    or which step differs first."""
    lines = []
    for seed in sorted({run["seed"] for run in runs}):
        first, *rest = [run for run in runs if run["seed"] == seed]
        for other in rest:
            step, common = first_difference(first, other), min(len(rewards(first)),
                                                               len(rewards(other)))
            equal = f"equal in {common} steps" if step is None else f"differ at step {step}"
            lines.append(f"seed {seed}: {title(first)} and {title(other)}: rewards {equal}")
    return lines


def text(runs: Sequence[Run]) -> str:
    """Returns the whole comparison as text."""
    lines = []
    for run in runs:
        before, after = ends(run)
        held = run["usage"]
        told = (f", {held['tool_calls']} tool calls, mean ACT {held['tool_act_s']:.3f} s, held "
                f"{held['held_core_h']:.3f} and idle {held['idle_core_h']:.3f} core-h"
                if held else "")
        lines.append(f"{title(run)} seed {run['seed']}: {len(rewards(run))} steps, reward "
                     f"{before:.2f} -> {after:.2f}, left {run['left']}{told}")
    lines += differences(runs)
    for row in speedup_rows(runs):
        lines.append(f"{row['kind']}: step {row['step_s']:.2f} s, rollout {row['rollout_s']:.2f} s,"
                     f" tools {row['tools_s']:.2f} s (loop {row['tool_loop_s']:.2f} s)" + (
            f"; tools {row['tools_shorter']:.1f} times shorter, rollout phase "
            f"{row['rollout_shorter']:.1f} times (bound {row['amdahl_bound']:.1f})"
            if "tools_shorter" in row else ""))
    return "\n".join(lines)


def main() -> None:
    """Prints the comparison."""
    p = argparse.ArgumentParser(description="Compares runs of run.py.")
    p.add_argument("runs", nargs="+", type=Path, help="files of run.py")
    print(text(read_runs(p.parse_args().runs)))


if __name__ == "__main__":
    main()
