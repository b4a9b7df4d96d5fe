"""Rollout pools on any history of turns, tools, losses and restarts: every turn is served once, and
the counts of the pool stay consistent."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.rollout_rig import Site, state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import RolloutsSpec
from tangram_hpc.domain.service import FALTERED
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.lease_reports import finished
from tangram_hpc.scheduler.routing.cmlfq import CausalTree, ToolSignal
from tangram_hpc.scheduler.routing.rollout_pools import shape_of
from tangram_hpc.scheduler.scheduler import Scheduler

ENDS = [ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT, ActionState.NODE_FAIL]
OPS = st.lists(st.tuples(st.sampled_from(
    ["turn", "turn", "turn", "finish", "finish", "cancel", "tool", "told", "ended", "lost", "drain",
     "join", "leave", "returned", "falters", "plan", "plan", "restart"]),
    st.integers(0, 5), st.integers(0, 3)), min_size=5, max_size=60)


class History(Site):
    """Plays operations, and counts what started and ended."""

    def start(self) -> None:
        self.asked = list[int]()
        self.happen(ev.BrokerStarted(0, "job", "first-fit", "none"))
        self.join_client()
        self.gpu_node(2)
        self.declare()

    def join_client(self) -> None:
        self.now += 1
        number = self.ledger.next_client
        self.happen(ev.ClientJoined(self.now, number, f"uid-{number}", "test", 0, 1, "socket"))
        self.client = number

    def play(self, op: str, a: int, b: int) -> None:
        begun = [n for n, lease in self.ledger.leases.items() if lease.begun]
        ahead = [n for n, lease in self.ledger.leases.items() if not lease.begun]
        waiting = self.pool.open_turns
        up = [n.node for n in self.ledger.up_nodes()]
        self.now += 1
        if op == "turn":
            once = f"once-{self.counter}" if b == 3 else ""
            self.asked.append(self.turn(a, generated=100 * b, attempts=1 + b % 3, once=once,
                                        context=(100, 5_000, 20_000, 100)[b]))
        elif op == "finish" and begun:
            outcome = Outcome(ENDS[b], returned=1_000 * a)
            self.happen(ev.LeaseFinished(self.now, begun[a % len(begun)], outcome, True))
        elif op == "falters" and begun:
            outcome = Outcome(ActionState.FAILED, pushed=FALTERED)
            end = ev.LeaseFinished(self.now, begun[a % len(begun)], outcome, True)
            for fact in finished(self.ledger, end):
                self.happen(fact)
        elif op == "returned" and ahead:
            self.happen(ev.LeaseReturned(self.now, ahead[-1]))
        elif op == "cancel" and waiting:
            action = list(waiting)[a % len(waiting)]
            self.happen(ev.ActionCancelled(self.now, action, "by its client"))
        elif op == "tool":
            self.happen(ev.ActionSubmitted(self.now, Action(self.id(), f"tool{b}",
                                                            trajectory=str(a))))
        elif op == "told":
            self.happen(ev.ToolReturned(self.now, self.client, "p", str(a), "search", 10, b % 3))
        elif op == "ended":
            self.end(a, 1_000 * b - 1, epoch=self.now)
        elif op == "lost" and up:
            self.happen(ev.NodeLost(self.now, up[a % len(up)], "gone"))
        elif op == "drain" and up:
            self.happen(ev.NodeDraining(self.now, up[a % len(up)], "drained"))
        elif op == "join" and len(up) < 3:
            self.gpu_node(2 + a)
        elif op == "leave" and self.ledger.by_uid:
            self.happen(ev.ClientLeft(self.now, self.client, b == 0, self.now + 5 * b))
            self.join_client()
        elif op == "restart":
            self.happen(ev.BrokerStarted(self.now, "job", "first-fit", "none"))
            self.join_client()
            self.gpu_node(4)
        elif op == "plan":
            self.plan()

    def settle(self) -> None:
        """Ends all that is open, on a node that has every service."""
        for node in self.ledger.up_nodes():
            self.happen(ev.NodeLost(self.now, node.node, "gone"))
        self.ledger.next_node = max(self.ledger.next_node, 1)
        spec = self.ledger.nodes[1].spec
        self.happen(ev.NodeJoined(self.now, self.ledger.next_node, spec))
        self.happen(ev.NodesComplete(self.now, 1))
        for _ in range(400):
            self.plan()
            for lease in [n for n, x in self.ledger.leases.items() if x.begun]:
                self.happen(ev.LeaseFinished(self.now, lease, Outcome(ActionState.COMPLETED),
                                             True))
            self.now = max(self.now, self.scheduler.next_deadline())
            if not self.pool.open_turns and not len(self.ledger.ready):
                return
        raise AssertionError(f"turns that never end: {self.pool.open_turns}")


@settings(max_examples=25, deadline=None)
@given(OPS)
def test_every_turn_is_served_once_and_the_pool_counts_stay_consistent(
        ops: list[tuple[str, int, int]]) -> None:
    check_history(ops)


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(OPS)
def test_every_turn_is_served_once_in_many_histories(ops: list[tuple[str, int, int]]) -> None:
    check_history(ops)


def check_history(ops: list[tuple[str, int, int]]) -> None:
    """Plays a history to its end (`SimulationWorld.happen` checks all invariants after each
    event)."""
    world = History()
    world.events.clear()
    world.scheduler = Scheduler(make_placer("first-fit"))
    world.start()
    for op, a, b in ops:
        world.play(op, a, b)
    world.settle()
    told = Counter(d.action for d in world.decisions if isinstance(d, de.ReplyToClient))
    assert all(told[action] == 1 for action in world.asked), "a turn ended twice or never"
    world.pool.router.check()
    assert world.pool.router.waiting == 0 and not any(
        max(0, world.pool.load(s)) for s in ("s0", "s1", "big"))
    starts = [d.action for d in world.decisions if isinstance(d, de.StartLease)]
    assert set(starts) <= {e.action.id for e in world.events if isinstance(e, ev.ActionSubmitted)}
    for wise in (False, True):  # a replay decides nothing, whatever it believes
        replay = Scheduler(make_placer("first-fit"))
        for event in world.events:
            replay.handle(event)
            replay.ledger.check()
            if wise and isinstance(event, ev.RolloutsDeclared):
                pool = replay.ledger.rollouts["p"]
                prior = tree_of_long_trajectories(pool.spec)
                pool.adopt_prior(prior, CausalTree(shape_of(pool.spec)))
        same, there = state_of(replay), state_of(world.scheduler)
        assert same[0] == there[0] and (wise or same[1] == there[1])


def tree_of_long_trajectories(spec: RolloutsSpec) -> CausalTree:
    """A tree that expects long trajectories after any tool result."""
    tree = CausalTree(shape_of(spec))
    for n in range(8):
        tree.learn(1, n, [ToolSignal(f"tool{n % 4}", 0, n % 3)], [0], 20_000)
    return tree
