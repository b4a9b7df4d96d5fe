"""Frozen: exit statuses of the command line, and the keys of everything that `--json` prints.

The commands run inside this process, in a folder of their own, with an environment without
settings. Only `tangram run` and what asks a running job are real processes (`live`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import journals, runs, where
from .shell import clean, run, told

# Objects whose keys are names that users chose, or words that depend on what happened.
_NAMED_KEYS = ("actions{}", "rollouts_unsaved{}", "rests_on{}", "held{}", "full{}", "best{}",
               "points[]{}", "factors{}")
_UNITS = frozenset({"CPUs", "GPUs"})


# ---- exit statuses ------------------------------------------------------------------------------


def statuses() -> dict[str, Any]:
    """What each command line ends with, and in what manner it says why."""
    found = {}
    with clean() as folder:
        _write_inputs(folder)
        for words in _lines():
            status, out, err = run(words)
            manner = ("usage" if err.startswith("usage:") else
                      "one line" if err.startswith("tangram: error: ") and err.count("\n") == 1
                      else "nothing" if not err else "more")
            found[" ".join(words) or "(nothing)"] = {"status": status, "stderr": manner,
                                                      "stdout": bool(out)}
    return found


def _write_inputs(folder: Path) -> None:
    """The files that the command lines name."""
    examples = where.find("examples")
    for name in ("cluster-24.json", "cluster-coding-200.json"):
        (folder / name).write_bytes((examples / name).read_bytes())
    texts = {
        "empty.json": "", "nonsense.toml": "nonsense", "unknown.toml": "unknwon = 1\n",
        "bad.toml": "grace_s = -1\n", "good.toml": "grace_s = 5\n", "rl.toml": "x = 1\n",
        "tiny.json": '{"nodes": [{"name": "c", "cpus": 1, "mem_mib": 1}]}',
        "open.sbatch": "#!/bin/sh\n#SBATCH --nodes=<NODES>\n", "done.sbatch": "#!/bin/sh\n",
        "broken.jsonl": "{\n", "readable.json": "{}"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "readable.json").chmod(0o644)
    kept = (journals.FOLDER / "story-elastic-6").read_bytes()
    older = (journals.FOLDER / "story-elastic-5").read_bytes()
    damaged = kept[:600] + bytes([kept[600] ^ 1]) + kept[601:]
    for job, data in {"good": kept, "older": older, "torn": kept[:-5], "damaged": damaged,
                      "ancient": kept[:6] + b"\x04\0" + kept[8:], "none": b"TG",
                      "strange": b"something else"}.items():
        home = folder / "home" / "jobs" / job
        home.mkdir(parents=True)
        (home / "journal").write_bytes(data)
    ended = folder / "home" / "jobs" / "ended" / "access.json"
    ended.parent.mkdir()
    ended.write_text(json.dumps({"format": "tangram-access/1", "job": "ended", "ended": "noon"}))
    ended.chmod(0o600)


def _lines() -> list[list[str]]:
    """Command lines: what is right, and one of each kind of wrong input."""
    lines = """

