"""Checks whether Slurm is here, and whether a broker's job would run under it.

The controller is asked once for its configuration (`scontrol show config`) and once for its
partitions. Nothing is submitted.
"""

from __future__ import annotations

import calendar
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping

from ..resources.cpu import affinity
from .check import CheckContext, CheckSpec, Finding, SlurmFacts, fail, ok, skip, warn
from .deadline import run_command

_COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_OLDEST = (20, 11)  # the first release with srun --overlap
_TRIED = "22.05"
_UNCONFIGURED = "configuration source"
_AS_OF = re.compile(r"data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
# settings of plugins that may rewrite a job
_HOOKS = ("JobSubmitPlugins", "CliFilterPlugins", "PlugStackConfig")
_MUNGE_S = 300.0  # how long munge's credentials are valid, seconds
ASK_S = 15.0


# ---- what the controller says --------------------------------------------------------------------


def ask(environ: Mapping[str, str]) -> SlurmFacts:
    """Asks the controller for its configuration, for `ASK_S` seconds at most."""
    lacking = [name for name in _COMMANDS if shutil.which(name) is None]
    if "scontrol" in lacking:
        inside = bool(environ.get("SLURM_JOB_ID"))
        return SlurmFacts(configured=inside, why="Slurm's commands are not on the PATH")
    named = environ.get("SLURM_CONF", "")
    # without this check, the commands would try for a minute
    if named and not os.path.exists(named):
        return SlurmFacts(configured=True, why=f"SLURM_CONF names {named}, which does not exist")
    fixed = {**environ, "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"}
    before = time.time()
    output = run_command(["scontrol", "show", "config"], fixed, ASK_S)
    after = time.time()
    if output.code:
        none = _UNCONFIGURED in output.err and not named
        why = "Slurm's commands are here, but no cluster is configured for them" if none else (
            f"the controller does not answer: {output.last}")
        return SlurmFacts(configured=not none, why=why, seconds=output.seconds)
    conf = {key.strip(): value.strip() for key, equals, value in
            (line.partition("=") for line in output.out.splitlines()) if equals}
    return SlurmFacts(conf, True, "", output.seconds, _skew(output.out, before, after))


def _skew(text: str, before: float, after: float) -> tuple[float, float]:
    """Returns bounds on the seconds by which the controller's clock is ahead of ours: (least,
    most).

    The controller gives the time of its answer in whole seconds, so there is no exact value.
    """
    match = _AS_OF.search(text)
    if match is None:
        return -1e9, 1e9
    theirs = calendar.timegm(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S"))
    return theirs - after, theirs + 1 - before


def release(text: str) -> tuple[int, int]:
    """Returns the release in a text such as `22.05.8` or `slurm-wlm 22.05.8`; (0, 0) if there is
    none.
    """
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# ---- the checks ----------------------------------------------------------------------------------


def controller(context: CheckContext) -> Finding:
    """Checks whether the controller answers."""
    facts = context.slurm
    if facts.conf:
        return ok(f"cluster {facts.conf.get('ClusterName', '?')} answers in "
                  f"{facts.seconds * 1000:.0f} ms")
    if facts.configured:
        return fail(facts.why, "run `scontrol ping`; set SLURM_CONF, or load the site's module, "
                               "when the commands do not find their cluster")
    return skip(facts.why)


def commands(context: CheckContext) -> Finding:
    """Checks whether the commands that a job's script calls are on the PATH."""
    lacking = [name for name in _COMMANDS if shutil.which(name) is None]
    if not context.slurm.configured:
        return skip(context.slurm.why)
    if not lacking:
        return ok(f"{', '.join(_COMMANDS)}")
    text = f"not on the PATH: {', '.join(lacking)}"
    remedy = "put Slurm's commands on the PATH (often `module load slurm`)"
    return fail(text, remedy) if {"srun", "sbatch"} & set(lacking) else warn(text, remedy)


def releases(context: CheckContext) -> Finding:
    """Compares the releases of the controller and of the commands."""
    if not context.slurm.conf:
        return skip("the controller has not answered")
    theirs = context.slurm.conf.get("SLURM_VERSION", "")
    ours = run_command(["srun", "--version"], context.environ, 5.0).out.strip()
    text = f"{theirs} (controller), {ours or 'unknown'} (commands)"
    if release(theirs) < _OLDEST or release(ours) < _OLDEST:
        return fail(text, f"steps of a job share its nodes since {_OLDEST[0]}.{_OLDEST[1]} "
                          "(srun --overlap): ask the site for a later one")
    if release(ours) > release(theirs):
        return warn(text, "commands newer than their controller may be refused: use the site's")
    return ok(text + ("" if theirs.startswith(_TRIED) else f"; the tests ran with {_TRIED}"))


def het_jobs(context: CheckContext) -> Finding:
    """Checks for the backfill scheduler, which alone starts het jobs."""
    if not context.slurm.conf:
        return skip("the controller has not answered")
    kind = context.slurm.conf.get("SchedulerType", "")
    if "backfill" not in kind:
        return warn(f"SchedulerType {kind}: het jobs never start",
                    "use the template of one component, or ask the site for sched/backfill")
    size = len(context.place.nodes) if context.place is not None else 0
    here = f"; this job has {size} components" if size > 1 else ""
    return ok(f"{kind} starts them{here}")


def plugins(context: CheckContext) -> Finding:
    """Checks which plugins Slurm uses to bind jobs to cores, limit memory and find processes."""
    conf = context.slurm.conf
    if not conf:
        return skip("the controller has not answered")
    task, track = conf.get("TaskPlugin", ""), conf.get("ProctrackType", "")
    hooks = [conf[key] for key in _HOOKS if conf.get(key, "(null)") != "(null)"]
    text = ", ".join([track, task, conf.get("SelectType", ""), *hooks])
    lacks = []
    if "cgroup" not in track:
        lacks.append("does not find all processes of a job step that dies")
    if "cgroup" not in task:
        lacks.append("does not limit a job's memory")
    if "cgroup" not in task and "affinity" not in task:
        lacks.append("does not limit a job's cores")
    if not lacks:
        return ok(text)
    return warn(f"{text}: Slurm {', '.join(lacks)}",
                "nothing here relies on it; proctrack/cgroup with task/cgroup,task/affinity is the "
                "site's to set")


def partitions(context: CheckContext) -> Finding:
    """Checks which partitions could run a job."""
    if not context.slurm.conf:
        return skip("the controller has not answered")
    output = run_command(["sinfo", "-h", "-o", "%R|%a|%D|%t|%G"], context.environ, ASK_S)
    if output.code:
        return warn(f"sinfo: {output.last}", "run `sinfo`")
    counts: dict[str, list[int]] = {}
    for row in output.out.splitlines():
        name, up, nodes, state, gres = (row.split("|") + [""] * 5)[:5]
        usable = up == "up" and not re.match(r"(down|dr|fail|maint|inval|unk)|.*\*", state)
        count = counts.setdefault(name, [0, 0, 0])
        number = int(nodes) if nodes.isdigit() else 0
        count[0] += number
        count[1] += number if usable else 0
        count[2] += number if usable and "gpu" in gres else 0
    text = ", ".join(f"{name} {up}/{all_} up{f' ({gpu} with GPUs)' if gpu else ''}"
                     for name, (all_, up, gpu) in counts.items())
    if not any(up for _, up, _ in counts.values()):
        return fail(text or "none is shown to you", "no node can take a job now: ask the site")
    return ok(text)


def clock(context: CheckContext) -> Finding:
    """Compares our clock with the controller's."""
    if not context.slurm.conf:
        return skip("there is no controller to compare with")
    low, high = context.slurm.skew_s
    if high - low > 1e6:
        return skip("this Slurm does not say when it answered")
    if low <= 0 <= high:
        return ok(f"the controller's and ours agree (told to the second, between {low:+.1f} and "
                  f"{high:+.1f} s)")
    off = min(abs(low), abs(high))
    text = f"the controller's clock is {'ahead' if low > 0 else 'behind'} by {off:.1f} s or more"
    remedy = "have the site synchronise clocks (chrony, ntp): a job's end would be misjudged"
    return fail(text, f"{remedy}, and munge refuses what is {_MUNGE_S:.0f} s off") if (
        off >= _MUNGE_S) else warn(text, remedy) if off > 2 else ok(text)


def job(context: CheckContext) -> Finding:
    """Reports what Slurm gave to this job on this node."""
    place = context.place
    if place is None:
        return skip("not inside a job")
    if not place.node:  # a shell of salloc on a login node: Slurm tells it nothing of a node
        return warn(f"job {place.job}, on none of whose nodes this shell is: what is said here of "
                    "cores, memory, GPUs and isolation is of this machine",
                    "`srun -n 1 tangram doctor` checks a node of the job")
    real = len(affinity.usable())
    gpus = f"{len(place.gpus)} GPU{'s' * (len(place.gpus) != 1)}"
    left = place.ends_at_s - time.time()
    end = f", ends in {left / 60:.0f} min" if place.ends_at_s else ""
    memory = f"{place.mem_mib} MiB" if place.mem_mib else "memory not told"
    text = f"job {place.job} on {place.node}: {place.cpus} CPUs, {memory}, {gpus}{end}"
    if real < place.cpus:
        return warn(f"{text}; but this process may run on {real} cores only",
                    "actions are counted, not bound to cores; where the node has more, give srun "
                    "--cpus-per-task, which steps do not inherit from sbatch")
    return ok(text)


def pyslurm(context: CheckContext) -> Finding:
    """Checks whether pyslurm can be used.

    pyslurm fits one release of Slurm only, and its import ends the process if Slurm is another, so
    it is imported in a child process.
    """
    if importlib.util.find_spec("pyslurm") is None:
        return skip("not installed, and not needed: Slurm's commands are used")
    try:
        version = importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    output = run_command([sys.executable, "-c", "import pyslurm"], context.environ, 20.0)
    if output.code:
        return warn(f"pyslurm {version} cannot be imported: {output.last}",
                    "nothing here needs it; it must be built against this very release of Slurm")
    theirs = release(context.slurm.conf.get("SLURM_VERSION", ""))
    if context.slurm.conf and release(version) != theirs:
        return warn(f"pyslurm {version} with Slurm {theirs[0]}.{theirs[1]:02}",
                    f"install pyslurm {theirs[0]}.{theirs[1]}.*, where there is one")
    return ok(f"pyslurm {version} can be imported")


CHECKS = (
    CheckSpec("controller", controller), CheckSpec("commands", commands),
    CheckSpec("release", releases),
    CheckSpec("het jobs", het_jobs), CheckSpec("plugins", plugins),
    CheckSpec("partitions", partitions, ASK_S + 5, "run `sinfo`"), CheckSpec("clock", clock),
    CheckSpec("job", job),
    CheckSpec("pyslurm", pyslurm, 25.0, "nothing here needs it: uninstall it"),
)
