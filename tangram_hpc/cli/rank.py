"""`tangram rank`: a prefix for the command of any trainer that `srun` starts.

The verb finds the broker. The process then becomes `tangram gateway` in the last rank of an MPI
world, and the trainer itself in all other ranks, so that signals and exit statuses are the
trainer's own.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..start_module import own_command
from .helpers import ids

if TYPE_CHECKING:
    from ..app.trainer_rank import TrainerTask

_SHARED_FS_S = 10.0  # how long a shared file system may take to show a new access file


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "rank", help="start a trainer's rank: srun ... tangram rank -- python train.py",
        description="Finds the broker, checks the job step and becomes COMMAND, which finds "
        "TANGRAM_* and, unless they are set already, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT in its environment. Signals and exit status are COMMAND's own. In a job step "
        "that srun starts with MPI, the last rank becomes the gateway, so start one rank more than "
        "trainers.")
    p.add_argument("--gateway", choices=("auto", "on", "off"), default="auto",
                   help="auto: the last rank is the gateway if the job step was started with MPI "
                        "and mpi4py is installed; on: fail if this is not so; off: all ranks are "
                        "trainers, and use the broker's socket (default: auto)")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id of the broker (default: TANGRAM_ACCESS, TANGRAM_JOB or the current "
                        "Slurm job)")
    p.add_argument("--access", metavar="FILE", help="access file (default: the job's file)")
    p.add_argument("--launcher", choices=("none", "torchrun", "ray"), default="none",
                   help="run COMMAND by torchrun (one rank for each GPU), or on a Ray cluster of "
                        "all nodes, which ends with COMMAND; the job step needs one task a node "
                        "and no gateway (default: none)")
    p.add_argument("--apptainer", default="", metavar="IMAGE",
                   help="run COMMAND and its launcher in this apptainer image, in which "
                        "tangram_hpc must be installed too")
    p.add_argument("--step-file", type=Path, metavar="FILE",
                   help="file to which rank 0 writes the number of this job step, for "
                        "`scancel --signal`; its nodes go to FILE.nodes")
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Checks the job step and becomes the gateway or the trainer; returns only an error's exit
    status.
    """
    from importlib.util import find_spec

    from ..app.trainer_launchers import (
        check_launcher,
        contained,
        torchrun_words,
        without_place,
    )
    from ..app.trainer_rank import rank_of, write_whole
    from ..errors import InvalidInput, TangramError
    from ..transport.mpi.mpi_launch import launch_rank

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    environ = os.environ
    try:  # an error raised here is the same in all ranks, so only rank 0 prints it
        if not command:
            raise InvalidInput("rank: it needs a command, as in `srun tangram rank -- python "
                               "train.py`")
        check_launcher(args.launcher, args.gateway, environ)
        gateway = args.gateway if args.launcher == "none" else "off"
        mpi = gateway != "off" and find_spec("mpi4py") is not None
        found = rank_of(environ, gateway, mpi)
    except TangramError as error:
        if launch_rank(environ) == 0:
            raise
        return error.exit_status
    try:  # an error raised here may differ between nodes: one rank of each node prints it
        made = _prepare(args, environ, found)
        if args.step_file and found.rank == 0:
            # the script sees by its nodes whether Slurm ended this step because one was lost
            write_whole(Path(f"{args.step_file}.nodes"),
                        environ.get("SLURM_STEP_NODELIST", "") + "\n")
            write_whole(args.step_file, environ.get("SLURM_STEP_ID", "") + "\n")
    except TangramError as error:
        if found.local != 0:
            return error.exit_status
        if found.rank == 0:
            raise
        raise type(error)(f"rank {found.rank} on {socket.gethostname()}: {error}") from None
    if found.is_gateway:
        # Slurm sends SIGTERM to all ranks; the gateway ends when the trainers have ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        command = own_command("gateway")  # it finds the broker by TANGRAM_ACCESS
    elif args.launcher == "ray":
        return _run_ray(args, command, found, made)
    elif args.launcher == "torchrun":
        command = torchrun_words(command, made)
        made = without_place(made)
    if not found.is_gateway:
        command = contained(args.apptainer, command, made)
    _become(command, made)


def _run_ray(args: argparse.Namespace, command: list[str], found: TrainerTask,
             made: dict[str, str]) -> int:
    """Runs this node of a Ray cluster; returns the exit status."""
    from ..app.ray_node import RayNode, run_node
    from ..app.trainer_launchers import known, without_place
    from ..app.trainer_rank import meeting_file

    host, port = (known("ray", made, name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    meeting = meeting_file(made, Path(made["TANGRAM_ACCESS"]).parent, "ray")
    node = RayNode(found.rank, found.trainers, f"{host}:{port}", meeting, args.apptainer)
    return run_node(node, command, without_place(made))


def _prepare(args: argparse.Namespace, environ: Mapping[str, str], found: TrainerTask
             ) -> dict[str, str]:
    """Returns the environment of this rank's program; TANGRAM_ACCESS names the access file."""
    from ..app.broker_location import await_access, find_access, meeting_address
    from ..app.trainer_rank import (
        affinity_complaint,
        master_address,
        trainer_environment,
        wants_master,
    )
    from ..config.settings import load_config
    from ..transport.mpi.mpi_oversubscription import oversubscribed

    path = Path(args.access) if args.access else find_access(environ, args.job or "")
    access = await_access(path, _SHARED_FS_S)
    master = None
    if wants_master(environ, found):
        own = meeting_address(load_config(environ).bind, environ) if found.rank == 0 else ""
        master = master_address(environ, found, Path(access.store).parent, own)
    if found.rank == 0 and found.gateway:
        print(f"tangram: {found.trainers} trainer ranks, and rank {found.size - 1} is the gateway "
              f"(with --gateway off, all {found.size} ranks are trainers)",
              file=sys.stderr, flush=True)
    usable, online = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if found.local == 0 and not found.is_gateway:
        complaint = affinity_complaint(environ, usable, online)
        if complaint:
            print(f"tangram: warning: rank {found.rank} on {socket.gethostname()}: {complaint}",
                  file=sys.stderr, flush=True)
    return trainer_environment(environ, found, access.job, str(path.resolve()), master,
                               oversubscribed(environ, usable, online))


def _become(command: list[str], made: dict[str, str]) -> NoReturn:
    from ..errors import InvalidInput

    # Python ignores these signals, and a program inherits ignored signals through exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, made)
    except OSError as error:
        raise InvalidInput(f"rank: {command[0]!r} cannot be started: {error.strerror}") from None
