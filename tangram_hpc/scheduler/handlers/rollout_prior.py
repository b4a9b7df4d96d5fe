"""Pure. Loads the trees that a rollout pool learned in earlier runs, as an event of the journal.

A pool whose declaration names a folder goes on from the causal trees in it (see `routing/cmlfq`).
The files in that folder change while other jobs learn, so a replay cannot read them again: the
trees travel in the event, and a replay begins with the same estimates as the broker did.

A tree in an event is the JSON text of `CausalTree.plain`, as in the files, compressed with zlib;
empty bytes stand for a tree that has learned nothing.
"""

from __future__ import annotations

import json
import zlib

from ...domain import event as ev
from ...domain.decision import Decision
from ..routing.cmlfq import CausalTree
from ..routing.rollout_pools import shape_of
from ..state.scheduler_state import SchedulerState

_LEVEL = 1  # of zlib; paths repeat, so higher levels cost time and gain little


def prior_of(pool: str, shared: CausalTree, own: CausalTree, now: int) -> ev.RolloutPriorLoaded:
    """Makes the event by which a pool goes on from these trees.

    Args:
        shared: the tree of all jobs that share the pool's folder.
        own: the tree of this job; only this one is saved again.
        now: the broker's time in epoch ns.
    """
    return ev.RolloutPriorLoaded(now, pool, _packed(shared), _packed(own))


def on_rollout_prior_loaded(state: SchedulerState, event: ev.RolloutPriorLoaded
                            ) -> list[Decision]:
    """Replaces the trees of a declared pool by the event's trees."""
    pool = state.ledger.rollouts[event.pool]
    shared, own = (_unpacked(packed) or CausalTree(shape_of(pool.spec))
                   for packed in (event.shared, event.own))
    pool.adopt_prior(shared, own)
    return []


def _packed(tree: CausalTree) -> bytes:
    if not tree.prompts and tree.newest < 0:
        return b""
    return zlib.compress(json.dumps(tree.plain(), separators=(",", ":")).encode(), _LEVEL)


def _unpacked(packed: bytes) -> CausalTree | None:
    return CausalTree.from_plain(json.loads(zlib.decompress(packed))) if packed else None
