"""`tangram broker`: the broker of one held allocation; started by the batch script."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..broker.satellites import SatelliteScripts
    from ..config.allocations import ElasticSettings

# what a satellite's workers must know of the broker's environment
_HANDED_ON = ("HOME", "CONFIG", "DEVICES", "ISOLATION", "ENFORCEMENT", "READ_PATHS", "DISK_MIB",
              "SESSION_PIDS", "STARTS_MAX", "WARM", "MEM_OVERCOMMIT", "BIND")


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("broker", help="run the broker of a job (the batch script does)")
    p.add_argument("--job", default="", help="job id (default: SLURM_JOB_ID, else a local name)")
    p.add_argument("--nodes", type=int, default=1, help="how many workers will join")
    p.add_argument("--placer", help="elastic, paper, first-fit, fcfs:K or static:K")
    p.add_argument("--sync", help="journal: none, batch or always")
    p.add_argument("--bind", help="address, interface or network to listen on")
    p.add_argument("--idle-release", type=float, metavar="SECONDS",
                   help="give back what has idled for so long: satellites, and components of a het "
                        "job but its first (0: never)")
    p.add_argument("--max-nodes", type=int, metavar="N",
                   help="ask for at most N nodes by satellites when the queue needs them")
    p.add_argument("--max-core-hours", type=float, metavar="H",
                   help="that all satellites together may use")
    p.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs until told to end."""
    from ..app.broker import BrokerPlan, serve_broker
    from ..config.allocations import alloc_policy, elastic
    from ..config.settings import load_config
    from ..slurm.job_environment import slurm_place
    from ..storage.rundir import local_job_name

    config = load_config(os.environ, {"placer": args.placer, "sync": args.sync, "bind": args.bind})
    place = slurm_place(os.environ)
    job = args.job or (place.job if place is not None else "") or local_job_name()
    told = elastic(config.elastic, {
        "idle_release_s": args.idle_release, "max_nodes": args.max_nodes,
        "max_core_hours": args.max_core_hours,
        "give_back": "all" if args.idle_release else None})
    wanted = told.max_nodes or (told.idle_release_s and told.give_back == "all")
    plan = BrokerPlan(job, args.nodes, config, args.lifeline,
                      alloc_policy(told) if wanted else None,
                      _scripts(told, job, os.environ) if told.max_nodes else None)
    asyncio.run(serve_broker(plan, os.environ))
    return 0


def _scripts(told: ElasticSettings, job: str, environ: Mapping[str, str]) -> SatelliteScripts:
    """The template `satellite`, filled in for each kind of satellite."""
    from ..broker.satellites import SatelliteScripts
    from ..storage.rundir import own_dir
    from .template import load, render

    template, scripts = load("satellite"), {}
    here = shlex.quote(str(Path(sys.executable).parent))
    for s in told.satellites:
        warn = max(1, min(120, round(s.time_min * 15)))  # at most a quarter of its time
        keys = {
            "broker": job, "job_name": f"tangram-{job}-{s.name}", "partition": s.partition,
            "qos": s.qos, "account": s.account, "nodes": str(s.nodes), "cpus": str(s.cpus),
            "mem": f"{s.mem_mib}M" if s.mem_mib else "", "time": str(round(s.time_min)),
            "gres": s.gres or (f"gpu:{s.gpus}" if s.gpus else ""), "component": s.component,
            "warn": str(warn), "setup": told.setup or f"export PATH={here}:$PATH"}
        if told.scratch:
            keys["scratch"] = told.scratch
        scripts[s.name] = render(template, keys)
    handed = {f"TANGRAM_{k}": environ[f"TANGRAM_{k}"] for k in _HANDED_ON
              if f"TANGRAM_{k}" in environ}
    if handed.get("TANGRAM_CONFIG"):  # a satellite may start in another folder
        handed["TANGRAM_CONFIG"] = str(Path(handed["TANGRAM_CONFIG"]).absolute())
    return SatelliteScripts(scripts, handed, str(own_dir(environ, job) / "%x-%j.out"))
