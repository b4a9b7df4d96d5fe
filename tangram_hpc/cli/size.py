"""`tangram size`: finds how many CPUs and GPUs to hold for a workload.

The search is in `simulator/sizing.py`. This file checks the options, plays the workload for each
size that the search asks for, and prints and draws the answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .helpers.progress_bar import ProgressBar

if TYPE_CHECKING:
    from ..simulator.pictures.curve_svg import Panel
    from ..simulator.sizing import Curve, Holding, Measure, RunFigures, Scale, SizingResult, Target

POLICIES = ("elastic", "paper", "fcfs:4", "static:4")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "size", help="find how many CPUs and GPUs to hold for a workload",
        description="Searches the smallest amount of held resources at which a policy reaches a "
                    "target, by simulating the workload on the cluster at many sizes.")
    p.add_argument("workload", metavar="WORKLOAD", type=Path,
                   help="tangram-workload/1 file, or the name of a shipped one: coding-200, "
                        "mixed-24")
    p.add_argument("--cluster", required=True, type=Path,
                   help="cluster file (JSON) whose resources are scaled down and up")
    goal = p.add_mutually_exclusive_group(required=True)
    goal.add_argument("--target-act", type=float, metavar="S",
                      help="target: a mean action completion time of at most S seconds")
    goal.add_argument("--target-step", type=float, metavar="S",
                      help="target: a step of at most S seconds")
    goal.add_argument("--like", metavar="POLICY",
                      help="target: the mean ACT and the step that POLICY has on the full cluster")
    p.add_argument("--policies", metavar="P,P",
                   help=f"placers to compare (default: {','.join(POLICIES)})")
    p.add_argument("--durations", choices=("oracle", "learned"), default="learned",
                   help="learned: the placer estimates run times, and each answer says beside it "
                        "what would do if they were known; oracle: it knows them (default: "
                        "learned)")
    p.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    p.add_argument("--plot", type=Path, metavar="OUT",
                   help="draw the curves into a file that ends in .svg or .png")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Searches, prints and draws; returns the exit status."""
    from ..errors import InvalidInput
    from ..scheduler.placement.placers.placer_name import ESTIMATING, parse_placer_name
    from ..scheduler.placement.placers.placer_registry import make_placer
    from ..simulator.sizing import scale_of, search
    from ..simulator.workload import check_match, read_cluster, read_workload

    draw = drawer(args.plot)
    policies = _policies(args.policies)
    reserve = max(make_placer(p).reserve for p in [*policies, *([args.like] if args.like else [])])
    work, cluster = read_workload(args.workload), read_cluster(args.cluster)
    check_match(work, cluster)
    scale = scale_of(work, cluster, reserve)
    if not (scale.cpus or scale.gpus):
        raise InvalidInput(f"workload {work.name}: none of its actions uses a CPU or a GPU of the "
                           "cluster, so there is nothing to size")
    with ProgressBar("size: simulations") as progress:
        measure, why = _measure(work, cluster, args.durations, args.seed, progress)
        target = _target(args, scale, measure, why)
        curves = [search(p, scale, target, measure) for p in policies]
        answers = [c.answer for c in curves if c.answer is not None]
        if not any(a.held for a in answers):
            raise InvalidInput(_unreached(target, answers, scale, why))
        oracle: dict[str, Curve] = {}
        if args.durations == "learned":
            measure, _ = _measure(work, cluster, "oracle", args.seed, progress)
            oracle = {p: search(p, scale, target, measure) for p in policies
                      if parse_placer_name(p)[0] in ESTIMATING}
    if args.json:
        print(json.dumps(_as_json(args, work.name, scale, target, curves, oracle, why)))
    else:
        print(f"{work.name}  target {_target_text(target)}  durations {args.durations}  full "
              f"cluster {_amounts(scale.full, scale)}")
        _table(curves, scale)
        print(*_lines(curves, oracle, args.like, scale, why), sep="\n")
    if draw is not None:
        draw(_panels(curves, target, work.name, scale), args.plot)
    return 0


# ---- input --------------------------------------------------------------------------------------


def _policies(text: str | None) -> list[str]:
    """Returns the requested policies, each once, or the default ones that are known."""
    from ..errors import InvalidInput
    from ..scheduler.placement.placers.placer_registry import make_placer

    if text is not None:
        wanted = [p.strip() for p in text.split(",") if p.strip()]
        if not wanted:
            raise InvalidInput("--policies: name at least one placer, such as fcfs:4,static:4")
        for policy in wanted:
            make_placer(policy)
        return list(dict.fromkeys(wanted))
    known = []
    for policy in POLICIES:
        try:
            make_placer(policy)
        except InvalidInput:
            continue
        known.append(policy)
    return known


