"""The options of `tangram acct` that choose among its rows, as sacct's do.

The rows are actions, or jobs, to which `--name` does not apply.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...accounting.selection import Selection


def add(p: argparse.ArgumentParser) -> None:
    """Adds the options that choose among the rows."""
    p.add_argument("-s", "--state", type=given, metavar="STATE[,STATE...]",
                   help="print only actions in these states: COMPLETED or CD, FAILED or F, ...")
    p.add_argument("-S", "--starttime", type=given, metavar="TIME",
                   help="print only what had not ended at TIME: 2026-11-26T14:30, 14:30, "
                        "now-2hours, today")
    p.add_argument("-E", "--endtime", type=given, metavar="TIME",
                   help="print only what was submitted before TIME")
    p.add_argument("-N", "--nodelist", type=given, metavar="NODE[,NODE...]",
                   help="print only actions that ran on these nodes, such as cpu[1-4]")
    p.add_argument("-r", "--partition", type=given, metavar="NAME[,NAME...]",
                   help="print only actions on nodes of these components")
    p.add_argument("--name", type=given, metavar="NAME[,NAME...]",
                   help="print only actions of these classes")
    p.add_argument("-u", "--user", "--uid", type=given, metavar="USER[,USER...]",
                   help="print only jobs that these users ran; names or numbers")
    p.add_argument("-A", "--accounts", type=given, metavar="ACCOUNT[,ACCOUNT...]",
                   help="print only jobs that are charged to these Slurm accounts")
    p.add_argument("-a", "--allusers", action="store_true", help="print all jobs of TANGRAM_HOME")


def given(text: str) -> str:
    """Returns the text of an option that chooses among rows. It is used as `type=` of an argument
    whose default is None, because argparse parses a default that is a text.

    An empty text is refused: it is a shell variable that is not set, and whoever gave it did not
    mean all rows.
    """
    if not text.strip(", "):
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; leave the option out to choose "
                                         "all")
    return text


def words(text: str | None) -> frozenset[str]:
    """Returns the words of an option that are separated by commas; none if it was left out."""
    return frozenset(word.strip() for word in (text or "").split(",") if word.strip())


def selection(args: argparse.Namespace) -> Selection:
    """Returns which rows the options choose.

    Raises:
        InvalidInput: a state, a time or a list of nodes is wrong.
    """
    from datetime import datetime

    from ...accounting.selection import Selection
    from .state_words import parse_states
    from .times import parse_time

    now = datetime.now()
    return Selection(
        frozenset(parse_states(args.state or "")), words(args.name),
        frozenset(node_names(args.nodelist)), words(args.partition), user_names(args.user),
        parse_time("--starttime", args.starttime, now) if args.starttime else 0,
        parse_time("--endtime", args.endtime, now) if args.endtime else 0,
        words(args.accounts))


def node_names(text: str | None) -> set[str]:
    """Returns the names of a hostlist such as `cpu[1-4],gpu7`; none if it was left out."""
    from ...errors import InvalidInput
    from ...slurm.hostlist import expand

    try:
        return set(expand(text or ""))
    except ValueError as error:
        raise InvalidInput(f"--nodelist: {error}") from None


def user_names(text: str | None) -> frozenset[str]:
    """Returns the login names of the users in a list such as `ada,1001`."""
    return frozenset(map(_user_name, words(text)))


def _user_name(text: str) -> str:
    """Returns the login name for a user's number; a name, or a number without one, as it is."""
    import pwd

    try:
        return pwd.getpwuid(int(text)).pw_name
    except (ValueError, KeyError, OverflowError):
        return text
