"""A job on nodes that are network namespaces, a trainer that submits all the time, and what befalls
a node of it. Law: everything is done to nodes through `devcluster node`, as to machines through
their cable and power; what is asserted is the trainer's ledger, the journal and Slurm's word."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.devcluster_fixture import devcluster
from helpers.slurm_site import DATA, Site

LAYOUTS = ("hetjob", "homogeneous", "satellites")


@dataclass
class Trial:
    """One job (and its satellites) of one layout."""

    site: Site
    layout: str
    name: str
    job: str = ""
    others: list[str] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    dark: set[str] = field(default_factory=set)  # nodes without power

    @property
    def home(self) -> Path:
        return self.site.cluster.home

    @property
    def go(self) -> Path:
        return self.home / f"{self.name}.go"

    def mark(self, what: str) -> None:
        self.marks[what] = time.time()

    def start(self) -> None:
        """Submits it; returns when work flows on all its nodes."""
        shutil.copy(DATA / "trainer_ledger.py", self.home)
        trainer = f"python trainer_ledger.py {self.name}.json {self.go.name} 4"
        site, common = self.site, {"time": "30", "trainer": trainer, "ranks": "1"}
        if self.layout == "hetjob":
            self.job = site.submit(
                "hetjob", self.name, partition_cpu="cpu", partition_gpu="gpu", gres_gpu="gpu:1",
                partition_trainer="trainer", mem_cpu="600", mem_gpu="600", nodes_gpu="1", **common)
        elif self.layout == "homogeneous":
            self.job = site.submit("homogeneous", self.name, partition="cpu", nodes="2", mem="1200",
                                   cpus_lent="4", mem_lent="600", mem_trainer="600", **common)
        else:
            self.job = site.submit("satellites", self.name, partition="trainer", **common)
            for number in range(2):
                self.others.append(site.submit(
                    "satellite", f"{self.name}s{number}", broker=self.job, partition="cpu",
                    mem="600", time="30", cpus="16"))
        site.until(lambda: len(self.nodes("UP")) == (3 if self.layout == "hetjob" else 2),
                   "all workers to join", 90, lambda: site.output(self.name, self.job))
        site.until(lambda: len({r["node"] for r in self.ended()}) == len(self.nodes("UP")),
                   "work to flow on all nodes", 60)

    def nodes(self, state: str) -> list[str]:
        """Names of the broker's nodes in this state."""
        told = self.site.info(self.job).get("nodes", [])
        return [n["name"] for n in told if n["state"] == state]

    def ended(self) -> list[dict[str, Any]]:
        """Actions that the journal has as ended well."""
        return [r for r in self.rows() if r["state"] == "COMPLETED"]

    def rows(self) -> list[dict[str, Any]]:
        """All actions that the journal has."""
        told = self.site.tangram("acct", "-j", self.job, "--json")
        return json.loads(told.stdout)["actions"] if told.returncode == 0 else []

    def leader(self) -> str:
        """The node on which batch script and broker run."""
        return self.site.cluster.run_as_user(
            ["squeue", "-h", "-j", self.job, "-o", "%B"]).stdout.split()[0]

    def fate(self, what: str, node: str) -> None:
        """Runs `devcluster node` with an operation on a node, such as "kill" or "start"."""
        done = devcluster("node", "--prefix", str(self.site.cluster.prefix), what, node)
        assert done.returncode == 0, done.stderr
        if what == "kill":
            self.dark.add(node)
        elif what == "start":
            self.dark.discard(node)
        self.mark(f"{what} {node}")

    def node_state(self, node: str) -> str:
        """Slurm's word for a node. sinfo of Slurm 22.05 says "mixed" for a node that is down, too,
        while some of its CPUs count for a job; the reason tells the two apart.
        """
        told = self.site.cluster.run_as_user(["sinfo", "-h", "-N", "-n", node, "-o", "%T|%E"])
        state, _, reason = told.stdout.splitlines()[0].partition("|")
        return "down*" if reason.strip() == "Not responding" else state.strip()

    def lost(self, node: str) -> bool:
        """Whether Slurm calls it down, or has taken it from the job."""
        ask = self.site.cluster.run_as_user
        here = ",".join(ask(["squeue", "-h", "-j", self.job, "-o", "%N"]).stdout.split())
        hosts = ask(["scontrol", "show", "hostnames", here]).stdout.split() if here else []
        return self.node_state(node).startswith("down") or node not in hosts

    def state_of(self, job: str) -> str:
        """Slurm's word for one job."""
        return self.site.state(job) or "gone"

    def states(self) -> dict[str, str]:
        """Slurm's words for the jobs."""
        return {job: self.state_of(job) for job in (self.job, *self.others)}

    def ledger(self, timeout_s: float = 120) -> dict[str, Any]:
        """What the trainer wrote at its end."""
        path = self.home / f"{self.name}.json"
        self.site.until(path.exists, "the trainer's ledger", timeout_s,
                        lambda: self.site.output(self.name, self.job)[-3000:])
        return json.loads(path.read_text())

    def stop(self) -> dict[str, Any]:
        """Ends the trainer; its ledger."""
        self.go.touch()
        return self.ledger()

    def clean(self) -> None:
        """Whatever is left of its jobs goes, and every node is as at first."""
        self.go.touch()
        cluster = self.site.cluster
        cluster.run_as_user(["scancel", self.job, *self.others])
        for node in (*cluster.cpu_nodes, *cluster.gpu_nodes, *cluster.trainer_nodes):
            devcluster("node", "--prefix", str(cluster.prefix),
                       "start" if node in self.dark else "join", node)
        self.site.until(lambda: not any(self.site.state(j) for j in (self.job, *self.others)),
                        "its jobs to go", 120)


def tally(ledger: dict[str, Any]) -> dict[str, Any]:
    """Per kind of action: how many were submitted, and how they ended for the trainer."""
    found: dict[str, Any] = {}
    for kind, count in ledger["submitted"].items():
        ends = [e for e in ledger["ends"] if e["kind"] == kind]
        found[kind] = {"submitted": count, "told": len(ends),
                       "ends": dict(Counter(f"{e['end']} {e.get('state', '')}".strip()
                                            for e in ends)),
                       "wrong": sum(e.get("right") is False for e in ends),
                       "again": sum(e.get("attempt", 1) > 1 for e in ends),
                       "why": sorted({e["text"][:120] for e in ends if "text" in e})[:6]}
    return found


def nothing_is_lost(ledger: dict[str, Any]) -> None:
    """Every action that was submitted ended for the trainer, with a right result or an error."""
    for kind, told in tally(ledger).items():
        assert told["submitted"] == told["told"] > 0 and not told["wrong"], (kind, told)
