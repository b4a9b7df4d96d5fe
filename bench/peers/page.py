"""Writes the figures of a run of `run.py` into docs/BENCHMARKS.md, and draws its pictures.

    python bench/peers/page.py build/peers.json

The page keeps its text; what stands between the comments `figures: begin` and `figures: end` is
replaced. The pictures are SVG files, the same line gives the same bytes, and nothing but this
package is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from peers import PEERS  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_OURS, _THEIRS, _RANGE = "#0072b2", "#b8b8b8", "#333"
_BAR, _GAP, _LEFT, _WIDE, _RIGHT, _TOP = 18, 8, 190, 380, 90, 40


def number(value: float) -> str:
    """A figure for people: thousands with a space."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"


def cell(figure: dict[str, Any] | None) -> str:
    """The median and the range."""
    if figure is None:
        return "–"
    low, high = figure["range"]
    return f"{number(figure['median'])} ({number(low)}–{number(high)})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def conditions(line: dict[str, Any]) -> Iterator[str]:
    """When, where and with which versions."""
    given, versions = line["parameters"], line["versions"]
    yield (f"Run of {given['date']}, commit `{line['commit']}`: {given['rounds']} rounds in "
           f"{given['minutes']} minutes, seed {given['seed']}, {line['cpus']} cores, Python "
           f"{versions['python']}, Linux {versions['kernel']}. The load was {given['load'][0]} at "
           f"the beginning and {given['load'][1]} at the end; processes that did not belong to the "
           f"bench took {given['other_work_cpu_share']:.0%} of the CPU time. Each figure is the "
           "median of the rounds, with the least and the greatest in brackets.")
    yield ""
    told = ", ".join(f"{name} {version}" if version[:1].isdigit() else version
                     for name, version in given["peer_versions"].items() if ", " not in name)
    yield f"Versions: {told}."
    yield ""


def tables(figures: dict[str, Any]) -> Iterator[str]:
    """All tables."""
    measured = [name for name in PEERS if any(
        name in figures[what] for what in ("functions_per_s", "commands_per_s", "idle_ms"))]
    columns = ("functions_per_s", "chunks_per_s", "commands_per_s", "sandboxed_per_s")
    yield from table(
        ("", "functions / s", "functions in chunks / s", "`/bin/true` / s",
         "`/bin/true` in open sandboxes / s"),
        ([name, *(cell(figures[what].get(name)) for what in columns)] for name in measured
         if any(name in figures[what] for what in columns)))

    def waits(name: str) -> list[str]:
        idle = figures["idle_ms"].get(name)
        return [name, cell(idle and idle["p50"]), number(idle["p99"]) if idle else "–",
                str(idle["trips"]) if idle else "–", cell(figures["cold_s"].get(name))]

    yield from table(("", "idle function, p50 ms", "p99 ms", "trips", "cold start, s"),
                     map(waits, measured))
    mixed = figures["mixed_mean_ms"]
    yield (f"Ideal of the mixed tasks: {cell(figures['ideal_ms'])} ms; without any waiting "
           f"{cell(figures['ideal_without_waiting_ms'])} ms.")
    yield ""
    yield from table(("400 mixed tasks", "mean completion, ms", "over the ideal"),
                     ([name, cell(mixed[name]), cell(figures["mixed_over_ideal"][name])]
                      for name in mixed))
    yield from table(
        ("trajectory of 150 steps", "cold start, ms", "a step, mean ms", "a step, p99 ms",
         "over a plain process, ms", "worker-hours of a million"),
        ([kind, *(cell(told[what]) for what in ("cold_ms", "step_ms", "step_p99_ms",
                                                "overhead_ms")),
          number(told["worker_hours_per_million"])]
         for kind, told in figures["trajectories"].items()))
    yield from table(("asked of the figures", "value", "bound", "met"), (
        [name, number(bar["value"]),
         f"at least {bar['at_least']}" if "at_least" in bar else f"at most {bar['at_most']}",
         "yes" if bar["met"] else "**no**"] for name, bar in figures["bars"].items()))


def left_out(figures: dict[str, Any]) -> Iterator[str]:
    """What was not measured, and why."""
    told = figures["left_out"]
    yield "Not measured in this run:"
    yield ""
    for name, why in told["peers"].items():
        yield f"- {name}: {why}."
    for name, why in told["failed"].items():
        yield f"- {name} failed, {why}."
    for name, lacks in told["measurements"].items():
        yield f"- {name}: {'; '.join(f'no {what} ({why})' for what, why in lacks.items())}."
    yield ""


