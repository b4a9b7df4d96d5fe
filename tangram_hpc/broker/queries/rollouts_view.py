"""Pure. Makes the views of rollout pools and of single turns."""

from __future__ import annotations

from typing import Any

from ...domain.states import ENDED
from ...scheduler.routing.rollout_pools import RolloutPool
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import ActionEntry


def rollouts(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns for every pool its services and their load, how many turns wait, and how good its
    decisions were. Fractions are None where nothing was counted yet.
    """
    return {"rollouts": [_pool(pool, now) for pool in scheduler.ledger.rollouts.values()]}


def _pool(pool: RolloutPool, now: int) -> dict[str, Any]:
    spec, counts = pool.spec, pool.counts
    return {
        "name": spec.name, "edges": list(spec.edges),
        "services": [{"name": s.name, "bucket": s.bucket, "degree": s.degree,
                      "load": pool.load(s.name), "running_max": s.running_max,
                      "queue_max": s.queue_max, "stands": pool.load(s.name) >= 0,
                      "closed_s": max(0, pool.closed(s.name) - now) / 1e9}
                     for s in spec.services],
        "waiting": pool.router.waiting, "trajectories": pool.trajectories,
        "turns": counts.turns, "ended": counts.ended, "dropped": counts.dropped,
        "judged": counts.judged, "accuracy": _share(counts.right, counts.judged),
        "moved": _share(counts.moved, counts.again),
        "moved_context": _share(counts.moved_context, counts.context),
        "prefixes": pool.queues.tree.nodes, "tree": spec.tree,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def turn_view(scheduler: Scheduler, entry: ActionEntry, now: int) -> dict[str, Any]:
    """Returns what `explain` adds for a turn: its service, or why it waits for one."""
    turn, route = entry.action.turn, entry.route
    if turn is None:
        return {}
    told: dict[str, Any] = {"pool": turn.pool, "trajectory": turn.trajectory,
                            "context": turn.context, "generated": turn.generated}
    if route is not None:
        return {"turn": told | {"service": route.service, "wanted": route.wanted,
                                "bucket": route.bucket, "how": route.how}}
    if entry.state in ENDED:
        return {"turn": told | {"why": "", "ahead": 0, "services": []}}
    pool = scheduler.ledger.rollouts[turn.pool]
    return {"turn": told | {"why": pool.why(entry.action.id),
                            "ahead": pool.turns_in_front(entry.action.id),
                            "services": _pool(pool, now)["services"]}}
