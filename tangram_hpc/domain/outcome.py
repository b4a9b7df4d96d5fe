"""Pure. `Outcome`: how one attempt of an action ended, as its worker measured it."""

from __future__ import annotations

import msgspec

from .states import ActionState

CPU_AT_LEAST, RSS_AT_LEAST = 1, 2  # bits of `Outcome.at_least`
TEXT_MAX = 4096  # characters of a text that is told


def too_long(limit_s: float) -> str:
    """The reason of what ended at its time limit, whoever ended it."""
    return f"it ran longer than its limit of {limit_s:g} s"


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an attempt ended.

    Attributes:
        state: one of the ended states.
        exit_code: the command's exit code; 0 when a signal ended it.
        signal: the signal that ended it, 0 for none. With `exit_code` this is sacct's ExitCode.
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
