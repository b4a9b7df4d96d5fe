"""Scores what the scheduler learns against what then happens, on loads that it has not seen.

Each load is simulated once under `elastic`, with durations that are learned from nothing, and the
line says how good the estimates were:

1. *Durations.* For each class: the estimated work over the true mean of the class when 1, 3, 10, 30
   and 100 of its actions had ended, and beside it a running mean of those that ended.
2. *Serial fractions.* The learned value at the same moments beside the true mean of the class.
3. *Forecasts.* At regular times one waiting action and one running one are drawn. `start` is when
   `tangram explain` expects the waiting action to start, `waiting_end` when that should end, `end`
   when the running one should end: how many were known, and how many of these within 25 % of the
   time from the question on; how many intervals were stated, and the share of true times inside,
   beside their level. `told` is the same with durations that are given, which is the most that
   better estimates can bring; its intervals are points.

Loads: `coding-200` of the package; three that are generated with what makes learning hard (a class
that mixes short and long actions, one whose works double halfway, a burst whose short actions end
first); and with `--shared FOLDER` the workload files of that folder and the traces below
`FOLDER/traces` (docs/SCHEDULER.md says which they are and what is made of them).
"""

from __future__ import annotations

import argparse
import csv
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import common

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.forecast import expected_end, forecast
from tangram_hpc.scheduler.intervals import LEVEL, Interval, end_interval, start_interval
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.workload import (
    Cluster,
    WorkAction,
    Workload,
    all_actions,
    read_cluster,
    read_workload,
    to_ns,
)
from tangram_hpc.simulator.world import SimulationWorld

COUNTS = (1, 3, 10, 30, 100)  # ended actions of a class at which its estimates are looked at
OWN = "coding-200"  # the package's workload, on 0.29 of its cluster
CLUSTER = {"nodes": [{"name": "c", "count": 1, "cpus": 232, "sockets": 2, "mem_mib": 4 << 20}]}
CLASS_MIN = 30  # classes with fewer actions have no row of their own
FORECASTS = 200  # about as many questions of each kind are asked in a run
DEGREES = [1, 2, 4, 8, 16]
TOKENS_PER_S = 100  # how fast a policy is taken to write the tokens of a trace
KINDS = ("start", "end", "waiting_end")  # which forecasts are asked for
Of = tuple[str, str]  # key and name of a class


class Asked(NamedTuple):
    """An answer of `explain`: when it was asked for, the time that it expects, and its interval."""

    at: int
    told: int | None
    between: Interval | None


# ---- loads ------------------------------------------------------------------------------------


def generated(seed: int, scale: float) -> Iterator[tuple[str, Workload, Cluster]]:
    """Yields three loads that are hard to learn: each with its name, workload and cluster."""
    rng = random.Random(seed)

    def lognormal(mean: float, spread: float) -> float:
        return mean * rng.lognormvariate(-spread * spread / 2, spread)

    def mixture(turn: float) -> dict[str, Any]:
        long = rng.random() < 0.15
        return _action("pytest", lognormal(30.0 if long else 1.0, 0.5), DEGREES, 0.05)

    def drift(turn: float) -> dict[str, Any]:
        return _action("train", lognormal(4.0 if turn < 0.5 else 8.0, 0.5), DEGREES, 0.15)

    def burst(turn: float) -> dict[str, Any]:
        return _action("build", lognormal(20.0, 1.2), [1, 2, 4, 8], 0.1)

    count = max(4, round(60 * scale))
    cluster = _cluster(max(8, round(64 * scale)))
    yield "mixture", _trajectories(rng, count, 12, 2.0, mixture), cluster
    yield "drift", _trajectories(rng, count, 12, 2.0, drift), cluster
    yield "burst", _trajectories(rng, 5 * count, 1, 0.5, burst), cluster


def _action(name: str, work_s: float, degrees: list[int], serial: float,
            resource: str = "cpu") -> dict[str, Any]:
    return {"name": name, "resource": resource, "work_s": round(work_s, 4), "degrees": degrees,
            "serial": serial}


def _trajectories(rng: random.Random, count: int, turns: int, think_s: float,
                  draw: Callable[[float], dict[str, Any]]) -> Workload:
    """A workload with one action in each turn; `draw` is told how far the trajectory is, 0 to 1."""
    return _workload([
        (rng.uniform(0, 5), [(rng.expovariate(1 / think_s), draw(k / turns)) for k in range(turns)])
        for _ in range(count)])


def _workload(trajectories: Iterable[tuple[float, list[tuple[float, dict[str, Any]]]]]) -> Workload:
    """A workload of (start, [(think time, action)]) in seconds."""
    return Workload.model_validate({"name": "calibration", "trajectories": [
        {"trajectory": f"t{n}", "start_s": max(0.0, start), "session": {"mem_mib": 16},
         "turns": [{"think_s": think, "actions": [action]} for think, action in turns]}
        for n, (start, turns) in enumerate(trajectories)]})


def _cluster(cpus: int, gpus: int = 0, service: str = "") -> Cluster:
    return Cluster.model_validate({
        "nodes": [{"name": "n", "cpus": cpus, "gpus": gpus, "mem_mib": 1 << 24}],
        "services": [{"name": service, "restore_s": 2.0, "weights_mib": 1024}] if service else []})


