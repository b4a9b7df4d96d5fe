"""A small training in float64 whose core is a real MPI world and whose hybrid replicas are real
processes; and the same training as plain gradient accumulation, to hold it against.

    mpiexec -n N python tests/helpers/hybrid_rig.py core SCENARIO.json
    python tests/helpers/hybrid_rig.py member SCENARIO.json NUMBER
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

INPUTS, HIDDEN = 5, 7
SIZE = HIDDEN * INPUTS + HIDDEN + HIDDEN + 1
PATIENT_S = 150.0  # a deadline that only ends a hang
Vector = np.ndarray


# ---- the mathematics -----------------------------------------------------------------------------


def begin_with(shard: int) -> Vector:
    """The first parameters."""
    return np.random.default_rng(shard).normal(0, 0.5, SIZE)


def gradient(params: Vector, samples: list[Any], shard: int) -> Vector:
    """The sum over samples of the gradient of a tanh network's squared error."""
    total = np.zeros_like(params)
    w = params[: HIDDEN * INPUTS].reshape(HIDDEN, INPUTS)
    b, v = params[HIDDEN * INPUTS : -HIDDEN - 1], params[-HIDDEN - 1 : -1]
    for sample in samples:
        dice = np.random.default_rng([sample, shard])
        x, y = dice.normal(size=INPUTS), dice.normal()
        h = np.tanh(w @ x + b)
        e = v @ h + params[-1] - y
        back = e * v * (1 - h * h)
        total += np.concatenate([np.outer(back, x).ravel(), back, e * h, [e]])
    return total


class Adam:
    """The optimizer; what it does depends on all steps before."""

    def __init__(self) -> None:
        self.m, self.v, self.t = np.zeros(SIZE), np.zeros(SIZE), 0

    def step(self, params: Vector, grad: Vector) -> Vector:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = 0.99 * self.v + 0.01 * grad * grad
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.99**self.t)
        return params - 0.01 * m / (np.sqrt(v) + 1e-8)


def samples_of(step: int, core: int) -> list[int]:
    """What a core is to learn in a step; now and then fewer than there are helpers."""
    count = random.Random(step * 31 + core).choice([0, 1, 2, 5, 8, 11])
    return [step * 10_000 + core * 100 + n for n in range(count)]


def plain(steps: int, cores: int, shard: int) -> Vector:
    """The same training by one process, sample after sample."""
    params, adam = begin_with(shard), Adam()
    for step in range(steps):
        every = [sample for core in range(cores) for sample in samples_of(step, core)]
        total = np.zeros(SIZE)
        for sample in every:
            total += gradient(params, [sample], shard)
        params = adam.step(params, total / max(1, len(every)))
    return params


# ---- a member ------------------------------------------------------------------------------------


class RigCallbacks:
    """The callbacks of this trainer's members. Serving rollouts is shown by a file that exists."""

    def __init__(self, told: dict[str, Any], number: int) -> None:
        self._shard, self._slow_s = number % told["width"], told["slow_s"]
        self._serves = Path(told["folder"], f"serves-{number}")
        self.start_rollouts()

    def stop_rollouts(self) -> None:
        time.sleep(self._slow_s)
        self._serves.unlink()

    def start_rollouts(self) -> None:
        self._serves.touch()

    def gradient(self, params: Vector, samples: list[Any]) -> Vector:
        assert not self._serves.exists(), "it serves rollouts and trains at once"
        assert not params.flags.writeable or params.base is not None
        time.sleep(self._slow_s)
        return gradient(params, samples, self._shard)


def member(told: dict[str, Any], number: int, incarnation: int = -1) -> None:
    """A member's process."""
    from tangram_hpc.libra.live.member import Member
    from tangram_hpc.storage.access import read_access

    Path(told["folder"], f"pid-{number}").write_text(str(os.getpid()))
    incarnation = time.time_ns() if incarnation < 0 else incarnation
    Member(read_access(Path(told["access"])), number, incarnation, RigCallbacks(told, number)).run()


# ---- the core ------------------------------------------------------------------------------------


