"""The command `tangram VERB`, with one file per verb.

A verb reads its options, asks the package and prints; it decides nothing itself. Results go to
stdout and everything else to stderr as `tangram: ...`. An error is one line; the exit status is 2
for wrong input and 1 for a failure. A traceback is shown only with TANGRAM_DEBUG=1. What several
verbs share is in `helpers/`. Verbs import the package inside their functions, so that `tangram
--help` starts fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidInput, TangramError
from .helpers.printable import printable

VERBS = ("demo", "run", "queue", "info", "top", "logs", "acct", "books", "report", "export",
         "explain", "sim", "sim_rl", "size", "plan", "replay", "image", "clean", "template",
         "config", "doctor", "journal", "broker", "worker", "gateway", "rank", "serve", "shutdown",
         "site", "completion")
# verbs that are in a folder of this package
_IN_FOLDERS = {"clean": "job_files.clean_verb", "journal": "job_files.journal_verb",
               "acct": "views.acct_verb", "books": "views.books_verb", "info": "views.info_verb",
               "explain": "views.explain_verb", "export": "views.export_verb",
               "logs": "views.logs_verb",
               "queue": "views.queue_verb", "report": "views.report_verb",
               "site": "site.site_verb", "top": "views.top_verb"}

# what a write to a file fails with that was opened before; most often stdout leads to that file
_FAILED_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_READ_SETTINGS = ("demo", "acct", "books", "plan", "replay", "image", "config", "doctor", "broker",
                  "worker", "gateway", "rank")
_CONFIG = ("settings file to read after the site's file and your own (default: TANGRAM_CONFIG; a "
           "tangram.toml in the current directory is read only if it is named)")


class _Verb(argparse.ArgumentParser):
    """The parser of one verb.

    argparse hands arguments that a verb does not know to the parser of `tangram`. This class
    reports them with the verb's own usage instead, and it leaves no option without its value.
    """

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Parses the arguments, and refuses those that are unknown."""
        args, unknown = super().parse_known_args(*given, **named)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return args, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Takes the `--` of `--delimiter=--` for its value. argparse drops it before Python 3.13,
        and the option then has an empty list as its value.
        """
        if action.option_strings and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)


def parser(verbs_wanted: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """Returns the parser of all verbs, or of some of them."""
    top = argparse.ArgumentParser(
        prog="tangram", description="Pack agentic-RL actions into held Slurm allocations.",
        epilog="Every verb has its own --help.")
    top.add_argument("--config", default=None, metavar="FILE", help=_CONFIG)
    top.add_argument("--version", action="version", version=f"tangram_hpc {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Verb)
    for verb in verbs_wanted:
        module = importlib.import_module(f".{_IN_FOLDERS.get(verb, verb)}", __name__)
        module.add(verbs)
    for verb in set(_READ_SETTINGS) & set(verbs_wanted):
        # SUPPRESS keeps a --config that was given before the verb
        verbs.choices[verb].add_argument("--config", default=argparse.SUPPRESS, metavar="FILE",
                                         help=_CONFIG)
    return top


def _parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser that knows the verb of this command line, or all verbs if the line does not
    begin with one. To load every verb takes longer than most verbs run.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("--config"):
        at += 1 if "=" in arguments[at] else 2
    modules = {verb.replace("_", "-"): verb for verb in VERBS}
    word = arguments[at] if at < len(arguments) else ""
    return parser([modules[word]]) if word in modules else parser()


@contextlib.contextmanager
def _config_file(config: str | None) -> Iterator[None]:
    """Sets TANGRAM_CONFIG to the file of `--config`, for this process and all that it starts."""
    if config is None:
        yield
        return
    if not config:
        raise InvalidInput("--config: the name of the file is empty; leave the option out to read "
                           "only the site's file and your own")
    before = os.environ.get("TANGRAM_CONFIG")
    os.environ["TANGRAM_CONFIG"] = str(Path(config).absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TANGRAM_CONFIG"]
        else:
            os.environ["TANGRAM_CONFIG"] = before


def _open_closed_streams() -> None:
    """Opens /dev/null as each of the standard streams that this process was started without.

    Otherwise the first file that a verb opens, such as a database, would get the number of that
    stream, and whatever writes to the stream would write into the file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(null, True)
            assert null == number
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _escape_what_stdout_has_not() -> None:
    """Lets stdout print characters that its encoding does not have, such as those of names and file
    names in an old locale, as `\\xfc`. stderr does so anyway.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def _give_up_stdout() -> None:
    """Throws away what is left for stdout if that cannot be written; Python's flush at exit would
    fail too.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _take_signals() -> None:
    """Takes signals as a shell's child does. Some launchers leave SIGCHLD ignored, which would hide
    how each child ended, or signals blocked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _current_directory_is_gone() -> bool:
    """Says whether a relative path cannot be made absolute any more."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _no_more_processes(error: Exception) -> int:
    """Says in one line that a limit of processes was reached, and raises any other error."""
    from ..app.loop import no_more_processes

    why = no_more_processes(error)
    if not why or os.environ.get("TANGRAM_DEBUG") == "1":
        raise error
    print(f"tangram: error: {why}", file=sys.stderr)
    return 1


def _refused_by_system(error: OSError) -> int:
    """Says in one line what the system refused, and returns the exit status. An error that is none
    of those a user can cause is raised again."""
    if isinstance(error, PermissionError) and error.filename:
        print(f"tangram: error: {printable(str(error.filename))}: {error.strerror}; ask its "
              "owner, or name a place of your own (for jobs by TANGRAM_HOME)", file=sys.stderr)
        return 2
    if error.errno == errno.ENAMETOOLONG and error.filename:
        # most often the ids of many jobs, without commas between them
        print(f"tangram: error: {printable(str(error.filename))}: {error.strerror}",
              file=sys.stderr)
        return 2
    if isinstance(error, FileNotFoundError) and _current_directory_is_gone():
        print("tangram: error: the current directory has been removed; change to another one",
              file=sys.stderr)
        return 2
    if error.errno not in _FAILED_WRITE:
        return _no_more_processes(error)
    _give_up_stdout()
    print(f"tangram: error: a write failed: {error.strerror}; what went to stdout or to a file "
          "is not complete", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    Args:
        argv: the words after `tangram`; None for those of this process, which then is the command.
    """
    if argv is None:
        _open_closed_streams()
        _take_signals()
        _escape_what_stdout_has_not()
        # Imports make 70,000 objects that live to the end: 100 collections would take 30 ms of 400.
        gc.set_threshold(100_000, 20, 100)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["sim", "rl"]:
        arguments[:2] = ["sim-rl"]
    try:
        args = _parser_for(arguments).parse_args(arguments)
        with _config_file(args.config):
            status: int = args.go(args)
        sys.stdout.flush()
        return status
    except TangramError as error:
        if os.environ.get("TANGRAM_DEBUG") == "1":
            raise
        print(f"tangram: error: {printable(str(error), lines=True)}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader of stdout is gone; without this, Python's flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if os.environ.get("TANGRAM_DEBUG") == "1":
            raise
        return _refused_by_system(error)
    except RuntimeError as error:
        return _no_more_processes(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
