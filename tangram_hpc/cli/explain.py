"""`tangram explain`: why an action waits, behind what, and when it should start."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from .helpers import ids
from .helpers.allocation_view import elastic_lines


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser(
        "explain", help="why an action waits, behind what, and when it should start",
        description="Asks the broker about one action. The expected start is found by running the "
                    "real scheduler ahead on a copy of its state; nothing that may still arrive is "
                    "in it, and it says what it rests on.")
    p.add_argument("action", metavar="ACTION", type=_named,
                   help="its id, or a session's, such as 2.17 or 4711.2.17 (`info`, `acct` show "
                        "it); `allocation`: what is held, asked for and given back, and why")
    p.add_argument("-j", "--job", type=ids.job, default="", help="job id (default: as for `run`)")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(go=go)


def _named(text: str) -> ids.Named:
    return ids.Named("", text) if text == "allocation" else ids.action(text)


def go(args: argparse.Namespace) -> int:
    """Asks the broker, or the journal about what is over, and prints."""
    from ..errors import InvalidInput

    action, job = args.action.action, args.job or args.action.job
    if args.job and args.action.job not in ("", args.job, args.job.partition("@")[0]):
        raise InvalidInput(f"ACTION: {args.action.job}.{action} is of job {args.action.job}, and "
                           f"--job says {args.job}; leave one of them out")
    told, over = _ask(job, action)
    if "error" in told and action != "allocation":
        told = _from_journal(job, action, over) or told
    if "error" in told:
        raise InvalidInput(f"ACTION: {told['error']}")
    if args.json:
        print(json.dumps(told))
        return 0
    for line in lines(told):
        print(line)
    return 0


def _ask(job: str, action: str) -> tuple[dict[str, Any], str]:
    """The broker's answer, or why there is none; and the job that was asked."""
    from ..app.connecting import connect, find_access
    from ..errors import AccessError, BrokerUnreachable
    from ..storage.rundir import last_job

    try:
        try:
            access = find_access(os.environ, job)
        except AccessError:
            access = find_access(os.environ, job or last_job(os.environ))
        with connect(access, name="tangram explain") as client:
            return client.ask("explain", action), client.job
    except (AccessError, BrokerUnreachable) as error:
        if action == "allocation":
            return {"error": "the job does not answer"}, ""
        return {"error": f"no action {action} is known, and the job does not answer: "
                         f"{error}"}, ""


def _from_journal(job: str, action: str, asked: str) -> dict[str, Any] | None:
    """How an action ended that the broker has forgotten; None when the journal has none."""
    from ..accounting.record import fold
    from ..domain.ids import parse, show
    from ..domain.states import ENDED
    from ..errors import TangramError
    from ..storage.journal import read_journals
    from ..storage.rundir import job_dir, last_job

    try:
        folder = job_dir(os.environ, job or asked or last_job(os.environ))
        record = fold(read_journals(folder)).records.get(parse(action))
    except (TangramError, OSError, ValueError, AssertionError):
        return None
    if record is None:
        return None
    done = record.outcome if record.state in ENDED else None
    return {
        "id": show(record.action.id), "name": record.action.name, "state": record.state.value,
        "key": record.action.key, "degrees": list(record.action.degrees),
        "session": show(record.action.session), "attempt": record.attempt,
        "node": record.node.name if record.node is not None else "", "units": record.cpus,
        "queue_s": record.planned_ns / 1e9, "exec_s": done.exec_ns / 1e9 if done else 0.0,
        "exit_code": done.exit_status if done else 0, "signal": done.signal if done else 0,
        "why": done.reason if done else "the job ended before it did",
    }


