"""Pure. What a broker answers to a question of `tangram info`, `tangram explain` and their like.

Law: changes nothing; an unknown question gets a line that names those there are.
"""

from __future__ import annotations

from typing import Any

from ...ports import Slurm
from ...protocol.message import Ask
from ...scheduler.scheduler import Scheduler
from ..satellites import Satellites
from .explain import explain
from .status import info, nodes, pending, services, slurm_calls
from .tell_allocs import allocations
from .tell_rollouts import rollouts

_VIEWS = {"info": info, "nodes": nodes, "pending": pending, "services": services,
          "rollouts": rollouts}


def answer(ask: Ask, scheduler: Scheduler, job: str, slurm: Slurm | None, satellites: Satellites,
           now: int) -> dict[str, Any]:
    """The answer as plain values for JSON."""
    if ask.what == "explain" and ask.argument == "allocation":
        return {"elastic": allocations(scheduler, satellites, now)}
    if ask.what == "explain":
        return explain(scheduler, now, ask.argument)
    view = _VIEWS.get(ask.what)
    if view is None:
        return {"error": f"{ask.what!r} is not a question; ask {', '.join(_VIEWS)}, explain"}
    told = view(scheduler, job, now)
    if ask.what == "info":
        told["elastic"] = allocations(scheduler, satellites, now)
        if slurm is not None:
            told["slurm"] = slurm_calls(slurm.calls(), now)
    return told
