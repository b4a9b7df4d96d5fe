"""The ideal for the mixed tasks: rigid schedules that know everything and cost nothing.

The least mean completion time of rigid tasks is hard to compute, so the ideal is the best of
several list schedules, each simulated without any overhead: whenever a task arrives or ends, the
waiting tasks are started in the list's order, as far as they fit. The orders are arrival, and
time**a * cores**b for several a and b, each with first-fit (a task that does not fit is passed
over) and without. The best order is then improved by random changes of single tasks' places.
`bound_s` is the mean of the times alone, which no rigid schedule beats.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from work import Task


def mean_completion_s(tasks: Sequence[Task], cores: int, keys: Sequence[float],
                      pass_over: bool = True) -> float:
    """The mean time from arrival to end, when waiting tasks start in the order of their keys."""
    free, number, total, now = cores, 0, 0.0, 0.0
    ends: list[tuple[float, int]] = []
    waiting: list[tuple[float, int]] = []
    while number < len(tasks) or ends:
        arrives = tasks[number].at_s if number < len(tasks) else float("inf")
        if ends and ends[0][0] <= arrives:
            now, which = heapq.heappop(ends)
            free += tasks[which].cores
        else:
            now = arrives
            heapq.heappush(waiting, (keys[number], number))
            number += 1
        passed: list[tuple[float, int]] = []
        while waiting and free:
            key, which = heapq.heappop(waiting)
            task = tasks[which]
            if task.cores <= free:
                free -= task.cores
                heapq.heappush(ends, (now + task.seconds, which))
                total += now + task.seconds - task.at_s
            else:
                passed.append((key, which))
                if not pass_over:
                    break
        for each in passed:
            heapq.heappush(waiting, each)
    return total / len(tasks)


def ideal(tasks: Sequence[Task], cores: int, changes: int = 1000) -> dict[str, float]:
    """`mean_s` of the best schedule that was found, and `bound_s`; see the module's text."""
    orders = [[task.at_s for task in tasks]]
    orders += [[task.seconds ** a * task.cores ** b for task in tasks]
               for a, b in ((1, 0), (1, 0.5), (1, 1), (0.5, 1), (0.5, 0.5), (0, 1))]
    best_s, keys, pass_over = min((mean_completion_s(tasks, cores, keys, over), keys, over)
                                  for keys in orders for over in (True, False))
    draw = random.Random(1)
    for _ in range(changes):
        which = draw.randrange(len(tasks))
        changed = list(keys)
        changed[which] = keys[draw.randrange(len(tasks))]
        mean_s = mean_completion_s(tasks, cores, changed, pass_over)
        if mean_s < best_s:
            best_s, keys = mean_s, changed
    return {"mean_s": best_s, "bound_s": sum(task.seconds for task in tasks) / len(tasks)}
