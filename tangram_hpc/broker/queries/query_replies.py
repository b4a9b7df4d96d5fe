"""Pure. The broker's replies to queries, as `tangram info`, `tangram explain` and the like send.

Nothing here changes the state. The reply to an unknown query is a line that names the known ones.
"""

from __future__ import annotations

from typing import Any

from ...ports import Slurm
from ...protocol.message import Query
from ...scheduler.scheduler import Scheduler
from ..satellites import Satellites
from .allocations_view import allocations
from .explain import explain
from .queue_view import queue
from .recent_actions import RecentActions
from .rollouts_view import rollouts
from .status import info, nodes, pending, pending_one, services, sessions, slurm_calls
from .tenants_view import tenants
from .top_view import top

_VIEWS = {"info": info, "nodes": nodes, "pending": pending, "services": services,
          "rollouts": rollouts, "sessions": sessions, "tenants": tenants}


def reply_to(ask: Query, scheduler: Scheduler, job: str, slurm: Slurm | None,
             satellites: Satellites, recent: RecentActions, now: int) -> dict[str, Any]:
    """Returns the reply to a query, as plain values for JSON; `{"error": ...}` to a wrong one."""
    if ask.what == "explain" and ask.argument == "allocation":
        return {"elastic": allocations(scheduler, satellites, now)}
    if ask.what == "explain":
        return explain(scheduler, now, ask.argument)
    if ask.what == "pending" and ask.argument:
        return pending_one(scheduler, ask.argument, now)
    if ask.what == "queue":
        return queue(scheduler, ask.argument, now)
    if ask.what == "top":
        return top(scheduler, recent, job, now)
    view = _VIEWS.get(ask.what)
    if view is None:
        return {"error": f"{ask.what!r} is not a query; known are {', '.join(_VIEWS)}, "
                         "explain, queue, top"}
    reply = view(scheduler, job, now)
    if ask.what == "info":
        reply["elastic"] = allocations(scheduler, satellites, now)
        if slurm is not None:
            reply["slurm"] = slurm_calls(slurm.calls(), now)
    return reply
