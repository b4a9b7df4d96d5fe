"""`tangram info`: prints what a running job holds, what is lent, and what waits for which reason.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..helpers import ids, row_choice, running_job, slurm_letters, table
from ..helpers.allocation_view import elastic_lines
from ..helpers.printable import printable_answer
from ..helpers.shared_sessions import shared_line
from ..helpers.table import Column

if TYPE_CHECKING:
    from ...client.client import Client

_PARTS = ("info", "nodes", "services", "rollouts", "sessions", "tenants", "pending")
_SHARED_MAX = 20  # lines of shared sessions
_REASONS = "Node,State,Reason"
_NODE_FORMAT = "Node,State,Partition,CPUS(A/I/T),GPUS,Mem,Sessions,Actions"


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("info", help="print what a running job holds, lends and has waiting")
    p.add_argument("-j", "--job", type=ids.job,
                   help="job id (default: as for `tangram run`)")
    p.add_argument("-N", "--nodes", "--Node", action="store_true",
                   help="print only a line for each node, as sinfo does")
    p.add_argument("-n", "--nodelist", type=row_choice.given, metavar="NODE[,NODE...]",
                   help="print only these nodes, such as cpu[1-4]; implies -N")
    p.add_argument("-p", "--partition", type=row_choice.given, metavar="NAME[,NAME...]",
                   help="print only nodes of these components; implies -N")
    p.add_argument("-t", "--states", type=row_choice.given, metavar="STATE[,STATE...]",
                   help="print only nodes in these states: UP, AWAY, DRAINING, DRAINED or DOWN, or "
                        "idle, mix, alloc or drain as in sinfo; implies -N")
    p.add_argument("-R", "--list-reasons", action="store_true",
                   help="print why nodes are drained; implies -N")
    p.add_argument("-o", "--format", "-O", "--Format", default="",
                   help="columns of -N to print, such as Node%%-30,State, or sinfo's letters: "
                        "%%n %%t %%C; implies -N")
    p.add_argument("--noheader", action="store_true", help="print no header above the lines of -N")
    p.add_argument("-i", "--iterate", type=running_job.seconds, metavar="SECONDS",
                   help="print again every so many seconds, until ^C")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Asks the broker and prints its answers; returns the exit status."""
    columns, wanted = _chosen(args), _wanted(args)  # a wrong one is reported before any broker is
    with running_job.connect_to(args.job, "tangram info") as client:
        return running_job.repeat(client, lambda: _show(client, args, columns, wanted),
                                  args.iterate, not args.json)


def _show(client: Client, args: argparse.Namespace, columns: list[Column],
          wanted: Callable[[dict[str, Any]], bool]) -> None:
    if (args.nodes or args.format or args.nodelist or args.partition or args.states
            or args.list_reasons) and not args.json:
        rows = filter(wanted, client.ask("nodes")["nodes"])
        for line in table.lines(columns, rows, not args.noheader):
            print(line)
        return
    answer = {k: v for what in _PARTS for k, v in client.ask(what).items()}
    _leave_out_itself(answer)
    if args.json:
        answer["nodes"] = list(filter(wanted, answer["nodes"]))
        print(json.dumps(answer))
        return
    answer = printable_answer(answer)
    _print_job(answer)
    _print_resources(answer)
    for line in tenant_lines(answer["tenants"]):
        print(line)
    _print_sessions(answer)


def _leave_out_itself(answer: dict[str, Any]) -> None:
    """Takes this command out of the numbers of clients: it is one of the job and of its tenant."""
    from ...domain.tenant import DEFAULT_TENANT

    answer["clients"] -= 1
    own = os.environ.get("TANGRAM_TENANT") or DEFAULT_TENANT
    for tenant in answer["tenants"]:
        tenant["clients"] -= tenant["name"] == own


def _chosen(args: argparse.Namespace) -> list[Column]:
    """Returns the columns of -N."""
    usual = _REASONS if args.list_reasons else _NODE_FORMAT
    return slurm_letters.choose(args.format or usual, _LETTERS, _NODE_COLUMNS)


def _wanted(args: argparse.Namespace) -> Callable[[dict[str, Any]], bool]:
    """Returns the function that says whether a node is one of those that the options name."""
    from ...errors import InvalidInput

    names = row_choice.node_names(args.nodelist)
    parts = row_choice.words(args.partition)
    states = row_choice.words(args.states and args.states.lower())
    if unknown := states - _STATES:
        raise InvalidInput(f"--states: {min(unknown)!r} is not the state of a node; choose from "
                           f"{', '.join(sorted(_STATES))}")

    def wants(node: dict[str, Any]) -> bool:
        return ((not names or node["name"] in names)
                and (not parts or node["component"] in parts)
                and (not states or bool(states & _states_of(node)))
                and (not args.list_reasons or bool(node["draining"])))

    return wants


