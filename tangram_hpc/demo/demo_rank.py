"""One trainer rank of the demo: drives its trajectories concurrently, scores, reduces over MPI.

Law: what a trainer's author would write with the public client and nothing else; the plans decide
everything, this file only carries them out and measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import tangram_hpc

from . import grpo
from .policy import (
    GROUP,
    RunStep,
    Think,
    TrajectoryResult,
    TrajectoryScript,
    Write,
    steps,
    trajectory_plan,
)
from .problems import Problem, choose_problems, load_problems
from .walls import isolation_options

SESSION_MEM_MIB = 64
RUN_TIMEOUT_S = 60.0


@dataclass
class Row:
    """One CPU action as its trajectory saw it; seconds. `admission_s` is the part of `queue_s`
    that its session waited to be opened (in the trajectory's first action)."""

    trajectory: str
    kind: str
    act_s: float
    queue_s: float
    exec_s: float
    admission_s: float = 0.0
    opening_s: float = 0.0

    @property
    def system_s(self) -> float:
        """Neither waiting for units nor running."""
        return max(0.0, self.act_s - self.queue_s - self.exec_s)


@dataclass
class Driven:
    """One trajectory's end."""

    plan: TrajectoryScript
    result: TrajectoryResult
    rows: list[Row] = field(default_factory=list)
    think_s: float = 0.0


async def drive(client: tangram_hpc.Client, plan: TrajectoryScript, scale: float,
                asked: Any) -> Driven:
    """Carries one trajectory out; its session is open from before its first thought to its end."""
    began = time.monotonic()
    rows: list[Row] = []
    thought = 0.0
    async with client.session(mem=SESSION_MEM_MIB, name=plan.name, **asked) as session:
        opening_s = time.monotonic() - began
        todo = steps(plan, sys.executable)
        step = next(todo)
        while True:
            code = None
            match step:
                case Think(seconds=seconds):
                    thought += seconds * scale
                    await asyncio.sleep(seconds * scale)
                case Write(path=path, text=text):
                    await session.write(path, text)
                case RunStep(kind=kind, argv=argv, files=files):
                    first = (session.wait_s, opening_s) if not rows else (0.0, 0.0)
                    code = await _run(session, kind, argv, files, rows, plan.name, *first)
            try:
                step = todo.send(code) if code is not None else next(todo)
            except StopIteration as end:
                return Driven(plan, end.value, rows, thought)


async def _run(session: tangram_hpc.Session, kind: str, argv: Any, files: Any, rows: list[Row],
               trajectory: str, admission_s: float, opening_s: float) -> int:
    future = session.submit(list(argv), files=dict(files), name=kind, timeout=RUN_TIMEOUT_S)
    result = await future
    if result.exit_code not in (0, 1) or (result.reason and not result.ok):
        raise tangram_hpc.ActionFailed(f"{trajectory} {kind}: the sandbox failed: {result}")
    told = future.details
    assert told is not None
    rows.append(Row(trajectory, kind, told.act_s + opening_s, told.queue_s + admission_s,
                    told.exec_s, admission_s, opening_s))
    return int(result.exit_code)


def settle(request: Any, pause_s: float = 0.002) -> None:
    """Waits for an MPI request without spinning a core that actions could use."""
    while not request.Test():
        time.sleep(pause_s)


async def all_of(client: tangram_hpc.Client, plans: list[TrajectoryScript],
                 scale: float) -> list[Driven]:
    """All of this rank's trajectories, at once."""
    asked = isolation_options(client)
    return list(await asyncio.gather(*(drive(client, plan, scale, asked) for plan in plans)))


def reduce_advantages(comm: Any, driven: list[Driven], group_of: dict[int, int]) -> dict[str, Any]:
    """GRPO over all ranks: each holds some members of each group, the sums meet by allreduce."""
    groups = np.array([group_of[d.plan.index] for d in driven], dtype=np.int64)
    rewards = np.array([d.result.reward for d in driven], dtype=np.float64)
    sums = grpo.partial(groups, rewards, len(group_of))
    settle(comm.Ibarrier())
    comm.Allreduce(sums.copy(), sums)
    advantages = grpo.advantages_from_sums(groups, rewards, sums)
    mixed = int(np.count_nonzero((sums[:, 1] > 0) & (sums[:, 1] < sums[:, 0])))
    return {"advantage_abs_mean": float(np.abs(advantages).mean()), "mixed_groups": mixed}


def arguments() -> argparse.ArgumentParser:
    """What every program of a rank is told."""
    p = argparse.ArgumentParser()
    p.add_argument("--problems", type=int, required=True)
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("--scale", type=float, required=True)
    p.add_argument("--out", required=True)
    return p


def run_step(args: argparse.Namespace, problems: list[Problem],
             work: Callable[[tangram_hpc.Client, list[TrajectoryScript]],
                            tuple[list[Driven], dict[str, Any]]]
             ) -> None:
    """Runs one step and leaves rank 0's summary of all ranks in `args.out`. `work` drives this
    rank's plans; what it has to tell besides goes into the summary."""
    client = tangram_hpc.connect(name="demo")
    comm = tangram_hpc.comm
    group_of = {problem.index: g for g, problem in enumerate(problems)}
    plans = [trajectory_plan(problem, member, args.seed)
             for problem in problems for member in range(GROUP)
             if member % comm.size == comm.rank]
    settle(comm.Ibarrier())
    began, began_ns = time.monotonic(), time.time_ns()
    driven, more = work(client, plans)
    own_step_s = time.monotonic() - began
    reduced = reduce_advantages(comm, driven, group_of)
    step_s = time.monotonic() - began
    wrong = [d.plan.name for d in driven if d.result.reward != d.plan.expected_reward
             or d.result.reward != d.result.expected]
    mine = {
        "rows": [asdict(row) for d in driven for row in d.rows],
        "rewards": [d.result.reward for d in driven], "wrong": wrong,
        "expected": [d.plan.expected_reward for d in driven],
        "think_s": sum(d.think_s for d in driven), "step_s": step_s, "own_step_s": own_step_s,
        "began_ns": began_ns, "via": client.via, **more,
    }
    settle(comm.Ibarrier())
    everyone = comm.gather(mine, root=0)
    if comm.rank == 0:
        with open(args.out, "w") as file:
            json.dump({"ranks": everyone, **reduced}, file)
    settle(comm.Ibarrier())
    client.close()


def main() -> None:
    """The coding step."""
    args = arguments().parse_args()
    problems = choose_problems(load_problems(), args.problems, args.seed)
    run_step(args, problems,
             lambda client, plans: (asyncio.run(all_of(client, plans, args.scale)), {}))


if __name__ == "__main__":
    main()
