"""One frame of `tangram top`: the broker's answer as lines of text that fit a screen. Pure.

The lines are the same on a terminal and in a pipe; a style is only a hint for a terminal. The head
(cores, GPUs, memory, rates, ACT, queue) always comes whole. What is left of the height is divided
between the services and endpoints, the nodes and the running actions, and each list that was cut
says how many more there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..helpers.table import Column, fit, lines

_BAR = 30
_EVERYTHING = 10_000  # rows of a frame without a height


class Line(NamedTuple):
    """A line of a frame, and the style in which a terminal shows it; empty for plain text."""

    text: str
    style: str = ""


def frame(answer: dict[str, Any], width: int, height: int) -> list[Line]:
    """Returns the lines of a frame.

    Args:
        answer: the broker's answer to the query `top`, with printable texts.
        width: columns of the screen.
        height: lines of the screen; 0 for no limit.
    """
    found = [_title(answer, width), *_bars(answer), *_recent(answer["recent"]), *_queue(answer)]
    stands, nodes = _stands(answer), lines(_NODES, answer["node_rows"])
    running = lines(_RUNNING, answer["running_rows"])
    left = height - len(found) if height else _EVERYTHING
    found += _section(stands, len(stands) - 1, max(3, left // 4))
    left = height - len(found) if height else _EVERYTHING
    found += _section(nodes, answer["nodes"], max(3, left // 2))
    left = height - len(found) if height else _EVERYTHING
    found += _section(running, answer["running"], left)
    return [Line(one.text[:width], one.style) for one in (found[:height] if height else found)]


def _section(table: Sequence[str], total: int, most: int) -> list[Line]:
    """Returns a list in at most so many lines; nothing if it is empty or has no room.

    Args:
        table: the heading, and the rows that are known.
        total: how many rows there are in all.
        most: the most lines.
    """
    room = most - 1  # below the heading
    if not total or room < 1:
        return []
    shown = table[1:room + 1] if total <= min(room, len(table) - 1) else table[1:room]
    found = [Line(table[0], "bold"), *map(Line, shown)]
    if total > len(shown):
        found.append(Line(f"... and {total - len(shown)} more"))
    return found


def _title(answer: dict[str, Any], width: int) -> Line:
    now = time.strftime("%H:%M:%S", time.localtime(answer["now_ns"] / 1e9))
    left = f"tangram top - job {answer['job']}, placer {answer['placer']}"
    right = f"clients {answer['clients'] - 1}  {now}"
    return Line(f"{left}{right:>{max(len(right) + 1, width - len(left))}}", "reverse")


def _bars(answer: dict[str, Any]) -> list[Line]:
    """Shows how much of what the job holds is lent."""
    found = []
    for name, key, unit in (("CPUs", "cpus", ""), ("GPUs", "gpus", ""), ("Mem", "mem_mib", " MiB")):
        total = answer[key]
        used = total - answer[f"{key}_free"]
        if total or key == "cpus":
            share = used / total if total else 0.0
            bar = "|" * round(share * _BAR)
            style = "green" if share < 0.75 else "yellow" if share < 0.95 else "red"
            found.append(Line(f"{name:<5}[{bar:<{_BAR}}] {share:>4.0%}  {used}/{total}{unit} lent",
                              style))
    return found


def _recent(windows: Sequence[dict[str, Any]]) -> list[Line]:
    """Shows how many actions ended, and their mean ACT with its two parts, by windows of time."""
    def row(name: str, key: str, form: str) -> Line:
        cells = ("-" if w[key] is None else format(w[key], form) for w in windows)
        return Line(f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells))

    words = [f"{w['window_s']} s" if w["window_s"] < 60 else f"{w['window_s'] // 60} min"
             for w in windows]
    return [Line(f"{'LAST':<14}" + "".join(f"{word:>12}" for word in words), "bold"),
            row("ended a s", "rate", ".1f"), row("not COMPLETED", "failed", "d"),
            row("mean ACT s", "act_s", ".3f"), row("  waiting s", "wait_s", ".3f"),
            row("  running s", "held_s", ".3f")]


def _queue(answer: dict[str, Any]) -> list[Line]:
    """Shows how many actions wait for which reason."""
    reasons = answer["reasons"]
    why = "  ".join(f"{name} {count}" for name, count in reasons.items()) or "nothing"
    sessions = f"{answer['sessions']} sessions"
    if answer["sessions_waiting"]:
        sessions += f" ({answer['sessions_waiting']} wait for a node)"
    calls = f", {answer['calls']} of them calls of endpoints" if answer["calls"] else ""
    return [Line(f"{answer['running']} actions run{calls}; {sessions}"),
            Line(f"{sum(reasons.values())} wait: {why}",
                 "yellow" if reasons else "")]


def _stands(answer: dict[str, Any]) -> list[str]:
    """Returns the heading and the lines of services, rollout pools and endpoints."""
    found = ["RESOURCE             STATE"]
    for s in answer["services"]:
        found.append(f"service {fit(s['name'], -12)} "
                     + (", ".join(s["stands_on"])
                        or f"on no GPU, {s['parked_mib']} MiB when parked"))
    for p in answer["rollouts"]:
        loads = "  ".join(f"{name} {load}/{most}" for name, load, most in p["loads"])
        found.append(f"pool    {fit(p['name'], -12)} {p['waiting']} turns wait, "
                     f"{p['trajectories']} trajectories  {loads}")
    for e in answer["endpoints"]:
        shut = f", throttled for {e['throttled_s']:.1f} s" if e["throttled_s"] else ""
        rate = f" at {e['rate_now']:g}/s" if e["rate"] else ""
        found.append(f"endpoint {fit(e['name'], -11)} {e['inside']}/{e['concurrency_now']} in "
                     f"flight{rate}{shut}, {e['waiting']} wait, {e['calls']} calls")
    return found


def _elapsed(ns: int) -> str:
    """Returns a time as people read it at a glance: 0.4 s, 3:07, 2:10:00."""
    if ns < 60 * 10**9:
        return f"{ns / 1e9:.1f} s"
    minutes, seconds = divmod(ns // 10**9, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _share(row: dict[str, Any], key: str) -> str:
    return f"{row[key] - row[key + '_free']}/{row[key]}"


_NODES = [
    Column("Node", -16, lambda r: r["name"], "its name"),
    Column("State", -9, lambda r: r["state"], "its state"),
    Column("CPUS", 9, lambda r: _share(r, "cpus") if r["state"] == "UP" else "-", "lent/all"),
    Column("GPUS", 6, lambda r: _share(r, "gpus"), "lent/all"),
    Column("Mem MiB", 15, lambda r: _share(r, "mem_mib"), "lent/all"),
    Column("Sessions", 8, lambda r: str(r["sessions"]), "open on it"),
    Column("Actions", 7, lambda r: str(r["leases"]), "that run on it")]
_RUNNING = [
    Column("Action", 10, lambda r: r["action"], "its id"),
    Column("Name", -18, lambda r: r["name"], "its class"),
    Column("Client", -14, lambda r: r["client_name"], "who submitted it"),
    Column("CPUS", 4, lambda r: str(r["ncpus"]), "that it holds"),
    Column("GPUS", 4, lambda r: str(r["gpus"]), "that it holds"),
    Column("Time", 9, lambda r: _elapsed(r["elapsed_ns"]), "since it began"),
    Column("Node", -14, lambda r: r["node"] or r["key"], "where it runs")]