def _states_of(node: dict[str, Any]) -> set[str]:
    """Returns the state of a node in our words and in sinfo's."""
    state = node["state"].lower()
    if state == "up":
        return {state, "idle" if not node["leases"] else "mix" if node["cpus_free"] else "alloc"}
    return {state, "drain"} if state in ("draining", "drained") else {state}


def _print_job(answer: dict[str, Any]) -> None:
    """Prints what the whole job holds and lends, and its nodes."""
    from ...domain.states import ENDED

    print(f"job {answer['job']}  placer {answer['placer']}  clients {answer['clients']}  "
          f"sessions {answer['sessions']} ({answer['sessions_waiting']} waiting)")
    print(f"cpus {answer['cpus'] - answer['cpus_free']}/{answer['cpus']} lent  "
          f"gpus {answer['gpus'] - answer['gpus_free']}/{answer['gpus']}  "
          f"memory {answer['mem_mib'] - answer['mem_mib_free']}/{answer['mem_mib']} MiB")
    # the broker knows those that have ended until their clients have the results: no total
    live = [f"{k} {v}" for k, v in answer["actions"].items() if k not in ENDED]
    print("actions  " + ("  ".join(live) or "none"))
    if "slurm" in answer:
        print(_slurm(answer["slurm"]))
    for line in elastic_lines(answer["elastic"], brief=True) if answer["elastic"] else ():
        print(line)
    print(f"\n{'NODE':<16}{'STATE':<10}{'COMPONENT':<12}{'CPUS':>9}{'GPUS':>6}{'SESSIONS':>10}"
          f"  {'ENFORCEMENT':<13}UNTRUSTED CODE IN")
    for n in answer["nodes"]:
        lent = f"{n['cpus'] - n['cpus_free']}/{n['cpus']}" if n["state"] == "UP" else "-"
        guards = ", ".join(map(_with_root(n), n["untrusted"])) or "none"
        print(f"{n['name']:<15} {n['state']:<9} {n['component']:<11} {lent:>9}{n['gpus']:>6}"
              f"{n['sessions']:>10}  {n['enforcement']:<12} {guards}")
    # a worker that starts again is a new node, and the one before it stays as DOWN
    there = [n for n in answer["nodes"] if n["state"] != "DOWN"]
    for line in network_lines(there):
        print(line)
    for n in there:
        if n["gpus"]:
            print(f"DEVICES  {n['name']:<15} {n['devices']}")


def network_lines(nodes: list[dict[str, Any]]) -> list[str]:
    """Returns the lines that say which networks sessions can have on which nodes, and why not."""
    reach: dict[str, list[str]] = {}
    shut: dict[str, list[str]] = {}
    for n in nodes:
        if n["networks"]:
            reach.setdefault(", ".join(n["networks"]), []).append(n["name"])
        if n["networks"] and n["why_not_open"]:
            shut.setdefault(n["why_not_open"], []).append(n["name"])
    lines = [f"NETWORKS {networks}{'' if len(reach) == 1 else '  on ' + ','.join(names)}"
             for networks, names in reach.items()]
    return lines + [f'NETWORKS no "open" on {",".join(names)}: {why}'
                    for why, names in shut.items()]


