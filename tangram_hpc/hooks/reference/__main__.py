"""The command line of the reference trainer: small but real asynchronous GRPO that uses all of
tangram_hpc. One rank's part is in `reference_rank.py`; read that file as an example of a trainer.

    python -m tangram_hpc.hooks.reference --steps 24 --router on --lend 4:18
    python -m tangram_hpc.hooks.reference --compare

This module must not import torch: without it, one line says what to install.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

from tangram_hpc import InvalidInput, TangramError

from .reference_compare import STEPS, compare, table
from .reference_run import RunPlan, run


def main() -> None:
    """Makes one run, or four to compare; prints the metrics as one line of JSON."""
    p = argparse.ArgumentParser(prog="python -m tangram_hpc.hooks.reference")
    for name in ("ranks", "prompts", "group", "seed", "slots", "stale", "hidden"):
        p.add_argument(f"--{name}", type=int, default=getattr(RunPlan, name))
    p.add_argument("--steps", type=int, help=f"{RunPlan.steps}, or {STEPS} to compare")
    p.add_argument("--patience_s", type=float, default=RunPlan.patience_s, help="see Plan")
    p.add_argument("--lend", default="", help="FROM:TO, the steps for which a replica is lent")
    p.add_argument("--plan", action="store_true", dest="planner",
                   help="the planner decides from its measurements when to lend the replica")
    p.add_argument("--router", choices=("on", "off"), default="off",
                   help="on: route turns by what tools returned; off: route them to the least "
                        "loaded service")
    p.add_argument("--compare", action="store_true",
                   help="make four runs, with pool and router on and off; print a table, then JSON")
    p.add_argument("--device", default=RunPlan.device, help="device of the ranks: cpu or cuda")
    args = vars(p.parse_args())
    lend_text, router, compared = args.pop("lend"), args.pop("router") == "on", args.pop("compare")
    if compared and (lend_text or router or args["planner"]):
        raise InvalidInput("--compare: it sets --router and --lend itself, and compares no --plan")
    try:
        lent = tuple(int(part) for part in lend_text.split(":")) if lend_text else ()
        if len(lent) not in (0, 2):
            raise ValueError
    except ValueError:
        raise InvalidInput(f"--lend: {lend_text!r} is not FROM:TO, as 4:18") from None
    if compared:
        args["steps"] = STEPS if args["steps"] is None else args["steps"]
        told = compare(RunPlan(folder="", **args))
        print(table(told), file=sys.stderr)
        print(json.dumps(told))
        return
    args["steps"] = RunPlan.steps if args["steps"] is None else args["steps"]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(RunPlan(folder=folder, lend=lent, router=router, **args))))


if __name__ == "__main__":
    try:
        main()
    except TangramError as error:
        print(f"tangram: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
