"""Defines `Action`, the unit of work that a client submits. Pure.

A client asks for each action exactly once and gives it its id. An action never changes after that:
events tell what happens to it, and its state is in the scheduler's ledger. The payload (command,
pickled function, file content) is not part of it. It travels beside the action, and neither the
broker nor the journal reads it.

An action is elastic in at most one resource, its key resource (ARL-Tangram, section 4.1). `degrees`
lists on how many units of `key` it can run. All its other demands are fixed.
"""

from __future__ import annotations

import msgspec

from .rollouts import Turn
from .states import FixedWord


class Kind(FixedWord):
    """Says which part of a worker, or of the client, carries an action out."""

    EXEC = "exec"  # runs a command in a sandbox
    FUNCTION = "function"  # runs a Python function in a runner
    FILE = "file"  # reads or writes a file of a session; holds no unit
    CALL = "call"  # calls a service, on the block of GPUs where the service is
    GRANT = "grant"  # takes a slot and a token of an endpoint; the client itself makes the call
    # holds CPUs for processes that earlier actions of its session left; only the broker submits it
    BACKGROUND = "background"


class Profile(msgspec.Struct, frozen=True, array_like=True):
    """The expected run time of an action: `work_ns * (serial + (1 - serial) / d)` on d units.

    The caller gives it, or the broker learns it from earlier actions of the same class.

    Attributes:
        work_ns: run time on one unit.
        serial_ppm: the serial fraction in millionths, 0 to 1,000,000.
    """

    work_ns: int
    serial_ppm: int = 0

    def duration_ns(self, units: int) -> int:
        """Returns the run time on `units` >= 1 units, rounded once to whole ns."""
        part = self.serial_ppm * units + 1_000_000 - self.serial_ppm
        return round(self.work_ns * part / (1_000_000 * units))


class Action(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One unit of work, as its client submitted it.

    Attributes:
        id: number that the client chose (`domain.ids`). The broker runs an id once, however often
            it is submitted.
        name: the class of the action. Accounting shows it as JobName, and run times are learned for
            each class.
        kind: which part of the worker carries it out.
        degrees: the numbers of units of the key resource on which it can run, ascending; `(0,)` for
            an action that holds none. For a service, these are sizes of aligned blocks of GPUs; for
            an endpoint, it is `(1,)`.
        key: the key resource: `cpu`, `service:NAME` or `endpoint:NAME`; `rollouts:POOL` for a turn
            that has not been routed to a service yet.
        mem_mib: memory that it holds while it runs, in addition to its session's.
        gpus: whole GPUs that it holds while it runs.
        session: id of the session in which it runs; 0 for none.
        timeout_ns: limit on its run time; waiting does not count. 0 for no limit.
        attempts_max: how often it may be started, when nodes fail while it runs.
        resizable: whether its CPUs may change while it runs.
        component: the het component or partition on whose nodes it must run; empty for any.
        profile: its expected run time, if the caller gave one.
        trusted: for a command without a session: the user wrote the code, so that it may see the
            user's files. The trust of a session is in its own specification, and the trust in a
            function's result stays with the client.
        once: idempotency key of the caller; empty for none. Work with one key is done once in a
            job, however often the job is requeued or the key is submitted, and whatever happens to
            the client.
        trajectory: the client's name for the trajectory whose tool call this is; empty for none.
            Rollout pools use the end of the call to estimate how many tokens the trajectory has
            left.
        turn: set if this is a call of a rollout pool, which is routed to one of the pool's
            services; None otherwise.
        guessed: whether the client's release derived `name` from the command because the caller
            gave none. Another release may derive another name from the same command.
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

    def routed_to(self, service: str, degrees: tuple[int, ...]) -> Action:
        """Returns this turn as a call of `service`."""
        return msgspec.structs.replace(self, key=f"service:{service}", degrees=degrees)

    def unrouted(self) -> Action:
        """Returns this turn as it was before it was routed to a service."""
        assert self.turn is not None
        return msgspec.structs.replace(self, key=f"rollouts:{self.turn.pool}", degrees=(1,))

    @property
    def trajectory_name(self) -> str:
        """Its client's name for the trajectory that it belongs to; empty for none."""
        return self.turn.trajectory if self.turn is not None else self.trajectory

    @property
    def guarded(self) -> bool:
        """Whether the action needs a node that can keep its code away from the user's files.

        Only a command without a session needs such a node; a session chose one when it opened.
        """
        return self.kind is Kind.EXEC and not self.session and not self.trusted
