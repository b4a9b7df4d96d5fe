"""`tangram sim rl`: plays an asynchronous RL run on paper, Libra beside its baselines."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..libra.simulation.rl_systems import System

EXAMPLES = Path(__file__).resolve().parent.parent / "libra" / "simulation" / "examples"


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "sim-rl", prog="tangram sim rl", help="play an asynchronous RL run on paper (`sim rl`)",
        description="Plays an asynchronous RL run (rollout, tools, training) on GPUs that are only "
                    "a file, with the real planner, router and pool. All of it is simulated.")
    p.add_argument("scenario", metavar="SCENARIO.toml", type=Path,
                   help="tangram-rl/1 file, or the name of a shipped one, such as rl-48")
    p.add_argument("--systems", metavar="S,S", help="only these, such as static-uniform,"
                                                    "'+ elastic' (default: all)")
    p.add_argument("--iterations", type=int, metavar="N", help="batches, instead of the file's")
    p.add_argument("--prompts", type=int, metavar="N", help="of a batch, instead of the file's")
    p.add_argument("--seed", type=int, help="instead of the file's")
    p.add_argument("--pipeline", choices=("batches", "trajectories"),
                   help="what is asynchronous, instead of the file's")
    p.add_argument("--steps", action="store_true", help="print every batch of every system too")
    p.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw the runs")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Plays, prints and draws."""
    from ..errors import InvalidInput
    from ..libra.simulation.rl_pipeline import Pipeline
    from ..libra.simulation.rl_report import panels, steps_table, table, told
    from ..libra.simulation.rl_scenario import read_rl_scenario, with_run
    from ..simulator.pictures.curve_svg import write

    systems = _systems(args.systems)
    if args.plot is not None and args.plot.suffix != ".svg":
        raise InvalidInput(f"--plot {args.plot}: its name must end in .svg")
    path = args.scenario
    shipped = EXAMPLES / f"{path}.toml"
    scenario = read_rl_scenario(shipped if not path.exists() and shipped.exists() else path)
    changed = {k: v for k, v in (
        ("iterations", args.iterations), ("prompts", args.prompts), ("seed", args.seed),
        ("pipeline", args.pipeline)) if v is not None}
    scenario = with_run(scenario, replace(scenario.run, **changed))
    runs = [Pipeline(scenario, system).play() for system in systems]
    if args.json:
        print(json.dumps({"scenario": scenario.name, "iterations": scenario.run.iterations,
                          "seed": scenario.run.seed, **told(runs)}))
    else:
        print(f"{scenario.name}  {scenario.run.gpus} GPUs  {scenario.run.iterations} batches of "
              f"{scenario.batch}  seed {scenario.run.seed}")
        for run in runs if args.steps else ():
            print(f"\n{run.system.name}", *steps_table(run), sep="\n")
        print("", *table(runs), sep="\n")
    if args.plot is not None:
        write(panels(runs, scenario.name), args.plot)
    return 0


def _systems(text: str | None) -> tuple[System, ...]:
    """Those asked for, in the order in which they are compared."""
    from ..errors import InvalidInput
    from ..libra.simulation.rl_systems import SYSTEMS

    if text is None:
        return SYSTEMS
    asked = [name.strip() for name in text.split(",") if name.strip()]
    names = [s.name for s in SYSTEMS]
    unknown = next((a for a in asked if a not in names), None)
    if unknown is not None or not asked:
        raise InvalidInput(f"--systems: {unknown!r} is not one of {', '.join(names)}")
    return tuple(s for s in SYSTEMS if s.name in asked)
