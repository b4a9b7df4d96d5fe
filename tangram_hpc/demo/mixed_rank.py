"""One trainer rank of the mixed demo.

Each trajectory searches once and is driven as in the coding demo; then the judge and the teachers
are called about its final program. Like `demo_rank`, this file contains the code that the author of
a trainer would write with the public client.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import tangram_hpc

from .demo_isolation import isolation_options
from .demo_models import DEMO_MODELS, opinion, question
from .demo_rank import TrajectoryRun, drive, rank_parser, run_step
from .policy import TrajectoryScript
from .problems import Problem, choose_problems, load_problems
from .search import SEARCH, get, query_of

SEARCH_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 300.0


@dataclass
class CallTiming:
    """The times of one search or service call as its trajectory saw them, in seconds.

    Attributes:
        trajectory: Name of the trajectory.
        kind: Name of the endpoint or the service.
        act_s: From submission to result.
        exec_s: Run time of the call; of a search, the time of its HTTP requests.
        queue_s: Waiting time; 0 for a search, as only the journal has the waiting time of a search.
        restore_s: Time to bring the service to a device.
        batch: Calls that ran as one batch.
    """

    trajectory: str
    kind: str
    act_s: float
    exec_s: float
    queue_s: float = 0.0
    restore_s: float = 0.0
    batch: int = 1


class MixedDemoRank:
    """Runs this rank's trajectories and collects their calls.

    Attributes:
        calls: The times of all searches and service calls.
        opinions: For each "TRAJECTORY MODEL", the sum of the model's log-probabilities; 0 for the
            judge.
        wrong: One line for each answer that failed its check.
    """

    def __init__(self, client: tangram_hpc.Client, problems: list[Problem], scale: float,
                 port: int) -> None:
        self._client, self._scale, self._port = client, scale, port
        self._problems = {problem.task_id: problem for problem in problems}
        self._search = client.endpoint(SEARCH)
        self._options = isolation_options(client)
        self.calls: list[CallTiming] = []
        self.opinions: dict[str, float] = {}
        self.wrong: list[str] = []

    async def all_of(self, plans: list[TrajectoryScript]) -> list[TrajectoryRun]:
        """Runs all trajectories of this rank concurrently."""
        return list(await asyncio.gather(*map(self._trajectory, plans)))

    async def _trajectory(self, plan: TrajectoryScript) -> TrajectoryRun:
        problem = self._problems[plan.task_id]
        await self._look_up(plan, problem)
        run = await drive(self._client, plan, self._scale, self._options)
        completion = run.result.final.source.removeprefix(problem.prompt)
        await asyncio.gather(*(self._call(plan, name, problem.prompt, completion)
                               for name in DEMO_MODELS))
        return run

    async def _look_up(self, plan: TrajectoryScript, problem: Problem) -> None:
        """Searches once; the hits must contain the trajectory's own problem."""
        spent_s = 0.0

        async def attempt() -> Any:
            nonlocal spent_s
            began = time.monotonic()
            try:
                reply = await get(self._port, plan.name, query_of(problem))
                return tangram_hpc.check_response(reply)
            finally:
                spent_s += time.monotonic() - began

        began = time.monotonic()
        reply = await self._search.request(attempt, timeout=SEARCH_TIMEOUT_S)
        self.calls.append(CallTiming(plan.name, SEARCH, time.monotonic() - began, spent_s))
        if reply.status != 200 or problem.task_id not in json.loads(reply.body)["hits"]:
            self.wrong.append(f"{plan.name}: its search did not find its own problem (HTTP status "
                              f"{reply.status})")

    async def _call(self, plan: TrajectoryScript, name: str, prompt: str, completion: str) -> None:
        method, arguments = question(name, prompt, completion)
        future = self._client.call(name, method, timeout=CALL_TIMEOUT_S, **arguments)
        total, why = opinion(name, completion, await future)
        if why:
            self.wrong.append(f"{plan.name}: {why}")
        self.opinions[f"{plan.name} {name}"] = total
        details = future.details
        assert details is not None
        self.calls.append(CallTiming(plan.name, name, details.act_s, details.exec_s,
                                     details.queue_s, details.restore_s, details.batch))

    def summary(self) -> dict[str, Any]:
        """Returns the part of the ranks' summary that only the mixed demo has."""
        return {"calls": [asdict(call) for call in self.calls], "opinions": self.opinions,
                "wrong_calls": self.wrong}


def main() -> None:
    """Runs the mixed step."""
    p = rank_parser()
    p.add_argument("--port", type=int, required=True)
    args = p.parse_args()
    problems = choose_problems(load_problems(), args.problems, args.seed)

    def work(client: tangram_hpc.Client,
             plans: list[TrajectoryScript]) -> tuple[list[TrajectoryRun], dict[str, Any]]:
        rank = MixedDemoRank(client, problems, args.scale, args.port)
        return asyncio.run(rank.all_of(plans)), rank.summary()

    run_step(args, problems, work)


if __name__ == "__main__":
    main()
