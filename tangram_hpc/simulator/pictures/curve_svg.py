"""Pure. Curves as an SVG picture: panels side by side, log axes, one line for each policy, a
legend.

It needs no other package, and the same values give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from ...atomic_file import replacing_output
from ...errors import InvalidInput

COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#000000")
_DASHES = ("", "", "7 3", "2 3", "9 3 2 3", "4 2", "")
_WIDE, _HIGH = 430, 300  # pixels of one panel's plot area
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 34, 18, 52
_ROW = 20  # height of a row of the legend, in pixels


@dataclass(frozen=True)
class PolicyCurve:
    """A policy's points in order of x, and its answer as a mark."""

    name: str
    legend: str
    points: Sequence[tuple[float, float]]
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, x_label, y_label: Texts.
        lines: The policies, in the same order in each panel.
        target: The value at which a dashed line crosses the panel; None for no line.
        key: A text that explains the dashed line and the marks; only the first panel's is shown.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[PolicyCurve]
    target: float | None = None
    key: str = "target; a ring is the smallest size that reaches it"


class Axis:
    """A log axis from values to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, most: int) -> None:
        good = [v for v in values if v > 0] or [1.0]
        self.low, self.high = min(good) / 1.06, max(good) * 1.06
        self._start, self._end, self._most = start, end, most

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values in the axis' range, in the finest steps for which there is room."""
        found: list[float] = []
        for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
                       tuple(i / 10 for i in range(10, 100, 2))):
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            now = [d * 10.0 ** e for e in range(first, last + 1) for d in digits
                   if self.low <= d * 10.0 ** e <= self.high]
            if found and len(now) > self._most:
                break
            found = now
        return found[::max(1, -(-len(found) // self._most))]


def svg(panels: Sequence[Panel]) -> str:
    """The picture as text."""
    legend = panels[0].lines if panels else ()
    wide = len(panels) * (_LEFT + _WIDE + _RIGHT)
    under = _TOP + _HIGH + _BOTTOM
    per_row = 2 if wide > 700 else 1
    high = under + _ROW * (-(-(len(legend) + 1) // per_row)) + 14
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
             f'viewBox="0 0 {wide} {high}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
             'font-size="12" fill="#222">',
             f'<rect width="{wide}" height="{high}" fill="#fff"/>']
    for i, panel in enumerate(panels):
        parts += _panel(panel, i * (_LEFT + _WIDE + _RIGHT))
    key = panels[0].key if panels else ""
    for i, (text, look, colour) in enumerate(_keys(legend, key)):
        x, y = _LEFT + (i % per_row) * wide // 2, under + _ROW * (i // per_row) + 12
        parts += [f'<line x1="{x}" y1="{y - 4}" x2="{x + 30}" y2="{y - 4}" stroke="{colour}" '
                  f'{look}/>', _text(x + 38, y, text)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def axes_of(panel: Panel, x: tuple[float, float], y: tuple[float, float]) -> tuple[Axis, Axis]:
    """Both axes of a panel. Their ranges contain all of its points."""
    every = [p for line in panel.lines for p in line.points]
    target = [panel.target] if panel.target else []
    return Axis([p[0] for p in every], *x, 9), Axis([*(p[1] for p in every), *target], *y, 8)


def write(panels: Sequence[Panel], path: Path) -> None:
    """Writes the picture.

    Raises:
        InvalidInput: The file cannot be written.
    """
    try:
        with replacing_output(path) as target:
            target.write_text(svg(panels))
    except OSError as error:
        raise InvalidInput(f"--plot {path}: {error.strerror}") from None


def tick_text(value: float) -> str:
    """A value as the label of a tick."""
    return f"{value:.6g}" if value < 1e6 else f"{value:.0e}"


def _keys(lines: Sequence[PolicyCurve], key: str) -> list[tuple[str, str, str]]:
    keys = [(line.legend, _look(i), COLOURS[i % len(COLOURS)]) for i, line in enumerate(lines)]
    return [*keys, (key, 'stroke-width="1.2" stroke-dasharray="4 4"', "#777")]


def _look(i: int) -> str:
    dash = _DASHES[i % len(_DASHES)]
    return 'stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more and " " + more}>{escape(text)}</text>'


def _panel(panel: Panel, x0: int) -> list[str]:
    left, right, top, bottom = x0 + _LEFT, x0 + _LEFT + _WIDE, _TOP, _TOP + _HIGH
    x, y = axes_of(panel, (left, right), (bottom, top))
    parts = [_text(left, top - 13, panel.title, 'font-size="14" font-weight="bold"')]
    for value in y.ticks():
        at = y.at(value)
        parts += [f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e4e4e4"/>',
                  _text(left - 7, at + 4, tick_text(value), 'text-anchor="end"')]
    for value in x.ticks():
        at = x.at(value)
        parts += [f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="#e4e4e4"/>',
                  _text(at, bottom + 17, tick_text(value), 'text-anchor="middle"')]
    middle = (top + bottom) / 2
    parts += [f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#444"/>',
              _text((left + right) / 2, bottom + 36, panel.x_label, 'text-anchor="middle"'),
              _text(x0 + 15, middle, panel.y_label,
                    f'text-anchor="middle" transform="rotate(-90 {x0 + 15} {middle:.1f})"')]
    if panel.target:
        at = y.at(panel.target)
        parts.append(f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#777" '
                     'stroke-width="1.2" stroke-dasharray="4 4"/>')
    return parts + _curves(panel, x, y)


def _curves(panel: Panel, x: Axis, y: Axis) -> list[str]:
    """The policies' lines. The last policy is drawn first, so that the first one is on top."""
    parts = []
    for i, line in reversed(list(enumerate(panel.lines))):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {_look(i)} '
                     f'stroke-linejoin="round"><title>{escape(line.name)}</title></polyline>')
        if line.mark is not None:
            parts.append(f'<circle cx="{x.at(line.mark[0]):.1f}" cy="{y.at(line.mark[1]):.1f}" '
                         f'r="5" fill="#fff" stroke="{colour}" stroke-width="2.2"/>')
    return parts
