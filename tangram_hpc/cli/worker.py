"""`tangram worker`: lends this node to the job's broker; one per node, started by `srun`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("worker", help="lend this node to the broker (one per node, by srun)")
    p.add_argument("--access", help="access file (default: TANGRAM_ACCESS, or the job's)")
    p.add_argument("--component", default="", help="name of the het component or partition")
    p.add_argument("--het-group", type=int, default=-1, metavar="N",
                   help="which component of a het job this is, so that it can be given back")
    p.add_argument("--name", default="", help="node name (default: SLURMD_NODENAME or the host)")
    p.add_argument("--cpus", type=int, help="CPUs to lend (default: all that this step has)")
    p.add_argument("--mem-mib", type=int, help="memory to lend (default: all this step has)")
    p.add_argument("--devices", help="devices to lend: none, cpu:N, fake:N (default: the GPUs)")
    p.add_argument("--end", help="when its allocation ends: seconds since the epoch, or +SECONDS "
                                 "(default: SLURM_JOB_END_TIME)")
    p.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.set_defaults(go=go)


def _without_access_in_argv(args: argparse.Namespace) -> int:
    """Starts this program again, which learns from its environment where the access file lies:
    code in a sandbox can read every command line of its machine, but no environment."""
    words = ["worker"]
    for option in ("component", "het_group", "name", "cpus", "mem_mib", "devices", "end",
                   "lifeline"):
        value = getattr(args, option)
        if value is not None:
            words.append(f"--{option.replace('_', '-')}={value}")
    env = {**os.environ, "TANGRAM_ACCESS": args.access}
    ours = ["-m", "tangram_hpc"] if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
    os.execve(sys.executable, [sys.executable, *ours, *words], env)


def go(args: argparse.Namespace) -> int:
    """Runs until the broker ends."""
    if args.access:
        return _without_access_in_argv(args)
    from ..app.connecting import find_access
    from ..app.worker import WorkerPlan, lend
    from ..config.settings import load_config
    from ..slurm.job_environment import slurm_place

    config = load_config(os.environ, {"cpus": args.cpus, "mem_mib": args.mem_mib,
                                      "devices": args.devices, "end": args.end},
                         say=slurm_place(os.environ) is None)  # in a job its broker says it, once
    access = find_access(os.environ)
    plan = WorkerPlan(access, config, args.component, args.name, args.lifeline,
                      args.het_group)
    return lend(plan, os.environ)
