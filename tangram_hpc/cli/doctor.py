"""`tangram doctor`: prints a page of checks of this node, with remedies.

The checks are in `doctor/`; this file shows progress and lays out the page. The exit status is 1 if
the main job would not run here.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..transport.socket.address import Addresses

_COLOURS = {"ok": "32", "warn": "33", "fail": "31", "skip": "2"}
_PLACES = {"machine": "a machine without Slurm, where the main job is an embedded run",
           "login": "a machine with Slurm, outside a job; the main job is a job with a broker",
           "job": "a machine inside a Slurm job; the main job is a job with a broker"}
_WIDTH, _LEFT = 100, 23
_CLEAR = "\r\033[K"  # erases the line that names the check in progress


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "doctor", help="check what works on this node, and print remedies for what does not",
        description="Checks this node for everything that broker, workers and trainers need, and "
                    "prints a remedy for each thing that is missing. It submits no job, needs no "
                    "root and leaves nothing behind; inside a job it starts two small job steps "
                    "beside those that run there. The exit status is 1 if the main job would not "
                    "run.")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--mpi", default="", metavar="TYPE",
                   help="value of srun's option --mpi (default: the one that the MPI library "
                        "needs)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Runs the checks and prints them; returns 1 if the main job would not run, else 0."""
    from ..app.broker_location import own_addresses
    from ..config.settings import Config, load_config
    from ..doctor.checkup import gather_context, run_checks
    from ..doctor.severity import blockers
    from ..errors import InvalidInput

    wrong = ""
    try:
        # one of the checks reports a tangram.toml that is not read
        config = load_config(os.environ, say=False)
    except InvalidInput as error:
        config, wrong = Config.model_validate({}), str(error)
    own: Addresses | str | None
    try:
        own = own_addresses(config.bind, os.environ)
    except InvalidInput as error:
        own = str(error)
    context = gather_context(os.environ, config, own, wrong, args.mpi)
    live = sys.stderr.isatty()
    checks = run_checks(context, _say if live else _say_nothing)
    if live:
        sys.stderr.write(_CLEAR)
    why = blockers(context.kind, checks)
    if args.json:
        from dataclasses import asdict

        print(json.dumps({"place": context.kind, "host": socket.gethostname(), "runs": not why,
                          "why_not": why, "checks": [asdict(c) for c in checks]}))
    else:
        node = context.place.node if context.place is not None else ""
        print("\n".join(page(context.kind, node or socket.gethostname(), checks, why,
                             sys.stdout.isatty() and "NO_COLOR" not in os.environ)))
    return 1 if why else 0


def _say(group: str, name: str) -> None:
    sys.stderr.write(f"{_CLEAR}{group}: {name} ...")
    sys.stderr.flush()


def _say_nothing(group: str, name: str) -> None:
    pass


def page(kind: str, host: str, checks: Sequence[Any], why: Sequence[str], colour: bool = False
         ) -> list[str]:
    """Returns the lines of the page: a section per group, and one or more lines per check."""
    lines = [f"{host}: {_PLACES[kind]}"]
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            lines += ["", group]
        state = f"{check.state:<4}"
        if colour:
            state = f"\033[{_COLOURS[check.state]}m{state}\033[0m"
        body = _wrapped(check.found, "") + (_wrapped(check.remedy, "-> ") if check.remedy else [])
        lines.append(f"  {state}  {check.name:<14} {body[0]}")
        lines += [" " * _LEFT + line for line in body[1:]]
    counts = {s: sum(c.state == s for c in checks) for s in _COLOURS}
    summary = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    lines += ["", f"The main job would {'not ' if why else ''}run here ({summary})."]
    return lines + [f"  {line}" for line in why]


def _wrapped(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - _LEFT, initial_indent=lead,
                         subsequent_indent=" " * len(lead), break_long_words=False,
                         break_on_hyphens=False) or [""]
