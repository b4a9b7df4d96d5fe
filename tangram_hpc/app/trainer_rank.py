"""Finds which rank of a trainers' job step this process is, and makes its program's environment.

The module reads only the mapping that it is given, and calls neither MPI nor Slurm. One file for
each step, in the broker's own folder, holds the address of rank 0; nothing else is written.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..atomic_file import replace_file
from ..errors import BrokerUnreachable, InvalidInput, WrongWorld
from ..slurm.job_environment import slurm_place
from ..transport.mpi.mpi_launch import launch_of, launch_rank, managed
from ..transport.mpi.mpi_oversubscription import wait_environment

_LOCALS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_MEET_S = 60.0
_GATEWAY = ("TANGRAM_GATEWAY", "TANGRAM_WORLD_SIZE")
REMEDY = ("start it with `srun --mpi=pmi2` (MPICH, Intel MPI; Open MPI needs --mpi=pmix), "
          "or use --gateway off")


@dataclass(frozen=True)
class TrainerTask:
    """One task of the trainers' step.

    Attributes:
        rank: its number in the step.
        size: how many tasks the step has.
        local: its number on this node.
        gateway: whether the last task of the step is the gateway.
    """

    rank: int
    size: int
    local: int
    gateway: bool

    @property
    def trainers(self) -> int:
        """How many tasks run the trainer's program."""
        return self.size - self.gateway

    @property
    def is_gateway(self) -> bool:
        """Whether this task is the gateway."""
        return self.gateway and self.rank == self.size - 1


# ---- what was launched -------------------------------------------------------------------------


def rank_of(environ: Mapping[str, str], gateway: str, mpi: bool) -> TrainerTask:
    """Returns which task of the step this process is.

    Args:
        environ: the process's environment.
        gateway: `auto`, `on` or `off`. `auto` makes the last rank a gateway if the step was started
            with MPI, has another rank, and `mpi` is true.
        mpi: whether this program could use MPI.

    Raises:
        WrongWorld: the step differs from the one that was meant; the message is one line.
    """
    torch = "TORCHELASTIC_RUN_ID" in environ
    local = next((int(environ[n]) for n in _LOCALS if environ.get(n, "").isdigit()), 0)
    if torch:  # torchrun started this process: its variables describe the ranks that it started
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local = int(environ["LOCAL_RANK"])
    else:
        rank, size = launch_rank(environ), _size(environ)
    with_mpi = managed(environ) and not torch
    if gateway == "on":
        _refuse_gateway(with_mpi, size)
    use = gateway == "on" or (gateway == "auto" and with_mpi and size > 1 and mpi)
    found = TrainerTask(rank, size, local, use)
    if not torch:
        _refuse_stale(environ, found)
    return found


def _size(environ: Mapping[str, str]) -> int:
    """Returns how many tasks were really started; `TANGRAM_WORLD_SIZE` says how many should be."""
    place = slurm_place(environ)
    if managed(environ):
        plain = {k: v for k, v in environ.items() if k != "TANGRAM_WORLD_SIZE"}
        size = launch_of(plain).size or 1
    elif place is None:
        size = 1
    elif "SLURM_STEP_ID" not in environ and place.ntasks > 1:
        raise WrongWorld(f"the job has {place.ntasks} tasks, but this is the only one: start it "
                         "with `srun tangram rank -- ...`")
    else:
        size = place.ntasks or 1
    meant = environ.get("TANGRAM_WORLD_SIZE", "")
    if meant and meant != str(size):
        raise WrongWorld(f"TANGRAM_WORLD_SIZE: {meant} ranks were meant, but {size} were started; "
                         f"give srun --ntasks={meant}")
    return size


def _refuse_gateway(with_mpi: bool, size: int) -> None:
    if not with_mpi:
        raise WrongWorld(f"--gateway on: nothing here started an MPI world of {size} ranks; "
                         f"{REMEDY}")
    if size < 2:
        raise WrongWorld("--gateway on: the world has 1 rank, and the gateway is one rank more "
                         "than the trainers: start at least 2, or use --gateway off")


