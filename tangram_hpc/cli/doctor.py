"""`tangram doctor`: a page of checks with remedies, for this node; status 1 if the main job would
not run."""

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
_PLACES = {"machine": "a machine without Slurm: the main job is an embedded run",
           "login": "beside a Slurm, not inside a job: the main job is a broker's job",
           "job": "inside a Slurm job: the main job is a broker's job"}
_WIDTH, _LEFT = 100, 23
_CLEAR = "\r\033[K"  # the line that says what is being looked at


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "doctor", help="check this node: what works, what does not, what to do",
        description="Checks this node for what broker, workers and trainers need, and says what to "
                    "do about what is missing. It submits no job, needs no root and leaves nothing "
                    "behind; inside a job it starts two small steps beside what runs there. Exit "
                    "status 1 when the main job would not run.")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.add_argument("--mpi", default="", metavar="WAY",
                   help="how srun starts MPI (default: what the MPI library wants)")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Looks, prints, and says whether the main job would run."""
    from ..app.connecting import own_addresses
    from ..config.settings import Config, load_config
    from ..doctor.checkup import gather_context, run_checks
    from ..doctor.severity import blockers
    from ..errors import InvalidInput

    wrong = ""
    try:
        config = load_config(os.environ, say=False)  # a line of the page tells it
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
    """The lines of the page: a group a subject, a line or more a check."""
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
    told = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    lines += ["", f"The main job would {'not ' if why else ''}run here ({told})."]
    return lines + [f"  {line}" for line in why]


def _wrapped(text: str, lead: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - _LEFT, initial_indent=lead,
                         subsequent_indent=" " * len(lead), break_long_words=False,
                         break_on_hyphens=False) or [""]
