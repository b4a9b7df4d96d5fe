"""`tangram explain`: explains why an action waits, what is in front of it, when it should start.

The running broker answers. When an action is over and the broker no longer knows it, or when no
broker runs, the job's journal answers instead.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from ..helpers import ids
from ..helpers.allocation_view import elastic_lines
from ..helpers.printable import printable_answer
from ..helpers.running_job import connect_to
from ..helpers.shared_sessions import shared_line


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "explain", help="explain why an action waits and when it should start",
        description="Asks the broker about one action. The expected start is computed by running "
                    "the real scheduler ahead on a copy of its state. Work that may still arrive "
                    "is not considered; the answer says which estimates it is based on, and "
                    "states an interval at a level.")
    p.add_argument("action", metavar="ACTION", type=_named,
                   help="id of an action or a session, such as 2.17 or 4711.2.17 (`info` and "
                        "`acct` print ids); or `allocation`, to explain which allocations are "
                        "held, requested and given back")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: as for `tangram run`)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def _named(text: str) -> ids.Named:
    return ids.Named("", text) if text == "allocation" else ids.action(text)


def go(args: argparse.Namespace) -> int:
    """Asks the broker, or the journal about an ended action, and prints; returns the exit status.
    """
    from ...errors import InvalidInput

    action, job = args.action.action, args.job or args.action.job
    if args.job and args.action.job not in ("", args.job, args.job.partition("@")[0]):
        raise InvalidInput(f"ACTION: {args.action.job}.{action} belongs to job {args.action.job}, "
                           f"but --job is {args.job}; leave one of them out")
    answer, asked = _ask(job, action)
    if "error" in answer and action != "allocation":
        answer = _from_journal(job, action, asked) or answer
    if "error" in answer:
        raise InvalidInput(f"ACTION: {answer['error']}")
    if args.json:
        print(json.dumps(answer))
        return 0
    for line in lines(printable_answer(answer)):
        print(line)
    return 0


def _ask(job: str, action: str) -> tuple[dict[str, Any], str]:
    """Returns the broker's answer or an error, and the job whose broker was asked.

    The job is empty if no broker was found.
    """
    from ...errors import AccessError, BrokerUnreachable

    try:
        with connect_to(job, "tangram explain") as client:
            return client.ask("explain", action), client.job
    except (AccessError, BrokerUnreachable) as error:
        if action == "allocation":
            return {"error": "the job's broker does not answer"}, ""
        return {"error": f"action {action} is not known from a journal, and the job's broker does "
                         f"not answer: {error}"}, ""


def _from_journal(job: str, action: str, asked: str) -> dict[str, Any] | None:
    """Returns how an action ended that the broker no longer knows, or that it has not ended.

    The answer comes from the journal. It is None if there is no journal that says anything, and an
    error if the job is over and had no such action.

    Raises:
        InvalidInput: no broker was asked, and the journal is damaged.
    """
    from ...accounting.record import fold
    from ...domain.ids import parse, show
    from ...domain.states import ENDED
    from ...errors import InvalidInput, TangramError
    from ...storage.job_folders import is_served
    from ...storage.journal_segments import journals, read_journals
    from ...storage.rundir import job_dir, last_job

    try:
        folder = job_dir(os.environ, job or asked or last_job(os.environ))
    except TangramError:
        return None
    try:
        served = is_served(folder)
        record = fold(read_journals(folder), served).records.get(parse(action))
    except InvalidInput:
        if asked or not journals(folder):
            return None
        raise
    except (TangramError, OSError, ValueError, AssertionError):
        return None
    if record is None:
        if asked or served:
            return None  # the broker knows more than its journal, or has answered already
        return {"error": f"job {folder.name} had no action {action}; `tangram acct -j "
                         f"{folder.name}` prints all of its actions"}
    done = record.outcome if record.state in ENDED else None
    open_because = "the job's broker does not answer" if served else (
        f"the job's next start goes on with it, because of once={record.action.once!r}")
    return {
        "id": show(record.action.id), "name": record.action.name, "state": record.state.value,
        "key": record.action.key, "degrees": list(record.action.degrees),
        "session": show(record.action.session), "attempt": record.attempt,
        "node": record.node.name if record.node is not None else "", "units": record.cpus,
        "queue_s": record.planned_ns / 1e9, "exec_s": done.exec_ns / 1e9 if done else 0.0,
        "exit_code": done.exit_status if done else 0, "signal": done.signal if done else 0,
        "why": done.reason if done else open_because,
    }


def lines(answer: dict[str, Any]) -> list[str]:
    """Returns the lines that show an answer of the broker to a person."""
    from ...domain.states import ENDED

    if "elastic" in answer:
        return elastic_lines(answer["elastic"]) if answer["elastic"] else [
            "the job keeps its allocations: its settings allow it neither to request nodes nor to "
            "give any back (set [elastic] in tangram.toml, or --idle-release)"]
    if "session_state" in answer:
        return _session(answer)
    degrees = ",".join(map(str, answer["degrees"]))
    where = f"  session {answer['session']}" if answer["session"] else ""
    first = f"{answer['id']} {answer['name']}  {answer['state']}  {answer['key']} {degrees}{where}"
    if "turn" in answer:
        first += "\n" + _turn(answer["turn"])
    if "start" in answer:
        return [first, *_waiting(answer)]
    if "runs_s" in answer:
        end = _soon(answer["ends_in_s"]) + _bounds(answer, answer.get("ends_between_s"))
        return [first, f"has run on {answer['node']} with {answer['units']} units for "
                       f"{answer['runs_s']:.1f} s ({answer['resizes']} resizes)",
                f"expected end: {end} (run time: {answer['rests_on']})"]
    on = f" on {answer['node']}" if answer.get("node") else ""
    if answer["state"] not in ENDED:
        return [first, f"has not ended{on}: {answer['why']}"]
    end = f"signal {answer['signal']}" if answer["signal"] else f"exit code {answer['exit_code']}"
    return [first, f"ended{on} after {answer['exec_s']:.3f} s: {end}"
                   + (f", {answer['why']}" if answer["why"] else "")]


def _turn(turn: dict[str, Any]) -> str:
    """Describes a turn: the service that it was routed to, or how busy the pool's services are.
    """
    of = (f"turn of trajectory {turn['trajectory']}: {turn['context']} tokens of context, "
          f"{turn['generated']} generated")
    if "service" in turn:
        return (f"{of}; routed to {turn['service']} (bucket {turn['bucket']}; its prediction is "
                f"bucket {turn['wanted']}; {turn['how']})")
    if not turn["why"]:
        return f"{of}; has not been routed"
    if turn["why"] == "TrajectoryBusy":
        return f"{of}; waits for {turn['ahead']} earlier turns of its trajectory"
    loads = ", ".join(f"{s['name']} has {s['load']} of {s['running_max'] + s['queue_max']} requests"
                      if s["stands"] else f"{s['name']} is on no GPU" for s in turn["services"])
    return (f"{of}; waits for {turn['ahead']} turns in front of it in the queue of pool "
            f"{turn['pool']}: {loads}")


def _session(answer: dict[str, Any]) -> list[str]:
    origin = f", a fork of {answer['origin']}" if answer["origin"] else ""
    found = [f"session {answer['id']} {answer['name']}  {answer['session_state']}  "
             f"{answer['mem_mib']} MiB{origin}"]
    if "reason" in answer:
        found += [f"has waited for {answer['waited_s']:.1f} s: {answer['reason']}",
                  f"{answer['ahead']} sessions are in front of it; {answer['nodes']} nodes are "
                  f"large enough, with at most {answer['most_free_mib']} MiB free on one"]
    else:
        found.append(f"is open on {answer['node']}")
    if "shared" in answer:
        found.append("shared: " + shared_line(answer["shared"]))
    return [*found, f"{answer['actions_running']} of its actions run, "
                    f"{answer['actions_waiting']} wait"]


def _soon(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"in {seconds:.1f} s"


def _bounds(answer: dict[str, Any], between: list[float] | None) -> str:
    """Describes an interval with its level, such as ` (80 %: 2.1 to 9.4 s)`; empty if there is
    none.
    """
    if between is None:
        return ""
    low, high = between
    return f" ({100 * answer['level']:.0f} %: {low:.1f} to {high:.1f} s)"


def _waiting(answer: dict[str, Any]) -> list[str]:
    start = answer["start"]
    why = f": {answer['ending']}" if answer.get("ending") else ""
    found = [f"has waited for {answer['waited_s']:.1f} s: {answer['reason']}{why}",
             f"{answer['ahead']} waiting actions of {answer['ahead_sessions']} sessions are in "
             "front of it"]
    found += [f"  {s['count']:>6} x {s['name']} on {s['key']} {','.join(map(str, s['degrees']))}"
              for s in answer["ahead_shapes"]]
    found.append(f"{answer['holders']} running actions hold units that it could run on")
    found += [f"  {h['id']:<10} {h['name']:<16} {h['units']:>3} units on {h['node']}, ends "
              f"{_soon(h['ends_in_s'])}" for h in answer["held_by"]]
    used = ", ".join(f"{n} {what}" for what, n in start["rests_on"].items()) or "none"
    if start["in_s"] is None:
        found.append(f"expected start: unknown: {start['why']}")
    else:
        bounds = _bounds(answer, start.get("between_s"))
        found.append(f"expected start: {_soon(start['in_s'])}{bounds} on {start['node']} with "
                     f"{start['units']} units, if no other work arrives")
        if why := start.get("why_no_interval"):
            found.append(f"no interval of the start is known: {why}")
    if "end" in answer:
        end = answer["end"]
        found.append(f"expected end: {_soon(end['in_s'])}{_bounds(answer, end['between_s'])}")
    return [*found, f"run times that this estimate uses: {used}"]
