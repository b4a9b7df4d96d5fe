"""`tangram broker`: the broker of one held allocation; started by the batch script."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("broker", help="run the broker of a job (the batch script does)")
    p.add_argument("--job", default="", help="job id (default: SLURM_JOB_ID, else a local name)")
    p.add_argument("--nodes", type=int, default=1, help="how many workers will join")
    p.add_argument("--placer", help="elastic, paper, first-fit, fcfs:K or static:K")
    p.add_argument("--sync", help="journal: none, batch or always")
    p.add_argument("--bind", help="address to listen on")
    p.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs until told to end."""
    from ..assemble import BrokerPlan, serve_broker
    from ..backends.rundir import local_job_name
    from ..backends.slurm.environ import slurm_place
    from ..config import load_config

    config = load_config(os.environ, {"placer": args.placer, "sync": args.sync, "bind": args.bind})
    place = slurm_place(os.environ)
    job = args.job or (place.job if place is not None else "") or local_job_name()
    asyncio.run(serve_broker(BrokerPlan(job, args.nodes, config, args.lifeline), os.environ))
    return 0
