"""`tangram queue`: prints the actions that run and wait, as squeue prints jobs.

The running broker answers. It is asked for a bounded number of rows, and says how many more there
are. Actions that have ended are rows of `tangram acct`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..helpers import ids, row_choice, running_job, slurm_letters, table
from ..helpers.next_verb import hint
from ..helpers.state_words import SHORT, parse_states
from ..helpers.table import Column

if TYPE_CHECKING:
    from ...client.client import Client

_DEFAULT = "ActionID,Name,Client,ST,Time,CPUS,GPUS,NodeList(Reason)"
_LONG = "ActionID,Name,Client,State,Time,Timelimit,CPUS,GPUS,NodeList(Reason)"
_LIMIT = 1_000
_CHOSEN = 900  # the broker takes 1,000 fields
# squeue's letters, and the columns that say the same of an action
_LETTERS = {"i": "JobID", "j": "Name", "P": "Partition", "u": "User", "t": "ST", "T": "State",
            "M": "Time", "l": "Timelimit", "D": "NNodes", "R": "NodeList(Reason)",
            "N": "NodeList", "r": "Reason", "C": "CPUS", "m": "ReqMem", "V": "Submit",
            "S": "Start"}


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "queue", add_help=False, help="print the actions that run and wait, as squeue does",
        description="Prints a row for each action that runs, with its node, and then for each that "
                    "waits, with the reason, in the order of submission. The options are "
                    "squeue's.")
    p.add_argument("--help", action="help", help="show this help message and exit")
    p.add_argument("job", nargs="?", type=ids.named_job, default=ids.Named(""), metavar="JOB",
                   help="id of a job, or of an action such as 4711.2.17 (default: as for "
                        "`tangram run`)")
    p.add_argument("-j", "--jobs", dest="named", type=ids.jobs, default=[], metavar="ID[,ID...]",
                   help="the same as JOB; several actions of one job are separated by commas")
    p.add_argument("-t", "--state", "--states", type=row_choice.given, metavar="STATE[,STATE...]",
                   help="print only actions in these states: PENDING or PD, CONFIGURING or CF, "
                        "RUNNING or R (default: all)")
    p.add_argument("-n", "--name", type=row_choice.given, metavar="NAME[,NAME...]",
                   help="print only actions of these classes")
    p.add_argument("-u", "--user", "--users", type=row_choice.given, metavar="USER[,USER...]",
                   help="print actions only if one of these users runs the job; names or numbers")
    p.add_argument("--me", action="store_true", help="print actions only if you run the job")
    p.add_argument("-w", "--nodelist", type=row_choice.given, metavar="NODE[,NODE...]",
                   help="print only actions on these nodes, such as cpu[1-4]")
    p.add_argument("-p", "--partition", type=row_choice.given, metavar="NAME[,NAME...]",
                   help="print only actions on nodes of these components, or that wait for them")
    p.add_argument("-a", "--all", "-r", "--array", action="store_true",
                   help="change nothing; scripts for squeue name these options")
    p.add_argument("-o", "--format", "-O", "--Format", default="",
                   help="columns to print, such as ActionID,Name%%-30,Planned,Reason, or squeue's "
                        "letters: %%.18i %%.8j %%t %%M %%R")
    p.add_argument("-l", "--long", action="store_true",
                   help="print the whole word of each state, and the time limit")
    p.add_argument("-h", "--noheader", action="store_true", help="print no header")
    p.add_argument("-i", "--iterate", type=running_job.seconds, metavar="SECONDS",
                   help="print again every so many seconds, until ^C")
    p.add_argument("--limit", type=int, default=_LIMIT, metavar="N",
                   help=f"the most rows to print, up to 10000 (default: {_LIMIT})")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--helpformat", action="store_true",
                   help="list the columns that --format knows")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Asks the broker and prints its rows; returns the exit status."""
    columns = _columns("")
    if args.helpformat:
        for column in columns:
            print(f"{column.name:<18} {column.about}")
        return 0
    from ...config.user_name import user_name

    named = [one for one in (args.job, *args.named) if one.job]
    job, ask = _job_of(named), _ask(args, named)
    # a wrong one is reported before any broker is
    slurm_letters.choose(args.format or _DEFAULT, _LETTERS, columns)
    user = running_job.user_of(job)
    if (args.user and user not in row_choice.user_names(args.user)) or (
            args.me and user != user_name()):
        ask = "client=0"  # numbers begin with 1: it has no action of theirs
    with running_job.connect_to(job, "tangram queue") as client:
        return running_job.repeat(client, lambda: _show(client, args, ask, user), args.iterate,
                                  stamped=not args.json)


def _job_of(named: Sequence[ids.Named]) -> str:
    """Returns the one job that the options name; empty for the default.

    Raises:
        InvalidInput: they name several.
    """
    from ...errors import InvalidInput

    jobs = sorted({one.job for one in named})
    if len(jobs) > 1:
        raise InvalidInput(f"--jobs: {', '.join(jobs)} are several jobs, each with a broker of its "
                           "own; name one")
    return jobs[0] if jobs else ""


