"""The rollouts of the reference trainer: services write the turns, sandboxes run the programs.

The rollouts are asynchronous: a batch that was begun goes on by itself, so the next step's
trajectories are written while this step's are trained on. One thread advances all trajectories.
Each answer of a service or a sandbox is one event, which submits the trajectory's next action. Each
turn names the oldest weights that it accepts; the service refuses to use older ones.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tangram_hpc import TangramError

from . import reference_task as task
from .reference_routes import Routes
from .reference_turns import ArithmeticTrajectory

TOOL = "verify"
_SANDBOX_MIB = 32
_TOOL_S = 20.0  # the longest run time of a program


@dataclass
class Live:
    """A trajectory that has not ended, and what its rank knows of it."""

    name: str
    number: int  # number of its prompt
    seed: int
    trajectory: ArithmeticTrajectory
    batch: Batch
    tool_s: float = 0.0  # seconds for which it has waited for its tools
    asked_at: float = 0.0  # when its last tool was submitted


@dataclass
class Batch:
    """One rank's trajectories of one step; trajectories of one prompt are neighbours."""

    step: int
    least: int  # the oldest version of the weights that may generate its turns
    began: float
    lives: list[Live] = field(default_factory=list)
    left: int = 0  # number of trajectories that have not ended
    failed: TangramError | None = None
    # set when half of the trajectories have ended
    half: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    # seconds to its end, from its begin or, if that was later, from the end of the batch before
    rollout_s: float = 0.0

    @property
    def oldest(self) -> int:
        """The version of the oldest weights that generated a part of the batch."""
        return min(one.trajectory.version for one in self.lives)


class RolloutDriver:
    """The rollouts of one rank.

    Args:
        client: `tangram_hpc.connect()`.
        routes: which service each turn goes to.
        sandboxes: how many sandboxes stay open; each runs one program at a time.
        group: trajectories of each prompt.
        seed: the seed of the sampling.
    """

    def __init__(self, client: Any, routes: Routes, sandboxes: int, group: int, seed: int) -> None:
        self._routes, self._group, self._seed = routes, group, seed
        self._events: queue.SimpleQueue[tuple[Callable[[Live, Any], None], Live, Future[Any]]
                                        | None] = queue.SimpleQueue()
        self._whole_at = 0.0  # when the last batch ended
        asked = _walls(client)
        self._sandboxes = [client.session(mem=_SANDBOX_MIB, name=f"{TOOL}-{n}", **asked)
                           for n in range(sandboxes)]
        for sandbox in self._sandboxes:
            sandbox.__enter__()
        self._mover = threading.Thread(target=self._move, name="rollouts", daemon=True)
        self._mover.start()

    def close(self) -> None:
        """Closes the sandboxes; no batch may be under way."""
        self._events.put(None)
        self._mover.join()
        for sandbox in self._sandboxes:
            sandbox.close()

    def begin(self, step: int, asked: list[tuple[int, str]], least: int) -> Batch:
        """Begins a batch; returns at once.

        Args:
            step: the train step that uses the batch.
            asked: (number, prompt) for each prompt; each prompt gets a group of trajectories.
            least: the oldest version of the weights that may generate its turns.
        """
        batch = Batch(step, least, time.monotonic())
        for number, prompt in asked:
            for member in range(self._group):
                seed = ((self._seed * 100_003 + step) * 1009 + number) * self._group + member
                batch.lives.append(Live(f"{step}-{number}-{member}", number, seed,
                                        ArithmeticTrajectory(prompt), batch))
        batch.left = len(batch.lives)
        for live in batch.lives:
            self._ask(live)
        return batch

    def half(self, batch: Batch) -> None:
        """Waits until half of a batch is over, so that the services have room for the next.

        Raises:
            TangramError: a service or sandbox could not serve.
        """
        self._await(batch, batch.half)

    def finish(self, batch: Batch) -> Batch:
        """Waits until a batch is over, and returns it.

        Raises:
            TangramError: a service or sandbox could not serve.
        """
        self._await(batch, batch.over)
        return batch

    def _await(self, batch: Batch, event: threading.Event) -> None:
        while not event.wait(1.0):
            if not self._mover.is_alive():
                raise TangramError("the rollouts' thread has ended; its log says why")
        if batch.failed is not None:
            raise batch.failed

    # ---- one trajectory ----

    def _ask(self, live: Live) -> None:
        """Submits the next turn."""
        one = live.trajectory
        self._then(self._said, live, self._routes.ask(
            live.name, one.prompt, one.tokens, one.generated, max_new_tokens=task.NEW_TOKENS,
            seed=live.seed * 16 + one.turns, min_version=live.batch.least,
            # for the token limit of a batch: what it reads and what it writes
            tokens=len(one.tokens) + task.NEW_TOKENS, name=f"rollout-{live.batch.step}"))

    def _said(self, live: Live, rows: list[dict[str, Any]]) -> None:
        """Adds the model's answer to the trajectory and runs the program in it as a tool call."""
        row = rows[0]
        program = live.trajectory.said([int(token) for token in row["tokens"]],
                                       [float(each) for each in row["logprobs"]],
                                       int(row["version"]))
        if live.trajectory.over:
            return self._over(live)
        live.asked_at = time.monotonic()
        sandbox = self._sandboxes[live.seed % len(self._sandboxes)]
        self._then(self._returned, live, sandbox.exec(
            task.check(program), timeout=_TOOL_S, name=TOOL, **self._routes.tool(live.name)))

    def _returned(self, live: Live, told: Any) -> None:
        """Adds the tool's output to the trajectory and submits the next turn, if there is one."""
        live.tool_s += time.monotonic() - live.asked_at
        live.trajectory.returned(told.exit_code, told.stdout)
        if live.trajectory.over:
            self._over(live)
        else:
            self._ask(live)

    def _over(self, live: Live) -> None:
        batch = live.batch
        self._routes.ended(live.name, live.trajectory.generated, batch.step)
        batch.left -= 1
        if batch.left <= len(batch.lives) // 2:
            batch.half.set()
        if not batch.left:
            now = time.monotonic()
            batch.rollout_s, self._whole_at = now - max(batch.began, self._whole_at), now
            batch.over.set()

    # ---- the thread ----

    def _then(self, what: Callable[[Live, Any], None], live: Live, answer: Future[Any]) -> None:
        answer.add_done_callback(lambda done: self._events.put((what, live, done)))

    def _move(self) -> None:
        while (event := self._events.get()) is not None:
            what, live, answer = event
            if live.batch.failed is not None:
                continue  # the rank is about to end
            try:
                what(live, answer.result())
            except TangramError as error:
                live.batch.failed = error
                live.batch.half.set()
                live.batch.over.set()


def _walls(client: Any) -> dict[str, Any]:
    """Returns the session options for the isolation of the sandboxes.

    The backend `process` starts fastest, and is used if it is safe for untrusted code on all nodes;
    else each node uses its best backend.
    """
    works = {name for node in client.ask("nodes")["nodes"] for name in node["untrusted"]}
    return {"backend": "process"} if "process" in works else {}
