"""Owns: which of the policy's services a trajectory's next turn goes to - the least loaded one, or
the one that the broker's router takes by what tools returned. Must not know what is asked.

Law: both ways have one face (`Routes`); a turn is asked for once and goes to one service.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any, Protocol

SERVICES = {"rollout-1": 1, "rollout-2": 2}  # of the policy, and the degree of each
EDGE = 6  # tokens left: one more turn and no second one
_RUNNING = 64  # turns that a service is given at once
_EPOCHS = 4  # train_steps of which lengths are remembered: a policy that learns gets shorter


class Routes(Protocol):
    """A way from trajectories to services."""

    def ask(self, trajectory: str, prompt: str, context: list[int], generated: int,
            **options: Any) -> Future[Any]:
        """The next turn of the trajectory of this name, which began with this prompt and wrote so
        many of the context's tokens itself; the service's answer."""
        ...

    def tool(self, trajectory: str) -> dict[str, Any]:
        """What a tool's action says so that its return is this trajectory's."""
        ...

    def ended(self, trajectory: str, generated: int, step: int) -> None:
        """A trajectory ended with so many tokens of its own."""
        ...

    def tally(self) -> dict[str, int]:
        """Turns by service so far, and what else is counted; each rank counts its own."""
        ...

    def told(self) -> dict[str, Any]:
        """What the broker has to tell of all ranks' turns."""
        ...


def routes(client: Any, router: bool, pool: str) -> Routes:
    """The routes of one rank; `router`: by what tools returned, in a rollout pool of this name."""
    return Routed(client, SERVICES, pool) if router else LeastLoaded(client, SERVICES)


def _costs(degree: int) -> dict[str, float]:
    """What the router believes of a service; of a batch of 17 turns 1.1 ms a step was seen."""
    return {"running_max": _RUNNING, "step_ms": 1.0 / degree, "request_us": 30.0 / degree,
            "prefill_us": 10.0 / degree}


class LeastLoaded:
    """The service with the fewest turns for its degree."""

    def __init__(self, client: Any, degrees: dict[str, int]) -> None:
        self._client, self._degrees = client, degrees
        self._load = dict.fromkeys(degrees, 0)
        self._turns: Counter[str] = Counter()
        self._lock = threading.Lock()  # answers come in the client's thread

    def ask(self, trajectory: str, prompt: str, context: list[int], generated: int,
            **options: Any) -> Future[Any]:
        """See `Routes.ask`."""
        with self._lock:
            service = min(self._load, key=lambda one: (self._load[one] / self._degrees[one],
                                                       self._degrees[one]))
            self._load[service] += 1
            self._turns[service] += 1
        call: Future[Any] = self._client.call(service, "sample", prompts=[context], **options)
        call.add_done_callback(lambda _: self._left(service))
        return call

    def tool(self, trajectory: str) -> dict[str, Any]:
        """Nobody wants to know."""
        return {}

    def ended(self, trajectory: str, generated: int, step: int) -> None:
        """Nobody wants to know."""

    def tally(self) -> dict[str, int]:
        """See `Routes.tally`."""
        with self._lock:
            return dict(self._turns)

    def told(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def _left(self, service: str) -> None:
        with self._lock:
            self._load[service] -= 1


class Routed:
    """The broker's router: buckets by what is left of a trajectory, the larger degree for who has
    more than one turn before it. What tools return it sees by itself, as they are its actions."""

    def __init__(self, client: Any, degrees: dict[str, int], pool: str) -> None:
        self._client, self._pool = client, pool
        self._turns: Counter[str] = Counter()
        self._wanted: dict[str, list[tuple[int, int]]] = {}  # decisions of those under way
        self._judged = self._right = self._long = 0
        self._lock = threading.Lock()  # answers come in the client's thread
        small, large = sorted(degrees, key=lambda name: degrees[name])
        client.register_rollouts(pool, {  # the same from each rank: harmless
            "buckets": [{"services": small, "upto": EDGE, **_costs(degrees[small])},
                        {"services": large, **_costs(degrees[large])}],
            "epochs": _EPOCHS})

    def ask(self, trajectory: str, prompt: str, context: list[int], generated: int,
            **options: Any) -> Future[Any]:
        """See `Routes.ask`."""
        call: Future[Any] = self._client.rollout(
            self._pool, "sample", trajectory=trajectory, prompt=prompt, context=len(context),
            generated=generated, prompts=[context], **options)
        call.add_done_callback(lambda done: self._left(done, trajectory, generated))
        return call

    def tool(self, trajectory: str) -> dict[str, Any]:
        """See `Routes.tool`."""
        return {"trajectory": trajectory}

    def ended(self, trajectory: str, generated: int, step: int) -> None:
        """See `Routes.ended`."""
        with self._lock:
            for before, wanted in self._wanted.pop(trajectory, [])[1:]:
                truly = int(generated - before > EDGE)
                self._judged += 1
                self._right += truly == wanted
                self._long += truly
        self._client.trajectory_ended(self._pool, trajectory, generated, epoch=step)

    def tally(self) -> dict[str, int]:
        """See `Routes.tally`. `judged`: turns after a tool's return of trajectories that have
        ended; `right`: those whose bucket was that of what was truly left; `long`: those that truly
        had more than one turn left."""
        with self._lock:
            return {**self._turns, "judged": self._judged, "right": self._right, "long": self._long}

    def told(self) -> dict[str, Any]:
        """What came of the pool's decisions; each trajectory's first is always the smallest
        bucket, and counts here too."""
        told = next(one for one in self._client.ask("rollouts")["rollouts"]
                    if one["name"] == self._pool)
        return {name: told[name] for name in ("turns", "ended", "judged", "accuracy", "moved",
                                              "moved_context", "prefixes")}

    def _left(self, call: Any, trajectory: str, generated: int) -> None:
        if call.exception() is None and (route := call.route) is not None:
            with self._lock:
                self._turns[route.service] += 1
                self._wanted.setdefault(trajectory, []).append((generated, route.wanted))
