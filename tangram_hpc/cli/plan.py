"""`tangram plan`: searches how to divide GPUs between training and rollouts, and the layouts of
both.

Input files are read by `config/planner`, the search is in `libra/planner`, and the costs come from
the built-in model or from the user's command. The result is printed, drawn, or written to a plan
file that a trainer may read. No running process is touched.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config.planner.files import ModelFile
    from ..config.planner.plan_file import PlanFile
    from ..config.planner.planner_settings import PlannerSettings
    from ..libra.planner.costs import AnalyticCosts, Costs
    from ..libra.planner.layout_tree import LayoutNode
    from ..libra.planner.shapes import Factors, Request, Search
    from ..libra.planner.split import Split, SplitPlan
    from ..simulator.pictures.curve_svg import Panel

PLAN_FILE = "tangram-plan.json"
# the value of `costs` in --json and in the plan file, which must not change (docs/GOLDEN.md);
# people read "the built-in model" instead
_BUILT_IN = "the own model"


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "plan", help="plan how to divide GPUs between training and rollouts",
        description="Searches the split of N GPUs between training and rollouts, with the layouts "
                    "of both, whose asynchronous step max(T_train, T_rollout) is shortest. The "
                    "bounds of the search are set in the table [planner] of tangram.toml.")
    p.add_argument("--model", required=True, metavar="M.toml",
                   help="model file, or the name of a shipped one")
    p.add_argument("--gpus", required=True, type=int, metavar="N", help="GPUs to divide")
    p.add_argument("--hardware", metavar="H.toml",
                   help="hardware file, or the name of a shipped one (default: [planner] hardware)")
    p.add_argument("--history", type=Path, metavar="LENGTHS.jsonl",
                   help="file of measured request lengths (default: [lengths] of the model file)")
    p.add_argument("--measured", type=Path, metavar="STEPS.jsonl",
                   help="file of measured times, which correct the cost model")
    p.add_argument("--top", type=int, default=8, metavar="K",
                   help="number of splits to print (default: 8)")
    p.add_argument("--explain", nargs="?", type=int, const=0, metavar="T",
                   help="print every node of the training search trees (with T: only those of T "
                        "training GPUs) and why it was cut")
    p.add_argument("--apply", nargs="?", type=Path, const=Path(PLAN_FILE), metavar="PLAN.json",
                   help=f"write the best split to a plan file (default: {PLAN_FILE}) that a "
                        "trainer may read. An existing plan is kept unless the new plan is worth "
                        "the cost of switching. No running process is touched")
    p.add_argument("--force", action="store_true",
                   help="with --apply: replace an existing plan in any case")
    p.add_argument("--plot", type=Path, metavar="OUT",
                   help="draw the splits into a file that ends in .svg or .png")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Plans, prints, draws and writes the plan file; returns the exit status."""
    from ..config.planner.files import read_hardware, read_model
    from .size import drawer

    _check(args)
    draw = drawer(args.plot)
    settings = _settings()
    model, kind = read_model(args.model), read_hardware(args.hardware or settings.hardware)
    history, source = _history(args.history, model, settings)
    factors, settings, learned = _learned(args.measured, settings)
    own = _own(model, kind, history, factors)
    seen: list[LayoutNode] = []
    found, costs, said = _plan(own, args, settings, seen)
    said += learned
    nodes = [node.words() for node in sorted(seen, key=lambda node: (node.gpus, node.path))]
    if args.explain is not None:
        nodes += _degree_texts(own)
    applied = _apply(args, found.best, costs, settings, factors, said)
    if args.json:
        print(json.dumps(_as_json(args, found, own, source, said, factors, nodes, applied)))
    else:
        print(*nodes, sep="\n", end="\n\n" if nodes else "")
        _print(found, own, source, said, factors, args.top)
        if applied:
            print(f"\n{applied}")
    if draw is not None:
        draw(_panels(found, costs, settings.search(), model.name, args.gpus), args.plot)
    return 0