class Director:
    """On rank 0: decides before each step what the signal says and which member dies when."""

    def __init__(self, told: dict[str, Any], core: Any) -> None:
        self._told, self._core, self._dice = told, core, random.Random(told["seed"])
        self.version, self.killed, self.trace = 0, [], []
        self._todo = list(told.get("kill_at", []))
        self._struck: list[int] = []
        self._deadline = time.monotonic() + PATIENT_S
        self._active_for = 0
        self.in_step = ""  # what to do while the step's gradients are computed

    def say(self, planned: int, step: int) -> None:
        from tangram_hpc.domain.hybrid import PipelineSignal

        self.version += 1
        ratio = (0, 1000) if planned == 0 else (1000, 1000)
        self._core.coordinator.signal(PipelineSignal(self.version, step, *ratio, planned=planned))

    def count(self, end: str) -> int:
        return sum(news.end.value == end for news in self._core.coordinator.ended_joins)

    def over(self, step: int) -> bool:
        """Called before a step; returns True when enough has been seen."""
        assert time.monotonic() < self._deadline, (step, self.trace[-20:], self._todo)
        states = [state.value for state in self._core.coordinator.states()]
        self.trace.append(states)
        return {"churn": self._churn, "kill": self._kill, "hang": self._kill}[
            self._told["mode"]](step, states)

    def _churn(self, step: int, states: list[str]) -> bool:
        if self._dice.random() < 0.4:
            self.say(self._dice.randint(0, len(states)), step)
        elif self._dice.random() < 0.5:  # let those who are on their way come through
            time.sleep(0.05)
        return step >= 30 and self.count("JOINED") >= 6 and self.count("LEFT") >= 4

    def _kill(self, step: int, states: list[str]) -> bool:
        state = states[0]
        self._active_for = self._active_for + 1 if state == "ACTIVE" else 0
        self.in_step = ""
        if state in ("LOST", "RETURNING"):
            time.sleep(0.05)
        elif self._active_for >= 3:
            if not self._todo:
                return (self.count("LOST") >= len(self.killed)
                        or bool(self._told.get("cluster")))  # there one dies on its way home
            if self._todo[0] == "in-step LEAVING":
                self.in_step = "leave"
            elif self._todo[0] not in ("ACTIVE", "in-step ACTIVE"):  # or it was passed too quickly
                self.say(0, step)
                self._at("LEAVING")
        else:
            self.say(1, step)
            time.sleep(0.02)
        self._at(state)
        if state == "ACTIVE" and self._todo and self._todo[0] == "in-step ACTIVE":
            self.in_step = "kill"
        return False

    def _at(self, state: str) -> None:
        if self._todo and self._todo[0] == state and state in ("ACTIVATING", "ACTIVE", "LEAVING"):
            self._strike()

    def _strike(self) -> None:
        number = self._told["replicas"][0][-1]
        pid = int(Path(self._told["folder"], f"pid-{number}").read_text())
        if pid in self._struck:
            return  # its end has not been noticed yet
        self._struck.append(pid)
        self.killed.append(self._todo.pop(0))
        os.kill(pid, signal.SIGSTOP if self._told["mode"] == "hang" else signal.SIGKILL)

    def computing(self) -> None:
        """Called while the core computes, and so do the members."""
        if self.in_step == "leave":
            self.say(0, 0 if not self.trace else len(self.trace))
        if self.in_step:
            time.sleep(self._told["slow_s"] / 2)
            self._strike()
        self.in_step = ""

    def news(self, order: Any) -> None:
        """An order is about to go out: what its stage is named for may be the end of the member."""
        stage = getattr(order, "stage", None)
        if (stage is not None and self._todo and self._todo[0] == stage.value
                and order.member == self._told["replicas"][0][-1]):
            self._strike()


