"""Background processes that get CPUs of their own while one of them can run (`background="run"`).

The init samples what they use (`background_demand` decides), tells the worker when they could run
(BackgroundRunnable), and runs them under the lease that comes (LeaseBackground) until none can run
and none waits in the kernel. The end of a lease is reported like that of an action, with CPU time
and memory.

Without a lease, processes that wait are left alone, so that a server notices its client. Those that
run use a twentieth of one core, and are stopped beyond that. The limits of the session hold under a
lease as they do for an action; if a process exceeds one, all background processes are killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...domain.outcome import CPU_AT_LEAST, RSS_AT_LEAST, Outcome
from ...domain.states import ActionState
from ...protocol.process_frames import BackgroundRunnable, Ended, KillCommand, LeaseBackground
from ...resources import process_tree
from .background_demand import SHARE, BackgroundDemand, BackgroundVerdict
from .isolation_setup import SandboxIsolation
from .resource_usage import GroupCpu
from .sandbox_meter import SandboxMeter
from .sandbox_processes import SandboxProcesses

_KILL_AGAIN_NS = 20_000_000


class Unstoppable(Exception):
    """The processes could not be reached, because there is no room for one more process."""


class LeasedBackground:
    """The background processes of one sandbox whose session has `background="run"`.

    Args:
        processes: reaches all processes of the sandbox.
        group: the CPU time of its cgroup, where one counts it.
        meter: measures memory, processes and disk.
        send: sends a frame to the worker.
        isolation: what isolates the sandbox.
        watch: whether no cgroup limits memory and the number of processes.

    Attributes:
        there: whether there are any processes.
    """

    def __init__(self, processes: SandboxProcesses, group: GroupCpu, meter: SandboxMeter,
                 send: Callable[[Ended | BackgroundRunnable], None], isolation: SandboxIsolation,
                 watch: bool) -> None:
        self._processes, self._meter, self._send = processes, meter, send
        self._isolation, self._watch = isolation, watch
        self._cpu = _CpuClock(group)
        self._demand = BackgroundDemand()
        self.there = False
        self._order: LeaseBackground | None = None
        self._stop: tuple[ActionState, str] | None = None  # why they are being killed
        self._kill_at = self._not_before = 0
        self._began = self._used_ns = self._maxrss_kib = 0

    @property
    def due(self) -> int:
        """When `tick` must be called (monotonic ns); 0 for never."""
        if self._stop is not None:
            return self._kill_at
        return max(self._demand.due, self._not_before) if self._demand.due else 0

    @property
    def held(self) -> bool:
        """Whether the processes were stopped because they had used their share of CPU time, or
        because the files of the sandbox are being frozen."""
        return self._demand.held

    def begin(self) -> None:
        """Notes that an action has left processes that go on; asks for CPUs if one can run."""
        now, pids = time.monotonic_ns(), self._processes.pids()
        self.there = True
        self._demand.begin(now)
        self._cpu.used(pids)
        self._sample(now, pids, 0, _in_state("R", pids))

    def wake(self) -> None:
        """Notes that an action begins, beside which the processes run."""
        if self._order is not None:
            self._report(*(self._stop or (ActionState.PREEMPTED, "an action of its session began")))
        if self._demand.held:
            self._processes.go_on()
        self._rest()

    def freeze(self) -> None:
        """Stops the processes until the next action, unless they hold CPUs."""
        if self._order is None:
            self._halt()
            self._demand.freeze()

    def lease(self, order: LeaseBackground) -> None:
        """Runs the processes under a lease."""
        now, pids = time.monotonic_ns(), self._processes.pids()
        if not self.there or self._processes.alone():
            self._rest()
            outcome = Outcome(ActionState.COMPLETED, isolation=self._isolation.name)
            return self._send(Ended(order.lease, outcome, None, True))
        held = self._demand.held
        self._order, self._began = order, now
        self._used_ns = self._maxrss_kib = 0
        self._demand.lease(order.units, now, self._cpu.used(pids))
        self._meter.begin(order.limits, self._watch, now)
        if held:
            self._processes.go_on()

    def resize(self, lease: int, units: int) -> bool:
        """Notes that a lease has another number of CPUs now. Returns False if background processes
        run under another lease, or under none.
        """
        if self._order is None or self._order.lease != lease:
            return False
        self._demand.lease(units, time.monotonic_ns())
        return True

    def end(self, order: KillCommand) -> None:
        """Ends a lease. The processes go on without it if others are to have its CPUs; for any
        other reason they are killed.
        """
        if self._order is None or self._order.lease != order.lease or self._stop is not None:
            return
        if order.state is not ActionState.PREEMPTED:
            return self._kill(order.state, order.reason)
        self._measure(self._processes.pids())
        self._report(order.state, order.reason)
        self._demand.begin(time.monotonic_ns())

    def close(self) -> None:
        """Reports the end of a lease, as the session is closed and all processes will be killed."""
        if self._order is not None:
            self._measure(self._processes.pids())
            state, reason = self._stop or (ActionState.CANCELLED, "its session was closed")
            self._report(state, reason, none_left=False)

    def reaped(self, usage: Any) -> None:
        """Counts a process that has ended, by its `os.wait4` usage."""
        self._cpu.reaped(usage)

    def tick(self) -> None:
        """Takes a sample when one is due, and does what follows from it.

        Raises:
            Unstoppable: only ending the init helps.
        """
        now, began = time.monotonic_ns(), time.thread_time_ns()
        if not self.due or now < self.due:
            return
        self._look(now)
        # as for the meter: looking at thousands of threads must not take a core
        self._not_before = now + SHARE * (time.thread_time_ns() - began)

    def _look(self, now: int) -> None:
        pids = self._processes.pids()
        used = self._measure(pids)
        if self._processes.alone():  # shells, which live on, are among `pids`
            return self._none_left()
        if self._stop is not None:
            return self._kill(*self._stop)
        if self._order is not None and self._meter.due and now >= self._meter.due and (
                broken := self._meter.look(now)):
            return self._kill(*broken)
        # A process that breaks its memory limit waits in the kernel ("D") before it is killed and
        # before it has ended. Its lease must not end meanwhile.
        states = "R" if self._order is None else "RD"
        # what uses no CPU time that a cgroup counts cannot run, or will have used some soon
        quiet = self._cpu.exact and not used and self._order is None
        self._sample(now, pids, used, not quiet and _in_state(states, pids))

    def _sample(self, now: int, pids: list[int], used: int, runnable: bool) -> None:
        verdict = self._demand.sample(used, runnable, now)
        if verdict is BackgroundVerdict.STOP:
            self._halt()
        elif verdict is BackgroundVerdict.END:
            self._report(ActionState.COMPLETED, "")
            self._demand.begin(now)
        if self._demand.ask(now):
            self._send(BackgroundRunnable())

    def _measure(self, pids: list[int]) -> int:
        """The CPU time since the last call, which counts for the lease if there is one."""
        used = self._cpu.used(pids)
        self._used_ns += used
        return used

    def _none_left(self) -> None:
        if self._order is not None:
            state, reason = self._stop or (ActionState.COMPLETED, "")
            self._report(state, reason)
        self._rest()

    def _rest(self) -> None:
        self.there, self._stop = False, None
        self._demand.rest(time.monotonic_ns())

    def _kill(self, state: ActionState, reason: str) -> None:
        """Kills all processes; the report follows when none is left."""
        self._stop = state, reason
        self._maxrss_kib = max(self._maxrss_kib, _high_water_kib(self._processes.pids()))
        try:
            self._processes.kill()
        except OSError as error:
            raise Unstoppable("the sandbox's background processes could not be killed "
                              f"({error.strerror})") from None
        self._kill_at = time.monotonic_ns() + _KILL_AGAIN_NS

    def _halt(self) -> None:
        try:
            self._processes.stop()
        except OSError as error:
            raise Unstoppable("the sandbox's background processes could not be stopped "
                              f"({error.strerror})") from None

    def _report(self, state: ActionState, reason: str, none_left: bool = True) -> None:
        assert self._order is not None
        peak = max(self._maxrss_kib, _high_water_kib(self._processes.pids()))
        unseen = self._isolation.pause is not None and not self._cpu.exact
        outcome = Outcome(
            state, exec_ns=time.monotonic_ns() - self._began, cpu_ns=self._used_ns,
            maxrss_kib=peak, reason=reason, isolation=self._isolation.name,
            at_least=RSS_AT_LEAST | (CPU_AT_LEAST if unseen else 0))
        self._send(Ended(self._order.lease, outcome, None, none_left))
        self._order = None
        self._meter.end()


class _CpuClock:
    """Measures the CPU time of background processes by their cgroup. Where they have none, the time
    is the sum of what /proc says of living processes and of what `wait` said of ended ones.
    """

    def __init__(self, group: GroupCpu) -> None:
        self._group = group
        self._reaped_ns = self._last_ns = 0

    @property
    def exact(self) -> bool:
        """Whether a cgroup counts the time."""
        return self._group.ns() >= 0

    def used(self, pids: list[int]) -> int:
        """Returns the CPU time in ns since the last call. Where no cgroup counts, the time is known
        in whole clock ticks, and the time of processes that end between two calls is missing.
        """
        now_ns = self._group.ns()
        if now_ns < 0:
            now_ns = sum(map(process_tree.cpu_ns, pids)) + self._reaped_ns
        used, self._last_ns = max(0, now_ns - self._last_ns), now_ns
        return used

    def reaped(self, usage: Any) -> None:
        """Adds a process that has been waited for."""
        self._reaped_ns += round((usage.ru_utime + usage.ru_stime) * 1e9)


def _in_state(states: str, pids: list[int]) -> bool:
    """Whether a thread of these processes is in one of the states, letters as in ps."""
    return any(process_tree.thread_state(pid, tid) in states
               for pid in pids for tid in process_tree.threads(pid))


def _high_water_kib(pids: list[int]) -> int:
    return max(map(process_tree.high_water_kib, pids), default=0)
