"""Defines `Outcome`, the end of one attempt of an action. Pure.

The worker that ran the attempt measures it. A figure that could not be measured to the end is
marked as a lower bound instead of being left out.
"""

from __future__ import annotations

import msgspec

from .states import ActionState

CPU_AT_LEAST, RSS_AT_LEAST = 1, 2  # bits of `Outcome.at_least`
TEXT_MAX = 4096  # characters; longer texts are cut
# Exit statuses for actions whose end their command did not choose. As with coreutils' `timeout` it
# is 124 after a time limit; 137 after the kernel's OOM killer; 130 after an interruption; and 1 for
# work that was ended in any other way.
_STATUSES = {ActionState.TIMEOUT: 124, ActionState.OUT_OF_MEMORY: 137, ActionState.CANCELLED: 130,
             ActionState.NODE_FAIL: 1, ActionState.PREEMPTED: 1}


def too_long(limit_s: float) -> str:
    """Returns the reason to give for an action that was ended at its time limit of `limit_s`
    seconds.
    """
    return f"it ran longer than its limit of {limit_s:g} s"


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an attempt ended.

    Attributes:
        state: one of the ended states.
        exit_code: the exit code of the command itself, as its node saw it; 0 if a signal ended it
            or nothing is known. People are shown `exit_status` instead.
        signal: number of the signal that ended it; 0 for none.
        exec_ns: run time on the node, by the node's monotonic clock.
        cpu_ns: user and system time of all its processes.
        maxrss_kib: largest resident set of any one of its processes.
        reason: one line that says why it ended so, where the state alone does not.
        isolation: the isolation backend in which the attempt really ran, such as `process`.
        enforcement: how the attempt was really kept to its units, such as `affinity` or `counted`.
        restore_ns: how long its service took to come onto the GPUs, before `exec_ns` began.
        batch: how many calls ran together with it as one batch, itself included.
        gpu_util_pct: mean utilisation of its GPUs in percent; -1 if not known.
        gpu_max_mem_mib: the most memory that was used on its GPUs, by any process; -1 if not known.
        energy_mj: its part of the energy that its GPUs drew, in mJ; -1 if not known. It is an
            estimate, as GPUs count energy for the whole device.
        cost_micro: what a call of an endpoint cost, in millionths of the caller's currency.
        pushed: how its endpoint refused the call: 0 (not at all), FALTERED or THROTTLED. A call of
            a service has FALTERED if the service could not be brought to its GPUs: then the call
            itself is not to blame, and may be tried on another service.
        retry_after_ns: how long that endpoint asked not to be called.
        returned: bytes of its result, with a few bytes of framing.
        at_least: bits that mark figures as lower bounds: CPU_AT_LEAST for `cpu_ns`, RSS_AT_LEAST
            for `maxrss_kib`; 0 for none.
        setup_ns: how long the node needed from the order to start the attempt until `exec_ns`
            began, without `restore_ns`: it waited for a sandbox or for the payload. -1 if not
            known.
        resize_ns: how long the node needed to apply all resizes of the attempt; 0 if it had none.
        direct_calls: how many direct calls it served (`DirectReturn`); 0 for every other action.
        direct_ns: the run time of these calls, in sum. The rest of `exec_ns` is time in which the
            action held its units and waited for its client.
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
    setup_ns: int = -1
    resize_ns: int = 0
    direct_calls: int = 0
    direct_ns: int = 0

    @property
    def lower_bounds(self) -> tuple[str, ...]:
        """The names of the figures that are lower bounds: any of "cpu" and "maxrss"."""
        names = ((CPU_AT_LEAST, "cpu"), (RSS_AT_LEAST, "maxrss"))
        return tuple(name for bit, name in names if self.at_least & bit)

    @property
    def known_cpu_ns(self) -> int:
        """The CPU time in ns; 0 if it is a lower bound."""
        return 0 if self.at_least & CPU_AT_LEAST else self.cpu_ns

    @property
    def exit_status(self) -> int:
        """The end as one number, which is 0 for COMPLETED and for no other state.

        A command that FAILED has its exit code, 128 + N after signal N, or 1 when neither is known.
        Each other state has a status of its own, whatever exit code the processes returned when
        they were ended: a command that answers SIGTERM with `exit 0` has still run out of time.
        """
        if self.state is ActionState.COMPLETED:
            return 0
        own = _STATUSES.get(self.state)
        if own is not None:
            return own
        return 128 + self.signal if self.signal else self.exit_code or 1

    def explained_by(self, why: Outcome | None) -> Outcome:
        """Returns this outcome; if the action was cancelled, with the reason of `why`.

        A worker that closes a session knows only that it was ordered to close it. The scheduler
        knows the reason.
        """
        if why is None or self.state is not ActionState.CANCELLED or not why.reason:
            return self
        return msgspec.structs.replace(self, reason=why.reason)

    def returning(self, payload: bytes | None, setup_ns: int = -1, resize_ns: int = 0) -> Outcome:
        """Returns this outcome with the size of `payload` as `returned`, and with both times."""
        return msgspec.structs.replace(self, returned=len(payload) if payload else self.returned,
                                       setup_ns=setup_ns, resize_ns=resize_ns)

    def lost(self, reason: str) -> Outcome:
        """Returns this outcome for a result that was lost with its node: it ran, and failed."""
        return msgspec.structs.replace(self, state=ActionState.NODE_FAIL, reason=reason, returned=0)

    def brief(self) -> Outcome:
        """Returns this outcome with each text cut to TEXT_MAX characters.

        Code that is not ours may have written these texts, so they may be of any length.
        """
        if max(len(self.reason), len(self.isolation), len(self.enforcement)) <= TEXT_MAX:
            return self
        return msgspec.structs.replace(
            self, reason=self.reason[:TEXT_MAX], isolation=self.isolation[:TEXT_MAX],
            enforcement=self.enforcement[:TEXT_MAX])
