"""`tangram demo`: one RL step over real coding tasks on this machine, under several placers.

With `--mixed`, the step also calls a judge, teachers and a search endpoint. The steps are run by
`demo/`; this file checks the options and prints the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .helpers.end_signals import ends_in_order

if TYPE_CHECKING:
    from ..demo.job import DemoPlan

DEFAULT_SCALE, MIXED_SCALE = 0.015, 0.1
DEFAULT_PROBLEMS, DEFAULT_MIXED, DEFAULT_REPLAYED = 64, 16, 24
SCALE_MAX = 100  # the longest latency before tests, 67 s, then takes almost two hours
MAX_REPLAYED = 200  # the shipped workload has as many trajectories


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "demo", help="one RL step over coding tasks: packed against static reservation",
        description="Runs one RL step over HumanEval problems on this machine, without Slurm: "
        "packed actions by the default placer, one core for each action in the order of arrival "
        "(fcfs:1), and one static reservation per trajectory (static:1), all on the same CPUs. The "
        "short runs are made twice, before and after the long run. A second part replays longer "
        "actions, which run faster on more cores. The last line is one JSON object.")
    p.add_argument("--mixed", action="store_true",
                   help="also call a judge, three teachers and a search endpoint: first with all "
                        "services on one device, then with one device each (needs the extra torch)")
    p.add_argument("--problems", type=int, default=None,
                   help="number of coding problems, 1 to 164 "
                        f"(default: {DEFAULT_PROBLEMS}; with --mixed {DEFAULT_MIXED})")
    p.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    p.add_argument("--scale", type=float, default=None,
                   help="factor on the measured policy latencies "
                        f"(default: {DEFAULT_SCALE}; with --mixed {MIXED_SCALE})")
    p.add_argument("--cpus", type=int, default=0,
                   help="CPUs to hold (default: all that this process may use)")
    p.add_argument("--replayed", type=int, default=DEFAULT_REPLAYED, metavar="N",
                   help="trajectories of the second part; 0 leaves it out (default: "
                        f"{DEFAULT_REPLAYED}; --mixed has none)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Checks the options, runs the demo and prints the results; returns the exit status."""
    from ..demo.job import DemoPlan
    from ..demo.problems import data_file
    from ..errors import InvalidInput
    from ..resources.cpu import affinity

    problems, scale = args.problems, args.scale
    if problems is None:
        problems = DEFAULT_MIXED if args.mixed else DEFAULT_PROBLEMS
    if scale is None:
        scale = MIXED_SCALE if args.mixed else DEFAULT_SCALE
    if not 1 <= problems <= 164:
        raise InvalidInput(f"--problems {problems}: must be from 1 to 164")
    if not 0 < scale <= SCALE_MAX:
        raise InvalidInput(f"--scale {scale:g}: must be above 0 and at most {SCALE_MAX}")
    if args.cpus < 0:
        raise InvalidInput(f"--cpus {args.cpus}: must be at least 0 (0: all that this process may "
                           "use)")
    if not 0 <= args.replayed <= MAX_REPLAYED:
        raise InvalidInput(f"--replayed {args.replayed}: must be from 0 to {MAX_REPLAYED}")
    data_file()  # in a rank a missing package would be told as a traceback
    cpus = args.cpus or len(affinity.usable())
    plan = DemoPlan(problems, args.seed, scale, cpus)
    with ends_in_order():  # folders of models and of the replayed job are removed
        return _mixed(plan) if args.mixed else _coding(plan, args.replayed)


def _announce(plan: DemoPlan) -> None:
    from ..demo.demo_isolation import isolation_warning
    from ..demo.job import TRAINERS
    from ..demo.policy import GROUP
    from ..demo.policy_latency import mean_s

    if warning := isolation_warning():
        print(f"tangram: {warning}", file=sys.stderr, flush=True)

    print(f"One RL step: {plan.problems} HumanEval problems x {GROUP} trajectories on {plan.cpus} "
          f"CPUs, {TRAINERS} MPI trainer ranks and a gateway, seed {plan.seed}.\n"
          f"Policy latencies are measured ones (mean {mean_s('test'):.1f} s before tests) times "
          f"{plan.scale}.", flush=True)