def lines(told: dict[str, Any]) -> list[str]:
    """An answer as a person reads it."""
    if "elastic" in told:
        return elastic_lines(told["elastic"]) if told["elastic"] else [
            "the job holds what it was given: its user allows neither to ask for nodes nor to give "
            "any back ([elastic] in tangram.toml, --idle-release)"]
    if "session_state" in told:
        return _session(told)
    degrees = ",".join(map(str, told["degrees"]))
    where = f"  session {told['session']}" if told["session"] else ""
    first = f"{told['id']} {told['name']}  {told['state']}  {told['key']} {degrees}{where}"
    if "turn" in told:
        first += "\n" + _turn(told["turn"])
    if "start" in told:
        return [first, *_waiting(told)]
    if "runs_s" in told:
        end = _soon(told["ends_in_s"])
        return [first, f"runs on {told['node']} with {told['units']} units for "
                       f"{told['runs_s']:.1f} s ({told['resizes']} resizes)",
                f"expected end: {end} (rests on: {told['rests_on']})"]
    on = f" on {told['node']}" if told.get("node") else ""
    end = f"signal {told['signal']}" if told["signal"] else f"exit code {told['exit_code']}"
    return [first, f"ended{on} after {told['exec_s']:.3f} s: {end}"
                   + (f", {told['why']}" if told["why"] else "")]


def _turn(turn: dict[str, Any]) -> str:
    """Where a turn went, or what its pool has room for."""
    of = (f"turn of trajectory {turn['trajectory']}: {turn['context']} tokens of context, "
          f"{turn['generated']} generated")
    if "service" in turn:
        return (f"{of}; dealt to {turn['service']} (bucket {turn['bucket']}, wanted "
                f"{turn['wanted']}, {turn['how']})")
    if not turn["why"]:
        return f"{of}; was never dealt"
    if turn["why"] == "TrajectoryBusy":
        return f"{of}; behind {turn['ahead']} earlier turns of its trajectory"
    loads = ", ".join(f"{s['name']} {s['load']} of {s['running_max'] + s['queue_max']}"
                      if s["stands"] else f"{s['name']} stands nowhere" for s in turn["services"])
    return f"{of}; behind {turn['ahead']} in the line of pool {turn['pool']}: {loads}"


def _session(told: dict[str, Any]) -> list[str]:
    origin = f", a fork of {told['origin']}" if told["origin"] else ""
    found = [f"session {told['id']} {told['name']}  {told['session_state']}  "
             f"{told['mem_mib']} MiB{origin}"]
    if "reason" in told:
        found += [f"waits for {told['waited_s']:.1f} s: {told['reason']}",
                  f"behind {told['ahead']} sessions; {told['nodes']} nodes could hold it, with at "
                  f"most {told['most_free_mib']} MiB free"]
    else:
        found.append(f"on {told['node']}")
    return [*found, f"{told['actions_running']} actions run in it, {told['actions_waiting']} wait"]


def _soon(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"in {seconds:.1f} s"


def _waiting(told: dict[str, Any]) -> list[str]:
    start = told["start"]
    why = f": {told['ending']}" if told.get("ending") else ""
    found = [f"waits for {told['waited_s']:.1f} s: {told['reason']}{why}",
             f"behind {told['ahead']} waiting of {told['ahead_sessions']} sessions"]
    found += [f"  {s['count']:>6} x {s['name']} on {s['key']} {','.join(map(str, s['degrees']))}"
              for s in told["ahead_shapes"]]
    found.append(f"{told['holders']} running hold what it could run on")
    found += [f"  {h['id']:<10} {h['name']:<16} {h['units']:>3} units on {h['node']}, ends "
              f"{_soon(h['ends_in_s'])}" for h in told["held_by"]]
    rests = ", ".join(f"{n} by {what}" for what, n in start["rests_on"].items()) or "nothing else"
    if start["in_s"] is None:
        found.append(f"expected start: unknown: {start['why']}")
    else:
        found.append(f"expected start: {_soon(start['in_s'])} on {start['node']} with "
                     f"{start['units']} units, if nothing else arrives")
    return [*found, f"rests on run times: {rests}"]
