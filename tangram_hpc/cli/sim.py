"""`tangram sim`: simulates a workload on a cluster that a file describes, with the real scheduler.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .helpers.next_verb import hint
from .helpers.progress_bar import ProgressBar

if TYPE_CHECKING:
    from ..simulator.message_world import Failure

_LATENCY_MAX_US = 60_000_000  # over slower links no action would ever end


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "sim", help="simulate a workload on a cluster that is described in a file",
        description="Simulates a tangram-workload/1 file with the real scheduler under a simulated "
                    "clock, and prints the metrics of the run. `tangram sim rl SCENARIO.toml` "
                    "simulates an asynchronous RL run instead.")
    p.add_argument("workload", metavar="WORKLOAD", type=Path,
                   help="tangram-workload/1 file, or the name of a shipped one: coding-200, "
                        "mixed-24")
    p.add_argument("--cluster", required=True, type=Path, help="cluster file (JSON)")
    p.add_argument("--policy", required=True, help="placer to use, such as fcfs:4 or static:4")
    p.add_argument("--durations", choices=("oracle", "learned"), default="oracle",
                   help="oracle: the placer knows the workload's run times; learned: it estimates "
                        "them (default: oracle)")
    p.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    p.add_argument("--records", type=Path, metavar="OUT",
                   help="file to write the records of the run to, as tangram-records/1 (JSON "
                        "lines)")
    p.add_argument("--latency-us", type=int, metavar="N", default=None,
                   help="simulate the processes too, and send their messages over links with a "
                        "latency of N to 2 N microseconds")
    p.add_argument("--fail", action="append", default=[], metavar="NODE@T[+B]",
                   help="let NODE fail at T seconds and join again B seconds later (implies "
                        "--latency-us 0 if that is not given)")
    p.add_argument("--elastic", type=Path, metavar="SCENARIO",
                   help="let the job request satellites and give them back as this file says "
                        "([elastic] as in tangram.toml, [slurm] for the modelled queue), and "
                        "compare the core-hours held and used with those of the job alone and of a "
                        "static reservation")
    p.add_argument("--static", default="static:4", metavar="static:K",
                   help="static reservation that --elastic compares with (default: static:4)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def _failure(text: str) -> Failure:
    """Parses `NODE@T` or `NODE@T+B`, in seconds."""
    from ..errors import InvalidInput
    from ..simulator.message_world import Failure

    node, _, times = text.partition("@")
    at, _, back = times.partition("+")
    try:
        failure = Failure(node, round(float(at) * 1e9), round(float(back or 0) * 1e9))
    except (ValueError, OverflowError):
        failure = None
    if failure is None or failure.at_ns < 0 or failure.back_ns < 0:
        raise InvalidInput(f"--fail {text!r}: must be NODE@SECONDS or NODE@SECONDS+SECONDS")
    return failure


def go(args: argparse.Namespace) -> int:
    """Simulates the workload and prints its metrics; returns the exit status."""
    from ..atomic_file import check_output
    from ..errors import InvalidInput
    from ..scheduler.placement.placers.placer_registry import make_placer
    from ..simulator.simulate import simulate
    from ..simulator.workload import read_cluster, read_workload

    if args.elastic is not None:
        return _three_ways(args)
    if args.latency_us is not None and not 0 <= args.latency_us <= _LATENCY_MAX_US:
        raise InvalidInput(f"--latency-us {args.latency_us}: must be from 0 to {_LATENCY_MAX_US}")
    if args.records is not None:
        check_output("--records", args.records)
    work = read_workload(args.workload)
    total = len(work.trajectories)
    with ProgressBar("sim: trajectories", total) as progress:
        run = simulate(work, read_cluster(args.cluster), make_placer(args.policy), args.durations,
                       args.seed, latency_us=args.latency_us,
                       failures=[_failure(f) for f in args.fail],
                       on_progress=lambda left: progress.at(total - left))
    if args.records is not None:
        run.write(args.records)
    figures = run.figures()
    if args.json:
        print(json.dumps(run.head | figures))
        return 0
    print(f"{run.head['workload']}  policy {run.head['policy']}  durations {run.head['durations']}")
    for name, value in figures.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name:<14}{shown:>16}")
    hint(f"`tangram size {args.workload}` finds how many CPUs reach a target")
    return 0


def _three_ways(args: argparse.Namespace) -> int:
    """Compares satellites with the job alone and with a static reservation: three runs of one
    workload.
    """
    from ..errors import InvalidInput
    from ..simulator.elastic_runs import read_elastic_scenario, three_ways
    from ..simulator.workload import read_cluster, read_workload

    if args.records is not None or args.fail or args.latency_us is not None:
        raise InvalidInput("--elastic: cannot be combined with --records, --fail or --latency-us")
    ways = three_ways(read_workload(args.workload), read_cluster(args.cluster), args.policy,
                      args.static, read_elastic_scenario(args.elastic), args.durations, args.seed)
    if args.json:
        print(json.dumps(ways))
        return 0
    print(f"{'':<9}{'HELD core-h':>12}{'USED core-h':>12}{'USED':>7}{'mean ACT':>11}{'step':>11}"
          "  POLICY")
    for name, way in ways.items():
        print(f"{name:<9}{way['held_core_h']:>12.3f}{way['used_core_h']:>12.3f}"
              f"{way['used_of_held']:>7.0%}{way['mean_act_s']:>9.2f} s{way['step_s']:>9.1f} s"
              f"  {way['policy']}")
    grown = ways["elastic"]
    print(f"{grown['satellites']} satellites held {grown['slurm_held_core_h']:.3f} core-h, with "
          f"{grown['slurm_calls']} calls of Slurm")
    for at, what in grown["decisions"]:
        print(f"{at:>10.1f} s  {what}")
    return 0
