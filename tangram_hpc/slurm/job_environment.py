"""The only reader of `SLURM_*`: what Slurm told this process about its job, step and node.

These functions read only the mapping they are given, and never call Slurm. Two traps: in every step
of a het job `SLURM_JOB_ID` is the leader's, and no variable tells a task its het group, so we pass
a component's name in an argument of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .hostlist import expand


@dataclass(frozen=True)
class SlurmPlace:
    """Where this process runs. A field that Slurm did not tell is zero or empty.

    Attributes:
        job: the job id; of a het job its leader's.
        node: this node's name, as Slurm calls it.
        cpus: CPUs of this node that the step or job may use.
        mem_mib: memory of this node that the job may use, MiB.
        gpus: this step's GPUs, by Slurm's own numbers.
        ntasks: tasks of the step, else of the job.
        ends_at_s: when the job reaches its time limit, epoch seconds.
        nodes: the number of nodes of each component; one number where it is no het job.
        tasks_here: tasks of this step on this node.
        bound: whether srun bound each task to CPUs of its own.
        cluster: the cluster's name.
        restarts: how often the job was requeued before this start.
    """

    job: str
    node: str
    cpus: int
    mem_mib: int
    gpus: tuple[int, ...]
    ntasks: int
    ends_at_s: int
    nodes: tuple[int, ...] = ()
    tasks_here: int = 0
    bound: bool = False
    cluster: str = ""
    restarts: int = 0


def slurm_place(environ: Mapping[str, str], het_group: int = -1) -> SlurmPlace | None:
    """Returns what Slurm says of this process, or None outside a job.

    Args:
        environ: the process's environment.
        het_group: the number of the het component in which the process runs; -1 for none. Slurm
            gives a job step no such number.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    cpus = _int(environ.get("SLURM_CPUS_ON_NODE"))
    env = _memory_of(environ, f"_HET_GROUP_{het_group}") or environ
    mem = _int(env.get("SLURM_MEM_PER_NODE")) or cpus * _int(env.get("SLURM_MEM_PER_CPU"))
    return SlurmPlace(
        job=job,
        node=environ.get("SLURMD_NODENAME", ""),
        cpus=cpus,
        mem_mib=mem,
        gpus=_gpus(environ),
        ntasks=_int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")),
        ends_at_s=_int(environ.get("SLURM_JOB_END_TIME")),
        nodes=_nodes(environ),
        tasks_here=_tasks_here(environ),
        bound=environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map", "rank")),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        restarts=_int(environ.get("SLURM_RESTART_COUNT")),
    )


def _memory_of(environ: Mapping[str, str], component: str) -> dict[str, str]:
    """Returns the variables of a component's memory, by their plain names. Under these names
    themselves a job step of any component finds component 0's.
    """
    return {name.removesuffix(component): value for name, value in environ.items()
            if name.startswith("SLURM_MEM_PER_") and name.endswith(component)}


def job_account(environ: Mapping[str, str]) -> str:
    """Returns the account that this process's job is charged to; empty where Slurm told none."""
    return environ.get("SLURM_JOB_ACCOUNT") or environ.get("SLURM_JOB_ACCOUNT_HET_GROUP_0", "")


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables of Slurm, of a process manager, or of ours."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "HYDI_", "MPI_",
                "OMPI_", "PRTE_", "TANGRAM_")
    return {k: v for k, v in environ.items() if not k.startswith(prefixes)}


# these name the Slurm to talk to, and the credentials
_CONFIGURES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


def slurm_command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which Slurm's commands do exactly what their arguments say.

    Inside a job, variables of the job and defaults such as `SQUEUE_FORMAT` would change a command's
    meaning. Only what names the Slurm to talk to is kept.
    """
    defaults = ("SQUEUE_", "SCANCEL_", "SCONTROL_", "SACCT_", "SACCTMGR_", "SINFO_")
    kept = {k: v for k, v in without_slurm(environ).items() if not k.startswith(defaults)}
    return kept | {k: environ[k] for k in _CONFIGURES if k in environ}


def _nodes(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the number of nodes of each component.

    A job step sees only its own component, unless its srun was started with the batch script's
    variables.
    """
    name = "SLURM_JOB_NUM_NODES"
    size = _int(environ.get("SLURM_HET_SIZE"))
    groups = tuple(_int(environ.get(f"{name}_HET_GROUP_{n}")) for n in range(size))
    return groups if groups and all(groups) else (_int(environ.get(name)) or 1,)


def other_nodes(environ: Mapping[str, str], step: bool = False) -> tuple[str, ...]:
    """Returns the names of this job's other nodes. O(nodes).

    Of a het job these are the nodes of all components, as far as Slurm tells them.

    Args:
        environ: the environment of a process of the job.
        step: return only the nodes of this job step, if Slurm tells them.
    """
    lists = [environ.get("SLURM_STEP_NODELIST", "")] if step else []
    if not any(lists):
        size = _int(environ.get("SLURM_HET_SIZE"))
        lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{n}", "") for n in range(size)]
        lists.append(environ.get("SLURM_JOB_NODELIST", ""))
    own = environ.get("SLURMD_NODENAME", "")
    try:
        names = [name for text in lists for name in expand(text)]
    except ValueError:
        return ()
    return tuple(dict.fromkeys(name for name in names if name != own))


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Returns this node's entry of a list such as `2(x3),1`; 0 where Slurm gave none."""
    at = _int(environ.get("SLURM_NODEID"))
    for group in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = group.partition("(x")
        at -= _int(times.rstrip(")")) or 1
        if at < 0:
            return _int(count)
    return 0


def unsized(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which to start a further job step.

    The size and shape of this process's own step are left out, since `srun` would take them for the
    new step's, and so are the variables of its process manager.
    """
    shapes = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER", "SLURM_CPUS_PER_", "SLURM_MEM_PER",
              "SLURM_TRES_PER", "SLURM_GPU", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_HINT",
              "SLURM_THREADS_PER", "SLURM_EXACT", "SLURM_OVERLAP", "SLURM_STEP_", "PMI_", "PMIX_",
              "OMPI_", "SLURM_MPI_TYPE", "SLURM_NNODES")
    return {k: v for k, v in environ.items() if not k.startswith(shapes)}


def _gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns this step's GPUs by Slurm's own numbers.

    CUDA_VISIBLE_DEVICES tells how many there are, but not always which: where cgroups hide the
    other GPUs it counts from 0. SLURM_JOB_GPUS may list more, as steps inherit their job's list.
    """
    step, job = (_numbers(environ.get(f"SLURM_{of}_GPUS", "")) for of in ("STEP", "JOB"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        own = step if "SLURM_STEP_ID" in environ else step or job
        return own or tuple(range(_int(environ.get("SLURM_GPUS_ON_NODE"))))
    words = [word.strip() for word in visible.split(",")] if visible.strip() else []
    if not words or words[0] in ("-1", "NoDevFiles"):
        return ()
    for numbers in (step, job):
        if len(numbers) == len(words):
            return numbers
    return _numbers(visible) or tuple(range(len(words)))


def _numbers(text: str) -> tuple[int, ...]:
    """Returns (0, 2, 3) for `0,2-3`, and () for what is no such list."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def step_marks(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns environment entries that all processes of this job step have, and no others; empty
    outside of a job step.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    marks = tuple(f"{name}={environ[name]}" for name in names if environ.get(name))
    return marks if len(marks) == len(names) else ()


def _int(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