def _coding(plan: DemoPlan, replayed: int) -> int:
    from ..demo import conditions, job, report

    _announce(plan)
    machine = conditions.machine_line()
    print(f"Runs: {', '.join(job.ORDER)}. Machine: {machine}", flush=True)
    ours, static, plain = job.run_all(plan, _bar)
    _finish_bar()
    print(report.table(ours, static, plain))
    print(report.load_line(ours, static, plain))
    summary = report.summary(ours, static, plain) | {"machine": machine}
    print(f"\npolicy latency : execution = {summary['think_per_execution']} : 1   system share of "
          f"the ACT {summary['system_share']:.1%}   frames went by {ours.via}")
    print(f"pass rate {ours.passed}/{ours.trajectories} (certain from the drafts: {ours.expected}/"
          f"{ours.trajectories}); {ours.mixed_groups} groups have passing and failing members; "
          f"unexpected rewards: {ours.wrong + static.wrong + plain.wrong}")
    for one in (ours, static, plain):
        for number in one.job.split(", "):
            print(f"records of {one.placer:<10} tangram acct -j {number}")
    try:
        if replayed:
            summary["scaling"] = _scaling(replayed, plan.seed)
    finally:  # what the first part showed is not lost with the second
        print(json.dumps(summary), flush=True)
    return 0 if summary["rewards_ok"] else 1


def _scaling(trajectories: int, seed: int) -> dict[str, Any]:
    """Runs and prints the second part; returns its figures."""
    from ..demo import scaling

    print(f"\n{scaling.introduction(trajectories)}", flush=True)
    runs = scaling.run_scaling(trajectories, seed, _bar)
    _finish_bar()
    print(scaling.table(runs), end="\n\n")
    return scaling.summary(runs)


def _mixed(plan: DemoPlan) -> int:
    from ..demo import demo_models, mixed, mixed_report, problems

    demo_models.need_torch()
    problems.load_problems()
    _announce(plan)
    print(f"Each trajectory searches once (a server on loopback, {mixed.RATE:g} a second), and a "
          f"judge and {len(demo_models.TEACHERS)} teachers\nare called about its program. They are "
          "small models with random weights on CPU slots that stand in for GPUs;\nthey compute on "
          "the same CPUs as the commands.", flush=True)
    with tempfile.TemporaryDirectory(prefix="tangram-demo-") as folder:
        models = demo_models.make_models(Path(folder), plan.seed)
        shared, own = (mixed.run_mixed(plan, models, phase, _bar) for phase in mixed.DEVICES)
    _finish_bar()
    print(mixed_report.table(shared, own))
    summary = mixed_report.summary(shared, own)
    print(f"\npass rate {shared.passed}/{shared.trajectories} (certain from the drafts: "
          f"{shared.expected}/{shared.trajectories}); teachers' answers that differ between the "
          f"phases: {summary['teachers_differ']}")
    for line in [*shared.wrong, *own.wrong, *mixed_report.disagreements(shared, own)][:20]:
        print(f"WRONG {line}")
    for one in (shared, own):
        print(f"records of {one.phase:<10} tangram acct -j {one.job}")
    print(json.dumps(summary), flush=True)
    return 0 if summary["ok"] else 1


_WIDTH = 40


def _bar(phase: str, share: float) -> None:
    """Shows progress: a live bar on a terminal, one line per phase elsewhere."""
    if sys.stderr.isatty():
        full = round(share * _WIDTH)
        sys.stderr.write(f"\r{phase:<12} [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}"
                         + ("\n" if share >= 1 else ""))
        sys.stderr.flush()
    elif share >= 1:
        print(f"{phase}: done", file=sys.stderr, flush=True)


def _finish_bar() -> None:
    sys.stdout.write("\n")