# ---- input --------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    from ..errors import InvalidInput

    if not 2 <= args.gpus <= 65536:
        raise InvalidInput(f"--gpus {args.gpus}: must be from 2 to 65536")
    if args.top < 1:
        raise InvalidInput(f"--top {args.top}: must be at least 1")
    if args.explain is not None and not 0 <= args.explain < args.gpus:
        raise InvalidInput(f"--explain {args.explain}: the number of training GPUs must be from 1 "
                           f"to {args.gpus - 1}")
    if args.force and args.apply is None:
        raise InvalidInput("--force: needs --apply")


def _settings() -> PlannerSettings:
    import os

    from ..config.planner.planner_settings import planner_settings
    from ..config.settings import load_config

    return planner_settings(load_config(os.environ).planner)


def _history(path: Path | None, model: ModelFile, settings: PlannerSettings) -> (
        tuple[list[Request], str]):
    """Returns the newest requests, and a description of their source."""
    from ..config.planner.files import read_history
    from ..errors import InvalidInput

    if path is not None:
        found = read_history(path)[-settings.history:]
        return found, f"{len(found)} requests of {path}"
    if model.lengths is None:
        raise InvalidInput(f"model {model.name}: its file has no table [lengths]; add one, or give "
                           "--history")
    return model.lengths.requests(model.training.batch), "[lengths] of the model file"


def _learned(path: Path | None, settings: PlannerSettings) -> (
        tuple[Factors, PlannerSettings, str]):
    """Returns the factors, the settings and a remark that follow from measured times."""
    from ..config.planner.files import read_measured
    from ..libra.planner.calibrate import Calibrator

    calibrator, routing = Calibrator(settings.learning()), settings.routing_loss
    for one in read_measured(path) if path is not None else ():
        said = one.modelled_ns
        if one.degree and routing:  # a loss of 0 means that the router knows all lengths
            said = round(said * (1 + routing)) if one.mixed else said
            calibrator.observe_plan(one.mixed, said, one.measured_ns, one.mean_tokens)
            said = round(said * calibrator.beside()) if one.mixed else said
        calibrator.observe(one.degree, said, one.measured_ns, one.mean_tokens)
    loss = calibrator.loss(routing)
    words = f", routing loss {loss:.3f} as measured" if loss != routing else ""
    return calibrator.factors(), settings.model_copy(update={"routing_loss": loss}), words


def _own(model: ModelFile, kind: Any, history: list[Request], factors: Factors) -> AnalyticCosts:
    from ..libra.planner.costs import AnalyticCosts

    return AnalyticCosts(model.shape(), kind.hardware(), model.job(), model.engine(), history,
                         factors)


def _plan(own: AnalyticCosts, args: argparse.Namespace, settings: PlannerSettings,
          seen: list[LayoutNode]) -> tuple[SplitPlan, Costs, str]:
    """Returns the plan, the costs that it was made with, and a description of their source."""
    from ..libra.live.plan_costs import CommandCosts, CostsFailed
    from ..libra.planner.split import plan

    def note(node: LayoutNode) -> None:
        if args.explain in (0, node.gpus):
            seen.append(node)

    wanted = note if args.explain is not None else None
    search, said = settings.search(), _BUILT_IN
    if settings.cost_command:
        command = CommandCosts(own, settings.cost_command, settings.cost_timeout_s)
        try:
            return (plan(command, args.gpus, search, wanted), command,
                    f"the command {settings.cost_command[0]}")
        except CostsFailed as error:
            if not settings.cost_fallback:
                raise
            said = f"the own model, as {error}"
            seen.clear()
    return plan(own, args.gpus, search, wanted), own, said


# ---- the plan file ------------------------------------------------------------------------------


def _apply(args: argparse.Namespace, best: Split, costs: Costs, settings: PlannerSettings,
           factors: Factors, said: str) -> str:
    """Writes the plan file if that is worth it; returns one line about it, empty without `--apply`.
    """
    from ..config.planner.plan_file import plan_file, read_plan, write_plan
    from ..libra.planner.trigger import worth

    if args.apply is None:
        return ""
    new = plan_file(best, costs.model.name, costs.hardware.name, costs.hardware.gpus_per_node,
                    factors, said)
    why = "there was no plan"
    if args.force:
        why = "--force"
    elif args.apply.exists():
        old = read_plan(args.apply)
        if _same_job(old, new):
            verdict = worth(settings.triggers(), _standing_ns(old, costs, settings), best.step_ns)
            why = verdict.why
            if not verdict.switch:
                return f"{args.apply}: kept as it is: {why}"
        else:
            why = f"the old plan was for {old.gpus} GPUs, {old.model} on {old.hardware}"
    write_plan(args.apply, new)
    return (f"{args.apply}: written ({why}). The plan takes effect when your trainer reads it; no "
            "process was touched")


