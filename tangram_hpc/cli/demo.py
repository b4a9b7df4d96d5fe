"""`tangram demo`: the main job on this machine - one RL step over real coding tasks, compared."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

DEFAULT_SCALE = 0.015


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "demo", help="one RL step over coding tasks: packed against static reservation",
        description="Runs one RL step over HumanEval problems on this machine, without Slurm: "
        "packed actions, then one static reservation per trajectory on the same CPUs, then plain "
        "fcfs:1. The last line is one JSON object.")
    p.add_argument("--problems", type=int, default=64, help="1 to 164 (default 64)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--scale", type=float, default=DEFAULT_SCALE,
                   help=f"factor on the measured think times (default {DEFAULT_SCALE})")
    p.add_argument("--cpus", type=int, default=0, help="CPUs to hold (default: all usable)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs the three phases and reports."""
    from ..backends.cpu import affinity
    from ..demo import job, report
    from ..demo.think import mean_s
    from ..errors import InvalidInput

    if not 1 <= args.problems <= 164:
        raise InvalidInput(f"--problems: {args.problems} is not between 1 and 164")
    if not args.scale > 0:
        raise InvalidInput(f"--scale: {args.scale} is not > 0")
    if args.cpus < 0:
        raise InvalidInput(f"--cpus: {args.cpus} is not a whole number >= 0")
    cpus = args.cpus or len(affinity.usable())
    plan = job.DemoPlan(args.problems, args.seed, args.scale, cpus)
    print(f"One RL step: {args.problems} HumanEval problems x {job.GROUP} trajectories on {cpus} "
          f"CPUs, {job.TRAINERS} MPI trainer ranks and a gateway, seed {args.seed}.\n"
          f"Think times are measured ones (mean {mean_s('test'):.1f} s before tests) scaled by "
          f"{args.scale}.", flush=True)
    ours, static, plain = (job.run_phase(plan, placer, _bar) for placer in
                           ("first-fit", "static:1", "fcfs:1"))
    _finish_bar()
    print(report.table(ours, static, plain))
    share = report.summary(ours, static, plain)
    print(f"\nthink : execution = {share['think_per_execution']} : 1   system share of the ACT "
          f"{share['system_share']:.1%}   frames went by {ours.via}")
    print(f"pass rate {ours.passed}/{ours.trajectories}, the mutations make "
          f"{ours.expected}/{ours.trajectories} certain; {ours.mixed_groups} groups of mixed "
          f"reward; unexpected rewards: {ours.wrong + static.wrong + plain.wrong}")
    for one in (ours, static, plain):
        print(f"records of {one.placer:<10} tangram acct -j {one.job}")
    print(json.dumps(share), flush=True)
    return 0 if share["rewards_ok"] else 1


_WIDTH = 40


def _bar(phase: str, share: float) -> None:
    """A live bar on a terminal, a line a phase elsewhere."""
    if sys.stderr.isatty():
        full = round(share * _WIDTH)
        sys.stderr.write(f"\r{phase:<10} [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}"
                         + ("\n" if share >= 1 else ""))
        sys.stderr.flush()
    elif share >= 1:
        print(f"{phase}: done", file=sys.stderr, flush=True)


def _finish_bar() -> None:
    sys.stdout.write("\n")
