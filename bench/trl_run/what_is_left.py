"""Finds what a run leaves open in its broker, and how much it held and used.

Both are found as a user would: by the broker's queries, and by `tangram acct`. This module needs no
TRL.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tangram_hpc import Client


def leftovers(client: Client, patience_s: float = 10.0) -> dict[str, int]:
    """Returns how many sessions and unfinished actions the broker still has.

    Args:
        patience_s: how long sessions that are being closed may take.
    """
    until = time.monotonic() + patience_s
    while True:
        info = client.ask("info")
        busy = sum(info["actions"].get(state, 0) for state in ("PENDING", "RUNNING"))
        if not (info["sessions"] or busy) or time.monotonic() > until:
            return {"sandboxes": info["sessions"], "actions": busy}
        time.sleep(0.05)


def usage(job: str) -> dict[str, Any]:
    """Returns what a job held and used, and how long its tools took, by `tangram acct`."""
    held = _acct("--held", "--json", "-j", job)
    return {**core_hours(held), **tool_acts(_acct("--json", "-j", job)["actions"])}


def core_hours(held: Mapping[str, Any]) -> dict[str, float]:
    """Returns core-hours held, used and idle, from the JSON of `tangram acct --held`."""
    return {"held_core_h": held["held_core_h"], "used_core_h": held["used_core_h"],
            "idle_core_h": held["held_core_h"] - held["used_core_h"]}


def tool_acts(actions: Sequence[Mapping[str, Any]], name: str = "run_tests") -> dict[str, float]:
    """Returns the number of tool calls and the parts of their mean ACT, in seconds.

    Args:
        actions: the rows of `tangram acct --json`.
        name: the class of the tool's actions.
    """
    tools = [row for row in actions if row["name"] == name and row["end_ns"]]

    def mean_s(values: Sequence[int]) -> float:
        return sum(values) / max(1, len(values)) / 1e9

    return {"tool_calls": len(tools),
            "tool_act_s": mean_s([row["end_ns"] - row["submit_ns"] for row in tools]),
            "tool_queue_s": mean_s([row["planned_ns"] for row in tools]),
            "tool_run_s": mean_s([row["exec_ns"] for row in tools]),
            "tool_cpus_max": max([row["ncpus"] for row in tools], default=0)}


def _acct(*words: str) -> dict[str, Any]:
    told = subprocess.run([sys.executable, "-m", "tangram_hpc", "acct", *words],
                          capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(told.stdout)
    return answer