def _same_job(old: PlanFile, new: PlanFile) -> bool:
    return (old.model, old.hardware, old.gpus) == (new.model, new.hardware, new.gpus)


def _standing_ns(old: PlanFile, costs: Costs, settings: PlannerSettings) -> int | None:
    """Returns the step time of the plan in the file with today's lengths; None if it cannot run."""
    from ..libra.planner.reprice import reprice

    now = reprice(costs, old.gpus, old.training.layout(), old.degrees(), settings.search())
    return now.step_ns if now else None


# ---- texts --------------------------------------------------------------------------------------


def layout_text(split: Split) -> str:
    """Returns a training layout in short, such as `tp2 pp1 dp4 mb2`."""
    x = split.layout
    ep = f" ep{x.ep}" if x.ep > 1 else ""
    return f"tp{x.tp}{ep} pp{x.pp} dp{x.dp} mb{x.micro}"


def instance_text(split: Split) -> str:
    """Returns the number of instances of each degree, short requests first, such as `4xTP1 2xTP4`.
    """
    runs: list[tuple[int, int]] = []
    for one in split.instances:
        count = runs.pop()[0] + 1 if runs and runs[-1][1] == one.degree else 1
        runs.append((count, one.degree))
    return " ".join(f"{count}xTP{degree}" for count, degree in runs)


def _degree_texts(own: AnalyticCosts) -> list[str]:
    """Describes what rollout instances of each degree can hold, by the built-in model."""
    longest, texts = max(r.total for r in own.batch), []
    for degree in own.rollout.degrees:
        cut = own.rollout_cost.cut(degree)
        room = own.rollout_cost.kv_tokens(degree)
        if not cut and room < longest:
            cut = ("usable only for requests that fit into the cache" if room else
                   "no memory is left for a cache")
        texts.append(f"rollout TP{degree}: cache of {room} tokens" + (f": cut: {cut}" if cut
                                                                      else ""))
    return texts


def _print(found: SplitPlan, own: AnalyticCosts, source: str, said: str, factors: Factors,
           top: int) -> None:
    totals = [r.total for r in own.batch]
    print(f"{own.model.name} ({own.model.params / 1e9:.1f} B weights) on {found.gpus} "
          f"{own.hardware.name} GPUs, {own.training.batch} sequences a step")
    print(f"lengths  {source}: mean {sum(totals) / len(totals):.0f} tokens, longest {max(totals)}")
    shown = said.replace(_BUILT_IN, "the built-in model", 1)
    print(f"costs    {shown}{_factor_text(factors)}")
    print(f"\n{'train':>6}{'rollout':>8}  {'step s':>9}{'train s':>9}{'rollout s':>10}"
          f"{'GiB':>7}{'spare':>6}  {'layout':<22}instances")
    for split in found.splits[:top]:
        print(f"{split.train_gpus:>6}{split.rollout_gpus:>8}  {split.step_ns / 1e9:>9.2f}"
              f" {split.price.ns / 1e9:>8.2f} {split.rollout_ns / 1e9:>9.2f}"
              f"{split.price.mem_bytes / 2**30:>7.1f}{split.spare:>6}  "
              f"{layout_text(split):<22}{instance_text(split)}")
    if len(found.splits) > top:
        print(f"{'':>6}and {len(found.splits) - top} slower splits")
    _print_best(found.best)


