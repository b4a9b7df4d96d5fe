"""Frozen: records and decisions of simulated runs of the shipped workloads, for every placer.

Each run goes through `tangram sim`, so that the records are the bytes a user gets; the scheduler is
listened to meanwhile.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import watch, where
from .shell import run, told

_SMALL = {"nodes": [{"name": "c", "cpus": 232, "sockets": 2, "mem_mib": 4194304}]}
ELASTIC = """[elastic]
max_nodes = 3
max_core_hours = 100
target_s = 2
grow_after_s = 1
arrive_s = 2
idle_release_s = 3
backoff_s = 5
[[elastic.satellites]]
name = "spare"
partition = "cpu"
cpus = 8
mem_mib = 8192
time_min = 10
[slurm]
wait_s = 1
"""
# What stands for K in the placers that the command line offers.
_DEGREES = {"fcfs:K": ("fcfs:1", "fcfs:4", "fcfs:16"), "static:K": ("static:1", "static:4")}


@dataclass(frozen=True)
class Case:
    """One run of `tangram sim`. `cheap`: it belongs to the default test suite."""

    name: str
    words: tuple[str, ...]
    cheap: bool = False
    records: bool = True


def placers() -> list[str]:
    """Every placer that the command line offers."""
    return [each for name in where.find("placers") for each in _DEGREES.get(name, (name,))]


def cases(folder: Path) -> Iterator[Case]:
    """All runs; files that they need are written into the folder."""
    examples = where.find("examples")
    big, mixed = examples / "cluster-coding-200.json", examples / "cluster-24.json"
    small, scenario = folder / "cluster-232.json", folder / "elastic.toml"
    small.write_text(json.dumps(_SMALL))
    scenario.write_text(ELASTIC)
    for placer in placers():
        def case(name: str, work: str, cluster: Path, *more: str, cheap: bool = False,
                 records: bool = True, placer: str = placer) -> Case:
            words = (work, "--cluster", str(cluster), "--policy", placer, *more)
            return Case(f"{name} {placer}", words, cheap, records)

        for durations in ("oracle", "learned"):
            how = ("--durations", durations)
            yield case(f"mixed-24 {durations}", "mixed-24", mixed, *how, cheap=True)
            yield case(f"coding-200 {durations}", "coding-200", big, *how)
            yield case(f"coding-200 on 232 CPUs {durations}", "coding-200", small, *how)
        yield case("mixed-24 over links", "mixed-24", mixed, "--latency-us", "300", "--seed", "7",
                   "--durations", "learned", cheap=True)
        yield case("mixed-24 with failures", "mixed-24", mixed, "--latency-us", "300", "--seed",
                   "3", "--fail", "c0@8+6", "--fail", "c1@20+3", cheap=True)
        yield case("coding-200 over links", "coding-200", small, "--latency-us", "300", "--seed",
                   "7", "--durations", "learned")
        yield case("mixed-24 with satellites", "mixed-24", mixed, "--elastic", str(scenario),
                   cheap=True, records=False)


def lines_of(case: Case, folder: Path) -> dict[str, list[str]]:
    """The records and the decisions of a run."""
    out = folder / "records.jsonl"
    with watch.decisions() as decisions:
        status, _, err = run(["sim", *case.words, "--json",
                              *(("--records", str(out)) if case.records else ())])
    if status:
        return {f"{case.name}: {what}": [f"status {status}: {err}"]
                for what in ("decisions", *(("records",) if case.records else ()))}
    found = {f"{case.name}: decisions": list(decisions)}
    if case.records:
        found[f"{case.name}: records"] = out.read_text().splitlines()
    return found


def collect(cheap: bool) -> Iterator[tuple[str, list[str]]]:
    """Each sequence of lines under its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases(folder):
            if case.cheap or not cheap:
                yield from lines_of(case, folder).items()


def figures() -> dict[str, Any]:
    """What the planner and the simulated RL run find, to six digits: they compute with floats."""
    found = {}
    for name, words in {
            "plan qwen3-14b": ["plan", "--model", "qwen3-14b", "--gpus", "48", "--hardware",
                               "a800-80g", "--top", "4", "--json"],
            "plan qwen3-30b-a3b": ["plan", "--model", "qwen3-30b-a3b", "--gpus", "16",
                                   "--hardware", "h200-141g", "--top", "4", "--json"],
            "sim rl rl-48": ["sim", "rl", "rl-48", "--iterations", "4", "--json"]}.items():
        found[name] = rounded(told(words))
    return found


def rounded(value: Any) -> Any:
    """The same with floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value
