"""The command `tangram VERB`, one file a verb. It prints and decides nothing.

Results go to stdout and everything else to stderr as `tangram: ...`. An error is one line; the exit
status is 2 for wrong input and 1 for failure. A traceback is shown only with TANGRAM_DEBUG=1. What
several verbs share is in `helpers/`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import TangramError

VERBS = ("demo", "run", "acct", "info", "explain", "sim", "sim_rl", "size", "plan", "replay",
         "template", "config", "doctor", "broker", "worker", "gateway", "rank", "shutdown")

_READ_SETTINGS = ("demo", "acct", "plan", "replay", "config", "doctor", "broker", "worker",
                  "gateway", "rank")
_CONFIG = ("settings to read besides the site's and your own (default: TANGRAM_CONFIG; "
           "tangram.toml of the current directory is read only when it is named)")


class _Verb(argparse.ArgumentParser):
    """A verb's own parser: words that it does not know are told with its usage, not with that of
    `tangram` itself, to which argparse hands them."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """As argparse's, but nothing is left over."""
        args, unknown = super().parse_known_args(*given, **named)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return args, unknown


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="tangram", description="Pack agentic-RL actions into held Slurm allocations.",
        epilog="Every verb has its own --help.")
    top.add_argument("--config", default="", metavar="FILE", help=_CONFIG)
    top.add_argument("--version", action="version", version=f"tangram_hpc {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Verb)
    for verb in VERBS:
        module = importlib.import_module(f".{verb}", __name__)
        module.add(verbs)
    for verb in _READ_SETTINGS:  # after the verb too; SUPPRESS keeps what stands before the verb
        verbs.choices[verb].add_argument("--config", default=argparse.SUPPRESS, metavar="FILE",
                                         help=_CONFIG)
    return top


@contextlib.contextmanager
def _named(config: str) -> Iterator[None]:
    """The file of `--config` is named to this process and to all that it starts."""
    if not config:
        yield
        return
    before = os.environ.get("TANGRAM_CONFIG")
    os.environ["TANGRAM_CONFIG"] = str(Path(config).absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TANGRAM_CONFIG"]
        else:
            os.environ["TANGRAM_CONFIG"] = before


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit status."""
    told = list(sys.argv[1:] if words is None else words)
    if told[:2] == ["sim", "rl"]:
        told[:2] = ["sim-rl"]
    args = parser().parse_args(told)
    try:
        with _named(args.config):
            status: int = args.go(args)
        sys.stdout.flush()
        return status
    except TangramError as error:
        if os.environ.get("TANGRAM_DEBUG") == "1":
            raise
        print(f"tangram: error: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader left: nobody to tell
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