def shared(folder: Path | None, scale: float) -> Iterator[tuple[str, Workload, Cluster]]:
    """The workload files of a folder on 0.29 of their clusters, but for the package's own, and its
    traces; nothing where they are not there."""
    if folder is None:
        return
    for path in sorted(folder.glob("*.jsonl")):
        cluster = folder / f"cluster-{path.stem}-0.29x.json"
        if cluster.exists() and path.stem != OWN:
            yield path.stem, read_workload(path), read_cluster(cluster)
    for name, file, made in (("agent-steps", "mini_swe_gemini3_steps.csv", agent_steps),
                             ("sandbox-starts", "mini_swe_gemini3_sandboxes.csv", sandbox_starts),
                             ("model-calls", "AzureLLMInferenceTrace_code.csv", model_calls)):
        if (folder / "traces" / file).exists():
            with (folder / "traces" / file).open(newline="") as rows:
                yield name, *made(list(csv.DictReader(rows)), scale)


def agent_steps(rows: list[dict[str, str]], scale: float) -> tuple[Workload, Cluster]:
    """Bash commands of coding agents, by their class. The trace has the time from one request to
    the policy to the next one; what the policy needs to write its tokens is taken as thinking, the
    rest as the command's run time."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        found[row["instance_id"]].append(row)
    trajectories = []
    for steps in list(found.values())[:max(4, round(len(found) * scale))]:
        turns = []
        for row in steps:
            if not row["gap_to_next_s"]:
                continue
            gap = float(row["gap_to_next_s"])
            think = min(gap, float(row["completion_tokens"] or 0) / TOKENS_PER_S)
            turns.append((think, _action(row["cmd_class"], max(0.05, gap - think), [1], 0.0)))
        if turns:
            trajectories.append((float(steps[0]["t_rel_s"]), turns))
    return _workload(trajectories), _cluster(5)


def sandbox_starts(rows: list[dict[str, str]], scale: float) -> tuple[Workload, Cluster]:
    """Starts of containers."""
    kept = rows[:max(30, round(len(rows) * scale))]
    return _workload([(float(row["start_rel_s"]), [
        (0.0, _action("start", float(row["start_latency_s"]), [1], 0.0))]) for row in kept]
        ), _cluster(2)


def model_calls(rows: list[dict[str, str]], scale: float) -> tuple[Workload, Cluster]:
    """Requests to a language model, as calls of a service: 10,000 tokens of context a second are
    read, and TOKENS_PER_S written."""
    def at(row: dict[str, str]) -> datetime:
        return datetime.fromisoformat(row["TIMESTAMP"][:26])

    kept = rows[:max(30, round(len(rows) * scale))]
    return _workload([((at(row) - at(kept[0])).total_seconds(), [(0.0, _action(
        "code", int(row["ContextTokens"]) / 10_000 + int(row["GeneratedTokens"]) / TOKENS_PER_S,
        [1], 0.0, "service:model"))]) for row in kept]), _cluster(1, 4, "model")


# ---- one run ----------------------------------------------------------------------------------


class Scored(SimulationWorld):
    """A simulated run that notes each estimate beside the truth."""

    def __init__(self, work: Workload, cluster: Cluster, seed: int, every_s: float,
                 told: bool = False) -> None:
        super().__init__(work, cluster, make_placer("elastic"), oracle=told)
        self._rng, self._every, self._ask_at = random.Random(seed), to_ns(every_s), 0
        self._true: dict[Of, tuple[float, float]] = {}  # mean work and serial fraction of a class
        by_class: dict[Of, list[WorkAction]] = defaultdict(list)
        for each in all_actions(work):
            by_class[each.resource, each.name].append(each)
        for of, all_of in by_class.items():
            self._true[of] = (sum(to_ns(a.work_s) for a in all_of) / len(all_of),
                              sum(a.serial for a in all_of) / len(all_of))
        self.size = {of: len(all_of) for of, all_of in by_class.items()}
        self._done: dict[Of, list[float]] = defaultdict(list)  # works in order of their ends
        self._works: dict[int, WorkAction] = {}  # by action
        self.estimates: dict[Of, dict[int, float]] = defaultdict(dict)
        self.baseline: dict[Of, dict[int, float]] = defaultdict(dict)
        self.serials: dict[Of, dict[int, int]] = defaultdict(dict)
        self.asked: dict[str, dict[int, Asked]] = {kind: {} for kind in KINDS}
        self.answers: dict[str, list[tuple[int, Asked]]] = {kind: [] for kind in KINDS}

    def _record_event(self, fact: ev.Event) -> None:
        ended = None
        if isinstance(fact, ev.ActionSubmitted):
            self._note_submission(fact.action)
        elif isinstance(fact, ev.LeaseGranted):
            self._note_answer("start", fact.action, fact.at)
        elif isinstance(fact, ev.LeaseFinished):
            ended = self.scheduler.ledger.leases[fact.lease].action
            action = self.scheduler.ledger.actions[ended].action
        super()._record_event(fact)
        if ended is not None:
            self._note_answer("end", ended, fact.at)
            self._note_answer("waiting_end", ended, fact.at)
            self._note_end(action)

    def _note_submission(self, action: Action) -> None:
        self._works[action.id] = self.client.submission(action.id).work

    def _note_end(self, action: Action) -> None:
        of, estimator = (action.key, action.name), self.scheduler.ledger.estimator
        ended, (work, _) = self._done[of], self._true[of]
        ended.append(to_ns(self._works.pop(action.id).work_s))
        if len(ended) in COUNTS and work:
            mean = estimator.mean(action.key, action.name, action.degrees)
            self.estimates[of][len(ended)] = mean / work
            self.baseline[of][len(ended)] = sum(ended) / len(ended) / work
            if action.degrees[-1] > 1:
                self.serials[of][len(ended)] = estimator.serial(action)

    # ---- forecasts

    def ask(self, left: int) -> None:
        """Asks when a waiting action starts, and when a running one ends, if it is time to."""
        now, ledger = self.event_queue.now, self.scheduler.ledger
        if now < self._ask_at:
            return
        self._ask_at = now + self._every
        waiting = [a for a, e in ledger.actions.items() if e.state is ActionState.PENDING
                   and a not in self.asked["start"]]
        if waiting:
            action = self._rng.choice(waiting)
            told = forecast(self.scheduler, action, now)
            bounds = start_interval(self.scheduler, action, now, told)
            self.asked["start"][action] = Asked(now, told.at, bounds.start)
            self.asked["waiting_end"][action] = Asked(now, told.end, bounds.end)
        running = [x for x in ledger.leases.values() if x.begun and x.action
                   not in self.asked["end"]]
        if running:
            lease = self._rng.choice(running)
            self.asked["end"][lease.action] = Asked(now, expected_end(ledger, lease, now),
                                                    end_interval(ledger, lease, now))

    def _note_answer(self, what: str, action: int, at: int) -> None:
        if action in self.asked[what]:
            self.answers[what].append((at, self.asked[what].pop(action)))

    # ---- what the line has

    def classes(self) -> dict[str, Any]:
        """A row for each class that is large enough."""
        rows: dict[str, Any] = {}
        for of in sorted(self.estimates):
            if self.size[of] < CLASS_MIN:
                continue
            row = rows["/".join(of)] = {"actions": self.size[of],
                                        "estimate": _rounded(self.estimates[of]),
                                        "running_mean": _rounded(self.baseline[of])}
            if of in self.serials:
                row |= {"serial": self.serials[of], "serial_true": round(1000 * self._true[of][1])}
        return rows

    def forecasts(self) -> dict[str, Any]:
        """How good the forecasts were, of starts and of ends."""
        return {what: _scored(answers) for what, answers in self.answers.items()}


def _rounded(by_count: dict[int, float]) -> dict[int, float]:
    return {count: round(ratio, 2) for count, ratio in by_count.items()}


def _scored(answers: list[tuple[int, Asked]]) -> dict[str, Any]:
    known = [(asked.told - asked.at, true - asked.at) for true, asked in answers
             if asked.told is not None]
    near = sum(abs(told - true) <= true / 4 for told, true in known)
    bounds = [(*asked.between, true) for true, asked in answers if asked.between is not None]
    inside = sum(low <= true <= high for low, high, true in bounds)
    return {"asked": len(answers), "known": len(known),
            "within_25_pct": round(near / len(known), 2) if known else None,
            "intervals": len(bounds), "level": LEVEL,
            "inside": round(inside / len(bounds), 2) if bounds else None}


def calibrated(work: Workload, cluster: Cluster, seed: int) -> dict[str, Any]:
    """Returns the row of one load: its classes, and its forecasts with both kinds of durations."""
    first = SimulationWorld(work, cluster, make_placer("elastic"), oracle=False).run()
    every_s = max(0.05, first.step_ns / 1e9 / FORECASTS)
    runs = []
    for told in (False, True):
        run = Scored(work, cluster, seed, every_s, told)
        run.run(run.ask)
        runs.append(run)
    return {"classes": runs[0].classes(), "forecasts": runs[0].forecasts(),
            "told": runs[1].forecasts()}


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder of further workloads and traces")
    parser.add_argument("--only", default="", help="only loads whose names begin with this")
    parser.add_argument("--scale", type=float, default=1.0, help="part of generated loads, traces")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    args = parser.parse_args()
    loads: Iterable[tuple[str, Workload, Cluster]] = generated(args.seed, 0.1)
    if not args.tiny:
        loads = [(OWN, read_workload(Path(OWN)), Cluster.model_validate(CLUSTER)),
                 *generated(args.seed, args.scale), *shared(args.shared, args.scale)]
    rows = {name: calibrated(work, cluster, args.seed) for name, work, cluster in loads
            if name.startswith(args.only)}
    if not rows:
        parser.error(f"--only {args.only!r}: no load's name begins with this")
    common.line("calibration", {"seed": args.seed, "scale": args.scale, "tiny": args.tiny,
                                "only": args.only}, rows)


if __name__ == "__main__":
    main()