--version
--help
nonsense
sim
sim mixed-24
sim mixed-24 --cluster cluster-24.json --policy fcfs:4
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --json
sim mixed-24 --cluster cluster-24.json --policy nonsense
sim mixed-24 --cluster cluster-24.json --policy fcfs:0
sim mixed-24 --cluster cluster-24.json --policy fcfs
sim mixed-24 --cluster missing.json --policy fcfs:4
sim mixed-24 --cluster empty.json --policy fcfs:4
sim mixed-24 --cluster tiny.json --policy fcfs:4
sim mixed-24 --cluster cluster-coding-200.json --policy fcfs:4
sim missing.jsonl --cluster cluster-24.json --policy fcfs:4
sim broken.jsonl --cluster cluster-24.json --policy fcfs:4
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --durations guessed
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --fail nonsense
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --fail nowhere@1
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --records missing/out.jsonl
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --elastic unknown.toml
sim mixed-24 --cluster cluster-24.json --policy fcfs:4 --elastic good.toml --fail c0@1
sim rl missing
sim rl rl.toml
sim rl rl-48 --systems nonsense
sim rl rl-48 --plot out.gif
size mixed-24
size mixed-24 --cluster cluster-24.json --target-act 0.001 --policies fcfs:4
size mixed-24 --cluster cluster-24.json --target-act -1
size mixed-24 --cluster cluster-24.json --target-act 5 --policies fcfs:4
plan --model qwen3-14b
plan --model missing --gpus 8
plan --model qwen3-14b --gpus 8 --top 0
plan --model qwen3-14b --gpus 8 --hardware missing
plan --model qwen3-14b --gpus 8 --hardware a800-80g --force
plan --model qwen3-14b --gpus 1 --hardware a800-80g
replay mixed-24 --scale 2
replay missing.jsonl --scale 0.1
replay mixed-24 --scale 0.1 --cpus 0
template
template list
template show hetjob
template show missing
template render single-node
template render single-node --strict
template render single-node -o nonsense=1
template render single-node -o nonsense
template check open.sbatch
template check done.sbatch
template check missing.sbatch
config
config --json
config --config good.toml
config --config missing.toml
config --config nonsense.toml
config --config unknown.toml
config --config bad.toml
--config good.toml config
acct
acct -e
acct -j good
acct -j good --json
acct -j good --held
acct -j good -P -n
acct -j good -s COMPLETED
acct -j good -s NONSENSE
acct -j good -o JobID,Nonsense
acct -j good.1.99999
acct -j good --comment
acct -j older
acct -j torn
acct -j damaged
acct -j ancient
acct -j none
acct -j strange
acct -j missing
report good --json --simulate 0
report good --json --static -1
report good -o missing/page.html --simulate 0
report good --window 9:3
report torn --json --simulate 0
report damaged --json
report missing --json
info
info -j good
info -j ended
info -j missing
explain
explain nonsense
explain 9.9 -j good
explain 9.9 -j missing
explain allocation -j missing
run
run -c nonsense -- true
run -j missing -- true
run -j ended -- true
shutdown
shutdown -j missing
broker --nodes nonsense
broker --placer nonsense
broker --config unknown.toml
worker --config bad.toml
rank
rank -- true
gateway --nonsense
doctor --nonsense
demo --nonsense"""
    return [line.split() for line in lines.splitlines()[1:]]


# ---- keys of --json -----------------------------------------------------------------------------


def keys(value: Any, place: str = "") -> dict[str, str]:
    """Every place of a JSON value, with the types that were seen there."""
    found: dict[str, set[str]] = {}

    def visit(value: Any, place: str) -> None:
        kind = {dict: "object", list: "list", str: "string", bool: "true or false", int: "whole",
                float: "number", type(None): "null"}[type(value)]
        found.setdefault(place or "(all)", set()).add(kind)
        if isinstance(value, dict):
            named = f"{place}{{}}".endswith(_NAMED_KEYS)
            for key, each in value.items():
                free = named and not (place.endswith(("best", "points[]")) and key not in _UNITS)
                visit(each, f"{place}{{}}" if free else f"{place}.{key}".lstrip("."))
        elif isinstance(value, list):
            for each in value:
                visit(each, f"{place}[]")
    visit(value, place)
    return {place: " or ".join(sorted(kinds)) for place, kinds in sorted(found.items())}


def json_keys() -> dict[str, Any]:
    """Keys of the verbs that need no running job."""
    found = {}
    with clean() as folder:
        _write_inputs(folder)
        (folder / "elastic.toml").write_text(runs.ELASTIC)
        past = told(["acct", "-j", "good", "--json"])["actions"][0]["action"]
        cluster = ["--cluster", "cluster-24.json"]
        for name, words in {
                "sim": ["sim", "mixed-24", *cluster, "--policy", "fcfs:4"],
                "sim --latency-us --fail": ["sim", "mixed-24", *cluster, "--policy", "fcfs:4",
                                            "--latency-us", "100", "--fail", "c0@2+1"],
                "sim --elastic": ["sim", "mixed-24", *cluster, "--policy", "fcfs:4", "--elastic",
                                  "elastic.toml"],
                "sim rl": ["sim", "rl", "rl-48", "--iterations", "4"],
                "size": ["size", "mixed-24", *cluster, "--target-act", "3", "--policies",
                         "fcfs:4,static:4"],
                "plan": ["plan", "--model", "qwen3-14b", "--gpus", "8", "--hardware",
                         "a800-80g"],
                "acct": ["acct", "-j", "good"],
                "report": ["report", "good"],
                "acct --held": ["acct", "-j", "good", "--held"],
                "explain of a past action": ["explain", past, "-j", "good"]}.items():
            found[name] = keys(told([*words, "--json"]))
        settings = told(["config", "--json"])
        found["config (of each setting)"] = sorted({key for s in settings.values() for key in s})
    return found


def records_keys() -> dict[str, Any]:
    """Keys of the lines of `--records`: the head's, and those of attempts."""
    with clean() as folder:
        _write_inputs(folder)
        run(["sim", "mixed-24", "--cluster", "cluster-24.json", "--policy", "elastic", "--records",
             "out.jsonl"])
        lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {"head of --records": keys(lines[0]),
            "line of --records": keys(lines[1:])}


