"""Writes a summary of a job's actions in one line, for the Comment of its Slurm job. Pure.

The format is stable: entries `key=value` in a fixed order. New entries go to the end. The line has
at most `TEXT_MAX` characters, and entries without a measurement are left out.
"""

from __future__ import annotations

from collections import Counter

from ..domain.states import ENDED, ActionState
from .record import Fold

TEXT_MAX = 240
_HOUR = 3600 * 10**9


def summary(folded: Fold) -> str:
    """Returns a line such as `actions=2000 act_mean=2.214s cpu_held=12.10h cpu_lent=81%
    cpu_used=63% ...`.

    `actions` counts the submitted actions. `act_mean` is the mean time from submission to result of
    the actions that ended. `cpu_held` is how many CPU-hours nodes lent to the broker; `cpu_lent` is
    the part that actions held, and `cpu_used` the part that their processes used. `gpu_lent` is how
    many GPU-hours actions held. The numbers of actions in each state follow. O(actions).
    """
    records, usage = folded.records.values(), folded.usage
    ended = [r for r in records if r.state in ENDED and r.end_ns]
    words = [f"actions={len(folded.records)}"]
    if ended:
        mean_ns = sum(r.end_ns - r.submit_ns for r in ended) // len(ended)
        words.append(f"act_mean={mean_ns / 1e9:.3f}s")
    words.append(f"cpu_held={usage.held_ns / _HOUR:.2f}h")
    if usage.held_ns:
        words += [f"cpu_lent={100 * usage.lent_ns / usage.held_ns:.0f}%",
                  f"cpu_used={100 * usage.burnt_ns / usage.held_ns:.0f}%"]
    if gpu_ns := sum(a.gpu_held_ns for r in records for a in r.attempts):
        words.append(f"gpu_lent={gpu_ns / _HOUR:.2f}h")
    counts = Counter(r.state for r in records)
    words += [f"{s.value.lower()}={counts[s]}" for s in ActionState if counts[s]]
    while len(text := " ".join(words)) > TEXT_MAX:
        words.pop()
    return text