def drawer(path: Path | None) -> Any:
    """Returns the function that draws into a file with this suffix; None without a path.

    Raises:
        InvalidInput: the suffix is neither .svg nor .png, or no file can be written there.
    """
    from ..atomic_file import check_output
    from ..errors import InvalidInput

    if path is None:
        return None
    check_output("--plot", path)
    if path.suffix == ".svg":
        from ..simulator.pictures.curve_svg import write
        return write
    if path.suffix == ".png":
        from ..simulator.pictures.curve_png import check, write
        check()
        return write
    raise InvalidInput(f"--plot {path}: the file's name must end in .svg or .png")


def _measure(work: Any, cluster: Any, durations: str, seed: int, progress: ProgressBar
             ) -> tuple[Measure, dict[str, str]]:
    """Returns a function that simulates the workload at one size, and a dict of reasons.

    The function writes into the dict why a policy cannot run the workload at all.
    """
    from ..errors import InvalidInput
    from ..scheduler.placement.placers.placer_registry import make_placer
    from ..simulator.simulate import simulate
    from ..simulator.sizing import RunFigures, resized

    why: dict[str, str] = {}
    done = itertools.count()

    def measure(policy: str, held: Holding) -> RunFigures | None:
        progress.at(next(done), f"{policy} on {held.cpus} CPUs, {held.gpus} GPUs")
        try:
            run = simulate(work, resized(cluster, held), make_placer(policy), durations, seed)
        except InvalidInput as error:
            why[policy] = str(error)
            return None
        found = run.figures()
        return RunFigures(found["mean_act_s"], found["p99_act_s"] or 0.0, found["step_s"])

    return measure, why