def _refuse_stale(environ: Mapping[str, str], found: TrainerTask) -> None:
    """Refuses a RANK or WORLD_SIZE that was exported before srun, as all ranks would have the same.
    """
    want = {"RANK": found.rank, "WORLD_SIZE": found.trainers}
    for name, number in want.items():
        if environ.get(name) and environ[name] != str(number) and not found.is_gateway:
            raise WrongWorld(f"{name}={environ[name]} is set, but this is rank {found.rank} of "
                             f"{found.trainers}; unset RANK and WORLD_SIZE before srun, or name "
                             "those that you want in the command")


def affinity_complaint(environ: Mapping[str, str], usable: int, online: int) -> str:
    """Returns what is wrong with the CPUs to which this task is bound, and the remedy; empty if
    nothing is.

    Args:
        environ: the process's environment.
        usable: how many CPUs the task may use.
        online: how many CPUs the machine has; a task that may use them all is not bound.
    """
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    if not asked.isdigit() or usable >= min(int(asked), online):
        return ""
    return (f"this rank may use {usable} of its {asked} CPUs (SLURM_CPUS_PER_TASK): srun may not "
            f"take that number from sbatch; give it --cpus-per-task={asked}")


# ---- what its program finds ----------------------------------------------------------------------


def trainer_environment(environ: Mapping[str, str], found: TrainerTask, job: str, access: str,
                        master: tuple[str, int] | None, is_shared: bool = False) -> dict[str, str]:
    """Returns the environment of the trainer's program.

    It is the given environment with the job and the access file. Variables that a torchrun-style
    trainer needs are added where they are not set. On an oversubscribed node, variables that tell
    MPI how to wait are added as well.

    Args:
        environ: the process's environment.
        found: which task this is.
        job: the broker's job.
        access: the path of the access file.
        master: host and port of rank 0; None leaves `MASTER_ADDR` and `MASTER_PORT` alone.
        is_shared: whether ranks share cores.
    """
    made = {k: v for k, v in environ.items() if k not in _GATEWAY}
    made |= {"TANGRAM_JOB": job, "TANGRAM_ACCESS": access}
    if found.gateway:
        made |= {"TANGRAM_GATEWAY": "1", "TANGRAM_WORLD_SIZE": str(found.size)}
        made |= wait_environment(environ, is_shared)
    if found.is_gateway:
        return made
    torch = {"RANK": str(found.rank), "WORLD_SIZE": str(found.trainers),
             "LOCAL_RANK": str(found.local)}
    if master is not None:
        torch |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return made | {k: v for k, v in torch.items() if not environ.get(k)}


def wants_master(environ: Mapping[str, str], found: TrainerTask) -> bool:
    """Whether this rank's program must be given the address of rank 0."""
    in_step = "SLURM_STEP_ID" in environ
    known = environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")
    return not known and not found.is_gateway and (in_step or found.trainers == 1)


def master_address(environ: Mapping[str, str], found: TrainerTask, folder: Path, address: str,
                   patience_s: float = _MEET_S) -> tuple[str, int]:
    """Returns host and port of rank 0. Rank 0 takes its own `address` and a port that is free
    there, and writes both into a file in `folder`, which all nodes see; the other ranks read it.

    Raises:
        BrokerUnreachable: rank 0 has not written the file within `patience_s` seconds.
        InvalidInput: the folder cannot be written.
    """
    if found.trainers == 1:
        return address, _free_port(address)
    path = meeting_file(environ, folder, "rank0")
    if found.rank == 0:
        told = address, _free_port(address)
        write_whole(path, f"{told[0]} {told[1]}\n")
        return told
    deadline, pause = time.monotonic() + patience_s, 0.02
    # listing the folder asks a shared file system anew; it may still remember the name as missing
    while path.name not in os.listdir(folder):
        if time.monotonic() > deadline:
            raise BrokerUnreachable(f"{path}: rank 0 of this step did not write it within "
                                    f"{patience_s:.0f} s; has it ended?")
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)
    host, port = path.read_text().split()
    return host, int(port)


def meeting_file(environ: Mapping[str, str], folder: Path, name: str) -> Path:
    """Returns the path of a file by which the tasks of this job step find each other. No other job
    step has the same path."""
    step = [environ.get(f"SLURM_{w}", "0") for w in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return folder / f"{name}.{'.'.join(step)}"


def write_whole(path: Path, text: str) -> None:
    """Writes a private file in one step, so that nobody reads half of it.

    Raises:
        InvalidInput: the file cannot be written.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
