"""`tangram sim rl`: simulates an asynchronous RL run, with Libra beside its baselines."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .helpers.progress_bar import ProgressBar

if TYPE_CHECKING:
    from ..libra.simulation.rl_pipeline import Played
    from ..libra.simulation.rl_systems import System

EXAMPLES = Path(__file__).resolve().parent.parent / "libra" / "simulation" / "examples"


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "sim-rl", prog="tangram sim rl", help="simulate an asynchronous RL run (`tangram sim rl`)",
        description="Simulates an asynchronous RL run (rollout, tools, training) with the real "
                    "planner, router and hybrid pool. GPUs, engines and tools are models; nothing "
                    "is run.")
    p.add_argument("scenario", metavar="SCENARIO.toml", type=Path,
                   help="tangram-rl/1 file, or the name of a shipped one, such as rl-48")
    p.add_argument("--systems", metavar="S,S", help="systems to compare, such as static-uniform,"
                                                    "'+ elastic' (default: all)")
    p.add_argument("--iterations", type=int, metavar="N",
                   help="number of batches (default: the scenario's)")
    p.add_argument("--prompts", type=int, metavar="N",
                   help="number of prompts in a batch (default: the scenario's)")
    p.add_argument("--seed", type=int, help="seed of all randomness (default: the scenario's)")
    p.add_argument("--pipeline", choices=("batches", "trajectories"),
                   help="unit of the asynchronous pipeline (default: the scenario's)")
    p.add_argument("--steps", action="store_true",
                   help="print also a row for each batch of each system")
    p.add_argument("--plot", type=Path, metavar="OUT.svg",
                   help="draw the runs into a file that ends in .svg")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Simulates the systems, prints them and draws them; returns the exit status."""
    from ..atomic_file import check_output
    from ..errors import InvalidInput
    from ..libra.simulation.rl_pipeline import Pipeline
    from ..libra.simulation.rl_report import panels, steps_table, table, told
    from ..libra.simulation.rl_scenario import read_rl_scenario, with_run
    from ..simulator.pictures.curve_svg import write

    systems = _systems(args.systems)
    if args.plot is not None and args.plot.suffix != ".svg":
        raise InvalidInput(f"--plot {args.plot}: the file's name must end in .svg")
    if args.plot is not None:
        check_output("--plot", args.plot)
    path = args.scenario
    shipped = EXAMPLES / f"{path}.toml"
    scenario = read_rl_scenario(shipped if not path.exists() and shipped.exists() else path)
    changed = {k: v for k, v in (
        ("iterations", args.iterations), ("prompts", args.prompts), ("seed", args.seed),
        ("pipeline", args.pipeline)) if v is not None}
    scenario = with_run(scenario, replace(scenario.run, **changed))
    runs: list[Played] = []
    with ProgressBar("sim rl: systems", len(systems)) as progress:
        for system in systems:
            progress.at(len(runs), system.name)
            runs.append(Pipeline(scenario, system).play())
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
    """Returns the requested systems in the order in which they are compared."""
    from ..errors import InvalidInput
    from ..libra.simulation.rl_systems import SYSTEMS

    if text is None:
        return SYSTEMS
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    names = [s.name for s in SYSTEMS]
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None or not wanted:
        raise InvalidInput(f"--systems: {unknown or text!r} is not one of {', '.join(names)}")
    return tuple(s for s in SYSTEMS if s.name in wanted)
