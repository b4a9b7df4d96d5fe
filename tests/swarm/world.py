"""The world of one seed: processes, their timers, connections, time, and the next turn.

In each turn one message is delivered, one timer runs, one thread of a client goes on, somebody does
something by himself, or a fault strikes. Which one is drawn. Time jumps when nothing is left to do
at this instant, and now and then although there is.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.disk import DiskCalls, LaterThread, ProcessKilled
from swarm.plan import Plan
from swarm.strands import Strand
from swarm.wires import Wire
from tangram_hpc.errors import BrokerUnreachable

S = 10**9
GRACE_S = 30.0
BEGIN = 1_700_000_000 * S
_DISK = (errno.ENOSPC, errno.EIO)
_order = itertools.count()


class Process:
    """One process: it lives, is stopped for a while, and has timers on its loop (`ports.Timer`).

    Attributes:
        alive: whether it was not killed and has not ended.
        stopped_until: it does nothing before (world's ns).
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive, self.stopped_until = world, name, True, 0
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._strands: list[Strand] = []
        self.threads: list[LaterThread] = []
        self._wall_ns = world.wall_ns
        world.processes.append(self)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls back later; see `ports.Timer`."""
        heapq.heappush(self._timers,
                       (self.world.now + max(0, int(delay_s * S)), next(_order), call))

    def now_ns(self) -> int:
        """The wall clock as it was when the process began, and the time since (`ports.Clock`)."""
        return self.world.now + self._wall_ns

    def strand(self, target: Callable[[], Any]) -> Strand:
        """Begins a thread of this process."""
        found = Strand(lambda: self.world.now, target)
        self._strands.append(found)
        return found

    def running(self) -> bool:
        """Whether it can do something now."""
        return self.alive and self.world.now >= self.stopped_until

    def add_choices(self, choices: list[tuple[Process, Callable[[], None]]]) -> None:
        """Adds what it could do at this instant."""
        if self._timers and self._timers[0][0] <= self.world.now:
            choices.append((self, self._fire))
        for strand in self._strands:
            if strand.ready():
                choices.append((self, strand.go_on))

    def _fire(self) -> None:
        heapq.heappop(self._timers)[2]()

    def wakes_at(self) -> int:
        """When it has something to do; 0 for never."""
        self._strands = [strand for strand in self._strands if not strand.done]
        times = [strand.until for strand in self._strands]
        if self._timers:
            times.append(self._timers[0][0])
        return max(self.stopped_until, min(times)) if times else 0

    def die(self) -> None:
        """Ends it at once."""
        self.alive = False
        self._timers.clear()
        for strand in self._strands:
            strand.kill()
        for thread in self.threads:
            thread.died()


class World:
    """One run. Who takes part is added by `swarm.job.Job`.

    Attributes:
        now: the monotonic clock of all machines, in ns.
        wall_ns: what the wall clock of the broker's machine adds to it.
        struck: how often each fault has struck.
        events: turns so far.
        current: the process whose code runs.
        serving: the broker that accepts connections; None while there is none.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rng = random.Random(f"schedule {plan.seed}")
        self.acts = random.Random(f"acts {plan.seed}")
        self._streams = {kind: random.Random(f"{kind} {plan.seed}") for kind in plan.rates}
        self.struck: Counter[str] = Counter()
        self.now, self.wall_ns, self.events = BEGIN, 0, 0
        self.faulty = True
        self.processes: list[Process] = []
        self.wires: list[Wire] = []
        self.disk = DiskCalls(self)
        self.current: Process | None = None
        self.serving: Any = None

    # ---- faults ----

    def stream(self, kind: str) -> random.Random:
        """The random stream of a fault kind."""
        return self._streams[kind]

    def next_strike(self, kind: str, turn: int) -> int:
        """The turn in which a fault strikes next: the gaps are geometric."""
        chance = self.plan.rates[kind] / 1000
        return turn + 1 + int(math.log(1 - self._streams[kind].random()) / math.log(1 - chance))

    def strikes(self, kind: str) -> bool:
        """Whether a fault strikes now; counts it."""
        rate = self.plan.rates.get(kind, 0.0)
        if not rate or not self.faulty or self._streams[kind].random() * 1000 >= rate:
            return False
        self.struck[kind] += 1
        return True

    def supersede_within(self) -> None:
        """Another broker takes over while the running one is stopped in the middle of a step."""
        raise NotImplementedError

    def broker_failed(self, process: Process, error: OSError) -> None:
        """A broker ends since its disk is full or fails."""
        raise NotImplementedError

    def broker_died(self, process: Process) -> None:
        """A broker was killed in the middle of a step."""
        raise NotImplementedError

    # ---- connections ----

    def dial(self, peer: Process) -> Wire:
        """Connects a peer with the broker that serves.

        Raises:
            BrokerUnreachable: there is none, or the way to it is shut.
        """
        broker = self.serving
        if broker is None or not broker.running() or self.shut(peer):
            raise BrokerUnreachable("no broker answers")
        wire = Wire(self, peer, broker)
        broker.accept(wire)
        self.wires.append(wire)
        return wire

    def shut(self, peer: Process) -> bool:
        """Whether a peer's way to brokers is cut off now."""
        return bool(getattr(peer, "shut_until", 0) > self.now)

    # ---- turns ----

    def do(self, process: Process | None, call: Callable[[], None]) -> None:
        """Runs a step of a process, which may die in it."""
        before, self.current = self.current, process
        try:
            call()
        except ProcessKilled:
            assert process is not None
            self.broker_died(process)
        except OSError as error:
            if process is None or error.errno not in _DISK:
                raise
            self.broker_failed(process, error)
        finally:
            self.current = before

    def step(self) -> bool:
        """Does one thing that can happen at this instant; returns whether there was any."""
        choices: list[tuple[Process, Callable[[], None]]] = []
        now = self.now
        for wire in self.wires:
            if wire.held_until <= now:
                for lane in (wire.up, wire.down):
                    if lane.items and (not lane.to.alive or lane.to.stopped_until <= now):
                        choices.append((lane.to, lane.deliver))
        for process in self.processes:
            if process.alive and process.stopped_until <= now:
                process.add_choices(choices)
        if not choices:
            return False
        self.events += 1
        self.do(*self.rng.choice(choices))
        return True

    def pass_time(self) -> bool:
        """Lets time jump to the next instant at which something happens; returns whether there is
        any.
        """
        self.processes = [process for process in self.processes if process.alive]
        self.wires = [wire for wire in self.wires if not wire.over]
        times = [wire.held_until for wire in self.wires
                 if wire.held_until > self.now and (wire.up.items or wire.down.items)]
        times += [process.wakes_at() for process in self.processes]
        times = [at for at in times if at > self.now]
        if not times:
            return False
        self.now = min(times)
        return True


class WorldTime:
    """What modules take for `time`: the world's clock."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self, world: World, sleep: Callable[[float], Any]) -> None:
        self._world, self.sleep = world, sleep

    def monotonic(self) -> float:
        return self._world.now / S

    def monotonic_ns(self) -> int:
        return self._world.now

    def time(self) -> float:
        return (self._world.now + self._world.wall_ns) / S

    def clock_gettime_ns(self, clock: int) -> int:
        return self._world.now

    def strftime(self, form: str) -> str:
        return time.strftime(form, time.gmtime(self.time()))
