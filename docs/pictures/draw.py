"""Draws the pictures of the documents as SVG, and the page docs/STATES.md.

    python docs/pictures/draw.py          # processes, one action's way, states; a second
    python docs/pictures/draw.py --act    # mean ACT against CPUs held; two minutes

A picture is text made of values: the same tree gives the same bytes, so that
tests/house/test_docs_site.py can compare what is checked in with what is drawn. Nothing but this
package is needed. Every picture has a white ground, to be read on dark pages too.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from xml.sax.saxutils import escape

from tangram_hpc.domain import hybrid, states
from tangram_hpc.scheduler.state import transitions as t

HERE = Path(__file__).resolve().parent
STATES = (
    ("Action", t.ACTION_MOVES, states.ActionState),
    ("Lease", t.LEASE_MOVES, states.LeaseState),
    ("Session", t.SESSION_MOVES, states.SessionState),
    ("Node", t.NODE_MOVES, states.NodeState),
    ("Allocation", t.ALLOC_MOVES, states.AllocState),
    ("Hybrid replica", t.REPLICA_MOVES, hybrid.ReplicaState),
)
BLUE, GREEN, ORANGE, GREY = "#dcebf7", "#ddf1e4", "#fdebd0", "#eeeeee"
INK, FORWARD, BACK = "#222", "#35618e", "#b0562a"


class Picture:
    """An SVG under construction; x and y are pixels from the upper left corner."""

    def __init__(self, wide: int, high: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
            f'font-size="12" fill="{INK}"><title>{escape(title)}</title>',
            f'<rect width="{wide}" height="{high}" fill="#fff"/>', "<defs>"]
        self._parts += [
            f'<marker id="m{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
            f'fill="{colour}"/></marker>' for name, colour in
            (("ink", INK), ("forward", FORWARD), ("back", BACK))]
        self._parts.append("</defs>")

    def text(self, x: float, y: float, words: str, anchor: str = "middle", bold: bool = False,
             size: int = 12) -> None:
        """One line of text whose baseline is at `y`."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
                           f'{weight}>{escape(words)}</text>')

    def box(self, x: float, y: float, wide: float, high: float, fill: str,
            lines: Sequence[str] = ()) -> None:
        """A rectangle with lines of text in its middle; the first line is bold."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="6" '
                           f'fill="{fill}" stroke="#888"/>')
        top = y + high / 2 + 4 - 7.5 * (len(lines) - 1)
        for row, words in enumerate(lines):
            self.text(x + wide / 2, top + 15 * row, words, bold=row == 0, size=11 if row else 12)

    def way(self, path: str, colour: str = INK, both: bool = False, dashed: bool = False,
            head: bool = True) -> None:
        """A line along an SVG path, with an arrow at its end, or at both."""
        name = {INK: "ink", FORWARD: "forward", BACK: "back"}.get(colour, "ink")
        heads = f' marker-end="url(#m{name})"' if head else ""
        heads += f' marker-start="url(#m{name})"' if both else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"'
                           f'{dashes}{heads}/>')

    def dot(self, x: str, y: str, colour: str) -> None:
        """A measured point."""
        self._parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')

    def drawn(self) -> str:
        """The whole file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def processes() -> str:
    """Which process speaks to which, and over what."""
    p = Picture(860, 400, "The processes of a job")
    p.box(12, 34, 300, 196, "#fafafa")
    p.text(162, 26, "trainer's job step (MPI world)", bold=True)
    p.box(372, 34, 476, 350, "#fafafa")
    p.text(610, 26, "held allocation: components 0 to n", bold=True)
    p.box(32, 54, 260, 56, BLUE, ["rank 0 .. N-1", "trainer + Client"])
    p.box(32, 160, 260, 56, BLUE, ["gateway rank", "copies bytes, keeps no state"])
    p.way("M162 112V158", both=True)
    p.text(172, 140, "MPI", "start")
    p.box(32, 256, 260, 50, BLUE, ["trainer without MPI", "Client"])
    p.box(32, 334, 260, 50, BLUE, ["login node", "tangram run, info, explain, acct"])
    p.box(392, 150, 150, 130, GREEN,
          ["broker", "first node of", "component 0; no MPI", "Scheduler, journal"])
    p.way("M294 188H390", both=True)
    p.way("M294 281H340V235H390", both=True)
    p.way("M294 359H352V260H390", both=True)
    p.text(340, 180, "sockets")
    for top, node in ((54, "node 1"), (226, "node 2")):
        p.box(590, top, 244, 146, "#fff")
        p.text(712, top + 16, node, bold=True)
        p.box(604, top + 24, 90, 50, ORANGE, ["worker"])
        p.box(730, top + 24, 92, 50, GREY, ["fork server"])
        p.way(f"M696 {top + 49}H728")
        p.box(604, top + 90, 104, 44, GREY, ["init", "a sandbox each"])
        p.box(718, top + 90, 104, 44, GREY, ["runner", "functions"])
        p.way(f"M760 {top + 76}L680 {top + 88}")
        p.way(f"M785 {top + 76}V{top + 88}")
        p.way(f"M544 {215 + (top - 140) * 0.25:g}L602 {top + 49}", both=True)
    return p.drawn()


