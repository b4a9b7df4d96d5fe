"""Pure. `Action`: what a client asks for, once. Immutable; its payload is elsewhere and opaque.

An action is elastic on at most one key resource (ARL-Tangram §4.1): `degrees` lists the units of
`key` it may run on; everything else it needs is a fixed demand.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from .rollouts import Turn


class Kind(str, Enum):
    """What carries the action out on the worker."""

    EXEC = "exec"  # a command in a sandbox
    FUNCTION = "function"  # a Python function in a runner
    FILE = "file"  # read or write in a session's sandbox; holds no unit
    CALL = "call"  # of a service, on the block of GPUs where that stands
    GRANT = "grant"  # a slot and a token of an endpoint: its client makes the call, no node


class Profile(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an action's run time: `work_ns * (serial + (1 - serial) / d)` on d units.

    `serial_ppm` is the serial fraction in millionths. Given by the caller or learned; a placer
    that uses it says so in the records.
    """

    work_ns: int
    serial_ppm: int = 0

    def duration_ns(self, units: int) -> int:
        """Run time on `units` >= 1 units, rounded once to whole ns."""
        part = self.serial_ppm * units + 1_000_000 - self.serial_ppm
        return round(self.work_ns * part / (1_000_000 * units))


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One unit of work, as its client submitted it.

    Attributes:
        id: minted by the client (`domain.ids`); the idempotency key.
        name: the action's class, for accounting (JobName) and for learning durations.
        degrees: feasible units of the key resource, ascending; `(0,)` holds none. Of a service:
            sizes of aligned GPU blocks; of an endpoint: 1.
        key: `cpu`, `service:NAME` or `endpoint:NAME`; `rollouts:POOL` until a turn is dealt.
        mem_mib: memory held while it runs, beyond its session's.
        gpus: whole GPUs held while it runs.
        session: id of the session it runs in; 0 for none.
        timeout_ns: limit on run time only, waiting never counts; 0 for none.
        attempts_max: how often it may be started when nodes fail under it.
        resizable: whether its CPUs may change while it runs.
        component: run only on nodes of this het component or partition; empty for any.
        trusted: a command without a session is its user's own and may see the user's files (in a
            session, the session says so; of a function's result, the client does).
        once: its caller's name for this work, which is done once in a job, however often the job
            is requeued and the name submitted; empty for none. It outlives its client.
        trajectory: its client's name for the trajectory whose tool it is: how it ends tells rollout
            pools what is left of that; empty for none.
        turn: it is a call of whichever service of a rollout pool is best; None of all others.
        guessed: `name` is what its client's release derives from the command, as its caller gave
            none; another release may derive another one for the same command.
    """

    id: int
    name: str
    kind: Kind = Kind.EXEC
    degrees: tuple[int, ...] = (1,)
    key: str = "cpu"
    mem_mib: int = 0
    gpus: int = 0
    session: int = 0
    timeout_ns: int = 0
    attempts_max: int = 1
    resizable: bool = True
    component: str = ""
    profile: Profile | None = None
    trusted: bool = False
    once: str = ""
    trajectory: str = ""
    turn: Turn | None = None
    guessed: bool = False

    def dealt(self, service: str, degrees: tuple[int, ...]) -> Action:
        """This turn as a call of a service."""
        return msgspec.structs.replace(self, key=f"service:{service}", degrees=degrees)

    def undealt(self) -> Action:
        """This turn as it was before it was dealt."""
        assert self.turn is not None
        return msgspec.structs.replace(self, key=f"rollouts:{self.turn.pool}", degrees=(1,))

    @property
    def guarded(self) -> bool:
        """Whether it needs a node that keeps code from its user's files; a session has its own."""
        return self.kind is Kind.EXEC and not self.session and not self.trusted