def core(told: dict[str, Any]) -> None:
    """A core rank."""
    from mpi4py import MPI

    from tangram_hpc.libra.hybrid.hybrid_signal import PoolRules
    from tangram_hpc.libra.live.core_trainer import CoreTrainer

    world = MPI.COMM_WORLD
    width = told["width"]
    shard = world.rank % width
    peers = world.Split(shard, world.rank)  # once, before anybody joins
    own = world.Split(world.rank // width, world.rank)  # a core's ranks: they compute together
    before = world.Get_group()
    heard: list[Any] = []
    director: Director | None = None

    def news(order: Any) -> None:
        if director is not None:
            director.news(order)

    def on_kill(number: int, incarnation: int) -> None:
        heard.append(number)
        os.kill(int(Path(told["folder"], f"pid-{number}").read_text()), signal.SIGKILL)

    cores = [list(range(n, n + width)) for n in range(0, world.size, width)]
    rules = PoolRules(cooldown_steps=0, retry_steps=0, ttl_steps=10**6,
                      stage_timeout_ns=round(told["stage_s"] * 1e9))
    pool = CoreTrainer(world, told["access"], cores, [], told["replicas"], rules=rules,
                      patience_s=told["patience_s"], on_order=news, on_kill=on_kill)
    if world.rank == 0:
        director = Director(told, pool)
    client = borrow(told, pool) if world.rank == 0 and told.get("cluster") else None
    params, adam, step, epochs = begin_with(shard), Adam(), 0, set()
    counted = 0

    def compute(at: Vector, samples: list[Any]) -> Vector:
        if director is not None:
            director.computing()
        together = np.array([len(samples)])
        own.Allreduce(MPI.IN_PLACE, together)
        assert together[0] == width * len(samples), "a core's ranks compute different samples"
        return gradient(at, samples, shard)

    while True:
        over = np.array([int(director.over(step)) if director is not None else 0])
        world.Bcast(over, root=0)
        if over[0]:
            break
        mine = samples_of(step, world.rank // width)
        total, plan = pool.step(step, step, params, mine, compute)
        epochs.add(plan.epoch)
        counted += len(plan.counting)
        sums = np.append(total, len(mine))
        peers.Allreduce(MPI.IN_PLACE, sums)
        params = adam.step(params, sums[:-1] / max(1, sums[-1]))
        assert MPI.Group.Compare(before, world.Get_group()) == MPI.IDENT
        step += 1
    every = world.gather({"shard": shard, "params": params.tolist(), "added": pool.channel.added,
                          "ignored": dict(pool.channel.ignored)}, root=0)
    if director is not None:
        assert pool.coordinator is not None
        told_ends = [[n.replica, n.generation, n.end.value, n.reason]
                     for n in pool.coordinator.ended_joins]
        Path(told["out"]).write_text(json.dumps(
            {"steps": step, "ranks": every, "news": told_ends, "epochs": len(epochs),
             "counted": counted, "killed": director.killed, "states": director.trace[-1],
             "heard": heard}))
    pool.close()
    world.Barrier()
    if client is not None:
        client.close()


def borrow(told: dict[str, Any], pool: Any) -> Any:
    """The members are actions of a broker, and their GPUs lent."""
    from tangram_hpc import connect
    from tangram_hpc.libra.live.leased_member import add_leased_member

    client = connect(Path(told["cluster"]))
    for number in (number for replica in told["replicas"] for number in replica):
        add_leased_member(pool.coordinator, number, 0,
             lambda number, incarnation: client.submit(member, told, number, incarnation, gpus=1,
                                                       retries=0))
    return client


# ---- from a test ---------------------------------------------------------------------------------


def run(folder: Path, mpiexec: str, ranks: int, **scenario: Any) -> dict[str, Any]:
    """Runs a scenario and returns what rank 0 wrote. Members that die are started again."""
    told = {"width": 1, "slow_s": 0.0, "stage_s": 60.0, "patience_s": 60.0, "seed": 1,
            "folder": str(folder), "access": str(folder / "access.json"),
            "out": str(folder / "out.json"), **scenario}
    path = folder / "scenario.json"
    path.write_text(json.dumps(told))
    me = [sys.executable, __file__]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(
        str(Path(__file__).resolve().parents[up]) for up in (1, 2)),
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    over = threading.Event()
    ended: list[int] = []

    def keep(number: int) -> None:
        while not over.is_set():
            if not Path(told["access"]).exists():
                time.sleep(0.01)
                continue
            child = subprocess.Popen([*me, "member", str(path), str(number)], env=environ,
                                     stdin=subprocess.DEVNULL)
            ended.append(child.wait())
            if ended[-1] == 0:
                return

    numbers = [] if told.get("cluster") else [n for members in told["replicas"] for n in members]
    keepers = [threading.Thread(target=keep, args=(number,), daemon=True) for number in numbers]
    for keeper in keepers:
        keeper.start()
    try:
        done = subprocess.run([mpiexec, "-n", str(ranks), me[0], "-m", "mpi4py", me[1], "core",
                               str(path)], env=environ, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=2 * PATIENT_S, check=False)
    finally:
        over.set()
    assert done.returncode == 0, done.stdout + done.stderr
    for keeper in keepers:
        keeper.join(20)
        assert not keeper.is_alive(), "a member outlives its coordinator"
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    result["ended"] = ended
    result["serving"] = sorted(p.name for p in folder.glob("serves-*"))
    return result


def worst(told: dict[str, Any], ranks: int, width: int) -> float:
    """The largest relative difference of any rank's parameters from those of plain accumulation."""
    most = 0.0
    for rank in told["ranks"]:
        right = plain(told["steps"], ranks // width, rank["shard"])
        most = max(most, float(np.abs(np.array(rank["params"]) - right).max()
                               / np.abs(right).max()))
    return most


if __name__ == "__main__":
    scenario = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "core":
        core(scenario)
    else:
        member(scenario, int(sys.argv[3]))