LANES = ("trainer: Client", "broker: driver", "broker: scheduler", "worker", "sandbox: init")
STEPS: tuple[tuple[int, int, str], ...] = (
    (0, 1, "Submit + payload"),
    (1, 1, "journal: ActionSubmitted"),
    (1, 2, "handle(ActionSubmitted)"),
    (1, 2, "once a beat: plan(now)"),
    (2, 1, "LeaseGranted"),
    (1, 1, "journal: LeaseGranted"),
    (1, 2, "handle(LeaseGranted)"),
    (2, 1, "StartLease"),
    (1, 3, "Start + payload"),
    (3, 4, "Run: fork, exec, wait"),
    (4, 3, "Ended"),
    (3, 1, "Finished: outcome, clean"),
    (1, 1, "journal: LeaseFinished"),
    (1, 2, "handle(LeaseFinished)"),
    (1, 0, "Result"),
    (0, 1, "Ack"),
)


def action() -> str:
    """One action's way as a sequence; time runs downwards."""
    gap, top, row = 180, 70, 27
    p = Picture(gap * 4 + 160, top + row * len(STEPS) + 24, "One action's way")
    at = [80 + gap * lane for lane in range(len(LANES))]
    for x, name in zip(at, LANES, strict=True):
        p.box(x - 70, 14, 140, 30, BLUE if x == at[0] else GREEN if x < at[3] else ORANGE, [name])
        p.way(f"M{x} 46V{top + row * len(STEPS) + 10}", "#aaa", dashed=True, head=False)
    for number, (start, end, words) in enumerate(STEPS):
        y = top + row * number + 8
        if start == end:
            p.box(at[start] - 84, y - 13, 168, 20, GREY)
            p.text(at[start], y + 1, words, size=11)
        else:
            p.way(f"M{at[start]} {y}H{at[end]}", FORWARD if end > start else BACK)
            left = min(at[start], at[end]) + 8
            p.text(left, y - 5, words, "start", size=11)
    return p.drawn()


