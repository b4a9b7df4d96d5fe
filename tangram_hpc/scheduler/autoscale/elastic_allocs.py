"""Pure. When to ask Slurm for more nodes, when to withdraw, when to give back; and why.

Law: reads the ledger and returns events; what it remembers between two looks (how long something
has been so) is no part of the state, so a restart only waits once more. Never beyond the user's
bounds; never a node with a lease or a session, nor the last `min_nodes`; nothing is asked for that
is on its way already. More is asked for only when the queue has not been expected to drain in time
for `grow_after_ns`, less is held only after `idle_ns` without use (or with so little that half of
the rest could do it), and each of the two begins anew after the other: so it does not flap.

The forecast: W unit-ns of expected work wait and run, C units are held, a satellite takes A until
it has joined. More is needed when W > C (A + target), and then so many units that what is left
after A is done within the target: (W - C A) / target - C.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...domain import event as ev
from ...domain.allocation import SatelliteShape
from ...domain.states import AllocState, NodeState
from ..policy.admission import has_block_for
from ..state.alloc_ledger import AllocEntry
from ..state.ledger import Ledger, NodeEntry
from .alloc_demand import DemandKey, QueueLoad, loads, satellite_serves, units_of
from .backoff import backoff_until

LOOK_NS = 1_000_000_000  # between two looks
_S = 1_000_000_000


class Need(NamedTuple):
    """What is missing: units of a kind, and memory for sessions."""

    units: int
    mem_mib: int


_ENOUGH = Need(0, 0)


class ElasticAllocs:
    """Decides by what it sees once a second. `verdict` says what it thought last, for people."""

    def __init__(self) -> None:
        self.verdict = ""
        self._looked_at = 0
        self._short_since: dict[DemandKey, int] = {}
        self._ample_since = 0
        self._idle_since: dict[int, tuple[int, int]] = {}  # node -> its news, and since when
        self._lent: deque[tuple[int, int]] = deque()  # (when, CPUs lent), of the last `idle_ns`
        self._lent_since = 0  # since when what is held is what it is, and nobody waits
        self._held_by: tuple[int, ...] = ()

    def due_at(self, ledger: Ledger) -> int:
        """When `decide` looks again; 0 for never."""
        policy = ledger.allocs.policy
        return self._looked_at + LOOK_NS if policy.max_nodes or policy.idle_ns else 0

    def decide(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """What is to be asked for or given back now; nothing before it is due."""
        due = self.due_at(ledger)
        if not due or now < due:
            return []
        self._looked_at = now
        demand = loads(ledger, now)
        self._watch_idle(ledger, now)
        self._watch_use(ledger, demand, now)
        short = {key: need for key, load in demand.items()
                 if any(need := _missing(ledger, key, load, now))}
        events = self._give_up(ledger, now)
        events += self._withdraw(ledger, demand, now)
        if not events:
            events = self._grow(ledger, demand, short, now)
        if not events and not short:
            events = self._give_back(ledger, now) or self._drain_spare(ledger, now)
        if events:
            self._short_since.clear()
        if any(isinstance(event, ev.AllocationAsked) for event in events):
            self._idle_since.clear()
            self._held_by = ()
        return events

    def idle_ns(self, node: int, now: int) -> int:
        """For how long a node has been seen idle."""
        return now - self._idle_since.get(node, (0, now))[1]

    # ---- more ----------------------------------------------------------------------------------

    def _grow(self, ledger: Ledger, demand: dict[DemandKey, QueueLoad],
              short: dict[DemandKey, Need], now: int
              ) -> list[ev.Event]:
        policy = ledger.allocs.policy
        for key in [k for k in self._short_since if k not in short]:
            del self._short_since[key]
        self.verdict = "" if short else "what is held and on its way is enough"
        for key, need in short.items():
            since = self._short_since.setdefault(key, now)
            why = _story(key, demand[key], need, policy.target_ns)
            if now - since < policy.grow_after_ns:
                self.verdict = f"{why}; it has been so for {(now - since) // _S} s"
                continue
            shape, self.verdict = _choose(ledger, key, now)
            if shape is None:
                self.verdict = f"{why}; {self.verdict}"
                continue
            count = max(-(-need.units // units_of(shape, key[0])),
                        -(-need.mem_mib // _mem(ledger, shape)))
            most = policy.asks_max if shape.name in ledger.allocs.taken else 1  # one to try it
            count = min(count, most, ledger.allocs.room(shape))
            return [ev.AllocationAsked(now, ledger.allocs.next_alloc + i, shape, why)
                    for i in range(count)]
        return []

    # ---- less ----------------------------------------------------------------------------------

    def _give_up(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """Requests that wait for too long while another shape may be tried, and satellites whose
        workers never join or are gone."""
        allocs, policy = ledger.allocs, ledger.allocs.policy
        for entry in allocs.satellites():
            shape = entry.shape
            assert shape is not None
            waits = now - entry.asked_at
            others = [s for s in policy.shapes if s.name != shape.name
                      and s.component == shape.component and (s.gpus > 0) == (shape.gpus > 0)
                      and not allocs.left_alone(s, now)]
            if entry.state is AllocState.PENDING and waits > policy.patience_ns and others:
                why = f"it waited {waits // _S} s in Slurm's queue and another may be quicker"
                return [_released(ledger, entry, why, now)]
            if entry.state is not AllocState.RUNNING:
                continue
            if not entry.joined and now - entry.held_at > policy.join_ns:
                why = f"no worker of it joined within {policy.join_ns // _S} s of its start"
                return [_released(ledger, entry, why, now)]
            if entry.nodes and all(ledger.nodes[n].state is NodeState.DRAINED for n in entry.nodes):
                why = ledger.nodes[next(iter(entry.nodes))].draining
                return [ev.AllocationReleased(now, entry.alloc, f"drained: {why}")]
            if entry.joined and not entry.nodes and now - entry.empty_at > policy.join_ns:
                return [ev.AllocationReleased(now, entry.alloc, "its workers are gone")]
        return []

    def _withdraw(self, ledger: Ledger, demand: dict[DemandKey, QueueLoad],
                  now: int) -> list[ev.Event]:
        """Requests that still wait although the queue will drain without them."""
        policy = ledger.allocs.policy
        waiting = [e for e in ledger.allocs.satellites()
                   if e.state in (AllocState.ASKED, AllocState.PENDING)]
        ample = all(2 * load.work_ns <= load.held * policy.target_ns and not load.sessions
                    for load in demand.values() if load.waiting or load.sessions)
        if not waiting or not ample:
            self._ample_since = 0
            return []
        self._ample_since = self._ample_since or now
        if now - self._ample_since < policy.grow_after_ns:
            return []
        why = (f"the queue has needed less than half of the {policy.target_ns // _S} s aimed at "
               f"for {(now - self._ample_since) // _S} s")
        self._ample_since = 0
        return [ev.AllocationReleased(now, e.alloc, why) for e in waiting]

    def _watch_idle(self, ledger: Ledger, now: int) -> None:
        seen = self._idle_since
        for node in ledger.nodes.values():
            if node.state is not NodeState.UP or node.leases or node.sessions:
                seen.pop(node.node, None)
            elif seen.get(node.node, (-1, 0))[0] != node.revision:
                seen[node.node] = (node.revision, now)

    def _watch_use(self, ledger: Ledger, demand: dict[DemandKey, QueueLoad], now: int) -> None:
        up = ledger.up_nodes()
        held = tuple(n.node for n in up)
        waits = any(load.waiting or load.sessions for load in demand.values())
        if held != self._held_by or waits:
            self._held_by, self._lent_since = held, now
            self._lent.clear()
        self._lent.append((now, sum(len(n.cores.units) - n.cores.free for n in up)))
        while self._lent[0][0] < now - ledger.allocs.policy.idle_ns:
            self._lent.popleft()

    def _drain_spare(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """One satellite of CPUs whose work the others could do twice over, for `idle_ns` now: light
        work that goes around would keep them all from idling."""
        policy = ledger.allocs.policy
        if not policy.idle_ns or now - self._lent_since < policy.idle_ns:
            return []
        peak = max(lent for _, lent in self._lent)
        if not peak:
            return []  # they idle
        for entry in ledger.allocs.satellites():
            nodes = [ledger.nodes[n] for n in entry.nodes]
            free = all(n.state is NodeState.UP and not n.sessions and not n.spec.gpus
                       for n in nodes)
            if entry.state is not AllocState.RUNNING or not nodes or not free:
                continue
            rest = sum(len(n.cores.units) for n in ledger.up_nodes() if n not in nodes)
            if 2 * peak <= rest and _may_go(ledger, entry):
                why = (f"at most {peak} CPUs were lent at once for {policy.idle_ns // _S} s, and "
                       f"{rest} are held without it")
                return [ev.NodeDraining(now, n.node, why) for n in nodes]
        return []

    def _give_back(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """The one allocation that has idled longest, when all its nodes have for long enough."""
        policy = ledger.allocs.policy
        best = (now - policy.idle_ns + 1, 0)
        if not policy.idle_ns:
            return []
        for entry in ledger.allocs.entries.values():
            ours = entry.shape is not None or policy.components
            if not ours or entry.own or entry.state is not AllocState.RUNNING or not entry.nodes:
                continue
            since = max(self._idle_since.get(n, (0, now + 1))[1] for n in entry.nodes)
            if since < best[0] and _may_go(ledger, entry):
                best = (since, entry.alloc)
        since, number = best
        if not number:
            return []
        entry, idle_s = ledger.allocs.entries[number], (now - since) // _S
        why = f"idle for {idle_s} s, and {policy.idle_ns // _S} s are allowed"
        return [*(ev.NodeDraining(now, n, why) for n in entry.nodes),
                ev.AllocationReleased(now, number, why)]


def _released(ledger: Ledger, entry: AllocEntry, why: str, now: int) -> ev.Event:
    """Given up, and its shape left alone for a while."""
    assert entry.shape is not None
    until = backoff_until(ledger, entry.shape.name, now)
    return ev.AllocationReleased(now, entry.alloc, why, until)


def _may_go(ledger: Ledger, entry: AllocEntry) -> bool:
    """Whether enough stays without an allocation, for every service that is declared too."""
    stay = [n for n in ledger.up_nodes() if n.node not in entry.nodes]
    if len(stay) < max(1, ledger.allocs.policy.min_nodes):
        return False
    return all(_stands(stay, ledger, name) for name in ledger.services)


def _stands(nodes: list[NodeEntry], ledger: Ledger, name: str) -> bool:
    service = ledger.services[name]
    return any(has_block_for(nodes, service, degree) for degree in service.degrees)


def _missing(ledger: Ledger, key: DemandKey, load: QueueLoad, now: int) -> Need:
    """What is needed beyond what is held and on its way."""
    policy, kind = ledger.allocs.policy, key[0]
    if not policy.max_nodes:
        return _ENOUGH
    coming = [e.shape for e in ledger.allocs.satellites()
              if e.coming and e.shape is not None and satellite_serves(e.shape, key)]
    mem = 0
    if load.sessions and now - load.oldest_at > policy.target_ns:
        mem = max(0, load.mem_mib - sum(_mem(ledger, s) for s in coming))
    arrive = min((_arrives(ledger, s) for s in policy.shapes if satellite_serves(s, key)),
                 default=0)
    left = load.work_ns - load.held * arrive
    if not load.waiting or left <= load.held * policy.target_ns:
        return Need(0, mem)
    wanted = min(-(-left // policy.target_ns) - load.held, load.units,
                 -(-load.movable_ns // policy.target_ns))
    return Need(max(0, wanted - sum(units_of(s, kind) for s in coming)), mem)


def _arrives(ledger: Ledger, shape: SatelliteShape) -> int:
    return ledger.allocs.arrive_ns.get(shape.name, ledger.allocs.policy.arrive_ns)


def _mem(ledger: Ledger, shape: SatelliteShape) -> int:
    """Memory that one of a shape adds; as much as the largest node has, where nobody said."""
    known = shape.mem_mib or max((n.spec.mem_mib for n in ledger.nodes.values()), default=0)
    return max(1, known * shape.nodes)


def _choose(ledger: Ledger, key: DemandKey, now: int) -> tuple[SatelliteShape | None, str]:
    """The first shape that may be asked for, or why none may."""
    allocs, why = ledger.allocs, "no shape of the policy serves that"
    for shape in allocs.policy.shapes:
        if not satellite_serves(shape, key):
            continue
        if allocs.left_alone(shape, now):
            rejected = allocs.rejected[shape.name]
            why = (f"{shape.name} is left alone for {(rejected.until - now) // _S + 1} s: "
                   f"{rejected.why}")
        elif allocs.on_trial(shape):
            why = f"Slurm has not said yet whether it takes a {shape.name}"
            break
        elif not allocs.room(shape):
            why = (f"the user's bounds allow no more {shape.name}: {allocs.nodes_live()} of "
                   f"{allocs.policy.max_nodes} nodes, {hours(allocs.core_ns())} of "
                   f"{hours(allocs.policy.max_core_ns)} core-hours used or promised")
        else:
            return shape, ""
    return None, why


def hours(core_ns: int) -> str:
    """Core-ns as core-hours, for people."""
    return f"{core_ns / 3600e9:.2f}"


def _story(key: DemandKey, load: QueueLoad, need: Need, target_ns: int) -> str:
    """Why more is needed, in one line."""
    kind, component = key
    where = f" in {component}" if component else ""
    if need.mem_mib:
        return f"{load.sessions} sessions wait for {load.mem_mib} MiB of memory{where}"
    needs = f"{load.work_ns // max(1, load.held) // _S} s" if load.held else "for ever"
    bound = f" ({load.bound} more could start on no new node)" if load.bound else ""
    return (f"{load.waiting} actions wait{where}{bound}; the queue needs {needs} on the "
            f"{load.held} {kind}s held, {target_ns // _S} s is aimed at")
