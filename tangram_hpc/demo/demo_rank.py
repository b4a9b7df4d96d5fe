"""One trainer rank of the demo: runs its trajectories concurrently, scores them, reduces over MPI.

The file contains the code that the author of a trainer would write with the public client. It makes
no decisions: the plans of `policy.py` say what each trajectory does, and this file carries them out
and measures.
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
from .demo_isolation import isolation_options
from .policy import (
    GROUP,
    AwaitPolicy,
    RunStep,
    TrajectoryResult,
    TrajectoryScript,
    Write,
    steps,
    trajectory_plan,
)
from .problems import Problem, choose_problems, load_problems

SESSION_MEM_MIB = 64
RUN_TIMEOUT_S = 60.0


@dataclass
class Row:
    """The times of one CPU action as its trajectory saw them, in seconds.

    Attributes:
        trajectory: Name of the trajectory.
        kind: `examples` or `tests`.
        act_s: From submission to result; the first action also holds `opening_s`.
        queue_s: Waiting for units; the first action also holds `admission_s`.
        exec_s: Run time of the process.
        admission_s: How long the session waited to be admitted; 0 but for the first action.
        opening_s: How long the session took to open, admission included; 0 but for the first
            action.
    """

    trajectory: str
    kind: str
    act_s: float
    queue_s: float
    exec_s: float
    admission_s: float = 0.0
    opening_s: float = 0.0

    @property
    def system_s(self) -> float:
        """Returns the time that was neither waiting for units nor running, in seconds."""
        return max(0.0, self.act_s - self.queue_s - self.exec_s)


@dataclass
class TrajectoryRun:
    """How one trajectory ended: its plan, its result, the rows of its actions and its policy
    latency.
    """

    plan: TrajectoryScript
    result: TrajectoryResult
    rows: list[Row] = field(default_factory=list)
    latency_s: float = 0.0


async def drive(client: tangram_hpc.Client, plan: TrajectoryScript, scale: float,
                options: Any) -> TrajectoryRun:
    """Carries out one trajectory. Its session is open from before the first policy latency to the
    end.
    """
    began = time.monotonic()
    rows: list[Row] = []
    latency_s = 0.0
    async with client.session(mem=SESSION_MEM_MIB, name=plan.name, **options) as session:
        opening_s = time.monotonic() - began
        todo = steps(plan, sys.executable)
        step = next(todo)
        while True:
            code = None
            match step:
                case AwaitPolicy(seconds=seconds):
                    latency_s += seconds * scale
                    await asyncio.sleep(seconds * scale)
                case Write(path=path, text=text):
                    await session.write(path, text)
                case RunStep(kind=kind, argv=argv, files=files):
                    first = (session.wait_s, opening_s) if not rows else (0.0, 0.0)
                    code = await _run(session, kind, argv, files, rows, plan.name, *first)
            try:
                step = todo.send(code) if code is not None else next(todo)
            except StopIteration as end:
                return TrajectoryRun(plan, end.value, rows, latency_s)


async def _run(session: tangram_hpc.Session, kind: str, argv: Any, files: Any, rows: list[Row],
               trajectory: str, admission_s: float, opening_s: float) -> int:
    future = session.submit(list(argv), files=dict(files), name=kind, timeout=RUN_TIMEOUT_S)
    result = await future
    if result.exit_code not in (0, 1) or (result.reason and not result.ok):
        raise tangram_hpc.ActionFailed(f"{trajectory} {kind}: the sandbox failed: {result}")
    details = future.details
    assert details is not None
    rows.append(Row(trajectory, kind, details.act_s + opening_s, details.queue_s + admission_s,
                    details.exec_s, admission_s, opening_s))
    return int(result.exit_code)


def settle(request: Any, pause_s: float = 0.002) -> None:
    """Waits for an MPI request without occupying a core that actions could use."""
    while not request.Test():
        time.sleep(pause_s)


async def all_of(client: tangram_hpc.Client, plans: list[TrajectoryScript],
                 scale: float) -> list[TrajectoryRun]:
    """Runs all trajectories of this rank concurrently."""
    options = isolation_options(client)
    return list(await asyncio.gather(*(drive(client, plan, scale, options) for plan in plans)))


def reduce_advantages(comm: Any, runs: list[TrajectoryRun],
                      group_of: dict[int, int]) -> dict[str, Any]:
    """Computes the GRPO advantages over all ranks.

    Each rank holds some members of each group; the sums of the groups are added by an allreduce.

    Returns:
        The mean absolute advantage of this rank's trajectories, and how many groups have both
        passing and failing members.
    """
    groups = np.array([group_of[run.plan.index] for run in runs], dtype=np.int64)
    rewards = np.array([run.result.reward for run in runs], dtype=np.float64)
    sums = grpo.partial(groups, rewards, len(group_of))
    settle(comm.Ibarrier())
    comm.Allreduce(sums.copy(), sums)
    advantages = grpo.advantages_from_sums(groups, rewards, sums)
    mixed = int(np.count_nonzero((sums[:, 1] > 0) & (sums[:, 1] < sums[:, 0])))
    return {"advantage_abs_mean": float(np.abs(advantages).mean()), "mixed_groups": mixed}


def rank_parser() -> argparse.ArgumentParser:
    """Returns the parser of the arguments that the programs of all ranks take."""
    p = argparse.ArgumentParser()
    p.add_argument("--problems", type=int, required=True)
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("--scale", type=float, required=True)
    p.add_argument("--out", required=True)
    return p


def run_step(args: argparse.Namespace, problems: list[Problem],
             work: Callable[[tangram_hpc.Client, list[TrajectoryScript]],
                            tuple[list[TrajectoryRun], dict[str, Any]]]
             ) -> None:
    """Runs one step; rank 0 writes the summary of all ranks to `args.out`.

    Args:
        args: The parsed arguments of `rank_parser`.
        problems: The problems of this step, the same in all ranks.
        work: Runs this rank's plans; returns the runs, and further entries of the summary.
    """
    client = tangram_hpc.connect(name="demo")
    comm = tangram_hpc.comm
    group_of = {problem.index: g for g, problem in enumerate(problems)}
    plans = [trajectory_plan(problem, member, args.seed)
             for problem in problems for member in range(GROUP)
             if member % comm.size == comm.rank]
    settle(comm.Ibarrier())
    began, began_ns = time.monotonic(), time.time_ns()
    runs, more = work(client, plans)
    own_step_s = time.monotonic() - began
    reduced = reduce_advantages(comm, runs, group_of)
    step_s = time.monotonic() - began
    wrong = [run.plan.name for run in runs if run.result.reward != run.plan.expected_reward
             or run.result.reward != run.result.expected]
    mine = {
        "rows": [asdict(row) for run in runs for row in run.rows],
        "rewards": [run.result.reward for run in runs], "wrong": wrong,
        "expected": [run.plan.expected_reward for run in runs],
        "think_s": sum(run.latency_s for run in runs), "step_s": step_s, "own_step_s": own_step_s,
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
    """Runs the coding step."""
    args = rank_parser().parse_args()
    problems = choose_problems(load_problems(), args.problems, args.seed)
    run_step(args, problems,
             lambda client, plans: (asyncio.run(all_of(client, plans, args.scale)), {}))


if __name__ == "__main__":
    main()
