"""Compares a pool with a static split: nine teachers, called in pulses, on three CPU slots.

Pooled: one cluster with three devices under `elastic`. Static: three clusters with one device and
three teachers each (teacher n on device n % 3, so that teachers whose pulses follow each other do
not share a device). All clusters exist at the same time, and the two sides run in turn, round by
round, with the same models, calls, times, batches and threads for each device; a change of teachers
costs a restore on both. Each call is submitted at its time, even if earlier ones have not ended;
its ACT is the time from then to its result.

CPU slots share the machine's CPUs: where fewer CPUs are free than there are slots, three slots
compute little more than one, and the ratio shows that. With `--backend fake` a device sleeps
instead of computing, so only scheduler, executor and transport are measured.

    python bench/bench_mopd_live.py [--tiny] [--backend torch|fake] [--load X] [--rounds N]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
from mopd import Timed, differences, make_models, mean, schedule

from tangram_hpc.accounting.record import ActionRecord, fold
from tangram_hpc.app.local import LocalCluster
from tangram_hpc.client.future import Future
from tangram_hpc.resources import process_tree
from tangram_hpc.storage.journal import read_journal

TEACHERS, SLOTS = 9, 3
NAMES = [f"teacher-{n}" for n in range(TEACHERS)]
BATCH, WAIT_MS = 4, 2.0
WITHIN_S = 300.0  # longest wait for submitted calls, seconds
# less than BUSY CPU seconds in LOOK_S seconds: no copy is loading any more
LOOK_S, BUSY = 1.5, 0.15
CLOSE = 2e-3  # largest difference of a call's logprobs between different batches
FAKE = {"wake_s": 0.02, "call_s": 0.004, "token_s": 0.00035}


@dataclass
class Side:
    """One side over all rounds: all teachers in one cluster, or divided among several."""

    clusters: Sequence[LocalCluster]
    acts: list[float] = field(default_factory=list)
    futures: list[tuple[int, Future]] = field(default_factory=list)  # with their cluster
    answers: list[Any] = field(default_factory=list)
    spent_s: float = 0.0
    lost: int = 0

    def register(self, services: Sequence[dict[str, Any]]) -> None:
        """Declares the teachers where they are called."""
        for n, service in enumerate(services):
            self._of(n).register_service(NAMES[n], service)

    def _of(self, teacher: int) -> LocalCluster:
        return self.clusters[teacher % len(self.clusters)]

    def submit(self, call: Timed, fake: bool) -> Future:
        """Calls the teacher."""
        told = {"length": len(call.prompt) + len(call.completion)} if fake else {
            "prompts": [call.prompt], "completions": [call.completion]}
        future: Future = self._of(call.teacher).call(NAMES[call.teacher], "logprobs", **told)
        return future

    def play(self, calls: Sequence[Timed], fake: bool) -> None:
        """One round."""
        began = time.perf_counter()
        futures, late = [], []
        for call in calls:
            time.sleep(max(0.0, began + call.at_s - time.perf_counter()))
            late.append(time.perf_counter() - began - call.at_s)
            futures.append(self.submit(call, fake))
        concurrent.futures.wait(futures, WITHIN_S)
        self.spent_s += time.perf_counter() - began
        for call, future, late_s in zip(calls, futures, late, strict=True):
            if not future.done() or future.exception() is not None:
                self.lost += 1
                continue
            assert future.told is not None
            self.acts.append(late_s + future.told[1] / 1e9)
            self.answers.append(future.result())
            self.futures.append((call.teacher % len(self.clusters), future))

    def one_by_one(self, calls: Sequence[Timed], fake: bool) -> None:
        """Returns when all are answered."""
        for call in calls:
            self.submit(call, fake).result(WITHIN_S)

    def rate(self, calls: Sequence[Timed], fake: bool) -> float:
        """Calls a second when every device is fed one by one and none changes its teacher."""
        fed = [[Timed(0.0, n, call.prompt, call.completion) for call in calls]
               for n in range(len(self.clusters))]
        with concurrent.futures.ThreadPoolExecutor(len(fed)) as threads:
            list(threads.map(lambda some: self.one_by_one(some[:1], fake), fed))
            began = time.perf_counter()
            list(threads.map(lambda some: self.one_by_one(some, fake), fed))
            return len(calls) * len(fed) / (time.perf_counter() - began)

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the measured calls, from the accounting records."""
        found: list[dict[int, ActionRecord]] = []
        for cluster in self.clusters:
            cluster.close()
            found.append(fold(read_journal(cluster.folder / "journal")).records)
        records = [found[where][f.action] for where, f in self.futures]
        outcomes = [r.outcome for r in records if r.outcome is not None]
        assert len(outcomes) == len(self.acts)
        restores = [o for o in outcomes if o.restore_ns]
        restored_s = sum(o.restore_ns for o in restores) / 1e9
        called_s = sum(o.exec_ns / o.batch for o in outcomes) / 1e9  # each batch once
        return {"mean_act_ms": round(mean(self.acts) * 1e3, 2),
                **{f"act_{k}": v for k, v in common.percentiles(self.acts).items()},
                "restores_per_min": round(len(restores) / self.spent_s * 60, 1),
                "mean_restore_ms": round(mean([o.restore_ns for o in restores]) / 1e6, 2),
                # all calls of a batch waited for the restore
                "restore_share_of_act": round(
                    sum(o.restore_ns * o.batch for o in restores) / 1e9 / sum(self.acts), 4),
                "restore_share_of_busy": round(restored_s / (restored_s + called_s), 4),
                "mean_exec_ms": round(mean([o.exec_ns for o in outcomes]) / 1e6, 2),
                "largest_batch": max(o.batch for o in outcomes),
                "mean_batch": round(1 / mean([1 / o.batch for o in outcomes]), 2),
                "devices_used": len({(where, record.gpus) for (where, _), record
                                     in zip(self.futures, records, strict=True)})}


