"""Compares the cost of a trajectory's turn through a rollout pool with a plain call of a service.

`core`: CPU time of the scheduler alone (submit, route, grant, finish, acknowledge), in alternating
rounds of both kinds, and for turns while others wait in the pool's queue. `live` (not with
`--tiny`): round trips through a real broker and worker to a fake service that takes no time, both
kinds in turn.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import common

from tangram_hpc import LocalCluster
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.rollouts import Turn
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.declarations import declaration_of_rollouts
from tangram_hpc.scheduler.scheduler import Scheduler

SERVICES = 16
ONE = {"running_max": 1, "queue_max": 0}  # each service runs one turn and queues none
POOL = {"buckets": [{"services": [f"s{n}" for n in range(8)], "upto": 4_000, **ONE},
                    {"services": [f"s{n}" for n in range(8, 16)], **ONE}]}


class Core:
    """A scheduler with a service on each of its GPUs, driven by hand."""

    def __init__(self) -> None:
        self.scheduler, self.now, self.count = Scheduler(make_placer("elastic")), 0, 0
        self.tell(ev.ClientJoined(0, 1, "bench", "bench", 0, 1, "socket"))
        self.tell(ev.NodeJoined(0, 1, NodeSpec("n1", "host", (0,), 1 << 20,
                                               tuple(range(SERVICES)))))
        self.tell(ev.NodesComplete(0, 1))
        for n in range(SERVICES):
            self.tell(ev.ServiceDeclared(0, ServiceSpec(f"s{n}", gpus=(n,))))
        for fact in declaration_of_rollouts(self.scheduler.ledger, rollouts_spec("p", POOL), 0)[0]:
            self.tell(fact)

    def tell(self, fact: ev.Event) -> None:
        """Handles one event and its consequences."""
        for event in self.scheduler.consequences(fact):
            self.scheduler.handle(event)

    def submit(self, routed: bool) -> int:
        """Submits one more call and returns its id."""
        self.count, self.now = self.count + 1, self.now + 1000
        turn = Turn("p", str(self.count), 1, 100, 0) if routed else None
        key = "rollouts:p" if routed else f"service:s{self.count % SERVICES}"
        action = Action(mint(1, self.count), "call", Kind.CALL, (1,), key, turn=turn)
        self.tell(ev.ActionSubmitted(self.now, action))
        return action.id

    @property
    def turns(self) -> int:
        """Returns how many turns were routed."""
        return self.scheduler.ledger.rollouts["p"].counts.turns

    def pass_(self, rounds: int, routed: bool) -> float:
        """CPU seconds a call."""
        began = time.process_time()
        for _ in range(rounds):
            for _ in range(SERVICES):
                self.submit(routed)
            self.serve()
        return (time.process_time() - began) / rounds / SERVICES

    def serve(self) -> None:
        """Plans, and ends all that runs."""
        while events := self.scheduler.plan(self.now):
            for event in events:
                self.tell(event)
        done = []
        for lease in list(self.scheduler.ledger.leases.values()):
            done.append(lease.action)
            self.tell(ev.LeaseFinished(self.now, lease.lease, Outcome(ActionState.COMPLETED), True))
        self.tell(ev.ActionAcknowledged(self.now, tuple(done)))
        for action in done:
            self.tell(ev.TrajectoryEnded(self.now, 1, "p", str(action & 0xFFFFFFFF), -1))


def core(rounds: int, line: int) -> dict[str, float]:
    """Returns microseconds per call of each kind, the least of five passes."""
    free, behind = Core(), Core()
    for _ in range(line):
        behind.submit(True)
    kinds = {"plain": (free, False), "routed": (free, True), "behind_line": (behind, True)}
    best = dict.fromkeys(kinds, float("inf"))
    for _ in range(5):
        for kind, (one, routed) in kinds.items():
            best[kind] = min(best[kind], one.pass_(rounds, routed))
    assert free.turns == 5 * rounds * SERVICES == behind.turns
    return {f"{kind}_us": round(took * 1e6, 1) for kind, took in best.items()} | {
        f"{kind}_ratio": round(best[kind] / best["plain"], 2) for kind in ("routed", "behind_line")}


def live(rounds: int) -> dict[str, Any]:
    """Round trips of both kinds, in turn."""
    took: dict[str, list[float]] = {"plain": [], "routed": []}
    with tempfile.TemporaryDirectory() as home, LocalCluster(
            cpus=1, devices="fake:2", home=home) as cluster:
        for name in ("a", "b"):
            cluster.register_service(name, {"backend": "fake", "batch_wait_ms": 0})
        cluster.register_rollouts("p", {"buckets": [{"services": "a", "upto": 1000},
                                                    {"services": "b"}]})
        for n in range(rounds + 20):
            plain = common.timed(lambda: cluster.call("a", "m").result(), 1)
            routed = common.timed(lambda: cluster.rollout(
                "p", "m", trajectory=n, prompt=n, context=10, generated=0  # noqa: B023
            ).result(), 1)
            if n >= 20:
                took["plain"] += plain
                took["routed"] += routed
    told: dict[str, Any] = {kind: common.percentiles(each) for kind, each in took.items()}
    return told | {"p50_ratio": round(told["routed"]["p50_ms"] / told["plain"]["p50_ms"], 2)}


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    rounds, line = (3, 20) if tiny else (200, 1000)
    figures: dict[str, Any] = {"core": core(rounds, line)}
    if not tiny:
        figures["live"] = live(500)
    common.line("rollouts", {"services": SERVICES, "rounds": rounds, "line": line}, figures)


if __name__ == "__main__":
    main()
