"""Pure. `SchedulerState`: everything that a scheduler holds.

The handlers (`scheduler/handlers`) are free functions `on_<event>(state, event)`; they get this
struct and nothing else. A copy of it (`copy.deepcopy`) is a scheduler of its own: no field refers
to a function that is bound to another state.

Invariants: the ledger is replaced only before the first event (`Scheduler.resume`), and only
`Scheduler.handle` changes it. `plan` changes `dirty`, the fields below it and the placer's memory;
a replay of the journal restores none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..autoscale.elastic_allocs import ElasticAllocs
from ..placement.placers.base import Placer
from .ledger import Ledger


@dataclass(slots=True)
class SchedulerState:
    """The state of one scheduler.

    Attributes:
        ledger: clients, nodes, sessions, actions and leases.
        placer: the rule that says which action starts where. It may keep a memory that saves work
            in the next pass; everything else is in the ledger.
        dirty: whether something happened since the last placement that may let an action start or
            a session open. Handlers set it, `plan` clears it.
        place_again_at: when the placer asked to be called again, although nothing happens until
            then; epoch ns, 0 for never.
        placed_at: when the placer was last called; epoch ns.
        drained: the GPUs whose copies take no further calls, as (node, GPU), as the placer said.
        planned_at: when `plan` last found nothing more to do; epoch ns.
        elastic: the memory of the rules that request and give back allocations.
    """

    ledger: Ledger
    placer: Placer
    dirty: bool = False
    place_again_at: int = 0
    placed_at: int = 0
    drained: set[tuple[int, int]] = field(default_factory=set)
    planned_at: int = 0
    elastic: ElasticAllocs = field(default_factory=ElasticAllocs)
