"""`tangram worker`: lends this node to the job's broker; one per node, started by `srun`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
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


def go(args: argparse.Namespace) -> int:
    """Runs until the broker ends."""
    from ..assemble.ways import find_access
    from ..assemble.worker import WorkerPlan, lend
    from ..backends.slurm.environ import slurm_place
    from ..config import load_config

    config = load_config(os.environ, {"cpus": args.cpus, "mem_mib": args.mem_mib,
                                      "devices": args.devices, "end": args.end},
                         say=slurm_place(os.environ) is None)  # in a job its broker says it, once
    access = Path(args.access) if args.access else find_access(os.environ)
    plan = WorkerPlan(access, config, args.component, args.name, args.lifeline,
                      args.het_group)
    return lend(plan, os.environ)
