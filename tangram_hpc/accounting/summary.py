"""Pure. A job's actions in one short line: what goes into the Comment of its Slurm job.

Law: the format is stable: words `key=value`, in this order, new ones only at the end; at most
`TEXT_MAX` characters; what was not measured is left out.
"""

from __future__ import annotations

from collections import Counter

from ..domain.states import ENDED, ActionState
from .record import Fold

TEXT_MAX = 240
_HOUR = 3600 * 10**9


def summary(folded: Fold) -> str:
    """`actions=2000 act_mean=2.214s cpu_held=12.10h cpu_lent=81% cpu_used=63% completed=1990 ...`.

    actions: that were submitted; act_mean: submit to result, of those that ended; cpu_held: CPU-
    hours that nodes lent to the broker; of those cpu_lent: held by actions, cpu_used: burnt by
    them; gpu_lent: GPU-hours held by actions; then how many ended in each state. O(actions).
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
    if gpu_ns := sum(r.gpu_held_ns for r in records):
        words.append(f"gpu_lent={gpu_ns / _HOUR:.2f}h")
    counts = Counter(r.state for r in records)
    words += [f"{s.value.lower()}={counts[s]}" for s in ActionState if counts[s]]
    while len(text := " ".join(words)) > TEXT_MAX:
        words.pop()
    return text