def _scale(rows: Sequence[tuple[str, dict[str, Any]]], log: bool
           ) -> tuple[Callable[[float], float], list[float]]:
    """From a value to its x in pixels, and the values of the scale's marks."""
    most = max(each["range"][1] for _, each in rows)
    if not log:
        step = 10 ** floor(log10(most))
        return (lambda value: _LEFT + _WIDE * value / most,
                [step * part for part in range(int(most / step) + 1)])
    first = floor(log10(min(each["range"][0] for _, each in rows)))
    decades = max(1, ceil(log10(most)) - first)
    return (lambda value: _LEFT + _WIDE * (log10(value) - first) / decades,
            [10.0 ** (first + part) for part in range(decades + 1)])


def picture(title: str, unit: str, values: dict[str, dict[str, Any]], least_first: bool) -> str:
    """Draws the medians, the best one on top, with the ranges as thin lines. Where less is better
    the values differ by orders of magnitude: points on a logarithmic scale, else bars."""
    rows = sorted(values.items(), key=lambda item: item[1]["median"] * (1 if least_first else -1))
    at_x, marks = _scale(rows, least_first)
    wide, bottom = _LEFT + _WIDE + _RIGHT, _TOP + len(rows) * (_BAR + _GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{bottom + 40}" '
             f'viewBox="0 0 {wide} {bottom + 40}" '
             'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12" fill="#222">'
             f'<title>{escape(title)}</title><rect width="{wide}" height="{bottom + 40}" '
             f'fill="#fff"/><text x="12" y="22" font-size="14">{escape(title)}</text>']
    for mark in marks:
        parts += [f'<path d="M{at_x(mark):.1f} {_TOP - 6}V{bottom}" stroke="#e4e4e4"/>',
                  f'<text x="{at_x(mark):.1f}" y="{bottom + 14}" text-anchor="middle" '
                  f'font-size="11">{number(mark)}</text>']
    for at, (name, each) in enumerate(rows):
        y, x = _TOP + at * (_BAR + _GAP), at_x(each["median"])
        low, up = map(at_x, each["range"])
        colour = _OURS if name.startswith("tangram_hpc") else _THEIRS
        parts += [f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
                  f'<circle cx="{x:.1f}" cy="{y + 9}" r="6" fill="{colour}"/>' if least_first else
                  f'<rect x="{_LEFT}" y="{y}" width="{x - _LEFT:.1f}" height="{_BAR}" '
                  f'fill="{colour}"/>',
                  f'<path d="M{low:.1f} {y + 9}H{up:.1f}" stroke="{_RANGE}" stroke-width="1.5"/>',
                  f'<text x="{max(up, x) + 9:.1f}" y="{y + 13}">{number(each["median"])}</text>']
    kind = " (logarithmic)" if least_first else ""
    parts.append(f'<text x="{_LEFT}" y="{bottom + 32}" font-size="11">{escape(unit)}{kind}; a thin '
                 "line is the range of the rounds</text></svg>")
    return "\n".join(parts) + "\n"


def pictures(figures: dict[str, Any]) -> dict[str, str]:
    """File name -> picture."""
    drawn = {
        "peers-functions.svg": ("No-op functions per second, one result each", "functions / s",
                                figures["functions_per_s"], False),
        "peers-commands.svg": ("/bin/true per second", "commands / s",
                               figures["commands_per_s"], False),
        "peers-idle.svg": ("Round trip of a function after 20 ms of silence, p50", "ms",
                           {name: each["p50"] for name, each in figures["idle_ms"].items()}, True),
        "peers-mixed.svg": ("400 mixed tasks of 1 to 4 cores: mean completion over the ideal",
                            "times the ideal", figures["mixed_over_ideal"], True)}
    return {name: picture(*how) for name, how in drawn.items() if how[2]}


def with_figures(page: str, line: dict[str, Any]) -> str:
    """The page with the figures of a run."""
    text = "\n".join([BEGIN, "", *conditions(line), *tables(line["figures"]),
                      *left_out(line["figures"]), END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, page, flags=re.DOTALL)


def main() -> None:
    """Writes page and pictures."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("line", type=Path, help="a file with the line that run.py printed")
    p.add_argument("--docs", type=Path, default=DOCS, help="the folder of BENCHMARKS.md")
    arguments = p.parse_args()
    line = json.loads(arguments.line.read_text())
    page = arguments.docs / "BENCHMARKS.md"
    page.write_text(with_figures(page.read_text(), line))
    for name, picture in pictures(line["figures"]).items():
        (arguments.docs / "pictures" / name).write_text(picture)


if __name__ == "__main__":
    main()
