"""tangram_hpc beside other systems that run small work: the same work in the same run.

    make bench-peers                   # in a venv of its own with the peers; prints one JSON line
    python bench/peers/run.py --tiny   # with those that need no installation

Each round starts every peer once for each set of measurements, in an order that is drawn, measures
it while nothing else of the bench runs, and ends it. The figures are medians of the rounds, with
their least and greatest values; ratios are taken within a round. A peer that is not installed, and
a measurement that a peer lacks, are in `left_out` with the reason. docs/BENCHMARKS.md says how each
peer is used and what the measurements mean; `work.py`, `serve.py`, `ideal.py` and `trajectory.py`
are the measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import common  # noqa: E402
from ideal import ideal  # noqa: E402
from peers import PEERS  # noqa: E402
from results import figures  # noqa: E402
from serve import MIXED, TINY_MIXED  # noqa: E402
from slots import (  # noqa: E402
    SlotFailed,
    become_subreaper,
    end_descendants,
    environment,
    no_slurm,
    run_slot,
    slurm,
)
from work import mixed_tasks  # noqa: E402

CORES, MIXED_CORES = 2, 16
STEPS, TINY_STEPS = 150, 3
TINY_PEERS = ("tangram_hpc", "tangram_hpc, resizable", "ProcessPool", "GNU parallel",
              "plain children")


class Slot(NamedTuple):
    """One process of a round. The peer `trajectory` is no peer: see trajectory.py."""

    peer: str
    cores: int
    measurements: tuple[str, ...]


def found() -> tuple[dict[str, str], dict[str, str]]:
    """The peers that can run here with their versions, and the others with the reason."""
    versions, missing = {}, {}
    for name, peer in PEERS.items():
        try:
            told = [version(package) for package in peer.packages]
        except PackageNotFoundError as error:
            missing[name] = f"the package {error.name} is not installed"
            continue
        absent = [program for program in peer.programs if not shutil.which(program)]
        why = f"the program {absent[0]} is not installed" if absent else (
            no_slurm() if peer.slurm else peer.missing())
        if why:
            missing[name] = why
        elif peer.version:
            said = subprocess.run(peer.version, text=True, check=False, capture_output=True,
                                  stdin=subprocess.DEVNULL).stdout
            versions[name] = (said.splitlines() or ["?"])[0]
        else:
            versions[name] = told[0] if told else sys.version.split()[0]
    return versions, missing


def slots_of(names: list[str], seed: int) -> list[Slot]:
    """What one round runs, in no order yet. The mixed tasks need many cores, which are only
    counted, so they have a process of their own."""
    slots = [Slot("trajectory", CORES, ("trajectory",))]
    for name in names:
        peer = PEERS[name]
        able = [each for each in peer.measured if each not in peer.lacks]
        if "mixed" in able:
            slots.append(Slot(name, MIXED_CORES, (f"mixed:{seed}",)))
        if few := tuple(each for each in able if each != "mixed"):
            slots.append(Slot(name, CORES, few))
    return slots


def run(slot: Slot, tiny: bool, seed: int) -> dict[str, Any]:
    """Runs one slot; see `run_slot`."""
    environ = environment()
    if slot.peer == "trajectory":
        argv = [sys.executable, str(HERE / "trajectory.py"), str(TINY_STEPS if tiny else STEPS),
                str(seed)]
        return run_slot(argv, environ, ["trajectory"])
    peer = PEERS[slot.peer]
    argv = peer.command([sys.executable, str(HERE / "serve.py"), slot.peer, str(slot.cores),
                         "tiny" if tiny else "full", *slot.measurements], slot.cores)
    with slurm(MIXED_CORES) if peer.slurm else nullcontext({}) as more:
        return run_slot(argv, {**environ, **more}, list(slot.measurements))


def busy_s() -> float:
    """CPU seconds that all processes of this machine have used."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process and of all that ended below it."""
    return sum(used.ru_utime + used.ru_stime for used in
               map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def rounds_of(names: list[str], arguments: argparse.Namespace, seed: int
              ) -> tuple[list[dict[str, dict[str, Any]]], dict[str, str]]:
    """All rounds: for each the answers by peer; and what failed, by peer."""
    rounds: list[dict[str, dict[str, Any]]] = []
    failed: dict[str, str] = {}
    draw = random.Random(seed)
    for number in range(1 if arguments.tiny else arguments.rounds):
        told: dict[str, dict[str, Any]] = defaultdict(dict)
        slots = slots_of(names, seed + number)
        draw.shuffle(slots)
        for slot in slots:
            began = time.perf_counter()
            try:
                answers = run(slot, arguments.tiny, seed + number)
            except SlotFailed as error:
                failed[slot.peer] = f"round {number + 1}: {error}"
                answers = {}
            finally:
                end_descendants()
            if slot.cores != CORES:
                answers.pop("cold_s", None)
            told[slot.peer].update({what.partition(":")[0]: value
                                    for what, value in answers.items()})
            print(f"round {number + 1}: {slot.peer}, {' '.join(slot.measurements)}: "
                  f"{time.perf_counter() - began:.1f} s{'' if answers else ' FAILED'}",
                  file=sys.stderr, flush=True)
        tasks = mixed_tasks(seed + number, TINY_MIXED if arguments.tiny else MIXED, MIXED_CORES)
        told["ideal"] = ideal(tasks, MIXED_CORES, 50 if arguments.tiny else 1000)
        rounds.append(told)
    return rounds, failed


def main() -> None:
    """Prints one line."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="seconds, for the tests")
    p.add_argument("--rounds", type=int, default=3, help="how often each peer is started")
    p.add_argument("--seed", type=int, help="of the order and of the mixed tasks; drawn if none")
    p.add_argument("--only", nargs="+", choices=list(PEERS), metavar="PEER",
                   help=f"some of: {'; '.join(PEERS)}")
    arguments = p.parse_args()
    become_subreaper()
    seed = random.SystemRandom().randrange(10 ** 6) if arguments.seed is None else arguments.seed
    versions, missing = found()
    only = arguments.only or (TINY_PEERS if arguments.tiny else PEERS)
    missing.update({name: "not asked for" for name in versions if name not in only})
    names = [name for name in versions if name in only]
    print(f"seed {seed}; left out: {json.dumps(missing)}", file=sys.stderr, flush=True)
    load, began, busy, own = os.getloadavg()[0], time.perf_counter(), busy_s(), own_s()
    try:
        rounds, failed = rounds_of(names, arguments, seed)
    finally:
        end_descendants()
    span = time.perf_counter() - began
    others = max(0.0, busy_s() - busy - (own_s() - own)) / span / (os.cpu_count() or 1)
    common.line("peers", {
        "seed": seed, "rounds": len(rounds), "cores": CORES, "mixed_cores": MIXED_CORES,
        "peer_versions": {name: versions[name] for name in names},
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "minutes": round(span / 60, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "other_work_cpu_share": round(others, 2)}, figures(rounds, missing, failed))


if __name__ == "__main__":
    main()
