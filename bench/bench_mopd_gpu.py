"""Measures nine teachers that share one device: how much their swaps cost, and what helps.

The same calls (`mopd.py`: pulses that follow each other, and some calls at any time) are played on
four sides, one after the other in each round, on the same device and with the same models:

- `one_at_a_time`: calls in the order in which they came (`fcfs:1`); the device holds the weights of
  one teacher, as on all sides but the last two.
- `swapped`: the placer `elastic`.
- `kept`: `elastic`, and weights of parked teachers stay on the device as far as there is room for
  four of the nine (setting `weights_cache_mib`).
- `oracle`: all nine are on the device all the time, so no weights are copied. The other sides are
  compared with it, to show what their swaps cost.

`overhead` is the share of the ACT that is neither execution nor waiting for the device: the restore
that a call waits for, as ARL-Tangram counts it (it states about 25 % for its GPU workloads).

    python bench/bench_mopd_gpu.py [--tiny] [--cpu] [--loads X...] [--seconds S]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from bench_gpu_park import lacking
from bench_mopd_live import BATCH, TEACHERS, WAIT_MS, WITHIN_S, Side, settle
from large_models import LAYERS, hidden_for, make_large
from mopd import Timed, schedule

from tangram_hpc.app.local import LocalCluster
from tangram_hpc.resources.gpu.devices import find_devices
from tangram_hpc.resources.gpu.nvml import look

ROOM = 4  # teachers for whose weights the side `kept` has room
SIDES = {"one_at_a_time": ("fcfs:1", 0), "swapped": ("elastic", 0), "kept": ("elastic", ROOM),
         "oracle": ("elastic", TEACHERS)}
# calls of each teacher in the rounds before the first that is measured, and the seconds between two
WARMING = ((1, 0.0), (8, 0.0), (8, 0.05))
# largest mean difference of the log-probabilities of a call between sides, where other calls share
# its batch; bfloat16 has 8 bits
CLOSE = 0.25


@dataclass(frozen=True)
class Plan:
    """The parameters of the measurement.

    Attributes:
        seed: from which texts and times are drawn.
        cpu: on one slot of CPU in place of a GPU.
        gigabytes, layers: size of each teacher, and the number of its layers.
        loads: offered calls, as fractions of those that the device serves in full batches; each is
            measured by itself.
        seconds: about how long the sides are played in all. The number of calls follows from it.
        rounds: how often the sides are played at each load.
        length: mean length of a text, bytes.
    """

    seed: int
    cpu: bool
    gigabytes: float
    layers: int
    loads: tuple[float, ...]
    rounds: int
    seconds: float
    length: int

    @property
    def hidden(self) -> int:
        """The width of each teacher."""
        return hidden_for(self.gigabytes, self.layers)


def load_and_warm(plan: Plan, sides: Sequence[Side]) -> None:
    """Loads all copies of all sides and calls them until their device has loaded its kernels.

    A device loads a kernel when a process uses it for the first time, and texts and batches of
    another size use other kernels. Those calls take seconds, so none of them may be measured. The
    sides do this at the same time.
    """
    rounds = [schedule(plan.seed - 1 - n, TEACHERS, n, spacing * TEACHERS * n, plan.length)
              for n, spacing in WARMING]
    with ThreadPoolExecutor(len(sides)) as threads:
        for calls in rounds:
            for side in threads.map(lambda side, calls=calls: played_once(side, calls), sides):
                if side.lost:
                    raise SystemExit(f"{side.lost} of the first {len(calls)} calls were lost")
            say(f"{len(calls)} calls on each side, not measured")


def played_once(side: Side, calls: Sequence[Timed]) -> Side:
    """Plays a round and returns it, apart from the measured rounds of the side."""
    apart = Side(side.clusters)
    apart.play(calls, False)
    return apart


def capacity(side: Side, calls: Sequence[Timed]) -> float:
    """Calls a second that the device serves in full batches of one teacher."""
    began = time.perf_counter()
    for future in [side.submit(Timed(0, 0, c.prompt, c.completion), False) for c in calls]:
        future.result(WITHIN_S)
    return len(calls) / (time.perf_counter() - began)


def swap_s(side: Side, calls: Sequence[Timed]) -> float:
    """Seconds of a call that is made alone and needs another teacher than the call before it."""
    began = time.perf_counter()
    side.one_by_one(calls, False)
    return (time.perf_counter() - began) / len(calls)


def calls_for(plan: Plan, rate: float, each_s: float) -> int:
    """How many calls of each teacher fit into a round."""
    per_call_s = sum(3 / (rate * load) + max(1 / (rate * load), each_s) for load in plan.loads)
    return max(4, round(plan.seconds / plan.rounds / per_call_s / TEACHERS))


def apart(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The median over calls of the mean difference of their log-probabilities."""
    return statistics.median(float(np.abs(a[0] - b[0]).mean())
                             for a, b in zip(one, other, strict=True))


def start(plan: Plan, home: Path, mib: int, stack: ExitStack) -> dict[str, LocalCluster]:
    """Starts a cluster for each side."""
    return {name: stack.enter_context(LocalCluster(
        1, placer=placer, devices="cpu:1" if plan.cpu else "", home=home, warm=0,
        mem_mib=TEACHERS * (mib + 4096), weights_cache_mib=room * (mib + 1)))
        for name, (placer, room) in SIDES.items()}


