"""`tangram broker`: runs the broker of a job; the batch script starts it.

Options win over the settings. The broker requests satellites only if the settings or the options
limit both their nodes and their core-hours. With `--restarts` this process only starts the broker,
as its child, and starts it again when it has crashed.
"""

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

# Names, without TANGRAM_, of the broker's environment variables that a satellite's workers get too.
_HANDED_ON = ("HOME", "CONFIG", "DEVICES", "ISOLATION", "ENFORCEMENT", "READ_PATHS", "DISK_MIB",
              "SESSION_PIDS", "STARTS_MAX", "WARM", "MEM_OVERCOMMIT", "BIND")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("broker", help="run the broker of a job (batch scripts start it)")
    p.add_argument("--job", default="", help="job id (default: SLURM_JOB_ID, else a local name)")
    p.add_argument("--nodes", type=int, default=1,
                   help="number of workers that will join (default: 1)")
    p.add_argument("--placer", help="placer: elastic, elastic:TAIL, paper, first-fit, fcfs:K or "
                                    "static:K (default: the setting `placer`)")
    p.add_argument("--sync", help="when the journal is synced to disk: none, batch or always "
                                  "(default: the setting `sync`)")
    p.add_argument("--bind", help="address, interface or network to listen on (default: the "
                                  "setting `bind`)")
    p.add_argument("--idle-release", type=float, metavar="SECONDS",
                   help="give back an allocation that has been idle for SECONDS: a satellite, or a "
                        "component of a heterogeneous job except the first (0: never)")
    p.add_argument("--max-nodes", type=int, metavar="N",
                   help="request satellites of at most N nodes in all when the queue needs them")
    p.add_argument("--max-core-hours", type=float, metavar="H",
                   help="limit the core-hours that all satellites together may use to H")
    p.add_argument("--restarts", type=int, default=0, metavar="N",
                   help="start the broker again when it has crashed, at most N times within 10 "
                        "minutes (default: 0, never)")
    p.add_argument("--workers-live", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs the broker until it is asked to end; returns the exit status."""
    from ..app.broker_process.serve_broker import BrokerPlan, serve_broker
    from ..config.allocations import alloc_policy, elastic
    from ..config.settings import load_config
    from ..errors import InvalidInput
    from ..resources import open_files
    from ..slurm.job_environment import slurm_place
    from ..storage.rundir import local_job_name

    if args.nodes < 0:
        raise InvalidInput(f"--nodes {args.nodes}: must be at least 0")
    place = slurm_place(os.environ)
    job = args.job or (place.job if place is not None else "") or local_job_name()
    if args.restarts:
        return _supervised(args, job)
    config = load_config(os.environ, {"placer": args.placer, "sync": args.sync, "bind": args.bind})
    settings = elastic(config.elastic, {
        "idle_release_s": args.idle_release, "max_nodes": args.max_nodes,
        "max_core_hours": args.max_core_hours,
        "give_back": "all" if args.idle_release else None})
    wanted = settings.max_nodes or (settings.idle_release_s and settings.give_back == "all")
    plan = BrokerPlan(job, args.nodes, config, args.lifeline,
                      alloc_policy(settings) if wanted else None,
                      _scripts(settings, job, os.environ) if settings.max_nodes else None,
                      args.workers_live, args.supervised)
    open_files.allow_many()  # one for each client
    asyncio.run(serve_broker(plan, os.environ))
    return 0


def _supervised(args: argparse.Namespace, job: str) -> int:
    """Runs the same command without `--restarts` as a child; returns the exit status.

    Raises:
        InvalidInput: the number of restarts is negative, or the job's name cannot be one.
    """
    from ..app.broker_supervisor import supervise
    from ..errors import InvalidInput
    from ..start_module import own_command
    from ..storage.access import NAME as ACCESS
    from ..storage.rundir import own_dir

    if args.restarts < 0 or args.lifeline >= 0:
        raise InvalidInput(f"--restarts {args.restarts}: must be at least 0, and 0 with --lifeline")
    words = ["broker", "--supervised", "--job", job]
    for option in ("nodes", "placer", "sync", "bind", "idle_release", "max_nodes",
                   "max_core_hours"):
        value = getattr(args, option)
        if value is not None:
            words.append(f"--{option.replace('_', '-')}={value}")
    if args.workers_live:
        words.append("--workers-live")
    return supervise(own_command(*words), own_dir(os.environ, job) / ACCESS, args.restarts)


def _scripts(settings: ElasticSettings, job: str, environ: Mapping[str, str]
             ) -> SatelliteScripts:
    """Fills in the template `satellite` for each kind of satellite."""
    from ..broker.satellites import SatelliteScripts
    from ..storage.rundir import own_dir
    from .template import load, render

    template, scripts = load("satellite"), {}
    here = shlex.quote(str(Path(sys.executable).parent))
    for s in settings.satellites:
        warn = max(1, min(120, round(s.time_min * 15)))  # seconds; at most a quarter of time_min
        keys = {
            "broker": job, "job_name": f"tangram-{job}-{s.name}", "partition": s.partition,
            "qos": s.qos, "account": s.account, "nodes": str(s.nodes), "cpus": str(s.cpus),
            "mem": f"{s.mem_mib}M" if s.mem_mib else "", "time": str(round(s.time_min)),
            "gres": s.gres or (f"gpu:{s.gpus}" if s.gpus else ""), "component": s.component,
            "warn": str(warn), "setup": settings.setup or f"export PATH={here}:$PATH"}
        if settings.scratch:
            keys["scratch"] = settings.scratch
        scripts[s.name] = render(template, keys)
    handed = {f"TANGRAM_{k}": environ[f"TANGRAM_{k}"] for k in _HANDED_ON
              if f"TANGRAM_{k}" in environ}
    if handed.get("TANGRAM_CONFIG"):  # a satellite may start in another working directory
        handed["TANGRAM_CONFIG"] = str(Path(handed["TANGRAM_CONFIG"]).absolute())
    return SatelliteScripts(scripts, handed, str(own_dir(environ, job) / "%x-%j.out"))
