"""Pure. The state and the core-hours of allocations that are requested, held or given back.

It is a part of the ledger, so only `Scheduler.handle` changes it. An allocation that lives counts
with all that it could still use, so that the user's bound of core-hours holds whatever happens
next; one that has ended counts with what it used. All times are epoch ns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...domain.allocation import AllocPolicy, SatelliteShape
from ...domain.states import AllocState

TOLD_MAX = 40  # how many decisions are kept to show to people


@dataclass(slots=True)
class AllocEntry:
    """An allocation that is requested or held.

    Attributes:
        alloc: its number.
        shape: what was requested of Slurm; None for an allocation that the broker did not request.
        asked_at: when it was requested, or became known.
        job: its Slurm job id; empty while that is not known.
        own: whether it is the broker's own allocation.
        state: where it is in its life.
        held_at: when the broker learned that Slurm had granted it; 0 before.
        since: when Slurm granted it; 0 before.
        cpus: CPUs of all its nodes.
        joined: whether a node of it has ever joined.
        nodes: its nodes that have joined and are not lost.
        empty_at: when its last node left; 0 while it has one.
        ended_at: when it ended; 0 before.
        why: the reason of the last decision or report about it.
    """

    alloc: int
    shape: SatelliteShape | None
    asked_at: int
    job: str = ""
    own: bool = False
    state: AllocState = AllocState.ASKED
    held_at: int = 0
    since: int = 0
    cpus: int = 0
    joined: bool = False
    nodes: dict[int, None] = field(default_factory=dict)
    empty_at: int = 0
    ended_at: int = 0
    why: str = ""

    @property
    def lives(self) -> bool:
        """Whether it is held, or may still be granted."""
        return self.state is not AllocState.ENDED

    @property
    def coming(self) -> bool:
        """Whether its nodes are still to join."""
        waits = self.state in (AllocState.ASKED, AllocState.PENDING, AllocState.RUNNING)
        return waits and not self.joined

    @property
    def core_ns(self) -> int:
        """The core-ns of a satellite: all that it may use while it lives, and the used core-ns once
        it has ended.
        """
        if self.lives:
            assert self.shape is not None
            return max(self.shape.core_ns, self.cpus * self.shape.time_ns)
        return self.cpus * max(0, self.ended_at - self.since) if self.since else 0


@dataclass(slots=True)
class Rejections:
    """The rejections of one shape.

    Attributes:
        count: how many came one after the other.
        until: when the shape may be requested again.
        why: the reason of the last one.
    """

    count: int = 0
    until: int = 0
    why: str = ""


@dataclass(slots=True)
class AllocLedger:
    """All allocations of the job.

    Attributes:
        own: the broker's own job id.
        policy: what the user allows.
        entries: the allocations that live, by number.
        by_job: the numbers of allocations by job id, as far as their job is known.
        rejected: the rejections since the last success, by shape.
        taken: the shapes of which Slurm accepted the last request.
        arrive_ns: how long it takes from a request to its first node, as a moving mean by shape.
        told: (time, what) of the last decisions, to show to people. The journal has all of them.
        asks: how many satellites were ever requested.
        ended: how many satellites have ended.
        ended_core_ns: what these used, in core-ns.
        next_alloc: the number of the next allocation.
    """

    own: str = ""
    policy: AllocPolicy = field(default_factory=AllocPolicy)
    entries: dict[int, AllocEntry] = field(default_factory=dict)
    by_job: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, Rejections] = field(default_factory=dict)
    taken: dict[str, None] = field(default_factory=dict)
    arrive_ns: dict[str, int] = field(default_factory=dict)
    told: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    asks: int = 0
    ended: int = 0
    ended_core_ns: int = 0
    next_alloc: int = 1

    def satellites(self) -> list[AllocEntry]:
        """The satellites that live, in order of their requests."""
        return [e for e in self.entries.values() if e.shape is not None]

    def nodes_live(self) -> int:
        """The nodes of satellites that are held or requested."""
        return sum(e.shape.nodes for e in self.entries.values() if e.shape is not None)

    def core_ns(self) -> int:
        """The core-ns that satellites have used, plus those that living ones may still use."""
        return self.ended_core_ns + sum(e.core_ns for e in self.satellites())

    def room(self, shape: SatelliteShape) -> int:
        """How many more satellites of a shape the user's bounds allow."""
        policy = self.policy
        nodes = (policy.max_nodes - self.nodes_live()) // shape.nodes
        cores = (policy.max_core_ns - self.core_ns()) // max(1, shape.core_ns)
        return max(0, min(nodes, cores))

    def left_alone(self, shape: SatelliteShape, now: int) -> bool:
        """Whether it is too soon after a rejection to request this shape again."""
        rejected = self.rejected.get(shape.name)
        return rejected is not None and now < rejected.until

    def on_trial(self, shape: SatelliteShape) -> bool:
        """Whether a request of this shape is open and Slurm has not accepted one since the last
        rejection. Then no further request of this shape is made.
        """
        return shape.name not in self.taken and any(
            e.shape is not None and e.shape.name == shape.name and e.state is AllocState.ASKED
            for e in self.entries.values())

    def check(self, nodes: set[int]) -> None:
        """Raises an AssertionError if an invariant is violated. `nodes` are the nodes that are not
        down.
        """
        for number, entry in self.entries.items():
            assert entry.alloc == number and entry.lives, f"{entry}"
            assert set(entry.nodes) <= nodes, f"{entry} holds a node that is down"
            assert not entry.job or self.by_job.get(entry.job) == number, f"{entry}: its job"
        assert len(self.by_job) == sum(bool(e.job) for e in self.entries.values()), "jobs"