def tenant_lines(tenants: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each tenant, in the words of sshare; none if there is one tenant."""
    lines = []
    for t in tenants:
        limits = ",".join(f"{name}={most}" for name, most in t["grp_tres"].items())
        lines.append(f"TENANT   {t['name']:<15} shares {t['shares']} ({t['norm_shares']:.1%})"
                     f"{'  priority ' + str(t['priority']) if t['priority'] else ''}"
                     f"  {t['cpus']} CPUs  {t['gpus']} GPUs  {t['mem_mib']} MiB lent  "
                     f"{t['waiting']} waiting  {t['clients']} clients"
                     f"{'  GrpTRES ' + limits if limits else ''}")
    return lines


def _print_resources(answer: dict[str, Any]) -> None:
    """Prints the services, rollout pools and endpoints."""
    for s in answer["services"]:
        where = ", ".join(s["stands_on"]) or "on no GPU"
        print(f"SERVICE  {s['name']:<15} {s['backend']:<9} {where}  restore {s['restore_s']:.2f} s"
              f"  {s['parked_mib']} MiB when parked")
    for pool in answer["rollouts"]:
        for line in pool_lines(pool):
            print(line)
    for name, why in answer["rollouts_unsaved"].items():
        print(f"ROLLOUTS {name:<15} the prefix tree of this pool was not saved: {why}")
    for e in answer["endpoints"]:
        rate = f"{e['rate_now']:g}/{e['rate']:g} a second" if e["rate"] else "any rate"
        closed = f"  throttled for {e['throttled_s']:.1f} s" if e["throttled_s"] else ""
        print(f"ENDPOINT {e['name']:<15} {e['inside']}/{e['concurrency_now']} calls in flight "
              f"(quota {e['concurrency']})  {rate}  {e['waiting']} waiting  {e['calls']} calls  "
              f"cost {e['cost']:g}{closed}")


def _print_sessions(answer: dict[str, Any]) -> None:
    """Prints the shared sessions, and what waits."""
    for s in answer["shared_sessions"][:_SHARED_MAX]:
        print("SHARED   " + shared_line(s))
    if len(answer["shared_sessions"]) > _SHARED_MAX:
        print(f"... and {len(answer['shared_sessions']) - _SHARED_MAX} more shared sessions")
    for p in answer["pending"][:20]:
        print(f"PENDING  {p['id']:<11} {p['name']:<19} {p['waited_s']:8.1f} s  {p['reason']}")
    if len(answer["pending"]) > 20:
        more = len(answer["pending"]) - 20 + answer.get("pending_more", 0)
        print(f"... and {more} more")
    for s in answer["pending_sessions"][:20]:
        print(f"SESSION  {s['id']:<11} {s['name']:<19} {s['waited_s']:8.1f} s  {s['reason']} "
              f"({s['mem_mib']} MiB)")
    if len(answer["pending_sessions"]) > 20:
        more = len(answer["pending_sessions"]) - 20 + answer.get("pending_sessions_more", 0)
        print(f"... and {more} more sessions")


def _with_root(node: dict[str, Any]) -> Callable[[str], str]:
    """Names a node's backends; bwrap with how its sessions can write their image."""
    root = node["image_root"]
    return lambda name: f"{name}+{root}" if root and name == "bwrap" else name


def pool_lines(pool: dict[str, Any]) -> list[str]:
    """Returns the lines of a rollout pool and of its services, which are ordered by bucket."""
    def share(name: str) -> str:
        return "-" if pool[name] is None else f"{100 * pool[name]:.1f} %"

    right = (f"{share('accuracy')} of {pool['judged']}" if pool["judged"] else
             "- (no trajectory has ended)")
    left = (f"{share('moved')} ({share('moved_context')} of context)" if pool["moved"] is not None
            else "- (no second turn was routed)")
    found = [f"ROLLOUTS {pool['name']:<15} {pool['trajectories']} trajectories  {pool['waiting']} "
             f"turns waiting  {pool['turns']} routed  right bucket {right}  moved away from their "
             f"KV {left}"]
    for s in pool["services"]:
        last = s["bucket"] == len(pool["edges"])
        upto = "any length" if last else f"up to {pool['edges'][s['bucket']]} tokens left"
        load = f"{s['load']}/{s['running_max']}+{s['queue_max']}" if s["stands"] else (
            f"fails, will be tried again in {s['closed_s']:.0f} s" if s["closed_s"] else
            "is on no GPU")
        found.append(f"  bucket {s['bucket']}  {upto:<25} {s['name']:<15} degree {s['degree']}  "
                     f"{load}")
    return found


def _slurm(answer: dict[str, Any]) -> str:
    """Describes how often Slurm was called, and the last error."""
    kinds = ("submits", "queries", "cancels", "comments")
    text = f"slurm    {answer['filling']}: " + ", ".join(f"{answer[k]} {k}" for k in kinds)
    for what in ("failed", "refused", "held_back"):
        if answer[what]:
            text += f", {answer[what]} {what.replace('_', ' ')}"
    if answer["closed_s"]:
        text += f"; no call for the next {answer['closed_s']:.0f} s"
    return text + (f" ({answer['last_error']})" if answer["last_error"] else "")


def _cpus(node: dict[str, Any]) -> str:
    """Returns the cores that are allocated, idle, and all, as sinfo prints them."""
    total, idle = node["cpus"], node["cpus_free"]
    return f"{total - idle}/{idle}/{total}" if node["state"] == "UP" else f"-/-/{total}"


_STATES = {"up", "away", "draining", "drained", "down", "idle", "mix", "alloc", "drain"}
# sinfo's letters, and the columns that say the same of a node
_LETTERS = {"n": "Node", "N": "Node", "t": "State", "T": "State", "P": "Partition",
            "C": "CPUS(A/I/T)", "c": "CPUS", "G": "GPUS", "m": "Mem", "E": "Reason"}
_NODE_COLUMNS = [
    Column("Node", -16, lambda n: n["name"], "its name"),
    Column("NodeList", -16, lambda n: n["name"], "same as Node"),
    Column("Host", -16, lambda n: n["host"], "the host that it is on"),
    Column("State", -9, lambda n: n["state"], "UP, AWAY, DRAINING, DRAINED or DOWN"),
    Column("Partition", -10, lambda n: n["component"], "its component"),
    Column("CPUS(A/I/T)", 12, _cpus, "cores: allocated/idle/all"),
    Column("CPUS", 5, lambda n: str(n["cpus"]), "all of its cores"),
    Column("GPUS", 4, lambda n: str(n["gpus"]), "all of its GPUs"),
    Column("Mem", 8, lambda n: f"{n['mem_mib']}M", "its memory"),
    Column("Sessions", 8, lambda n: str(n["sessions"]), "sessions on it"),
    Column("Actions", 7, lambda n: str(n["leases"]), "actions on it"),
    Column("Reason", -20, lambda n: n["draining"] or "none", "why it is drained"),
]
