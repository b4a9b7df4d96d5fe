"""`tangram replay`: runs a workload live on this machine and compares it with the simulator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "replay", help="run a workload live, with virtual CPUs, and compare it with `sim`",
        description="Runs a tangram-workload/1 file through a real broker and worker on this "
                    "machine. CPUs are only counted; each action is a real process that counts its "
                    "work down at the rate of the CPUs it is told it has.")
    p.add_argument("workload", metavar="WORKLOAD", type=Path,
                   help="tangram-workload/1 file, or a shipped one: coding-200, mixed-24")
    p.add_argument("--cluster", type=Path, metavar="C",
                   help="cluster file (default: one node with --cpus)")
    p.add_argument("--cpus", type=int, default=64, help="without --cluster (default: 64)")
    p.add_argument("--scale", type=float, required=True, metavar="F",
                   help="wall seconds a second of the workload, at most 1")
    p.add_argument("--policy", default="elastic", help="a placer (default: elastic)")
    p.add_argument("--first", type=int, metavar="N", help="only the first N trajectories")
    p.add_argument("--seed", type=int, default=0, help="of the simulated run (default: 0)")
    p.add_argument("--records", type=Path, metavar="OUT",
                   help="write tangram-records/1 (JSON lines) of the live run there")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs and prints."""
    from ..errors import InvalidInput
    from ..simulator.replay.replay_run import first, replay
    from ..simulator.workload import Cluster, read_cluster, read_workload

    work = read_workload(args.workload)
    if args.first is not None:
        work = first(work, args.first)
    if args.cluster is not None:
        cluster = read_cluster(args.cluster)
    elif args.cpus < 1:
        raise InvalidInput(f"--cpus {args.cpus}: at least one")
    else:
        mem = sum(t.session.mem_mib for t in work.trajectories)
        cluster = Cluster.model_validate(
            {"nodes": [{"name": "n", "cpus": args.cpus, "mem_mib": max(1, mem)}]})
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
