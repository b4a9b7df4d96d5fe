"""A seeded story of a job that a scheduler lives through: every kind of fact, and its own plans.

The simulator's workloads know neither clients that leave nor brokers that start again. This story
does. Facts are made from their wire layout (`[tag, at, field, ...]`), so that it does not matter
where their classes stand or what they are called. What it yields is a journal.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from . import where

S = 10**9
_COUNTER_BITS = 32
# What may be asked of Slurm: see `AllocPolicy` and `SatelliteShape`.
_SHAPE = ["spare", "cpu", "", "", 1, 4, 8192, 0, "", 600 * S, "satellite"]
_POLICY = [2, 10**15, 1, 2 * S, S, 2 * S, 3 * S, True, 60 * S, 20 * S, 5 * S, 60 * S, 2, [_SHAPE]]
_STATES = ("COMPLETED",) * 6 + ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL")


def _pool(degree: int) -> list[Any]:
    """A rollout pool: name, edges, services (name, bucket, degree, running, queued, context,
    costs)."""
    return ["pool", [400], [["roll-short", 0, 1, 4, 4, 9000, 8_000_000, 100_000, 2_000],
                            ["roll-long", 1, degree, 2, 2, 9000, 6_000_000, 200_000, 2_000]]]


def _tree() -> bytes:
    """A tree that has learned five trajectories of one prompt: whose first tool failed went on."""
    failed, passed = ["python", 0, 1], ["python", 0, 0]
    cells = [[0, [[100, 3, 3000], [110, 2, 16000]]]]
    plain = {"format": "tangram-cmlfq/1", "newest": 0,
             "shape": {"payload_edges": [1000, 12000], "depth": 24, "least": 4, "enough": 200,
                       "epochs": 8, "nodes_max": 20000, "since": True},
             "nodes": [[own, prompt, path, rows] for own, prompt in ((True, 1), (False, 0))
                       for path, rows in (([], cells), ([failed], [[0, [[110, 2, 16000]]]]),
                                          ([passed], [[0, [[90, 3, 2400]]]]))]}
    return zlib.compress(json.dumps(plain).encode(), 1)


class Story:
    """One story under one placer.

    Attributes:
        events: all facts in the order in which they were handled.
        orders: each with the fact that led to it.
    """

    def __init__(self, placer: str, seed: int, with_prior: bool = False) -> None:
        self.events: list[Any] = []
        self.orders: list[tuple[Any, Any]] = []
        self._placer, self._rng = placer, random.Random(seed)
        self._with_prior = with_prior  # the pool goes on from trees that were learned before
        self._scheduler = where.find("Scheduler")(where.find("make_placer")(placer), 5 * S)
        self._now, self._job_number = 1000 * S, 700
        self._todo: list[Any] = []  # orders that are not carried out yet
        self._clients: dict[int, int] = {}  # by number: the counter of its ids
        self._away: set[int] = set()
        self._nodes: dict[int, list[Any]] = {}  # that are up, by number
        self._next_node = 1
        self._actions: dict[int, list[Any]] = {}  # that are open
        self._ended: list[int] = []
        self._leases: dict[int, list[Any]] = {}  # granted and not over: the grant
        self._dirty: list[int] = []  # leases that are over and not clean
        self._sessions: dict[int, str] = {}  # by id: requested, opening, open, moving or closing
        self._allocs: dict[int, str] = {}  # asked for or held: its job

    def play(self, steps: int) -> Story:
        """Lives through so many random steps, a restart in their middle."""
        self._begin()
        moves = self._moves()
        for step in range(steps):
            if step == steps // 2:
                self._restart()
            self._now += self._pick((1, S // 10, S // 2, S))
            self._pick(moves)()
            self._plan()
        self._share_session()
        if self._with_prior:
            self._broker_comes_back()
        self._record_event("broker-stopped", "the story is over")
        return self

    # ---- what happens --------------------------------------------------------------------------

    def _moves(self) -> list[Callable[[], None]]:
        """Every kind of step, as often as it is likely."""
        often = [self._submit] * 8 + [self._finish] * 12 + [self._request_session] * 3
        now_and_then = [self._cancel, self._acknowledge, self._acknowledge, self._start_leases,
                        self._clean, self._clean, self._close_session, self._renew,
                        self._submit_turn, self._submit_turn, self._tool, self._call, self._grant]
        seldom = [self._join_node, self._lose_node, self._drain_node, self._leave, self._come_back,
                  self._throttle, self._trajectory_ends, self._stall, self._end_told, self._rest,
                  self._give_back_lease, self._close_rollouts]
        return often + now_and_then * 2 + seldom

    def _begin(self) -> None:
        self._record_event("broker-started", "4711", self._placer, "none", "user", "0.1.0")
        degree = 1 if self._placer.startswith("static") else 2  # static deals single GPUs
        for service in (["judge", 2 * S, 1024, 0, "fake", b"", list(range(1, degree + 1)), 4, S],
                        ["critic", S, 2048], *([name, S, 0, 0, "fake", b"", [degree], 4]
                                               for name, degree in (("roll-short", 1),
                                                                    ("roll-long", degree)))):
            self._record_event("service-declared", service)
        self._record_event("endpoint-declared", ["search", 2, 3_000_000, 2_000_000])
        self._record_event("rollouts-declared", _pool(degree))
        if self._with_prior:
            self._record_event("rollout-prior-loaded", "pool", _tree(), b"")
        self._record_event("allocations-allowed", _POLICY)
        for _ in range(3):
            self._join_node()
        self._record_event("nodes-complete", 3)
        self._record_event("service-loaded", "critic", 1, [3])
        for _ in range(2):
            self._join_client()
        if self._with_prior:
            self._record_event("tenant-declared", ["math", 3, 0, [["cpu", 6], ["mem", 2048]]])
            self._record_event("tenant-named", 2, "math")

    def _restart(self) -> None:
        """Another broker goes on with the journal."""
        self._record_event("broker-started", "4711", self._placer, "batch", "user", "0.1.0")
        self._away.clear()
        for _ in range(3):
            self._join_node()
        self._record_event("nodes-complete", 3)
        self._join_client()

    def _broker_comes_back(self) -> None:
        """Another broker goes on with the journal, the workers and the clients of this one."""
        self._submit()
        self._record_event("broker-started", "4711", self._placer, "batch", "user", "0.1.0", 8,
                           self._now + 30 * S)
        for node in sorted(self._nodes):
            self._record_event("node-rejoined", node)
        for client in sorted(self._clients):
            self._record_event("client-joined", client, f"uid-{client}", "again", client, 2,
                               "socket")
        self._away.clear()
        for action in sorted(self._actions):
            self._record_event("action-resubmitted", action)
        self._plan()

    def _join_client(self) -> None:
        number = max(self._clients, default=0) + 1 if self._clients else 1
        number = max(number, 1 + max((e[2] for e in self._told("client-joined")), default=0))
        self._clients[number] = 0
        self._record_event("client-joined", number, f"uid-{number}", f"rank-{number}", number, 2,
                     self._pick(("socket", "mpi")))

    def _leave(self) -> None:
        here = [c for c in self._clients if c not in self._away]
        if len(here) > 1:
            gone = self._pick(here)
            self._away.add(gone)
            self._record_event("client-left", gone, self._pick((True, False)), self._now + 5 * S)

    def _come_back(self) -> None:
        if self._away:
            back = self._pick(sorted(self._away))
            self._away.discard(back)
            self._record_event("client-joined", back, f"uid-{back}", "again", back, 2, "socket")
        elif len(self._clients) < 2:
            self._join_client()

    # ---- nodes and allocations -----------------------------------------------------------------

    def _join_node(self, allocation: str = "4711", cpus: int = 8) -> None:
        if len(self._nodes) > 5:
            return
        number = self._next_node
        self._next_node += 1
        gpus = [0, 1, 2, 3] if number % 2 and allocation == "4711" else []
        spec = [f"n{number}", "host", list(range(cpus)), 8192, gpus,
                "satellite" if allocation != "4711" else "", False,
                self._now + 900 * S if number % 3 else 0, ["process"], ["process"], 2, "",
                allocation, "counted", [[4, 4]] if cpus == 8 else []]
        self._nodes[number] = spec
        self._record_event("node-joined", number, spec)

    def _lose_node(self) -> None:
        if len(self._nodes) > 2:
            self._record_event("node-lost", self._pick(sorted(self._nodes)), "it fell silent")

    def _drain_node(self) -> None:
        if len(self._nodes) > 3:
            self._record_event("node-draining", self._pick(sorted(self._nodes)), "maintenance")
        else:
            self._join_node()

    def _end_told(self) -> None:
        ends = self._now + self._pick((30, 300, 900)) * S
        self._record_event("allocation-end-asked", "4711", self._now + 3 * S)
        self._record_event("allocation-end-told", "4711", ends)

    def _ask_allocation(self, alloc: int) -> None:
        """Slurm's answer to a request, sooner or later."""
        if self._pick((0, 1, 2)) == 0:
            self._record_event("allocation-refused", alloc, "QOSMaxJobs", self._now + 5 * S)
            return
        self._job_number += 1
        job = str(self._job_number)
        self._allocs[alloc] = job
        self._record_event("allocation-queued", alloc, job)
        self._now += S
        self._record_event("allocation-held", alloc, self._now)
        self._join_node(job, 4)

    def _end_allocation(self, alloc: int, nodes: list[int]) -> None:
        for node in nodes:
            if node in self._nodes:
                self._record_event("node-lost", node, "given back")
        if self._allocs.pop(alloc, ""):
            self._record_event("allocation-ended", alloc, "given back", self._now)

    # ---- actions -------------------------------------------------------------------------------

    def _submit(self) -> None:
        degrees = self._pick(([1], [1, 2, 4], [2], [1, 2, 3, 4, 6, 8], [4, 8]))
        session = self._pick([0, 0, *self._open_sessions()])
        once = f"step-{self._draw(40)}" if not session and self._draw(4) == 0 else ""
        if once and any(a[14] == once for a in self._actions.values()):
            once = ""
        profile = [self._draw(5 * S) + S // 10, self._draw(600_000)] if self._draw(3) else None
        kind = self._pick(("exec", "exec", "function"))
        if session and self._draw(4) == 0:
            kind, degrees, profile = "file", [0], None
        self._push(session, [f"work-{self._draw(5)}", kind, degrees, "cpu", self._draw(64), 0,
                             session, 60 * S * self._draw(2), 1 + self._draw(3),
                             self._draw(4) > 0, "", profile, self._draw(2) > 0, once, "", None])

    def _call(self) -> None:
        both = [1] if self._placer.startswith("static") else [1, 2]
        name, degrees = self._pick((("judge", both), ("critic", [1])))
        self._push(0, [f"{name}-call", "call", degrees, f"service:{name}", 0, 0, 0, 0, 2])

    def _grant(self) -> None:
        self._push(0, ["search", "grant", [1], "endpoint:search"])

    def _submit_turn(self) -> None:
        number = self._draw(6)
        turn = ["pool", f"t{number}", number // 2, 100 + self._draw(900), self._draw(500)]
        self._push(0, ["turn", "call", [1], "rollouts:pool", 0, 0, 0, 0, 2, True, "", None, False,
                       "", "", turn])

    def _push(self, session: int, fields: list[Any]) -> None:
        """Submits an action; of a session, its own client does."""
        owner = session >> _COUNTER_BITS if session else self._someone()
        if owner:
            self._record_event("action-submitted", [self._id(owner), *fields])

    def _cancel(self) -> None:
        if self._actions:
            action = self._pick(sorted(self._actions))
            self._record_event("action-cancelled", action, "its client wanted it")

    def _acknowledge(self) -> None:
        ended, self._ended = self._ended[:8], self._ended[8:]
        if ended:
            self._record_event("action-acknowledged", ended)

    def _start_leases(self) -> None:
        for lease, grant in list(self._leases.items()):
            if not grant[9] and self._draw(2):
                self._record_event("lease-started", lease)

    def _finish(self, state: str = "") -> None:
        """The attempt of some lease that has begun is over."""
        begun = [lease for lease in self._leases if self._has_begun(lease)]
        if begun:
            self._end_lease(self._pick(begun), state or self._pick(_STATES), "")

    def _has_begun(self, lease: int) -> bool:
        after = self._leases[lease][9]
        return after not in self._leases and after not in self._dirty

    def _end_lease(self, lease: int, state: str, reason: str) -> None:
        grant = self._leases[lease]
        ran = max(1, self._now - grant[1])
        clean = self._draw(5) > 0 or not grant[4] or not self._has_begun(lease)
        on_gpus = len(grant[7]) > 0
        outcome = [state, int(state == "FAILED"), 0, ran, ran // 2, 2048, reason, "process",
                   "counted", grant[8] // 2, 1 + self._draw(3) * on_gpus, -1, -1, -1, 0, 0, 0,
                   self._draw(9000)]
        self._record_event("lease-finished", lease, outcome, clean)
        if not clean:
            self._dirty.append(lease)

    def _clean(self) -> None:
        dirty, self._dirty = self._dirty, []
        for lease in dirty:
            self._record_event("lease-released", lease)

    def _give_back_lease(self) -> None:
        behind = [lease for lease, grant in self._leases.items() if grant[9] in self._leases]
        if behind:
            self._record_event("lease-returned", self._pick(behind))

    def _throttle(self) -> None:
        self._record_event("endpoint-throttled", "search", self._now + 2 * S, self._now - 1,
                     1 + self._draw(2))

    # ---- sessions, rollouts, time --------------------------------------------------------------

    def _request_session(self) -> None:
        owner = self._someone()
        if not owner or len(self._sessions) > 12:
            return
        origins = [s for s in self._open_sessions() if s >> _COUNTER_BITS == owner]
        origin = self._pick([0, 0, *origins])
        self._record_event("session-requested", [
            self._id(owner), "sandbox", self._pick((64, 512, 2048)), "", self._draw(3) == 0, "", "",
            False, 0, True, "stop", origin, 20 * S * self._draw(2), -1, self._draw(2) > 0])

    def _share_session(self) -> None:
        """A client attaches to the session of another one, and leaves it. This comes last, so that
        what comes before is what it was before sessions could be shared."""
        self._join_client()
        self._join_client()
        owner, other = [*self._clients][-2:]
        session = self._id(owner)
        self._record_event("session-requested", [
            session, "shared", 64, "", False, "", "", False, 0, True, "stop", 0, 0, -1, False, "",
            "a" * 64, "b" * 64, 3600 * S])
        self._plan()
        self._record_event("session-attached", session, other, True, False)
        self._record_event("session-detached", session, other)

    def _close_session(self) -> None:
        if self._sessions:
            session = self._pick(sorted(self._sessions))
            self._record_event("session-closing", session, "")

    def _renew(self) -> None:
        if self._sessions:
            self._record_event("session-renewed", self._pick(sorted(self._sessions)))

    def _tool(self) -> None:
        owner = self._someone()
        if owner:
            self._record_event("tool-returned", owner, "pool", f"t{self._draw(6)}",
                         self._pick(("python", "search")), self._draw(20_000), self._draw(2))

    def _trajectory_ends(self) -> None:
        owner = self._someone()
        if owner:
            self._record_event("trajectory-ended", owner, "pool", f"t{self._draw(6)}",
                         self._draw(2000) - 1, self._draw(4))

    def _close_rollouts(self) -> None:
        if self._draw(2):
            self._record_event("rollout-service-closed", "pool", "roll-long", self._now + 4 * S)
        else:
            self._record_event("rollout-service-tried", "pool", "roll-long")

    def _stall(self) -> None:
        self._now += 4 * S
        self._record_event("broker-stalled", 4 * S)

    def _rest(self) -> None:
        """Nothing happens until the scheduler's own deadline."""
        self._now = max(self._now, min(self._scheduler.next_deadline(), self._now + 40 * S))

    # ---- the scheduler -------------------------------------------------------------------------

    def _record_event(self, tag: str, *fields: Any) -> None:
        self._apply(msgspec.convert([tag, self._now, *fields], where.find("AnyEvent")))

    def _apply(self, fact: Any) -> None:
        for event in self._scheduler.consequences(fact):
            self.events.append(event)
            made = self._scheduler.handle(event)
            self._note(msgspec.to_builtins(event))
            self.orders += [(event, order) for order in made]
            self._todo += made

    def _plan(self) -> None:
        """Plans until there is nothing to do, then carries out what was ordered, and again."""
        for _ in range(1000):
            events = self._scheduler.plan(self._now)
            for event in events:
                self._apply(event)
            if not events:
                if not self._todo:
                    return
                self._perform(self._todo.pop(0))
        raise AssertionError("the scheduler plans for ever")

    def _perform(self, order: Any) -> None:
        """What the cluster does about an order."""
        kind, *fields = type(order).__name__, *msgspec.structs.astuple(order)
        by_layout = {"KillLease": self._killed, "OpenSession": self._opened,
                     "CloseSession": self._closed, "PackSession": self._packed,
                     "AskAllocation": lambda alloc, shape: self._ask_allocation(alloc),
                     "EndAllocation": lambda alloc, job, nodes, why:
                         self._end_allocation(alloc, list(nodes))}
        if where.old_name(kind) == "Reply":
            self._actions.pop(fields[0], None)
            self._ended.append(fields[0])
        act = by_layout.get(where.old_name(kind))
        if act is not None:
            act(*fields)

    def _killed(self, node: int, lease: int, state: Any, reason: str) -> None:
        if lease in self._leases:
            self._end_lease(lease, state.value, reason)

    def _opened(self, node: int, spec: Any) -> None:
        session = msgspec.to_builtins(spec)[0]
        if self._draw(8) == 0:
            self._record_event("session-closed", session, "its image is not there")
        elif self._sessions.get(session) == "opening":
            self._record_event("session-ready", session)

    def _closed(self, node: int, session: int) -> None:
        for lease, grant in list(self._leases.items()):
            if lease in self._leases and self._actions.get(grant[3], [0] * 8)[7] == session:
                self._end_lease(lease, "CANCELLED", "")
        if session in self._sessions:
            self._record_event("session-closed", session, "")

    def _packed(self, node: int, session: int) -> None:
        self._record_event("session-packed", session, f"digest-{session}")

    def _note(self, told: list[Any]) -> None:
        """Keeps what the next steps need to know."""
        tag, _, *fields = told
        first = fields[0] if fields else None
        moves = {"session-requested": "requested", "session-placed": "opening",
                 "session-ready": "open", "session-moving": "moving", "session-packed": "requested",
                 "session-closing": "closing"}
        if tag in moves:
            self._sessions[first[0] if tag == "session-requested" else first] = moves[tag]
        elif tag == "session-closed":
            self._sessions.pop(first, None)
        elif tag == "action-submitted":
            self._actions[first[0]] = first
        elif tag == "lease-granted":
            self._leases[first] = told
        elif tag in ("lease-finished", "lease-returned"):
            self._leases.pop(first, None)
        elif tag == "node-lost":
            self._nodes.pop(first, None)
        elif tag == "client-expired":
            self._clients.pop(first, None)
            self._away.discard(first)

    # ---- small things --------------------------------------------------------------------------

    def _told(self, tag: str) -> list[Any]:
        return [msgspec.to_builtins(e) for e in self.events if e.__struct_config__.tag == tag]

    def _open_sessions(self) -> list[int]:
        return [s for s, state in self._sessions.items() if state == "open"
                and s >> _COUNTER_BITS in self._clients
                and s >> _COUNTER_BITS not in self._away]

    def _someone(self) -> int:
        """A client that is here; 0 for none."""
        here = [c for c in self._clients if c not in self._away]
        return self._pick(here) if here else 0

    def _id(self, client: int) -> int:
        self._clients[client] += 1
        return client << _COUNTER_BITS | self._clients[client]

    def _draw(self, below: int) -> int:
        return int(self._rng.random() * below)

    def _pick(self, choices: Any) -> Any:
        return choices[self._draw(len(choices))]