@dataclass(frozen=True)
class Plan:
    """The parameters of the measurement."""

    seed: int
    fake: bool
    calls: int  # number of calls of each teacher in a round
    rounds: int
    load: float  # load, as a fraction of the calls that the devices can serve
    length: int  # mean length of a text, bytes
    hidden: int
    layers: int


def settle() -> None:
    """Returns when nothing beneath this process computes any more: all copies are loaded."""
    before = -1.0
    while (now := _cpu_s()) - before > BUSY or before < 0:
        before = now
        time.sleep(LOOK_S)


def _cpu_s() -> float:
    """CPU seconds of all processes beneath this one."""
    spent = 0
    for pid in process_tree.descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        spent += int(fields[11]) + int(fields[12])
    return spent / os.sysconf("SC_CLK_TCK")


def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """Plays both sides in turn."""
    services: list[dict[str, Any]] = [{"backend": "fake", **FAKE}] * TEACHERS if plan.fake else [
        {"backend": "torch", "model": str(folder)}
        for folder in make_models(home, TEACHERS, plan.hidden, plan.layers)]
    services = [{**told, "batch": BATCH, "batch_wait_ms": WAIT_MS} for told in services]
    with ExitStack() as stack:
        def cluster(slots: int) -> LocalCluster:
            return stack.enter_context(LocalCluster(slots, devices=f"cpu:{slots}", home=home,
                                                    mem_mib=65536, warm=0))

        pooled = Side([cluster(SLOTS)])
        static = Side([cluster(1) for _ in range(SLOTS)])
        first = schedule(plan.seed, TEACHERS, 2, 1.0, plan.length)
        pooled.register([{**told, "copies": SLOTS} for told in services])
        static.register(services)
        for side in (pooled, static):
            side.one_by_one(first, plan.fake)  # the first copy of each is loaded when this returns
        settle()
        rate = static.rate(first, plan.fake)
        span_s = TEACHERS * plan.calls / rate / plan.load
        for n in range(plan.rounds):
            calls = schedule(plan.seed + n, TEACHERS, plan.calls, span_s, plan.length)
            for side in (pooled, static) if n % 2 else (static, pooled):
                side.play(calls, plan.fake)
        told = {"pooled": pooled.figures(), "static": static.figures()}
    lost = pooled.lost + static.lost
    if lost:
        raise SystemExit(f"{lost} calls were lost")
    apart = 0.0 if plan.fake else differences(pooled.answers, static.answers)
    if apart > CLOSE:
        raise SystemExit(f"the same call was answered otherwise: {apart}")
    return {"act_ratio": round(told["static"]["mean_act_ms"] / told["pooled"]["mean_act_ms"], 2),
            "backend": "fake" if plan.fake else "torch on CPU",
            "devices_calls_per_s": round(rate, 1),
            "span_s": round(span_s, 2), "calls": len(pooled.acts), "lost": lost,
            "largest_difference": float(f"{apart:.3g}"), **told}


def main() -> None:
    """Prints one line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="seconds, for the tests")
    p.add_argument("--backend", choices=("torch", "fake"), default="torch")
    p.add_argument("--load", type=float, default=0.65, help="of what the devices can do")
    p.add_argument("--length", type=int, default=160, help="bytes of a text, on average")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--calls", type=int, default=40)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    plan = Plan(a.seed, a.backend == "fake", *((3, 1) if a.tiny else (a.calls, a.rounds)), a.load,
                a.length, *((64, 2) if a.tiny else (512, 4)))
    why = "" if plan.fake or find_spec("torch") else "tangram-hpc's extra `torch` is not installed"
    with tempfile.TemporaryDirectory() as home:
        figures = {"left_out": why} if why else measure(plan, Path(home))
    common.line("mopd_live", {"teachers": TEACHERS, "slots": SLOTS, "batch": BATCH,
                              "fake": FAKE if plan.fake else None, **asdict(plan)}, figures)


if __name__ == "__main__":
    main()