def doctor() -> dict[str, Any]:
    """Keys of `tangram doctor --json`; its checks take seconds."""
    with clean():
        status, out, _ = run(["doctor", "--json"])
    assert status in (0, 1), status
    page = keys(json.loads(out))
    return {"doctor": {k: v for k, v in page.items() if not k.startswith("why_not[]")}}


# ---- what needs a running job -------------------------------------------------------------------


def live() -> dict[str, Any]:
    """Keys of `info` and `explain`, and statuses of `tangram run`, of a job on this machine."""
    from tangram_hpc import LocalCluster

    found: dict[str, Any] = {}
    with clean() as folder, LocalCluster(
            cpus=2, mem_mib=2000, home=folder / "home", job="golden", devices="fake:2",
            placer="fcfs:2") as cluster:
        for command, status in _RUNS.items():
            found[f"run {command}"] = tangram("run", *command.split(" ", 2)[:2], "-j", "golden",
                                              "--", "sh", "-c", command.split(" ", 2)[2])
            assert found[f"run {command}"] == status
        waiting, running, session = _fill(cluster.client)
        for name, words in {"info": ["info"], "explain (waits)": ["explain", waiting],
                            "explain (runs)": ["explain", running],
                            "explain (session)": ["explain", session],
                            "explain allocation": ["explain", "allocation"]}.items():
            found[f"keys of {name}"] = keys(told([*words, "-j", "golden", "--json"]))
        found["keys of info"].pop("nodes[].untrusted[]", None)  # not every machine isolates
        found["shutdown"] = tangram("shutdown", "-j", "golden")
    return found


# Options and a shell command, and the status that `tangram run` hands on.
_RUNS = {"-c 1 true": 0, "-c 1 exit 3": 3, "-t 0.2 sleep 20": 124, "-c 1 kill -9 $$": 137,
         "-c 99 true": 2}


def _fill(client: Any) -> tuple[str, str, str]:
    """A job in which something of every kind is: ids of an action that waits, one that runs, and a
    session that waits."""
    client.register_endpoint("search", concurrency=2, rate=5)
    for name in ("judge", "roll"):
        client.register_service(name, {"backend": "fake"})
    client.register_rollouts("pool", {"buckets": [{"services": "roll", "context_max": 9000}]})
    first, last = (client.session(mem=1500, trusted=True) for _ in range(2))
    first.exec(["true"]).result(60)
    running = client.submit(["sleep", "60"], cpus=2, trusted=True)
    _await(lambda: client.ask("explain", running.id).get("state") == "RUNNING")
    client.submit(["true"], cpus=2, trusted=True)  # is ahead of the next one
    waits = client.submit(["true"], cpus=1, trusted=True)
    return waits.id, running.id, last.id


def _await(true: Any) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it did not happen within 30 s"
        time.sleep(0.02)


def tangram(*words: str) -> int:
    """A process of its own; its status."""
    return subprocess.run([sys.executable, "-m", where.PACKAGE, *words],
                          stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
