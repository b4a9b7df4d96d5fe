"""`tangram worker`: lends this node to the job's broker; `srun` starts one per node."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..start_module import own_command
from .helpers import ids


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("worker", help="lend this node to the broker (srun starts one per node)")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: TANGRAM_ACCESS, TANGRAM_JOB or the current Slurm job)")
    p.add_argument("--access", metavar="FILE",
                   help="access file of workers, or access.json beside it (default: "
                        "TANGRAM_ACCESS, else the job's file)")
    p.add_argument("--component", default="",
                   help="name of this node's component or partition (default: none)")
    p.add_argument("--het-group", type=int, default=-1, metavar="N",
                   help="het group of this node's component, by which the component can be given "
                        "back")
    p.add_argument("--name", default="",
                   help="node name (default: SLURMD_NODENAME, else the host name)")
    p.add_argument("--cpus", type=int, help="CPUs to lend (default: all of this job step)")
    p.add_argument("--mem-mib", type=int,
                   help="memory to lend in MiB (default: all of this job step)")
    p.add_argument("--devices",
                   help="devices to lend: none, cpu:N or fake:N (default: this job step's GPUs)")
    p.add_argument("--end", help="end of the allocation: seconds since the epoch, or +SECONDS from "
                                 "now (default: SLURM_JOB_END_TIME)")
    p.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.add_argument("--remove", default="", help=argparse.SUPPRESS)  # for the templates' task epilog
    p.set_defaults(go=go)


def _without_access_in_argv(args: argparse.Namespace) -> int:
    """Starts this program again with the path of the access file in its environment.

    Code in a sandbox can read the arguments of every process of its machine, but no environment.
    """
    argv = ["worker"]
    for option in ("component", "het_group", "name", "cpus", "mem_mib", "devices", "end",
                   "lifeline"):
        value = getattr(args, option)
        if value is not None:
            argv.append(f"--{option.replace('_', '-')}={value}")
    env = {**os.environ, "TANGRAM_ACCESS": args.access}
    os.execve(sys.executable, own_command(*argv), env)


def go(args: argparse.Namespace) -> int:
    """Runs until the broker ends; returns the exit status. With `--remove` only removes the scratch
    folder of a worker that was killed, also what users of images own in it, which rm cannot.
    """
    from ..errors import InvalidInput

    if args.remove:
        from ..storage.rundir import remove_scratch

        return 0 if remove_scratch(args.remove) else 1
    if args.access and args.job:
        raise InvalidInput("worker: --job and --access both name a broker; give one of them")
    if args.access:
        return _without_access_in_argv(args)
    from ..app.broker_location import find_access
    from ..app.worker import WorkerPlan, lend
    from ..config.settings import load_config
    from ..slurm.job_environment import slurm_place
    from ..storage.access import worker_file

    config = load_config(os.environ, {"cpus": args.cpus, "mem_mib": args.mem_mib,
                                      "devices": args.devices, "end": args.end},
                         say=slurm_place(os.environ) is None)  # in a job, its broker warns once
    access = worker_file(find_access(os.environ, args.job or ""))
    plan = WorkerPlan(access, config, args.component, args.name, args.lifeline,
                      args.het_group)
    return lend(plan, os.environ)