def chain(name: str, moves: dict[Enum, set[Enum]], kind: type[Enum]) -> str:
    """States in a row, ends last in one box; arcs above lead on, arcs below lead back."""
    live, ends = [s for s in kind if moves.get(s)], [s for s in kind if not moves.get(s)]
    wide, step = 108, 136
    place = {s: 20 + step * number for number, s in enumerate(live)}
    place |= dict.fromkeys(ends, 20 + step * len(live))
    pairs = sorted({(place[old], place[new]) for old in live for new in moves[old]})
    reach = max(abs(b - a) // step for a, b in pairs)
    below = max([(a - b) // step for a, b in pairs if b < a], default=0)
    half = max(18.0, 8.0 * len(ends) + 4)
    middle = 30 + 17 * reach + half
    p = Picture(20 + step * (len(live) + bool(ends)), int(middle + half + 17 * below + 20), name)
    for a, b in pairs:
        far = abs(b - a) // step
        side, colour = (-1, FORWARD) if b > a else (1, BACK)
        if b - a == step:
            p.way(f"M{a + wide} {middle:g}H{b - 2}", colour)
            continue
        last = bool(ends) and b == place[ends[0]]
        edge = middle + side * (half if last else 18)
        start, end = a + wide / 2 + 14 * -side, b + wide / 2 - 14 * -side
        bend = 17 * far * 1.33
        p.way(f"M{start:g} {middle + side * 18:g}C{start:g} {middle + side * (18 + bend):g} "
              f"{end:g} {edge + side * bend:g} {end:g} {edge + side * 2:g}", colour)
    for s in live:
        p.box(place[s], middle - 18, wide, 36, BLUE if s is live[0] else GREEN, [s.value])
    if ends:
        p.box(place[ends[0]], middle - half, wide, 2 * half, GREY)
        for number, s in enumerate(ends):
            p.text(place[s] + wide / 2, middle + 4 + 16 * (number - (len(ends) - 1) / 2), s.value,
                   size=11)
    return p.drawn()


def states_file(name: str) -> str:
    """The name of the picture of one table."""
    return f"states-{name.lower().replace(' ', '-')}.svg"


def states_page() -> str:
    """docs/STATES.md."""
    parts = ["# States\n\nThese pictures and tables are made from `tangram_hpc/scheduler/state/"
             "transitions.py`; a test compares them. An action ends\nwhen its result is known, a "
             "lease when its node is clean again. Blue arcs lead on, brown arcs lead back; grey "
             "states are final.\n"]
    for name, moves, kind in STATES:
        order = list(kind)
        rows = [f"| {old.value} | "
                + (", ".join(s.value for s in sorted(moves[old], key=order.index))
                   if moves.get(old) else "final") + " |" for old in kind]
        parts.append(f"\n## {name}\n\n{inspect.getdoc(kind)}\n\n"
                     f"![States of the table below](pictures/{states_file(name)})\n\n"
                     "| state | may become |\n|---|---|\n" + "\n".join(rows))
    return "\n".join(parts) + "\n"


def pictures() -> dict[str, str]:
    """All that is drawn from the tree alone: file name to text."""
    return {"processes.svg": processes(), "action.svg": action(),
            **{states_file(name): chain(name, moves, kind) for name, moves, kind in STATES}}


# ---- mean ACT against CPUs held ------------------------------------------------------------------

COMMAND = ("size", "coding-200", "--cluster", "coding-200", "--like", "static:4",
           "--policies", "elastic,fcfs:4,static:4", "--durations", "oracle", "--json")
CURVES = (("elastic", "#0072b2", "elastic: cores lent per action, resized while it runs"),
          ("fcfs:4", "#e69f00", "fcfs:4: 4 cores per action, in order of arrival"),
          ("static:4", "#d55e00", "static:4: 4 cores reserved per trajectory"))


def ticks(low: float, high: float, values: Iterable[float], start: float,
          end: float) -> list[tuple[float, float]]:
    """Values on a log axis between `low` and `high`, with their pixels."""
    span = math.log(high / low)
    return [(v, start + (end - start) * math.log(v / low) / span) for v in values]


def act(measured: dict[str, list[dict[str, float]]]) -> str:
    """Mean ACT of three placers against the CPUs held, on log axes."""
    p = Picture(760, 400, "Mean action completion time against CPUs held")
    p.text(70, 24, "200 coding trajectories, simulated: mean action completion time (ACT)", "start",
           True, 14)
    left, right, top, bottom = 70, 730, 44, 300
    for value, y in ticks(1.2, 20, (1.5, 2, 3, 5, 10, 20), bottom, top):
        p.way(f"M{left} {y:.1f}H{right}", "#e4e4e4", head=False)
        p.text(left - 8, y + 4, f"{value:g} s", "end")
    for value, x in ticks(95, 850, (100, 150, 200, 300, 400, 600, 800), left, right):
        p.way(f"M{x:.1f} {top}V{bottom}", "#e4e4e4", head=False)
        p.text(x, bottom + 18, f"{value:g}")
    p.text((left + right) / 2, bottom + 36, "CPUs held (log scale)")
    for number, (name, colour, legend) in enumerate(CURVES):
        cpus = ticks(95, 850, [m["CPUs"] for m in measured[name]], left, right)
        acts = ticks(1.2, 20, [m["mean_act_s"] for m in measured[name]], bottom, top)
        points = [f"{x:.1f} {y:.1f}" for (_, x), (_, y) in zip(cpus, acts, strict=True)]
        p.way("M" + "L".join(points), colour, head=False)
        for point in points:
            p.dot(*point.split(), colour)
        y = bottom + 56 + 16 * number
        p.way(f"M{left} {y - 4}h24", colour, head=False)
        p.text(left + 32, y, legend, "start")
    return p.drawn()


def measure() -> dict[str, list[dict[str, float]]]:
    """The points of `tangram size`, by placer."""
    told = subprocess.run([sys.executable, "-m", "tangram_hpc", *COMMAND], check=True,
                          capture_output=True, text=True).stdout
    return {policy["policy"]: policy["points"] for policy in json.loads(told)["policies"]}


if __name__ == "__main__":
    if sys.argv[1:] == ["--act"]:
        (HERE / "act-coding-200.svg").write_text(act(measure()))
    else:
        for file, text in pictures().items():
            (HERE / file).write_text(text)
        (HERE.parent / "STATES.md").write_text(states_page())