def _print_best(best: Split) -> None:
    parts = ", ".join(f"{name} {ns / 1e9:.2f}" for name, ns in best.price.named().items()
                      if ns >= 5_000_000)
    print(f"\nbest: {best.train_gpus} GPUs for training, {best.rollout_gpus} for rollouts"
          + (f"; {best.spare} of these could be lent to others without making the step longer"
             if best.spare else ""))
    if parts:
        print(f"seconds of a training step: {parts}")
    print(f"{'instance':>9}{'degree':>7}{'requests':>9}{'tokens from':>12}{'to':>8}{'seconds':>10}")
    for k, one in enumerate(best.instances):
        print(f"{k:>9}{one.degree:>7}{one.requests:>9}{one.shortest:>12}{one.longest:>8}"
              f" {one.ns / 1e9:>9.2f}")


def _factor_text(factors: Factors) -> str:
    known = [("training", factors.train), *((f"TP{d}", f) for d, f in factors.rollout)]
    moved = [f"{name} x {factor:.3f}" for name, factor in known if factor != 1.0]
    return f", corrected by measured times: {', '.join(moved)}" if moved else ""


def _as_json(args: argparse.Namespace, found: SplitPlan, own: AnalyticCosts, source: str,
             said: str, factors: Factors, nodes: list[str], applied: str) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    from dataclasses import asdict

    def row(split: Split) -> dict[str, Any]:
        return {"train_gpus": split.train_gpus, "rollout_gpus": split.rollout_gpus,
                "step_s": split.step_ns / 1e9, "train_s": split.price.ns / 1e9,
                "rollout_s": split.rollout_ns / 1e9, "mem_bytes": split.price.mem_bytes,
                "spare": split.spare, "idle": split.idle, "layout": asdict(split.layout),
                "train_parts_s": {name: ns / 1e9 for name, ns in split.price.named().items()},
                "instances": [{**{k: v for k, v in asdict(one).items() if k != "ns"},
                               "seconds": one.ns / 1e9} for one in split.instances]}

    return {"model": own.model.name, "hardware": own.hardware.name, "gpus": found.gpus,
            "lengths": source, "costs": said,
            "factors": {"train": factors.train, "rollout": dict(factors.rollout)},
            "splits": [row(s) for s in found.splits[:args.top]],
            **({"nodes": nodes} if args.explain is not None else {}),
            **({"applied": applied} if applied else {})}


# ---- picture ------------------------------------------------------------------------------------


def _panels(found: SplitPlan, costs: Costs, search: Search, name: str, gpus: int) -> list[Panel]:
    """Returns two panels: both stages against the split, and the best step against the number of
    GPUs.
    """
    from ..simulator.pictures.curve_svg import Panel

    key = "the best step; a ring is the best split"
    by_train = sorted(found.splits, key=lambda s: s.train_gpus)
    best = _by_gpus(costs, search, gpus)
    return [
        Panel(f"Splits of {gpus} GPUs, {name}", "GPUs that train", "seconds",
              _lines([(float(s.train_gpus), s) for s in by_train], found.best),
              found.best.step_ns / 1e9, key),
        Panel(f"Best split by GPUs held, {name}", "GPUs", "seconds",
              _lines([(float(s.gpus), s) for s in best], found.best),
              found.best.step_ns / 1e9, key)]


def _by_gpus(costs: Costs, search: Search, gpus: int) -> list[Split]:
    """Returns the best split for all GPUs, and for up to twelve smaller numbers of GPUs."""
    from ..errors import InvalidInput
    from ..libra.planner.split import plan

    node, found = costs.hardware.gpus_per_node, []
    step = max(1, -(-gpus // (12 * node))) * node
    for some in [*range(step, gpus, step), gpus]:
        try:
            found.append(plan(costs, some, search).best)
        except InvalidInput:
            continue  # too few GPUs for this model
    return found


def _lines(points: list[tuple[float, Split]], best: Split) -> list[Any]:
    from ..simulator.pictures.curve_svg import PolicyCurve

    def line(name: str, ns: Any) -> PolicyCurve:
        mark = next(((x, ns(s) / 1e9) for x, s in points if s == best), None)
        return PolicyCurve(name, name, [(x, ns(s) / 1e9) for x, s in points],
                           mark if name == "step" else None)

    return [line("step", lambda s: s.step_ns), line("training", lambda s: s.price.ns),
            line("rollouts", lambda s: s.rollout_ns)]
