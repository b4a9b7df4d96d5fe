"""Decides when to ask Slurm for more nodes, to withdraw a request, and to give nodes back. Pure.

The forecast: let W be the expected work of all actions that wait or run, in unit-ns; C the units
that are held; and A the time from a request until its satellite has joined. More units are needed
if W > C (A + target). While the satellite is on its way, the held units do C A of the work. To do
the rest within the target takes (W - C A) / target - C further units.

More is requested only when the queue has not been expected to drain in time for `grow_after_ns`. A
node is given back only after `idle_ns` without use, or after `idle_ns` in which the other nodes
could have done all work twice over. After a request the wait before a return begins anew, and the
other way round, so nodes are not requested and given back in quick alternation. The user's bounds
are never exceeded. No node with a lease or a session is given back, nor the last `min_nodes`, and
nothing is requested that is on its way already.

The module reads the ledger and returns events. Between two checks it remembers since when each
condition has held. This memory is no part of the state: after a restart the waits only begin anew.
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

LOOK_NS = 1_000_000_000  # time between two calls of `decide`
_S = 1_000_000_000


class Need(NamedTuple):
    """The amounts of one kind of resource that are missing.

    Attributes:
        units: units of the kind.
        mem_mib: memory for sessions, in MiB.
    """

    units: int
    mem_mib: int


_ENOUGH = Need(0, 0)


class ElasticAllocs:
    """Decides once a second what to request, withdraw or give back.

    Attributes:
        verdict: the reason of the last decision, for people.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self._looked_at = 0
        self._short_since: dict[DemandKey, int] = {}
        self._ample_since = 0
        self._idle_since: dict[int, tuple[int, int]] = {}  # node -> (revision, since when)
        self._lent: deque[tuple[int, int]] = deque()  # (epoch ns, CPUs lent) of the last `idle_ns`
        self._lent_since = 0  # since when the held nodes are the same and nothing waits
        self._held_by: tuple[int, ...] = ()

    def due_at(self, ledger: Ledger) -> int:
        """Returns when `decide` is due, in epoch ns; 0 for never."""
        policy = ledger.allocs.policy
        return self._looked_at + LOOK_NS if policy.max_nodes or policy.idle_ns else 0

    def decide(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """Returns events that request or give back allocations now; none before it is due."""
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
        """Returns for how long a node has been seen idle, in ns."""
        return now - self._idle_since.get(node, (0, now))[1]

    # ---- more ----------------------------------------------------------------------------------

    def _grow(self, ledger: Ledger, demand: dict[DemandKey, QueueLoad],
              short: dict[DemandKey, Need], now: int
              ) -> list[ev.Event]:
        policy = ledger.allocs.policy
        for key in [k for k in self._short_since if k not in short]:
            del self._short_since[key]
        self.verdict = "" if short else "the units that are held and on their way suffice"
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
            # A shape that Slurm never accepted yet is tried with one request.
            most = policy.asks_max if shape.name in ledger.allocs.taken else 1
            count = min(count, most, ledger.allocs.room(shape))
            return [ev.AllocationAsked(now, ledger.allocs.next_alloc + i, shape, why)
                    for i in range(count)]
        return []

    # ---- less ----------------------------------------------------------------------------------

    def _give_up(self, ledger: Ledger, now: int) -> list[ev.Event]:
        """Releases requests and satellites that are not expected to bring workers any more.

        These are requests that have waited for too long while another shape may be tried, and
        satellites whose workers never joined or are gone.
        """
        allocs, policy = ledger.allocs, ledger.allocs.policy
        for entry in allocs.satellites():
            shape = entry.shape
            assert shape is not None
            waits = now - entry.asked_at
            others = [s for s in policy.shapes if s.name != shape.name
                      and s.component == shape.component and (s.gpus > 0) == (shape.gpus > 0)
                      and not allocs.left_alone(s, now)]
            if entry.state is AllocState.PENDING and waits > policy.patience_ns and others:
                why = f"it waited {waits // _S} s for its nodes; another shape may start sooner"
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
        """Withdraws requests that still wait although the queue will drain without them."""
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
        why = (f"the queue has needed less than half of its target of {policy.target_ns // _S} s "
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
        """Drains a CPU satellite if the other nodes could have done the work twice over.

        The work is that of the last `idle_ns`. Without this, light work that moves from node to
        node would keep every node from being idle.
        """
        policy = ledger.allocs.policy
        if not policy.idle_ns or now - self._lent_since < policy.idle_ns:
            return []
        peak = max(lent for _, lent in self._lent)
        if not peak:
            return []  # all nodes are idle: `_give_back` decides
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
        """Gives back the allocation that is idle longest, if it is idle for at least `idle_ns`."""
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
        why = f"idle for {idle_s} s (limit {policy.idle_ns // _S} s)"
        return [*(ev.NodeDraining(now, n, why) for n in entry.nodes),
                ev.AllocationReleased(now, number, why)]


def _released(ledger: Ledger, entry: AllocEntry, why: str, now: int) -> ev.Event:
    """Returns the event that gives up a satellite; its shape is not requested again for a while."""
    assert entry.shape is not None
    until = backoff_until(ledger, entry.shape.name, now)
    return ev.AllocationReleased(now, entry.alloc, why, until)


def _may_go(ledger: Ledger, entry: AllocEntry) -> bool:
    """Returns whether the other allocations have enough nodes, also for every declared service."""
    stay = [n for n in ledger.up_nodes() if n.node not in entry.nodes]
    if len(stay) < max(1, ledger.allocs.policy.min_nodes):
        return False
    return all(_stands(stay, ledger, name) for name in ledger.services)


def _stands(nodes: list[NodeEntry], ledger: Ledger, name: str) -> bool:
    service = ledger.services[name]
    return any(has_block_for(nodes, service, degree) for degree in service.degrees)


def _missing(ledger: Ledger, key: DemandKey, load: QueueLoad, now: int) -> Need:
    """Returns the needs that exceed the resources that are held or requested."""
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
    """Returns the memory that a satellite adds in MiB.

    Each node of a shape that names no memory counts with the memory of the largest known node.
    """
    known = shape.mem_mib or max((n.spec.mem_mib for n in ledger.nodes.values()), default=0)
    return max(1, known * shape.nodes)


def _choose(ledger: Ledger, key: DemandKey, now: int) -> tuple[SatelliteShape | None, str]:
    """Returns the first shape that may be requested, or None and the reason why none may."""
    allocs, why = ledger.allocs, "no satellite shape of the policy has what is missing"
    for shape in allocs.policy.shapes:
        if not satellite_serves(shape, key):
            continue
        if allocs.left_alone(shape, now):
            rejected = allocs.rejected[shape.name]
            why = (f"{shape.name} is not requested for another "
                   f"{(rejected.until - now) // _S + 1} s: {rejected.why}")
        elif allocs.on_trial(shape):
            why = f"Slurm has not answered yet whether it accepts a {shape.name}"
            break
        elif not allocs.room(shape):
            why = (f"the user's bounds allow no more of {shape.name}: {allocs.nodes_live()} of "
                   f"{allocs.policy.max_nodes} nodes, {hours(allocs.core_ns())} of "
                   f"{hours(allocs.policy.max_core_ns)} core-hours used or promised")
        else:
            return shape, ""
    return None, why


def hours(core_ns: int) -> str:
    """Returns core-ns as core-hours, for people."""
    return f"{core_ns / 3600e9:.2f}"


def _story(key: DemandKey, load: QueueLoad, need: Need, target_ns: int) -> str:
    """Returns why more is needed, in one line."""
    kind, component = key
    where = f" in {component}" if component else ""
    if need.mem_mib:
        return f"{load.sessions} sessions wait for {load.mem_mib} MiB of memory{where}"
    units, target = f"{kind.upper()}s", f"target {target_ns // _S} s"
    bound = f" ({load.bound} more cannot start on new nodes)" if load.bound else ""
    waits = f"{load.waiting} actions wait{where}{bound}"
    if not load.held:
        return f"{waits} but no {units} are held; the queue cannot drain ({target})"
    needs = load.work_ns // load.held // _S
    return f"{waits}; the queue needs {needs} s on the {load.held} {units} held ({target})"
