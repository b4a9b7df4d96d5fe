"""A world with a rollout pool, for the tests of pools within the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from tangram_hpc.broker.broker_settings import Settings
from tangram_hpc.broker.registration import Registration
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import Turn
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ENDED, ActionState
from tangram_hpc.scheduler.policy.admission import refusal
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.routing.cmlfq import CausalTree
from tangram_hpc.scheduler.scheduler import Scheduler

from .builders import World

POOL = {"buckets": [{"services": ["s0", "s1"], "upto": 1_000, "running_max": 1, "queue_max": 1,
                     "context_max": 8_000},
                    {"services": "big", "running_max": 2, "queue_max": 0, "context_max": 30_000}],
        "least": 2, "idle": 0, "crowded": 1 << 60}


class Site(World):
    """A world with three services, each on one node, and a rollout pool over them."""

    def gpu_node(self, gpus: int) -> None:
        """A node with prefetching, so that calls run in batches."""
        number = self.ledger.next_node
        spec = NodeSpec(f"n{number}", "host", (0, 1, 2, 3), 1024, tuple(range(gpus)), ahead=4,
                        backends=("model",), untrusted=("model",))
        self.happen(ev.NodeJoined(self.now, number, spec))
        self.happen(ev.NodesComplete(self.now, number))

    def declare(self, **fields: object) -> None:
        for name, node in (("s0", "n1"), ("s1", "n1"), ("big", "")):
            self.happen(ev.ServiceDeclared(0, ServiceSpec(name, node=node, batch=3)))
        facts, why = declaration_of_rollouts(self.ledger, rollouts_spec("p", {**POOL, **fields}), 0)
        assert why == ""
        for fact in facts:
            self.happen(fact)

    @property
    def pool(self):
        return self.ledger.rollouts["p"]

    def turn(self, trajectory: object, generated: int = 0, context: int = 100,
             attempts: int = 2, once: str = "", prompt: int = 1) -> int:
        turn = Turn("p", str(trajectory), prompt, context, generated)
        action = Action(self.id(), "p.sample", Kind.CALL, (1,), "rollouts:p", turn=turn,
                        attempts_max=attempts, once=once)
        assert refusal(self.ledger, self.scheduler.state.placer, action) == ""
        self.now += 1
        self.happen(ev.ActionSubmitted(self.now, action))
        return action.id

    def tool(self, trajectory: object, name: str, size: int = 10,
             state: ActionState = ActionState.COMPLETED) -> None:
        """A command of a trajectory, from its submission to its end."""
        action = Action(self.id(), name, trajectory=str(trajectory))
        self.happen(ev.ActionSubmitted(self.now, action))
        self.plan()
        outcome = Outcome(state, returned=size)
        self.happen(ev.LeaseFinished(self.now, self.lease_of(action.id), outcome, True))

    def end(self, trajectory: object, tokens: int, epoch: int = -1) -> None:
        self.happen(ev.TrajectoryEnded(self.now, self.client, "p", str(trajectory), tokens, epoch))

    def service(self, action: int) -> str:
        route = self.ledger.actions[action].route
        return route.service if route is not None else ""

    def serve(self, action: int) -> str:
        """Lets a turn run to its end; returns the service on which it ran."""
        self.plan()
        service = self.service(action)
        self.finish(action)
        return service


def site(**fields: object) -> Site:
    made = Site()
    made.node(gpus=4)
    made.declare(**fields)
    return made


def teach(world: Site, told: bool) -> None:
    """Plays trajectories that end soon when their tests pass, and continue for long when they
    fail."""
    for n in range(8):
        name, long = f"old-{n}", n % 2 == 1
        world.serve(world.turn(name))
        if told:
            world.tool(name, "tests", state=ActionState.FAILED if long else ActionState.COMPLETED)
        world.serve(world.turn(name, generated=200))
        world.end(name, 9_000 if long else 300, epoch=n)


class Saves:
    """A broker's registration with a pool that saves its trees in `/trees`; timer, clock and folder
    belong to the test."""

    def __init__(self, world: Site) -> None:
        self.now, self.takes_s, self.due_s, self.saved = 0, 0.0, 0.0, list[int]()
        self.registration = Registration(world.scheduler, self, self, lambda: self.now,
                                         world.happen, lambda *message: None)
        self.registration.start(Settings("j", "/store", rollouts=(
            rollouts_spec("p", {**POOL, "tree": "/trees"}),)))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due_s, self.elapse = delay_s, call

    def load(self, _: str) -> tuple[None, None]:
        return None, None

    def trouble(self, _: str) -> str:
        return ""

    def close(self) -> None:
        pass

    def save(self, _: str, tree: CausalTree) -> None:
        self.now += round(self.takes_s * 1e9)
        self.saved.append(tree.root.visits)


def state_of(scheduler: Scheduler) -> tuple[object, object]:
    """The parts of a state that a replay must restore, estimates included."""
    pool = scheduler.ledger.rollouts["p"]
    actions = {a: (e.state, e.action.key, e.route) for a, e in scheduler.ledger.actions.items()
               if e.state not in ENDED or client_of(a)}
    books = actions, pool.trajectories, [pool.load(s.name) for s in pool.spec.services]
    return books, (pool.counts, pool.queues.tree.plain(), pool.lesson.plain())
