"""Pure. `Outcome`: how one attempt of an action ended, as its worker measured it."""

from __future__ import annotations

import msgspec

from .states import ActionState

CPU_AT_LEAST, RSS_AT_LEAST = 1, 2  # bits of `Outcome.at_least`
TEXT_MAX = 4096  # characters of a text that is told
# Exit statuses of the ends that a command does not choose itself. 124 is that of coreutils'
# `timeout`, 137 that of a process that the kernel's OOM killer ended, 130 that of one that was
# interrupted; 1 stands for work that never came to an end of its own.
_STATUSES = {ActionState.TIMEOUT: 124, ActionState.OUT_OF_MEMORY: 137, ActionState.CANCELLED: 130,
             ActionState.NODE_FAIL: 1, ActionState.PREEMPTED: 1}


def too_long(limit_s: float) -> str:
    """The reason of what ended at its time limit, whoever ended it."""
    return f"it ran longer than its limit of {limit_s:g} s"


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an attempt ended.

    Attributes:
        state: one of the ended states.
        exit_code: the code that the command itself ended with, as its node saw it; 0 when a signal
            ended it or nothing is known. People are shown `exit_status` instead.
        signal: the signal that ended it, 0 for none.
        exec_ns: run time on the node, by the node's monotonic clock.
        cpu_ns: user + system time of the action's processes.
        maxrss_kib: largest resident set of any one of its processes.
        reason: one line that says why, when the state alone does not.
        isolation: the isolation it really had (`process`, ...).
        enforcement: how its units were really enforced (`affinity`, `counted`, ...).
        restore_ns: what bringing its service onto the GPUs took, before `exec_ns`.
        batch: how many calls ran as one with it, itself included.
        gpu_util_pct: mean use of its GPUs; -1: not known, as for the next two.
        gpu_max_mem_mib: the most memory that was taken on its GPUs, by whomever.
        energy_mj: its part of what its GPUs drew: an estimate, counters are per device.
        cost_micro: what a call of an endpoint cost, in millionths of its caller's unit.
        pushed: how its endpoint pushed back: 0, FALTERED or THROTTLED; of a call of a service,
            FALTERED: the service cannot be brought to its GPUs, so the call is not to blame.
        retry_after_ns: how long that endpoint wants to be left alone.
        returned: bytes that it gave back, their wrapping of a few bytes included.
        at_least: which figures are lower bounds, as they could not be measured to the end:
            CPU_AT_LEAST for `cpu_ns`, RSS_AT_LEAST for `maxrss_kib`; 0: none.
    """

    state: ActionState
    exit_code: int = 0
    signal: int = 0
    exec_ns: int = 0
    cpu_ns: int = 0
    maxrss_kib: int = 0
    reason: str = ""
    isolation: str = ""
    enforcement: str = ""
    restore_ns: int = 0
    batch: int = 1
    gpu_util_pct: int = -1
    gpu_max_mem_mib: int = -1
    energy_mj: int = -1
    cost_micro: int = 0
    pushed: int = 0
    retry_after_ns: int = 0
    returned: int = 0
    at_least: int = 0

    @property
    def lower_bounds(self) -> tuple[str, ...]:
        """The names of the figures that are lower bounds."""
        names = ((CPU_AT_LEAST, "cpu"), (RSS_AT_LEAST, "maxrss"))
        return tuple(name for bit, name in names if self.at_least & bit)

    @property
    def exit_status(self) -> int:
        """The end as one number, which is 0 for COMPLETED and for no other state.

        A command that FAILED has its exit code, 128 + N after signal N, or 1 when neither is known.
        The other states have a status of their own, whatever the processes did when they were
        ended: a command that answers SIGTERM with `exit 0` has still run out of time.
        """
        if self.state is ActionState.COMPLETED:
            return 0
        own = _STATUSES.get(self.state)
        if own is not None:
            return own
        return 128 + self.signal if self.signal else self.exit_code or 1

    def explained_by(self, why: Outcome | None) -> Outcome:
        """The same, if it was cancelled: for the reason why somebody ended it. A worker that closes
        a session knows only that it was told to."""
        if why is None or self.state is not ActionState.CANCELLED or not why.reason:
            return self
        return msgspec.structs.replace(self, reason=why.reason)

    def returning(self, payload: bytes | None) -> Outcome:
        """The same, giving so much back."""
        return msgspec.structs.replace(self, returned=len(payload)) if payload else self

    def brief(self) -> Outcome:
        """The same, its texts cut: code that is not ours may have written them, of any length."""
        if max(len(self.reason), len(self.isolation), len(self.enforcement)) <= TEXT_MAX:
            return self
        return msgspec.structs.replace(
            self, reason=self.reason[:TEXT_MAX], isolation=self.isolation[:TEXT_MAX],
            enforcement=self.enforcement[:TEXT_MAX])
