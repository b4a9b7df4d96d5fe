"""Pure. Decides from samples of CPU use when background processes need CPUs, and when they do not.

Problem: a process that waits (a server, a `sleep`) should not be stopped, since it could then never
notice what it waits for. But one that runs without CPUs of its own takes them from other actions.

Idea: processes without a lease run freely as long as they use no more than a twentieth of one core.
A token bucket (`_allowance_ns`) counts it: it fills at that rate up to BURST_NS, and what they use
is taken from it. When a process can run, CPUs are asked for; when the bucket is empty, all are
stopped until the CPUs come. A sample may come late, so more than the bucket held may have been
used. That debt is paid with a later lease, which goes on until it has been idle for as long.

A lease ends when nothing has run, and nothing could, for QUIET_NS. Under a lease, a process that
waits in the kernel for a disk or for memory counts as one that can run.

Invariant: what is used without a lease in a time t is at most t / SHARE + BURST_NS, one sample's
time on the cores to which the processes are bound, and what idle time of leases has paid for.
"""

from __future__ import annotations

from enum import Enum

SHARE = 20  # without a lease: one core for a twentieth of the time
BURST_NS = 10_000_000
QUIET_NS = 30_000_000
LEASED_TICK_NS = 10_000_000  # between samples under a lease
FIRST_TICK_NS, LAST_TICK_NS = 5_000_000, 80_000_000  # without one; doubles while little is used
ASK_AGAIN_NS = 2_000_000_000
_NOTHING_NS = 200_000  # less use than this between two samples counts as none


class BackgroundVerdict(Enum):
    """What is to be done after a sample."""

    GO_ON = "go on"
    STOP = "stop"  # stop all processes until CPUs are leased
    END = "end"  # end the lease: nothing can run


class BackgroundDemand:
    """What background processes of one sandbox need. Times are monotonic ns.

    Attributes:
        due: when the next sample is due; 0 for never.
        units: the CPUs that are leased; 0 without a lease.
        wants: whether CPUs are needed and not leased.
        held: whether the processes are stopped until CPUs are leased.
    """

    def __init__(self) -> None:
        self.due = self.units = 0
        self.wants = self.held = False
        self._allowance_ns = BURST_NS
        self._at = self._quiet_since = self._asked_at = 0
        self._tick_ns = FIRST_TICK_NS

    def begin(self, now: int) -> None:
        """Notes that processes run without a lease from now on."""
        if self._at:
            self._fill((now - self._at) // SHARE)
        self.units, self.held = 0, False
        self._at, self._tick_ns = now, FIRST_TICK_NS
        self.due = now + FIRST_TICK_NS

    def lease(self, units: int, now: int, used_ns: int = 0) -> None:
        """Notes that the processes hold CPUs from now on, or other ones than before.

        Args:
            units: how many.
            now: the time.
            used_ns: at the start of a lease, what was used since the last sample.
        """
        if not self.units:
            self._fill((now - self._at) // SHARE - used_ns)
            self._at = self._quiet_since = now
        self.units, self.wants, self.held, self._asked_at = units, False, False, 0
        self.due = now + LEASED_TICK_NS

    def rest(self, now: int) -> None:
        """Notes that an action runs beside the processes, or that none is left."""
        self.units = self.due = self._asked_at = 0
        self.wants = self.held = False
        self._at = now

    def freeze(self) -> None:
        """Notes that the processes were stopped for another reason: nothing is due or wanted."""
        self.due = self._asked_at = 0
        self.wants, self.held = False, True

    def sample(self, used_ns: int, runnable: bool, now: int) -> BackgroundVerdict:
        """Takes a sample.

        Args:
            used_ns: CPU time that the processes used since the last sample, or since `begin` or
                `lease`.
            runnable: whether one of them can run now. Under a lease, also whether one waits in the
                kernel.
            now: the time.
        """
        passed, self._at = now - self._at, now
        if self.held:
            self._fill(passed // SHARE)
            self.due = self._asked_at + ASK_AGAIN_NS
            return BackgroundVerdict.GO_ON
        if self.units:
            return self._under_lease(passed, used_ns, runnable, now)
        if runnable:  # what is used may be known in whole clock ticks only
            used_ns = max(used_ns, min(passed, FIRST_TICK_NS))
        self._fill(passed // SHARE - used_ns)
        self.wants = runnable or self._allowance_ns <= 0
        idle = used_ns < max(_NOTHING_NS, passed // (2 * SHARE)) and not self.wants
        self._tick_ns = min(2 * self._tick_ns, LAST_TICK_NS) if idle else FIRST_TICK_NS
        self.due = now + self._tick_ns
        if self._allowance_ns > 0:
            return BackgroundVerdict.GO_ON
        self.held = True
        self.due = (self._asked_at or now) + ASK_AGAIN_NS
        return BackgroundVerdict.STOP

    def _under_lease(self, passed: int, used_ns: int, runnable: bool, now: int
                     ) -> BackgroundVerdict:
        self._fill(max(0, self.units * passed - used_ns))
        self.due = now + LEASED_TICK_NS
        if runnable or used_ns * SHARE > passed:
            self._quiet_since = now
        over = now - self._quiet_since >= QUIET_NS and self._allowance_ns >= 0
        return BackgroundVerdict.END if over else BackgroundVerdict.GO_ON

    def ask(self, now: int) -> bool:
        """Whether to ask for CPUs now: when they are wanted, and again if they do not come."""
        if not self.wants or (self._asked_at and now < self._asked_at + ASK_AGAIN_NS):
            return False
        self._asked_at = now
        if self.held:
            self.due = now + ASK_AGAIN_NS
        return True

    def _fill(self, ns: int) -> None:
        self._allowance_ns = min(BURST_NS, self._allowance_ns + ns)
