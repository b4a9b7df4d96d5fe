"""`tangram replay`: runs a workload live on this machine and compares it with the simulator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .helpers.end_signals import ends_in_order


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "replay", help="run a workload live, with virtual CPUs, and compare it with `sim`",
        description="Runs a tangram-workload/1 file through a real broker and worker on this "
                    "machine. CPUs are virtual: the broker only counts them, and each action is a "
                    "real process that works for as long as it would on the CPUs that it is lent.")
    p.add_argument("workload", metavar="WORKLOAD", type=Path,
                   help="tangram-workload/1 file, or the name of a shipped one: coding-200, "
                        "mixed-24")
    p.add_argument("--cluster", type=Path, metavar="C",
                   help="cluster file (default: one node with --cpus CPUs)")
    p.add_argument("--cpus", type=int, default=64,
                   help="virtual CPUs of the node without --cluster (default: 64)")
    p.add_argument("--scale", type=float, required=True, metavar="F",
                   help="wall-clock seconds per second of the workload, from 1e-9 to 1")
    p.add_argument("--policy", default="elastic", help="placer to use (default: elastic)")
    p.add_argument("--first", type=int, metavar="N", help="run only the first N trajectories")
    p.add_argument("--seed", type=int, default=0, help="seed of the simulated run (default: 0)")
    p.add_argument("--records", type=Path, metavar="OUT",
                   help="file to write the records of the live run to, as tangram-records/1 (JSON "
                        "lines)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs the workload and prints the comparison; returns the exit status."""
    from ..atomic_file import check_output
    from ..errors import InvalidInput
    from ..simulator.replay.replay_run import first, replay
    from ..simulator.workload import UNITS_MAX, Cluster, read_cluster, read_workload

    if args.records is not None:
        check_output("--records", args.records)
    work = read_workload(args.workload)
    if args.first is not None:
        work = first(work, args.first)
    if args.cluster is not None:
        cluster = read_cluster(args.cluster)
    elif not 1 <= args.cpus <= UNITS_MAX:
        raise InvalidInput(f"--cpus {args.cpus}: must be from 1 to {UNITS_MAX}")
    else:
        mem = sum(t.session.mem_mib for t in work.trajectories)
        cluster = Cluster.model_validate(
            {"nodes": [{"name": "n", "cpus": args.cpus, "mem_mib": max(1, mem)}]})
    with ends_in_order():  # the folder of the live job is removed
        run = replay(work, cluster, args.policy, args.scale, args.seed)
    if args.records is not None:
        run.live.write(args.records)
    live, simulated, both = run.live.figures(), run.simulated.figures(), run.comparison()
    if args.json:
        print(json.dumps(run.live.head | {"figures": live, "simulated": simulated} | both))
        return 0
    print(f"{work.name}  policy {args.policy}  scale {args.scale:g}")
    print(f"{'':<14}{'live':>14}{'simulated':>14}")
    for name, value in live.items():
        shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in (value, simulated[name])]
        print(f"{name:<14}{shown[0]:>14}{shown[1]:>14}")
    ratio = both["ratio"]
    print("mean ACT live / simulated: " + (f"{ratio:.3f}" if ratio is not None else "-"))
    return 0