def _ask(args: argparse.Namespace, named: Sequence[ids.Named]) -> str:
    """Returns the argument of the query."""
    from ...errors import InvalidInput

    if args.limit < 0:
        raise InvalidInput(f"--limit: {args.limit} is below 0")
    asked = args.state or "all"
    states = set() if asked.lower() == "all" else parse_states(asked)
    actions = [] if any(not one.action for one in named) else [one.action for one in named]
    names, parts = sorted(row_choice.words(args.name)), sorted(row_choice.words(args.partition))
    nodes = sorted(row_choice.node_names(args.nodelist))
    if len(nodes) + len(names) + len(parts) + len(actions) > _CHOSEN:
        raise InvalidInput("--nodelist, --name, --partition and --jobs: together more than "
                           f"{_CHOSEN} values; name fewer, or choose among the rows of --json")
    return urlencode([("limit", args.limit), *(("state", s) for s in sorted(states)),
                      *(("name", n) for n in names), *(("action", a) for a in actions),
                      *(("node", n) for n in nodes), *(("partition", p) for p in parts)],
                     errors="replace")  # what is no UTF-8 is the name of no action


def _show(client: Client, args: argparse.Namespace, ask: str, user: str) -> None:
    answer = running_job.answer_of(client, "queue", ask)
    if args.json:
        print(json.dumps({"job": client.job, **answer}))
        return
    usual = _LONG if args.long else _DEFAULT
    columns = slurm_letters.choose(args.format or usual, _LETTERS, _columns(client.job, user))
    for line in table.lines(columns, answer["queue"], not args.noheader):
        print(line)
    if any(row["reason"] for row in answer["queue"]) and args.iterate is None:
        hint("`tangram explain ACTION` says why an action waits, and when it should start")
    if answer["more"]:
        sys.stdout.flush()
        print(f"tangram: ... and {answer['more']} more; -t and -n choose among them, --limit "
              "prints more", file=sys.stderr)


def _columns(job: str, user: str = "") -> list[Column]:
    """Returns all columns, with acct's names where acct has the same. `job` is the job's id, and
    `user` who runs it.
    """
    from ...accounting.fields import duration, stamp

    def time(ns: int) -> str:
        return duration(ns).partition(".")[0]

    def limit(row: dict[str, Any]) -> str:
        return time(row["timeout_ns"]) if row["timeout_ns"] else "UNLIMITED"

    def where(row: dict[str, Any]) -> str:
        return row["node"] or (f"({row['reason']})" if row["reason"] else "")

    return [
        Column("ActionID", 10, lambda r: r["action"], "client and the client's own counter"),
        Column("JobID", 22, lambda r: f"{job}.{r['action']}", "job and ActionID"),
        Column("Name", -16, lambda r: r["name"], "the action's class"),
        Column("JobName", -16, lambda r: r["name"], "same as Name"),
        Column("User", -10, lambda r: user, "who runs the job"),
        Column("Client", -10, lambda r: r["client_name"] or str(r["client"]),
               "name of the client that submitted it"),
        Column("ST", -2, lambda r: SHORT[r["state"]], "State as Slurm's short code"),
        Column("State", -11, lambda r: r["state"], "PENDING, CONFIGURING or RUNNING"),
        Column("Time", 10, lambda r: time(r["elapsed_ns"]), "for how long it has run"),
        Column("Elapsed", 13, lambda r: duration(r["elapsed_ns"]), "Time, with milliseconds"),
        Column("Planned", 13, lambda r: duration(r["planned_ns"]),
               "for how long it has waited, or did before it began"),
        Column("Timelimit", 10, limit, "limit on run time"),
        Column("Submit", 23, lambda r: stamp(r["submit_ns"]), "when it was submitted"),
        Column("Start", 23, lambda r: stamp(r["start_ns"]), "when it began"),
        Column("CPUS", 4, lambda r: str(r["ncpus"] or r["req_cpus"]),
               "CPUs that it holds; while it waits, the fewest that it asks for"),
        Column("NCPUS", 5, lambda r: str(r["ncpus"]), "CPUs that it holds"),
        Column("ReqCPUS", 7, lambda r: str(r["req_cpus"]), "the fewest CPUs that it asks for"),
        Column("GPUS", 4, lambda r: str(r["gpus"]), "GPUs that it holds or asks for"),
        Column("ReqMem", 8, lambda r: f"{r['mem_mib']}M", "memory that it asks for"),
        Column("Resource", -16, lambda r: r["key"], "cpu, service:NAME or endpoint:NAME"),
        Column("NNodes", 6, lambda r: "1", "1, also while it waits, as in squeue"),
        Column("NodeList", -14, lambda r: r["node"], "where it runs"),
        Column("NodeList(Reason)", -16, where, "where it runs, or why it waits"),
        Column("Reason", -18, lambda r: r["reason"] or "None",
               "why it waits; `tangram explain` says more"),
        Column("Partition", -10, lambda r: r["component"], "component of the node"),
        Column("Session", 10, lambda r: r["session"], "the session it runs in"),
        Column("SessionName", -16, lambda r: r["session_name"], "the name of that session"),
        Column("Trajectory", -16, lambda r: r["trajectory"], "the trajectory that it belongs to"),
        Column("Restarts", 8, lambda r: str(max(0, r["attempt"] - 1)), "starts beyond the first"),
    ]
