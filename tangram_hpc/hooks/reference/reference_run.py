"""One run of the reference trainer: what is trained, on what, and the figures of it.

Law: a run is its plan; a cluster may serve one after another. Must not import torch: without it one
line says what to install.
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
class Plan:
    """What to train, and on what.

    Attributes:
        prompts, group: prompts of a rank in a step, and trajectories of each.
        hidden: width of the model.
        stale: steps by which the weights that write a turn may lag behind those it trains;
            at least 2, as the next step's are asked for before this step's weights are published.
        router: turns go where the broker's router sends them, not to the least loaded service.
        lend: from which step to which one replica trains; empty: never.
        planner: the planner says when one does, from what was measured; not together with `lend`.
        patience_s: how long the step before waits for the replica's process, which in a real
            training starts well within a step and in a tiny one does not; 0: not at all.
        slots: devices that the services and the replica share.
        device: of the core's ranks and the replica.
        served: where model and newer weights lie that the services have; the folder, if empty.
        base: the version that this run's first weights have; not 0 where others were served before.
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
        """Raises InvalidInput: a field makes no sense; names it."""
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
        """Whether there is a replica at all."""
        return bool(self.lend) or self.planner


@contextmanager
def cluster_of(plan: Plan) -> Iterator[LocalCluster]:
    """A cluster of this machine's own on which this plan can run, and others that differ from it
    in what is on and off. The untrained model is made in the plan's folder."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise MissingExtra(f"the reference trainer needs {', '.join(missing)}; "
                           f"{how_to_install('torch,mpi')}")
    from .reference_model import make_policy

    make_policy(Path(plan.folder) / "model", plan.seed, plan.hidden)
    with LocalCluster(max(4, plan.ranks * 2), devices=f"cpu:{plan.slots}", mem_mib=8192,
                      home=Path(plan.folder) / "home") as cluster:
        yield cluster


def run(plan: Plan) -> dict[str, Any]:
    """Trains on a cluster of this machine's own; the figures. Raises as `run_on`."""
    with cluster_of(plan) as cluster:
        return run_on(cluster, plan)


def run_on(cluster: LocalCluster, plan: Plan) -> dict[str, Any]:
    """Trains there; the figures.

    Raises:
        TangramError: a rank failed; the message holds the end of its words.
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


def figures(plan: Plan, told: dict[str, Any]) -> dict[str, Any]:
    """What a run was like, from what rank 0 told."""
    steps, part = told["steps"], max(1, plan.steps // 4)
    rewards = [step["reward"] for step in steps]
    told_plan = {"plan": plan_figures(told["plan"])} if told["plan"] else {}
    told_router = {"router": _routed(told)} if told["router"] else {}

    def middle(name: str) -> float:
        return statistics.median(step[name] for step in steps[1:])

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
    """What the router decided: the broker's counts; and of the turns after a tool's return, which
    are those that anything is known of, the share that was right, and what naming the more frequent
    bucket each time would have given."""
    judged, right, long = (told["turns"][name] for name in ("judged", "right", "long"))
    return {**told["router"], "after_returns": judged,
            "accuracy_after_returns": right / judged if judged else None,
            "base_rate": max(long, judged - long) / judged if judged else None}
