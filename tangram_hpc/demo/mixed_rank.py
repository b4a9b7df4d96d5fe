"""One trainer rank of the mixed demo: each trajectory searches, is driven as in the plain demo, and
then a judge and three teachers look at the program that it came to.

Law: as `rank`: what a trainer's author would write with the public client and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import tangram_hpc

from .crew import CREW, opinion, question
from .demo_rank import Driven, arguments, drive, run_step
from .policy import TrajectoryScript
from .problems import Problem, choose_problems, load_problems
from .search import SEARCH, get, query_of
from .walls import isolation_options

SEARCH_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 300.0


@dataclass
class CallTiming:
    """One search, or one call of a service, as its trajectory saw it; seconds. `queue_s` of a
    search is not known here."""

    trajectory: str
    kind: str
    act_s: float
    exec_s: float
    queue_s: float = 0.0
    restore_s: float = 0.0
    batch: int = 1


class MixedDemoRank:
    """This rank's trajectories and what they leave."""

    def __init__(self, client: tangram_hpc.Client, problems: list[Problem], scale: float,
                 port: int) -> None:
        self._client, self._scale, self._port = client, scale, port
        self._problems = {problem.task_id: problem for problem in problems}
        self._search = client.endpoint(SEARCH)
        self._asked = isolation_options(client)
        self.calls: list[CallTiming] = []
        self.opinions: dict[str, float] = {}  # by trajectory and member of the crew
        self.wrong: list[str] = []

    async def all_of(self, plans: list[TrajectoryScript]) -> list[Driven]:
        """Every plan, at once."""
        return list(await asyncio.gather(*map(self._trajectory, plans)))

    async def _trajectory(self, plan: TrajectoryScript) -> Driven:
        problem = self._problems[plan.task_id]
        await self._look_up(plan, problem)
        driven = await drive(self._client, plan, self._scale, self._asked)
        completion = driven.result.final.source.removeprefix(problem.prompt)
        await asyncio.gather(*(self._call(plan, name, problem.prompt, completion)
                               for name in CREW))
        return driven

    async def _look_up(self, plan: TrajectoryScript, problem: Problem) -> None:
        """One search; it must find the trajectory's own problem."""
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
            self.wrong.append(f"{plan.name}: its search did not find its problem ({reply.status})")

    async def _call(self, plan: TrajectoryScript, name: str, prompt: str, completion: str) -> None:
        method, told = question(name, prompt, completion)
        future = self._client.call(name, method, timeout=CALL_TIMEOUT_S, **told)
        total, why = opinion(name, completion, await future)
        if why:
            self.wrong.append(f"{plan.name}: {why}")
        self.opinions[f"{plan.name} {name}"] = total
        details = future.details
        assert details is not None
        self.calls.append(CallTiming(plan.name, name, details.act_s, details.exec_s,
                                     details.queue_s, details.restore_s, details.batch))

    def told(self) -> dict[str, Any]:
        """For the summary."""
        return {"calls": [asdict(call) for call in self.calls], "opinions": self.opinions,
                "wrong_calls": self.wrong}


def main() -> None:
    """The mixed step."""
    p = arguments()
    p.add_argument("--port", type=int, required=True)
    args = p.parse_args()
    problems = choose_problems(load_problems(), args.problems, args.seed)

    def work(client: tangram_hpc.Client,
             plans: list[TrajectoryScript]) -> tuple[list[Driven], dict[str, Any]]:
        rank = MixedDemoRank(client, problems, args.scale, args.port)
        return asyncio.run(rank.all_of(plans)), rank.told()

    run_step(args, problems, work)


if __name__ == "__main__":
    main()
