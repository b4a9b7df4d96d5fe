"""Routes of the reference trainer: which of the policy's services a trajectory's next turn goes to.

There are two kinds with one interface (`Routes`): the least loaded service, or the service that the
broker's router chooses by what tools returned. Each turn is submitted once and goes to one service.
This module does not know what the turns are about.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any, Protocol

SERVICES = {"rollout-1": 1, "rollout-2": 2}  # service of the policy -> its CPU threads
EDGE = 6  # remaining tokens of a trajectory: enough for one more turn, but not for two
_RUNNING = 64  # the most turns that run on a service at once
_EPOCHS = 4  # train steps whose lengths count: trajectories get shorter while the policy learns


class Routes(Protocol):
    """Chooses a service for each turn of a trajectory, and submits the turn."""

    def ask(self, trajectory: str, prompt: str, context: list[int], generated: int,
            **options: Any) -> Future[Any]:
        """Submits the next turn of a trajectory.

        Args:
            trajectory: the trajectory's name.
            prompt: the prompt that it began with.
            context: the tokens with which the turn begins.
            generated: how many of them the policy has generated.
            options: arguments of `Client.call` and of the service's method.

        Returns:
            A Future of the service's answer.
        """
        ...

    def tool(self, trajectory: str) -> dict[str, Any]:
        """The arguments of `submit` by which an action becomes a tool of this trajectory."""
        ...

    def ended(self, trajectory: str, generated: int, step: int) -> None:
        """Reports that a trajectory has ended in this step, after `generated` tokens of the
        policy."""
        ...

    def tally(self) -> dict[str, int]:
        """This rank's counts so far: turns by service, and others."""
        ...

    def told(self) -> dict[str, Any]:
        """The broker's counts of all ranks' turns; empty without a router."""
        ...


def routes(client: Any, router: bool, pool: str) -> Routes:
    """Makes the routes of one rank.

    Args:
        client: `tangram_hpc.connect()`.
        router: whether the broker's router chooses; otherwise the least loaded service is taken.
        pool: the name of the rollout pool for the router.
    """
    return BrokerRoutes(client, SERVICES, pool) if router else LeastLoaded(client, SERVICES)


def _costs(degree: int) -> dict[str, float]:
    """Returns the costs of a service with which the router begins. A batch of 17 turns was measured
    at 1.1 ms a step."""
    return {"running_max": _RUNNING, "step_ms": 1.0 / degree, "request_us": 30.0 / degree,
            "prefill_us": 10.0 / degree}


class LeastLoaded:
    """Takes the service with the fewest turns for its degree."""

    def __init__(self, client: Any, degrees: dict[str, int]) -> None:
        self._client, self._degrees = client, degrees
        self._load = dict.fromkeys(degrees, 0)
        self._turns: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the counts: callbacks run in the client's thread

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
        """See `Routes.tool`; nothing is reported."""
        return {}

    def ended(self, trajectory: str, generated: int, step: int) -> None:
        """See `Routes.ended`; nothing is reported."""

    def tally(self) -> dict[str, int]:
        """See `Routes.tally`."""
        with self._lock:
            return dict(self._turns)

    def told(self) -> dict[str, Any]:
        """See `Routes.told`."""
        return {}

    def _left(self, service: str) -> None:
        with self._lock:
            self._load[service] -= 1


class BrokerRoutes:
    """Lets the broker's router choose. There are two buckets by the tokens that are left: the
    service with the larger degree takes trajectories that have more than one turn left. The broker
    sees the returns of tools itself, because they are its actions."""

    def __init__(self, client: Any, degrees: dict[str, int], pool: str) -> None:
        self._client, self._pool = client, pool
        self._turns: Counter[str] = Counter()
        # trajectory -> (generated, bucket that the router wanted) of each turn so far
        self._wanted: dict[str, list[tuple[int, int]]] = {}
        self._judged = self._right = self._long = 0
        self._lock = threading.Lock()  # guards the counts: answers come in the client's thread
        small, large = sorted(degrees, key=lambda name: degrees[name])
        client.register_rollouts(pool, {  # every rank declares the same, which is harmless
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
        """See `Routes.tally`; three counts concern turns after a tool's return in ended
        trajectories.

        `judged` is the number of these turns. `right` is how many of them the router wanted to send
        to the bucket that fitted the number of tokens really left. `long` is how many of them
        really had more than one turn left."""
        with self._lock:
            return {**self._turns, "judged": self._judged, "right": self._right, "long": self._long}

    def told(self) -> dict[str, Any]:
        """The pool's metrics. They count the first turn of each trajectory too, which always goes
        to the smallest bucket."""
        told = next(one for one in self._client.ask("rollouts")["rollouts"]
                    if one["name"] == self._pool)
        return {name: told[name] for name in ("turns", "ended", "judged", "accuracy", "moved",
                                              "moved_context", "prefixes")}

    def _left(self, call: Any, trajectory: str, generated: int) -> None:
        if call.exception() is None and (route := call.route) is not None:
            with self._lock:
                self._turns[route.service] += 1
                self._wanted.setdefault(trajectory, []).append((generated, route.wanted))
