"""Draws runs of `run.py`: the reward by step, and where the time of a rollout phase goes.

    python bench/trl_run/plots.py --out docs/pictures/trl-run.svg RUN.json ...

The picture is an SVG file, and the same runs give the same bytes. Needs no other package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from summary import Run, read_runs, rewards, speedup_rows, title

_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9")
_HIGH, _WIDE, _TOP = 220, 360, 40  # of each plot area, in pixels
_LEFT, _GAP, _BOTTOM = 50, 140, 70  # beside, between and below the plot areas


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Returns the mean of each value and those before it, `width` in all."""
    return [sum(part) / len(part) for part in
            (values[max(0, at + 1 - width):at + 1] for at in range(len(values)))]


def _text(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(words)}</text>")


def _curves(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the left plot: a line for each run, with the reward from 0 to 1."""
    steps = max((len(rewards(run)) for run in runs), default=1)
    for tenth in range(0, 11, 2):
        y = _TOP + _HIGH * (1 - tenth / 10)
        yield f'<path d="M{_LEFT} {y:.1f}h{_WIDE}" stroke="#e4e4e4"/>'
        yield _text(_LEFT - 6, y + 4, f"{tenth / 10:g}", "end", 11)
    for share in (0.0, 0.5, 1.0):
        yield _text(_LEFT + share * _WIDE, _TOP + _HIGH + 16, f"{share * steps:.0f}", size=11)
    for number, run in enumerate(runs):
        colour, values = _COLOURS[number % len(_COLOURS)], smooth(rewards(run))
        points = " ".join(f"{_LEFT + (at + 1) / steps * _WIDE:.1f},{_TOP + _HIGH * (1 - value):.1f}"
                          for at, value in enumerate(values))
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        yield _text(_LEFT + 40 + 70 * number, _TOP + _HIGH + 52, f"seed {run['seed']}", size=11)
        yield (f'<path d="M{_LEFT + 4 + 70 * number} {_TOP + _HIGH + 48}h14" stroke="{colour}" '
               'stroke-width="3"/>')
    yield _text(_LEFT + _WIDE / 2, _TOP + _HIGH + 34, "step")
    name = title(runs[0]) if runs else ""
    yield _text(_LEFT + _WIDE / 2, 24, f"mean reward of 5 steps, {name}", size=14)


def _bars(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the right plot: a bar for each kind of run, the tools' part and the rest."""
    rows, left = speedup_rows(runs), _LEFT + _WIDE + _GAP
    longest = max((row["tools_s"] + row["others_s"] for row in rows), default=1.0)
    parts = (("tools_s", "tools and scoring"), ("others_s", "generation and the rest"))
    for number, row in enumerate(rows):
        height = _HIGH / len(rows)
        at, y = float(left), _TOP + number * height
        yield _text(left - 6, y + height / 2 + 4, row["kind"], "end", 11)
        for part, (name, _) in enumerate(parts):
            wide = row[name] / longest * (_WIDE - 50)
            yield (f'<rect x="{at:.1f}" y="{y + height * .15:.1f}" width="{wide:.1f}" '
                   f'height="{height * .7:.1f}" fill="{_COLOURS[part * 2]}"/>')
            at += wide
        yield _text(at + 4, y + height / 2 + 4, f"{row['tools_s'] + row['others_s']:.1f} s",
                    "start", 11)
    for part, (_, words) in enumerate(parts):
        yield _text(left + 22 + 140 * part, _TOP + _HIGH + 34, words, "start", 11)
        yield (f'<rect x="{left + 4 + 140 * part}" y="{_TOP + _HIGH + 24}" width="12" height="12" '
               f'fill="{_COLOURS[part * 2]}"/>')
    yield _text(left + _WIDE / 2, 24, "rollout phase of a step (median)", size=14)


def draw(curves: Sequence[Run], timed: Sequence[Run], out: Path) -> None:
    """Draws both pictures side by side into one SVG file.

    Args:
        curves: the runs whose rewards are drawn, a line for each.
        timed: the runs whose times are compared.
        out: the file.
    """
    wide, high = _LEFT + 2 * _WIDE + _GAP + 10, _TOP + _HIGH + _BOTTOM
    body = "\n".join([*_curves(curves), *_bars(timed)])
    out.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
                   f'font-family="sans-serif">\n<rect width="{wide}" height="{high}" '
                   f'fill="white"/>\n{body}\n</svg>\n')


def main() -> None:
    """Draws the picture."""
    p = argparse.ArgumentParser(description="Draws runs of run.py.")
    p.add_argument("runs", nargs="+", type=Path, help="files whose rewards are drawn")
    p.add_argument("--timed", nargs="*", type=Path, default=[],
                   help="files whose times are compared; those of the curves if there are none")
    p.add_argument("--out", type=Path, required=True, help="the picture, an .svg file")
    args = p.parse_args()
    curves = read_runs(args.runs)
    draw(curves, read_runs(args.timed) or curves, args.out)


if __name__ == "__main__":
    main()
