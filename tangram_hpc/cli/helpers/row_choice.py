"""The options of `tangram acct` that choose among its rows, as sacct's do.

The rows are actions, or jobs, to which `--name` does not apply.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...accounting.job_row import JobRow
    from ...accounting.record import ActionRecord


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
    p.add_argument("-a", "--allusers", action="store_true", help="print all jobs of TANGRAM_HOME")


def chooser(args: argparse.Namespace) -> Callable[[ActionRecord | JobRow], bool]:
    """Returns the function that tells whether the options choose a row.

    Raises:
        InvalidInput: a state, a time or a list of nodes is wrong.
    """
    from datetime import datetime

    from ...accounting.job_row import JobRow
    from .state_words import parse_states
    from .times import parse_time

    states, now = parse_states(args.state), datetime.now()
    since = parse_time("--starttime", args.starttime, now) if args.starttime else 0
    until = parse_time("--endtime", args.endtime, now) if args.endtime else 0
    parts, names, users = ({word.strip() for word in text.split(",") if word.strip()}
                           for text in (args.partition, args.name, args.user))
    nodes, users = _nodes(args.nodelist), set(map(_user_name, users))

    def wanted(row: ActionRecord | JobRow) -> bool:
        if users and row.user not in users:
            return False
        if isinstance(row, JobRow):
            return (row.end_ns >= since and (not until or row.start_ns < until)
                    and (not states or row.state in states)
                    and (not nodes or bool(nodes & {*row.nodes}))
                    and (not parts or bool(parts & {*row.partitions})))
        on = row.node
        return ((not states or row.state.value in states)
                and (not names or row.action.name in names)
                and (not nodes or (on is not None and on.name in nodes))
                and (not parts or (on is not None and on.component in parts))
                and (not row.end_ns or row.end_ns >= since)
                and (not until or row.submit_ns < until))

    return wanted


def _nodes(text: str) -> set[str]:
    """Returns the names of a hostlist such as `cpu[1-4],gpu7`."""
    from ...errors import InvalidInput
    from ...slurm.hostlist import expand

    try:
        return set(expand(text))
    except ValueError as error:
        raise InvalidInput(f"--nodelist: {error}") from None


def _user_name(text: str) -> str:
    """Returns the login name for a user's number; a name, or a number without one, as it is."""
    import pwd

    try:
        return pwd.getpwuid(int(text)).pw_name
    except (ValueError, KeyError, OverflowError):
        return text
