"""Pure. What is known of allocations: those asked for, held, given back, and what they cost.

Law: a part of the ledger, changed only by `handle`. What lives counts with all that it could still
use, so that the user's core-hours hold whatever happens next; what has ended counts with what it
had. Times are epoch ns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...domain.allocation import AllocPolicy, SatelliteShape
from ...domain.states import AllocState

TOLD_MAX = 40  # decisions that are kept for people; the journal has all


@dataclass(slots=True)
class AllocEntry:
    """One allocation. `shape` is None for one that the broker did not ask for; `own` is its own.
    `nodes`: the nodes that joined from it and are not lost."""

    alloc: int
    shape: SatelliteShape | None
    asked_at: int
    job: str = ""
    own: bool = False
    state: AllocState = AllocState.ASKED
    held_at: int = 0  # when we knew of the grant
    since: int = 0  # when Slurm granted it
    cpus: int = 0  # of all its nodes
    joined: bool = False  # a node of it was here
    nodes: dict[int, None] = field(default_factory=dict)
    empty_at: int = 0  # when its last node left
    ended_at: int = 0
    why: str = ""  # the last thing that was decided or heard of it

    @property
    def lives(self) -> bool:
        """Whether it is held, or may still come."""
        return self.state is not AllocState.ENDED

    @property
    def coming(self) -> bool:
        """Whether nodes of it are still to join."""
        waits = self.state in (AllocState.ASKED, AllocState.PENDING, AllocState.RUNNING)
        return waits and not self.joined

    @property
    def core_ns(self) -> int:
        """What it may use in all while it lives, what it used when it has ended; of a satellite."""
        if self.lives:
            assert self.shape is not None
            return max(self.shape.core_ns, self.cpus * self.shape.time_ns)
        return self.cpus * max(0, self.ended_at - self.since) if self.since else 0


@dataclass(slots=True)
class Rejections:
    """Of one shape: how many came one after the other, and until when it is left alone."""

    count: int = 0
    until: int = 0
    why: str = ""


@dataclass(slots=True)
class AllocLedger:
    """All allocations."""

    own: str = ""  # the broker's job
    policy: AllocPolicy = field(default_factory=AllocPolicy)
    entries: dict[int, AllocEntry] = field(default_factory=dict)  # those that live
    by_job: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, Rejections] = field(default_factory=dict)  # by shape
    taken: dict[str, None] = field(default_factory=dict)  # shapes of which Slurm took the last
    arrive_ns: dict[str, int] = field(default_factory=dict)  # by shape: ask to joined
    told: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    asks: int = 0
    ended: int = 0  # satellites
    ended_core_ns: int = 0  # what those used
    released_at: int = 0  # when something was last given back
    next_alloc: int = 1

    def satellites(self) -> list[AllocEntry]:
        """Those of the broker that live, in order of asking."""
        return [e for e in self.entries.values() if e.shape is not None]

    def nodes_live(self) -> int:
        """Nodes of satellites that are held or asked for."""
        return sum(e.shape.nodes for e in self.entries.values() if e.shape is not None)

    def core_ns(self) -> int:
        """What satellites used, and what those that live may come to use."""
        return self.ended_core_ns + sum(e.core_ns for e in self.satellites())

    def room(self, shape: SatelliteShape) -> int:
        """How many more of a shape the user's bounds allow."""
        policy = self.policy
        nodes = (policy.max_nodes - self.nodes_live()) // shape.nodes
        cores = (policy.max_core_ns - self.core_ns()) // max(1, shape.core_ns)
        return max(0, min(nodes, cores))

    def left_alone(self, shape: SatelliteShape, now: int) -> bool:
        """Whether it is too soon after a rejection."""
        rejected = self.rejected.get(shape.name)
        return rejected is not None and now < rejected.until

    def on_trial(self, shape: SatelliteShape) -> bool:
        """Whether Slurm has not said yet what it thinks of such requests, and has one."""
        return shape.name not in self.taken and any(
            e.shape is not None and e.shape.name == shape.name and e.state is AllocState.ASKED
            for e in self.entries.values())

    def check(self, nodes: set[int]) -> None:
        """Proves the laws; `nodes`: those that are not down."""
        for number, entry in self.entries.items():
            assert entry.alloc == number and entry.lives, f"{entry}"
            assert set(entry.nodes) <= nodes, f"{entry} holds a node that is down"
            assert not entry.job or self.by_job.get(entry.job) == number, f"{entry}: its job"
        assert len(self.by_job) == sum(bool(e.job) for e in self.entries.values()), "jobs"
