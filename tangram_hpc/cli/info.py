"""`tangram info`: what the job holds, what is lent, who waits and why."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from .helpers import ids
from .helpers.allocation_view import elastic_lines


def add(verbs: Any) -> None:
    """Adds the verb."""
    p = verbs.add_parser("info", help="what a running job holds, lends and has waiting")
    p.add_argument("-j", "--job", type=ids.job, default="", help="job id (default: as for `run`)")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Asks the broker and prints."""
    from ..app.connecting import connect, find_access
    from ..errors import AccessError
    from ..storage.rundir import last_job

    try:
        access = find_access(os.environ, args.job)
    except AccessError:
        access = find_access(os.environ, last_job(os.environ))
    with connect(access, name="tangram info") as client:
        told = {k: v for what in ("info", "nodes", "services", "rollouts", "pending")
                for k, v in client.ask(what).items()}
    if args.json:
        print(json.dumps(told))
        return 0
    print(f"job {told['job']}  placer {told['placer']}  clients {told['clients'] - 1}  "
          f"sessions {told['sessions']} ({told['sessions_waiting']} waiting)")
    print(f"cpus {told['cpus'] - told['cpus_free']}/{told['cpus']} lent  "
          f"gpus {told['gpus'] - told['gpus_free']}/{told['gpus']}  "
          f"memory {told['mem_mib'] - told['mem_mib_free']}/{told['mem_mib']} MiB")
    print("actions  " + ("  ".join(f"{k} {v}" for k, v in told["actions"].items()) or "none"))
    if "slurm" in told:
        print(_slurm(told["slurm"]))
    for line in elastic_lines(told["elastic"], brief=True) if told["elastic"] else ():
        print(line)
    print(f"\n{'NODE':<16}{'STATE':<10}{'COMPONENT':<12}{'CPUS':>9}{'GPUS':>6}{'SESSIONS':>10}"
          f"  {'ENFORCEMENT':<13}UNTRUSTED CODE IN")
    for n in told["nodes"]:
        lent = f"{n['cpus'] - n['cpus_free']}/{n['cpus']}" if n["state"] == "UP" else "-"
        print(f"{n['name']:<16}{n['state']:<10}{n['component']:<12}{lent:>9}{n['gpus']:>6}"
              f"{n['sessions']:>10}  {n['enforcement']:<13}{', '.join(n['untrusted']) or 'none'}")
    for n in told["nodes"]:
        if n["gpus"]:
            print(f"DEVICES  {n['name']:<16}{n['devices']}")
    for s in told["services"]:
        where = ", ".join(s["stands_on"]) or "parked"
        print(f"SERVICE  {s['name']:<16}{s['backend']:<10}{where}  restore {s['restore_s']:.2f} s"
              f"  {s['parked_mib']} MiB parked")
    for pool in told["rollouts"]:
        for line in pool_lines(pool):
            print(line)
    for name, why in told["rollouts_unsaved"].items():
        print(f"ROLLOUTS {name:<16}what it learned was not saved: {why}")
    for e in told["endpoints"]:
        rate = f"{e['rate_now']:g}/{e['rate']:g} a second" if e["rate"] else "any rate"
        closed = f"  throttled for {e['throttled_s']:.1f} s" if e["throttled_s"] else ""
        print(f"ENDPOINT {e['name']:<16}{e['inside']}/{e['concurrency_now']} inside (of "
              f"{e['concurrency']})  {rate}  {e['waiting']} waiting  {e['calls']} calls  "
              f"cost {e['cost']:g}{closed}")
    for p in told["pending"][:20]:
        print(f"PENDING  {p['id']:<12}{p['name']:<20}{p['waited_s']:8.1f} s  {p['reason']}")
    if len(told["pending"]) > 20:
        print(f"... and {len(told['pending']) - 20} more")
    for s in told["pending_sessions"][:20]:
        print(f"SESSION  {s['id']:<12}{s['name']:<20}{s['waited_s']:8.1f} s  {s['reason']} "
              f"({s['mem_mib']} MiB)")
    if len(told["pending_sessions"]) > 20:
        print(f"... and {len(told['pending_sessions']) - 20} more sessions")
    return 0


def pool_lines(pool: dict[str, Any]) -> list[str]:
    """A rollout pool, and its services by bucket."""
    def share(name: str) -> str:
        return "-" if pool[name] is None else f"{100 * pool[name]:.1f} %"

    right = (f"{share('accuracy')} of {pool['judged']}" if pool["judged"] else
             "- (no trajectory has ended)")
    left = (f"{share('moved')} ({share('moved_context')} of context)" if pool["moved"] is not None
            else "- (no second turn was dealt)")
    found = [f"ROLLOUTS {pool['name']:<16}{pool['trajectories']} trajectories  {pool['waiting']} "
             f"turns waiting  {pool['turns']} dealt  right bucket {right}  left their KV {left}"]
    for s in pool["services"]:
        last = s["bucket"] == len(pool["edges"])
        upto = "any" if last else f"up to {pool['edges'][s['bucket']]} left"
        load = f"{s['load']}/{s['running_max']}+{s['queue_max']}" if s["stands"] else (
            f"fails, tried again in {s['closed_s']:.0f} s" if s["closed_s"] else "nowhere")
        found.append(f"  bucket {s['bucket']}  {upto:<20}{s['name']:<16}degree {s['degree']}  "
                     f"{load}")
    return found


def _slurm(told: dict[str, Any]) -> str:
    """How often Slurm was asked, and what stands in the way."""
    kinds = ("submits", "queries", "cancels", "comments")
    text = f"slurm    {told['filling']}: " + ", ".join(f"{told[k]} {k}" for k in kinds)
    for what in ("failed", "refused", "held_back"):
        if told[what]:
            text += f", {told[what]} {what.replace('_', ' ')}"
    if told["closed_s"]:
        text += f"; none for {told['closed_s']:.0f} s"
    return text + (f" ({told['last_error']})" if told["last_error"] else "")