def measure(plan: Plan, home: Path) -> dict[str, Any]:
    """Plays all sides in turn, round by round, for each load."""
    folders = [make_large(home / f"teacher-{n}", plan.hidden, plan.layers, n)
               for n in range(TEACHERS)]
    mib = -(-sum(f.stat().st_size for f in folders[0].glob("*.safetensors")) >> 20)
    services = [{"backend": "torch", "model": str(folder), "dtype": "bfloat16", "batch": BATCH,
                 "batch_wait_ms": WAIT_MS, "batch_tokens": 1 << 20, "max_len": 1 << 20}
                for folder in folders]
    with ExitStack() as stack:
        clusters = start(plan, home, mib, stack)
        say("models are written")
        first = schedule(plan.seed, TEACHERS, 2, 1.0, plan.length)
        ready = {name: Side([cluster]) for name, cluster in clusters.items()}
        for side in ready.values():
            side.register(services)
        load_and_warm(plan, list(ready.values()))
        settle()
        rate = capacity(ready["oracle"], (first * BATCH)[:16 * BATCH])
        each_s = swap_s(ready["one_at_a_time"], first)
        calls = calls_for(plan, rate, each_s)
        say(f"{rate:.1f} calls/s in full batches, {each_s:.3f} s for a call with a swap, "
            f"{calls} calls of each teacher in a round")
        told = [{"load": load, **judged(sides)}
                for load, sides in played_loads(plan, rate, calls, clusters)]
    return {"backend": "torch on CPU" if plan.cpu else "torch", "weights_mib": mib,
            "devices_calls_per_s": round(rate, 1), "alone_with_swap_s": round(each_s, 4),
            "calls_of_each": calls, "loads": told}


def say(text: str) -> None:
    """Tells on stderr how far the measurement is."""
    print(f"bench_mopd_gpu: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def played_loads(plan: Plan, rate: float, number: int, clusters: dict[str, LocalCluster]
                 ) -> list[tuple[float, dict[str, Side]]]:
    """Returns the sides of each load. After ^C these are the loads that were played to their end:
    what was measured until then is not lost."""
    played: list[tuple[float, dict[str, Side]]] = []
    try:
        for load in plan.loads:
            played.append((load, play_load(plan, load, rate, number, clusters)))
    except KeyboardInterrupt:
        say(f"stopped: {len(played)} of {len(plan.loads)} loads were measured")
    return played


def play_load(plan: Plan, load: float, rate: float, number: int,
              clusters: dict[str, LocalCluster]) -> dict[str, Side]:
    """Plays the rounds of one load, the sides in turn."""
    sides = {name: Side([cluster]) for name, cluster in clusters.items()}
    span_s = TEACHERS * number / rate / load
    for n in range(plan.rounds):
        calls = schedule(plan.seed + n, TEACHERS, number, span_s, plan.length)
        for name in SIDES if n % 2 else reversed(SIDES):
            before = len(sides[name].acts)
            sides[name].play(calls, False)
            some = sides[name].acts[before:]
            say(f"load {load}, round {n}, {name}: mean ACT {statistics.fmean(some) * 1e3:.1f} ms")
    return sides


def judged(sides: dict[str, Side]) -> dict[str, Any]:
    """Returns the figures of one load. Every call must have been answered, and alike on all sides.
    """
    if lost := sum(side.lost for side in sides.values()):
        raise SystemExit(f"{lost} calls were lost")
    answers = sides["oracle"].answers
    differ = max(apart(side.answers, answers) for side in sides.values())
    if differ > CLOSE:
        raise SystemExit(f"the same call was answered otherwise: {differ}")
    told = {name: figures(side) for name, side in sides.items()}
    best = told["oracle"]["mean_act_ms"]
    return {"calls": len(answers), "lost": 0, "largest_difference": round(differ, 4),
            "act_over_oracle": {name: round(told[name]["mean_act_ms"] / best, 2)
                                for name in SIDES if name != "oracle"}, **told}


def figures(side: Side) -> dict[str, Any]:
    """Returns the figures of a side, and how its ACT is divided."""
    told = side.figures()
    restore_ms = told["restore_share_of_act"] * told["mean_act_ms"]
    return {**told, "overhead": told["restore_share_of_act"],
            "queue_ms": round(told["mean_act_ms"] - told["mean_exec_ms"] - restore_ms, 2)}


def main() -> None:
    """Prints one line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="small models and few calls")
    p.add_argument("--cpu", action="store_true", help="on one slot of CPU in place of a GPU")
    p.add_argument("--loads", type=float, nargs="+", default=(0.3, 0.5, 0.7),
                   help="of what the device serves at most")
    p.add_argument("--gigabytes", type=float, default=1.0, help="size of each teacher")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--seconds", type=float, default=120, help="of the calls, about")
    p.add_argument("--length", type=int, default=2500, help="bytes of a text, on average")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    small = (0.004, 2, (0.5,), 1, 5.0, 160)
    plan = Plan(a.seed, a.cpu, *(small if a.tiny else (
        a.gigabytes, LAYERS, tuple(a.loads), a.rounds, a.seconds, a.length)))
    devices = find_devices(os.environ, "cpu:1" if a.cpu else "")
    why = lacking(devices)
    with tempfile.TemporaryDirectory() as home:
        told = {"left_out": why} if why else {
            "device": devices.summary(), "driver": look().driver, **measure(plan, Path(home))}
    common.line("mopd_gpu", {"teachers": TEACHERS, "batch": BATCH, "room": ROOM, **asdict(plan)},
                told)


if __name__ == "__main__":
    main()
