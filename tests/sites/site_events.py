"""What an administrator, other users and failing parts do to a running job, and what it must do.

A deck of events is drawn for each template. A job with a trainer that submits all the time gets one
event after the other until one of them ends it; then the next job gets the rest of the deck. After
each event the job must go on, start again, or be over; a job that is over may leave nothing on any
node, and has an end for each of its actions.

Events are carried out for real: by Slurm's commands, by the power of a node (`devcluster node`), by
the daemons of Slurm, and by filling the file system that holds `TANGRAM_HOME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from helpers.devcluster_fixture import devcluster
from helpers.netns_rig import Trial
from helpers.slurm_site import DATA

TEMPLATES = ("hetjob", "homogeneous", "single-node", "satellites")
COLUMNS = ("template", "event", "the job", "asked", "ended", "lost", "left")
GOES_ON, AGAIN, OVER = "goes on", "starts again", "over"
WARN_S = 20
_KEYS = {
    "hetjob": {"partition_cpu": "scav", "partition_gpu": "gpu", "partition_trainer": "trainer",
               "nodes_gpu": "1", "gres_gpu": "gpu:1", "mem_cpu": "600", "mem_gpu": "600"},
    "homogeneous": {"partition": "scav", "nodes": "2", "mem": "1200", "cpus_lent": "4",
                    "mem_lent": "600", "mem_trainer": "600"},
    "single-node": {"partition": "scav", "cpus_lent": "6", "mem": "1800"},
    "satellites": {"partition": "trainer"}}
_LENDERS = {"hetjob": 3, "homogeneous": 2, "single-node": 1, "satellites": 2}
_ACTIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")


@dataclass
class EventJob(Trial):
    """A job of any template that meets events.

    Attributes:
        rng: chooses nodes and times.
        full: the folder of a file system that holds `TANGRAM_HOME` alone.
        attended: whether a node that was down waits for an administrator, as where ReturnToService
            is 0 or 1.
        undo: what makes the cluster as it was, by name.
    """

    rng: random.Random = field(default_factory=random.Random)
    full: Path = Path()
    attended: bool = False
    undo: dict[str, Callable[[], object]] = field(default_factory=dict)

    def start(self) -> None:
        """Submits it; returns when work flows on all its nodes."""
        (self.home / "trainer_ledger.py").write_text((DATA / "trainer_ledger.py").read_text())
        self.job = self.site.submit(
            self.layout, self.name, time="30", ranks="1", warn=str(WARN_S),
            trainer=f"python trainer_ledger.py {self.name}.json {self.go.name} 2",
            **_KEYS[self.layout])
        self.submit_satellites()
        self.site.until(lambda: len(self.nodes("UP")) == _LENDERS[self.layout],
                        "all workers to join", 150,
                        lambda: self.site.output(self.name, self.job)[-3000:])
        self.site.until(self.flows, "work to flow", 60)

    def submit_satellites(self) -> None:
        """Submits them as a user does who needs some: satellites end with their broker."""
        for _ in range(2 if self.layout == "satellites" else 0):
            self.others.append(self.site.submit(
                "satellite", f"{self.name}s{len(self.others)}", broker=self.job, partition="scav",
                mem="600", time="30", cpus="8", component=f"s{len(self.others)}"))

    def flows(self, *where: str) -> bool:
        """Whether an action that is submitted from now on ends well.

        Args:
            where: options of `tangram run` that choose its nodes.
        """
        try:
            told = self.site.tangram("run", "-j", self.job, *where, "--", "echo", "flows",
                                     timeout=30)
        except subprocess.TimeoutExpired:  # it waits for CPUs, of which there are none yet
            return False
        return told.stdout == "flows\n"

    def all_nodes(self) -> list[str]:
        """The nodes of the job and of its satellites, as Slurm has them now."""
        ask = self.site.cluster.run_as_user
        here = ask(["squeue", "-h", "-j", ",".join([self.job, *self.others]), "-o", "%N"]).stdout
        return ask(["scontrol", "show", "hostnames", ",".join(here.split())]).stdout.split()

    def outcome(self, seconds: float = 420) -> str:
        """Waits until the job goes on with all its satellites, starts again and works, or is over.
        """
        end, waited = time.monotonic() + seconds, False
        while time.monotonic() < end:
            state = self.site.state(self.job)
            waited = waited or state in ("PENDING", "REQUEUED")
            if state == "PENDING":
                self.return_nodes()
            if state not in (*_ACTIVE, "PENDING", "REQUEUED"):
                return OVER
            if waited and state == "RUNNING" and not any(map(self.site.state, self.others)):
                self.submit_satellites()
            if state == "RUNNING" and self.flows():
                if waited or self.starts() > 1:  # earlier satellites ended with their broker
                    return AGAIN
                self.satellites_work()
                return GOES_ON
            time.sleep(1)
        raise AssertionError(f"after {seconds:.0f} s job {self.job} is {self.states()} and does "
                             f"not work: {self.said()[-3000:]}")

    def return_nodes(self) -> None:
        """Returns nodes that earlier events have drained: a job that waits may have no others."""
        for node in self.undo.keys() - {"slurmdbd"}:
            self.undo.pop(node)()

    def satellites_work(self) -> None:
        """Waits until each satellite of a job that goes on runs an action. One that the event has
        ended has to come back: it is put into the queue again, and joins the broker again."""
        for number, satellite in enumerate(self.others):
            self.site.until(partial(self._works, satellite, f"s{number}"),
                            f"satellite {satellite} to run an action", 300,
                            lambda: f"{self.states()} {self.said()[-2000:]}")

    def _works(self, satellite: str, component: str) -> bool:
        return self.site.state(satellite) == "RUNNING" and self.flows("-p", component)

    def starts(self) -> int:
        """How often the job has begun."""
        return len(list(self.home.glob(f"{self.name}-{self.job}*.out")))

    def quiet_s(self) -> float:
        """How long ago Slurm last took one of its jobs for active, in seconds: at their present
        starts, at the end of a suspension, or when all nodes registered with a new slurmctld."""
        starts = self.root("squeue", "-h", "-j", ",".join((self.job, *self.others)), "-t",
                           "running,suspended", "-o", "%S").split()
        return time.time() - max([
            *(time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) for start in starts),
            *(self.marks.get(mark, 0) for mark in ("resumed", "registered"))])

    def said(self) -> str:
        """What all starts of the job and its satellites printed."""
        return "".join(path.read_text() for path in sorted(self.home.glob(f"{self.name}*.out")))

    def counts(self) -> tuple[int, int, list[str]]:
        """How many actions the job was asked for and how many have an end, by its accounting; and
        what is wrong with them: actions without an end, and what the trainer was not told."""
        told = self.site.tangram("acct", "-j", self.job, "--json")
        assert told.returncode == 0, told.stderr
        rows = json.loads(told.stdout)["actions"]
        still = Counter(row["state"] for row in rows
                        if row["state"] in ("PENDING", "CONFIGURING", "RUNNING"))
        wrong = [f"{count} {state}" for state, count in still.items()]
        ledger = self.home / f"{self.name}.json"
        if ledger.exists():
            seen = json.loads(ledger.read_text())
            asked = sum(seen["submitted"].values())
            if asked != len(seen["ends"]):
                wrong.append(f"{asked - len(seen['ends'])} not told")
            wrong += [f"wrong result: {e}" for e in seen["ends"] if e.get("right") is False]
        return len(rows), len(rows) - still.total(), wrong

    def restore(self) -> None:
        """Undoes what events did to the cluster."""
        for back in list(self.undo.values()):
            back()
        self.undo.clear()

    def end(self) -> None:
        """Ends the trainer in order, and the satellites that wait for a broker in vain."""
        self.go.touch()
        self.restore()
        try:
            self.site.until(lambda: self.site.state(self.job) not in _ACTIVE, "its end", 120,
                            self.said)
        finally:
            waiting = [job for job in (self.job, *self.others) if self.site.state(job)]
            if waiting:
                self.site.cluster.run_as_user(["scancel", *waiting])
            self.site.until(lambda: not any(map(self.site.state, (self.job, *self.others))),
                            "its jobs to go", 120, lambda: str(self.states()))

    def root(self, *words: str) -> str:
        """Runs a command of Slurm as an administrator."""
        told = subprocess.run(words, env=self.site.cluster.env, capture_output=True, text=True,
                              check=False)
        assert told.returncode == 0, (words, told.stderr)
        return told.stdout


# ---- events --------------------------------------------------------------------------------------


def scancel(job: EventJob) -> None:
    job.site.cluster.run_as_user(["scancel", job.job], check=True)


def _set_node(job: EventJob, node: str, state: str) -> None:
    # without a check: a node that is down comes back by itself when its slurmd answers
    job.undo[node] = lambda: subprocess.run(
        ["scontrol", "update", f"nodename={node}", "state=resume"], env=job.site.cluster.env,
        capture_output=True, check=False)
    job.root("scontrol", "update", f"nodename={node}", f"state={state}", "reason=event")


def _return_to_service(job: EventJob, node: str, reason: str) -> None:
    """Where Slurm leaves a node down, an administrator returns it a while after the event."""
    if job.attended:
        job.site.until(lambda: f"Reason={reason} " in job.root("scontrol", "show", "node", node),
                       f"Slurm to set {node} down: {reason}", 60)
        time.sleep(job.rng.uniform(5, 30))
        job.root("scontrol", "update", f"nodename={node}", "state=resume")


def drain(job: EventJob) -> None:
    _set_node(job, job.rng.choice(job.all_nodes()), "drain")


def down(job: EventJob) -> None:
    node = job.rng.choice(job.all_nodes())
    _set_node(job, node, "down")
    _return_to_service(job, node, "event")


def _limit(job: EventJob, minutes: int) -> None:
    job.root("scontrol", "update", f"jobid={job.job}", f"timelimit={minutes}")


def limit_up(job: EventJob) -> None:
    _limit(job, 60)


def limit_down(job: EventJob) -> None:
    """To a minute from now, at the most: the job is warned, and has to end in order."""
    used = job.root("squeue", "-h", "-j", job.job, "-o", "%M").split()[0]
    minutes, _, _ = used.partition(":")
    _limit(job, int(minutes) + 1)
    job.site.until(lambda: job.site.state(job.job) not in _ACTIVE, "the job to end at its limit",
                   160, lambda: job.said()[-3000:])


def suspend(job: EventJob) -> None:
    job.root("scontrol", "suspend", job.job)
    time.sleep(job.rng.uniform(2, 20))
    job.root("scontrol", "resume", job.job)
    job.mark("resumed")


def preempt(job: EventJob) -> None:
    """Another user's job of a partition that goes first takes a node."""
    victims = [n for n in job.all_nodes() if n in job.site.cluster.cpu_nodes]
    node = job.rng.choice(victims or job.site.cluster.cpu_nodes)
    if node in job.undo:  # no job starts on a node that an earlier event has drained
        job.undo.pop(node)()
    told = job.site.cluster.run_as_user(
        ["sbatch", "--parsable", "-p", "cpu", "-w", node, "--exclusive", "-t", "1", "-o",
         "/dev/null", "--wrap", "sleep 8"])
    other = told.stdout.strip()
    end = time.monotonic() + 90
    while job.site.state(other) == "PENDING" and time.monotonic() < end:
        time.sleep(1)
    if job.site.state(other) == "PENDING":  # Slurm does not preempt a component of a het job
        assert job.layout == "hetjob", f"nothing was preempted for job {other}"
        job.site.cluster.run_as_user(["scancel", other])
    job.site.until(lambda: not job.site.state(other), "the other job to end", 60)


