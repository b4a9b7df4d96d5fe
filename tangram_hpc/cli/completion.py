"""`tangram completion`: prints the script by which a shell completes `tangram` command lines, made
from the same parsers as `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHELLS = ("bash", "zsh")
_FOLDERS = ("FOLDER",)
_FILES = ("FILE", "OUT", "OUT.svg", "PATH", "WORKLOAD", "SCENARIO", "SCENARIO.toml", "PLAN.json",
          "STEPS.jsonl", "M.toml", "H.toml")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "completion", help="print a script that completes command lines in bash or zsh",
        description="Prints a script for a shell. In bash: eval \"$(tangram completion bash)\", in "
                    "~/.bashrc for every shell. In zsh: tangram completion zsh > _tangram, in a "
                    "folder of fpath.")
    p.add_argument("shell", choices=_SHELLS)
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit status."""
    import shtab

    from . import parser

    top = parser()
    for action in _actions(top):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # shtab reads it
        elif _names_a_file(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(top, args.shell))
    return 0


def _names_a_file(action: argparse.Action) -> bool:
    """Whether files complete the argument; those of a command that is run are most often files."""
    return (action.metavar in _FILES or action.type is Path
            or action.nargs == argparse.REMAINDER)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments of a parser and of those below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