def _target(args: argparse.Namespace, scale: Scale, measure: Measure,
            why: dict[str, str]) -> Target:
    from ..errors import InvalidInput
    from ..simulator.sizing import Target

    for flag, value in (("--target-act", args.target_act), ("--target-step", args.target_step)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidInput(f"{flag} {value}: must be finite and above 0 seconds")
    if args.like is None:
        return Target(args.target_act, args.target_step)
    figures = measure(args.like, scale.full)
    if figures is None:
        raise InvalidInput(f"--like {args.like}: {why[args.like]}")
    return Target(figures.mean_act_s, figures.step_s)


def _unreached(target: Target, answers: list[SizingResult], scale: Scale,
               why: dict[str, str]) -> str:
    if not answers:
        return next(iter(why.values()))
    best = min(answers, key=lambda a: target.excess(a.figures))
    return (f"target {_target_text(target)}: no policy reaches it, even with unlimited resources; "
            f"the best result is {_reached(best.figures)} ({best.policy} with "
            f"{_amounts(best.at, scale)})")


# ---- texts --------------------------------------------------------------------------------------


def _target_text(target: Target) -> str:
    parts = (("mean ACT", target.act_s), ("step", target.step_s))
    return " and ".join(f"{name} {value:.3f} s" for name, value in parts if value is not None)


def _reached(figures: RunFigures) -> str:
    return f"mean ACT {figures.mean_act_s:.3f} s, step {figures.step_s:.3f} s"


def _used(held: Holding, scale: Scale) -> list[tuple[str, int]]:
    """Returns the name and amount of each resource whose amount is searched."""
    return [(name, amount) for name, on, amount in (
        ("CPUs", scale.cpus, held.cpus), ("GPUs", scale.gpus, held.gpus)) if on]


def _amounts(held: Holding, scale: Scale) -> str:
    return " and ".join(f"{amount} {name}" for name, amount in _used(held, scale))


def _table(curves: list[Curve], scale: Scale) -> None:
    names = [name for name, _ in _used(scale.full, scale)]
    heads = [*names, "mean ACT s", "p99 ACT s", "step s"]
    for curve in curves:
        print(f"\n{curve.policy}\n" + "".join(f"{head:>12}" for head in heads))
        reached = curve.answer is not None and curve.answer.held is not None
        for point in curve.shown():
            cells = [str(amount) for _, amount in _used(point.held, scale)]
            cells += [f"{v:.3f}" for v in point.figures] if point.figures else ["-"] * 3
            mark = reached and curve.answer is not None and point.level == curve.answer.level
            print("".join(f"{cell:>12}" for cell in cells)
                  + ("  <- reaches the target" if mark else ""))
    print()


def _lines(curves: list[Curve], oracle: dict[str, Curve], like: str | None, scale: Scale,
           why: dict[str, str]) -> list[str]:
    """Returns a line for each policy with its answer, and the oracle's answer where there is one.
    """
    held = {c.policy: c.answer.held for c in curves if c.answer and c.answer.held}
    against = like if like in held else max(held, key=lambda p: held[p])
    lines = []
    for curve in curves:
        answer = curve.answer
        if answer is None:
            lines.append(f"{curve.policy}: cannot run this workload: {why[curve.policy]}")
        elif answer.held is None:
            lines.append(f"{curve.policy}: does not reach the target, even with unlimited "
                         f"resources; its best result is {_reached(answer.figures)} with "
                         f"{_amounts(answer.at, scale)}")
        else:
            lines.append(f"{curve.policy}: {_amounts(answer.held, scale)} reach "
                         f"{_reached(answer.figures)}"
                         + _compared(curve.policy, answer.held, against, held[against], scale))
        if curve.policy in oracle:
            known = _known(oracle[curve.policy], scale)
            lines.append(f"  with run times known beforehand: {known}")
    return lines


def _known(curve: Curve, scale: Scale) -> str:
    """Describes the answer of a search that knew the run times."""
    answer = curve.answer
    if answer is None:
        return "it cannot run this workload"
    if answer.held is None:
        return f"it does not reach the target; its best result is {_reached(answer.figures)}"
    return f"{_amounts(answer.held, scale)} reach {_reached(answer.figures)}"


def _compared(policy: str, held: Holding, against: str, other: Holding, scale: Scale) -> str:
    if policy == against:
        return ""
    shares = []
    for (_, mine), (_, its) in zip(_used(held, scale), _used(other, scale), strict=True):
        share = 100 * (1 - mine / its)
        shares.append("the same number" if mine == its else
                      f"{abs(share):.0f} % {'fewer' if share > 0 else 'more'}")
    return f"; {against} needs {_amounts(other, scale)}: {' and '.join(shares)}"


def _as_json(args: argparse.Namespace, name: str, scale: Scale, target: Target,
             curves: list[Curve], oracle: dict[str, Curve], why: dict[str, str]
             ) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    def figures(f: RunFigures | None) -> dict[str, float | None]:
        return dict(f._asdict()) if f else dict.fromkeys(
            ("mean_act_s", "p99_act_s", "step_s"))

    def answered(curve: Curve) -> dict[str, Any]:
        answer = curve.answer
        found = answer.held if answer else None
        return {"reached": found is not None,
                "held": dict(_used(found, scale)) if found else None,
                "best": ({**dict(_used(answer.at, scale)), **figures(answer.figures)}
                         if answer else None)}

    policies = []
    for curve in curves:
        told = oracle.get(curve.policy)
        policies.append({
            "policy": curve.policy, **answered(curve),
            "why": why.get(curve.policy) if curve.answer is None else None,
            "oracle": answered(told) if told is not None else None,
            "points": [{**dict(_used(p.held, scale)), **figures(p.figures)}
                       for p in curve.points()]})
    return {"workload": name, "durations": args.durations, "seed": args.seed, "like": args.like,
            "target": {"mean_act_s": target.act_s, "step_s": target.step_s},
            "full": dict(_used(scale.full, scale)), "policies": policies}


# ---- picture ------------------------------------------------------------------------------------


def _panels(curves: list[Curve], target: Target, name: str, scale: Scale) -> list[Panel]:
    """Returns panels of mean ACT and step against the resource of which the cluster has more."""
    from ..simulator.pictures.curve_svg import Panel, PolicyCurve

    unit, full = max(_used(scale.full, scale), key=lambda pair: pair[1])
    beside = [f"{amount} {other}" for other, amount in _used(scale.full, scale) if other != unit]
    x_label = f"{unit} held" + (f" (in proportion, {beside[0]} at {full})" if beside else "")
    panels = []
    for title, column, wanted in (("Mean ACT", 0, target.act_s), ("Step", 2, target.step_s)):
        lines = []
        for curve in curves:
            points = [(float(dict(_used(p.held, scale))[unit]), p.figures[column])
                      for p in curve.points() if p.figures]
            answer, mark, text = curve.answer, None, "not reached"
            if answer is not None and answer.held is not None:
                at, figures = scale.holding(answer.level), curve.at(answer.level)
                mark = (float(dict(_used(at, scale))[unit]), figures[column]) if figures else None
                text = _amounts(answer.held, scale)
            lines.append(PolicyCurve(curve.policy, f"{curve.policy}: {text}", points, mark))
        panels.append(Panel(f"{title}, {name}", x_label, "seconds", lines, wanted))
    return panels