def _daemon(job: EventJob, fate: str, name: str) -> None:
    done = devcluster("daemon", "--prefix", str(job.site.cluster.prefix), fate, name)
    assert done.returncode == 0, done.stderr


def slurmctld_restart(job: EventJob) -> None:
    _daemon(job, "stop", "slurmctld")
    time.sleep(job.rng.uniform(0, 10))
    _daemon(job, "start", "slurmctld")
    job.mark("registered")


def slurmdbd_down(job: EventJob) -> None:
    """It stays away until the job's end, or for the rest of the deck."""
    if "slurmdbd" not in job.undo:
        _daemon(job, "stop", "slurmdbd")
        job.undo["slurmdbd"] = lambda: _daemon(job, "start", "slurmdbd")


def full_home(job: EventJob) -> None:
    """The file system of TANGRAM_HOME is full for a while."""
    path = job.full / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    time.sleep(job.rng.uniform(3, 12))
    path.unlink()


def node_reboot(job: EventJob) -> None:
    node = job.rng.choice(job.all_nodes())
    job.fate("kill", node)
    holder = job.site.cluster.pid_of(f"node-{node}")
    # memory does not outlive a reboot
    for path in Path(f"/proc/{holder}/root", "dev/shm").iterdir():
        path.unlink()
    if job.attended:  # no epilog runs on a node that is set down; Debian empties /tmp at boot
        for path in Path(f"/proc/{holder}/root", "tmp").iterdir():
            if not path.name.startswith("devcluster-"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    # A node that registers without a job's script ends the job if it was last active 20 s before
    # (BatchStartTimeout and 10 s). One that registers earlier is asked again ten minutes later.
    time.sleep(max(job.rng.uniform(1, 8), 35 - job.quiet_s()))
    job.fate("start", node)
    _return_to_service(job, node, "Node unexpectedly rebooted")
    time.sleep(45)  # srun learns only when it asks that a node has no process of its step


EVENTS: dict[str, tuple[Callable[[EventJob], None], frozenset[str]]] = {
    "scancel": (scancel, frozenset({OVER})),
    "drain": (drain, frozenset({GOES_ON})),
    "down": (down, frozenset({GOES_ON, AGAIN, OVER})),
    "limit up": (limit_up, frozenset({GOES_ON})),
    "limit down": (limit_down, frozenset({OVER})),
    "suspend": (suspend, frozenset({GOES_ON})),
    "preempt": (preempt, frozenset({GOES_ON, AGAIN})),
    "slurmctld restart": (slurmctld_restart, frozenset({GOES_ON})),
    "slurmdbd down": (slurmdbd_down, frozenset({GOES_ON})),
    "full home": (full_home, frozenset({GOES_ON, OVER})),
    "node reboot": (node_reboot, frozenset({GOES_ON, AGAIN, OVER}))}


def deck(template: str, count: int, seed: int, kinds: Sequence[str] = tuple(EVENTS)) -> list[str]:
    """Returns the events for a template: each kind as often as any other, in random order."""
    rng, cards = random.Random(f"{seed} {template}"), list[str]()
    while len(cards) < count:
        more = list(kinds)
        rng.shuffle(more)
        cards += more
    return cards[:count]


def cgroups_of(user: str) -> list[str]:
    """Returns the control groups that belong to a user, or that the plugin made for a job."""
    uid, found = pwd.getpwnam(user).pw_uid, list[str]()
    for path, _, _ in os.walk("/sys/fs/cgroup"):
        with contextlib.suppress(OSError):  # others of this machine come and go
            if os.stat(path).st_uid == uid or os.path.basename(path).startswith("tangram-job"):
                found.append(path)
    return found
