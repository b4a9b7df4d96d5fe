"""One run of the reference trainer: what is trained, on what, and the metrics of the run.

A run is described by its plan alone; one cluster may serve several runs one after another. This
module must not import torch: without it, one line says what to install.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tangram_hpc import InvalidInput, LocalCluster, TangramError
from tangram_hpc.errors import MissingExtra, how_to_install
from tangram_hpc.training import JoinOutcome, mpiexec

from .reference_planning import figures as plan_figures
from .reference_routes import SERVICES

_RANK = "tangram_hpc.hooks.reference.reference_rank"
_NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "mpi4py")


@dataclass(frozen=True)
class RunPlan:
    """What to train, and on what.

    Attributes:
        folder: the folder of the run: model, plan, logs and results.
        steps: how many steps are trained; at least 2.
        ranks: how many ranks always train.
        prompts: prompts of each rank in a step.
        group: trajectories of each prompt; at least 2.
        seed: the seed of the weights, the prompts and the sampling.
        lr: the learning rate of Adam.
        hidden: the width of the model; a multiple of 16.
        stale: the largest number of steps by which the weights that generate a turn may be older
            than the weights that the turn trains. At least 2, because the next step's turns are
            submitted before this step's weights are published.
        router: whether the broker's router chooses the services; otherwise the least loaded is
            taken.
        lend: (from, to): the steps in which one replica trains; empty for never.
        planner: whether the planner decides when a replica trains; not together with `lend`.
        patience_s: how many seconds the step before the first one with a replica waits for the
            replica's process; 0: it does not wait. In a real training the process starts well
            within a step; here a step is too short.
        slots: the devices that the services and the replica share.
        sandboxes: how many sandboxes each rank keeps open.
        device: the device of the ranks and the replica, "cpu" or "cuda".
        served: the folder with the model and the newer weights of the services; empty for `folder`.
        base: the version of this run's first weights; larger than 0 if the cluster has served
            another run.
    """

    folder: str
    steps: int = 24
    ranks: int = 2
    prompts: int = 3
    group: int = 16
    seed: int = 1
    lr: float = 0.006
    hidden: int = 64
    stale: int = 2
    router: bool = False
    lend: tuple[int, ...] = ()
    planner: bool = False
    patience_s: float = 240.0
    slots: int = 3
    sandboxes: int = 4
    device: str = "cpu"
    served: str = ""
    base: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidInput, which names the field, if a field is out of range."""
        least = {"steps": 2, "ranks": 1, "prompts": 1, "group": 2, "stale": 2, "sandboxes": 1,
                 "slots": 2 if self.pool else 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InvalidInput(f"{name}: {getattr(self, name)} must be at least {low}")
        if self.device not in ("cpu", "cuda"):
            raise InvalidInput(f"device: {self.device!r} is neither cpu nor cuda")
        if self.hidden < 16 or self.hidden % 16:
            raise InvalidInput(f"hidden: {self.hidden} must be a multiple of 16")
        if self.lend and not 0 <= self.lend[0] < self.lend[-1]:
            raise InvalidInput(f"lend: from step {self.lend[0]} to {self.lend[-1]} there is none; "
                               "take a later end")
        if self.lend and self.planner:
            raise InvalidInput("lend: the planner says when a replica is lent; leave one out")

    @property
    def pool(self) -> bool:
        """Whether a replica may train in this run."""
        return bool(self.lend) or self.planner


Plan = RunPlan  # the old name, kept for one release


@contextmanager
def cluster_of(plan: RunPlan) -> Iterator[LocalCluster]:
    """Starts a cluster on this machine and makes the untrained model in the plan's folder.

    Args:
        plan: the plan. The cluster also serves plans that differ from it only in `router`, `lend`,
            `planner`, `folder` and `base`.

    Raises:
        MissingExtra: a package is missing; the message says how to install it.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise MissingExtra(f"the reference trainer needs {', '.join(missing)}; "
                           f"{how_to_install('torch,mpi')}")
    from .reference_model import make_policy

    make_policy(Path(plan.folder) / "model", plan.seed, plan.hidden)
    with LocalCluster(max(4, plan.ranks * 2), devices=f"cpu:{plan.slots}", mem_mib=8192,
                      home=Path(plan.folder) / "home") as cluster:
        yield cluster


def run(plan: RunPlan) -> dict[str, Any]:
    """Trains on a new cluster on this machine; returns and raises what `run_on` does."""
    with cluster_of(plan) as cluster:
        return run_on(cluster, plan)


def run_on(cluster: LocalCluster, plan: RunPlan) -> dict[str, Any]:
    """Trains on a cluster.

    Returns:
        The metrics of the run, see `figures`.

    Raises:
        TangramError: a rank failed; the message holds the end of its output.
    """
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(
        {**asdict(plan), "served": plan.served or plan.folder}))
    environ = {**os.environ, "TANGRAM_ACCESS": str(cluster.access), "TANGRAM_GATEWAY": "1",
               "TANGRAM_WORLD_SIZE": str(plan.ranks + 1), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-m"]
    words = [mpiexec(), "-n", str(plan.ranks), *python, _RANK,
             str(folder / "plan.json"), ":", "-n", "1", *python, "tangram_hpc", "gateway"]
    log, out = folder / "ranks.log", folder / "out.json"
    with open(log, "wb") as file:
        world = subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, stdout=file,
                               stderr=file, check=False)
    if world.returncode != 0 or not out.exists():
        tail = log.read_text(errors="replace").strip()[-1500:]
        raise TangramError(f"the ranks failed (status {world.returncode}): {tail}")
    return figures(plan, json.loads(out.read_text()))


def figures(plan: RunPlan, told: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a run, from the results of rank 0."""
    steps, part = told["steps"], max(1, plan.steps // 4)
    rewards = [step["reward"] for step in steps]
    told_plan = {"plan": plan_figures(told["plan"])} if told["plan"] else {}
    told_router = {"router": _routed(told)} if told["router"] else {}

    def middle(name: str) -> float:
        value: float = statistics.median(step[name] for step in steps[1:])
        return value

    return {
        "pool": plan.pool, "routed": plan.router, "steps": len(steps),
        "reward_first": statistics.fmean(rewards[:part]),
        "reward_last": statistics.fmean(rewards[-part:]),
        "solved_last": statistics.fmean(step["solved"] for step in steps[-part:]),
        "turns_first": statistics.fmean(step["turns"] for step in steps[:part]),
        "turns_last": statistics.fmean(step["turns"] for step in steps[-part:]),
        "step_s": middle("step_s"), "train_s": middle("train_s"),
        "rollout_s": middle("rollout_s"), "stale_max": max(step["stale"] for step in steps),
        "steps_with_a_replica": sum(step["replicas"] > 0 for step in steps),
        "joined": sum(end == JoinOutcome.JOINED.value for _, end, _ in told["news"]),
        "added": told["added"], "ignored": told["ignored"], "news": told["news"],
        "buckets": {name: told["turns"][name] for name in SERVICES}, **told_router, **told_plan,
        "rewards": [round(reward, 3) for reward in rewards]}


def _routed(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the router's metrics: the broker's counts and two shares. The shares are of the turns
    after a tool's return, because nothing is known of the others: the share of turns whose bucket
    was right, and the share that would be right if all turns got the more frequent bucket."""
    judged, right, long = (told["turns"][name] for name in ("judged", "right", "long"))
    return {**told["router"], "after_returns": judged,
            "accuracy_after_returns": right / judged if judged else None,
            "base_rate": max(long, judged - long) / judged if judged else None}
