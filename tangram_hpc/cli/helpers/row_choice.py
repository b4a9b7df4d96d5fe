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
    p.add_argument("-s", "--state", default="", metavar="STATE[,STATE...]",
                   help="print only actions in these states: COMPLETED or CD, FAILED or F, ...")
    p.add_argument("-S", "--starttime", default="", metavar="TIME",
                   help="print only what had not ended at TIME: 2026-11-26T14:30, 14:30, "
                        "now-2hours, today")
    p.add_argument("-E", "--endtime", default="", metavar="TIME",
                   help="print only what was submitted before TIME")
    p.add_argument("-N", "--nodelist", default="", metavar="NODE[,NODE...]",
                   help="print only actions that ran on these nodes, such as cpu[1-4]")
    p.add_argument("-r", "--partition", default="", metavar="NAME[,NAME...]",
                   help="print only actions on nodes of these components")
    p.add_argument("--name", default="", metavar="NAME[,NAME...]",
                   help="print only actions of these classes")
    p.add_argument("-u", "--user", "--uid", default="", metavar="USER[,USER...]",
                   help="print only jobs that these users ran; names or numbers")
    p.add_argument("-A", "--accounts", default="", metavar="ACCOUNT[,ACCOUNT...]",
                   help="print only jobs that are charged to these Slurm accounts")
    p.add_argument("-a", "--allusers", action="store_true", help="print all jobs of TANGRAM_HOME")


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
    parts, names, users, accounts = (
        frozenset(word.strip() for word in text.split(",") if word.strip())
        for text in (args.partition, args.name, args.user, args.accounts))
    return Selection(
        frozenset(parse_states(args.state)), names, frozenset(node_names(args.nodelist)), parts,
        frozenset(map(_user_name, users)),
        parse_time("--starttime", args.starttime, now) if args.starttime else 0,
        parse_time("--endtime", args.endtime, now) if args.endtime else 0,
        accounts)


def node_names(text: str) -> set[str]:
    """Returns the names of a hostlist such as `cpu[1-4],gpu7`."""
    from ...errors import InvalidInput
    from ...slurm.hostlist import expand

    try:
        return set(expand(text))
    except ValueError as error:
        raise InvalidInput(f"--nodelist: {error}") from None


def user_names(text: str) -> set[str]:
    """Returns the login names of the users in a list such as `ada,1001`."""
    return {_user_name(word.strip()) for word in text.split(",") if word.strip()}


def _user_name(text: str) -> str:
    """Returns the login name for a user's number; a name, or a number without one, as it is."""
    import pwd

    try:
        return pwd.getpwuid(int(text)).pw_name
    except (ValueError, KeyError, OverflowError):
        return text
