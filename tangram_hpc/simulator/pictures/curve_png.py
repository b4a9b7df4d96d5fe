"""The curves of `curve_svg` as a PNG.

This is the only module that imports matplotlib. It draws the values that it is given and decides
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...atomic_file import replacing_output
from ...errors import InvalidInput, MissingExtra, how_to_install
from .curve_svg import COLOURS, Panel, axes_of, tick_text


def check() -> None:
    """Checks that a PNG can be drawn at all.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra(f"--plot: a .png needs matplotlib; {how_to_install('plot')}, or "
                           "write an .svg, which needs nothing") from None


def write(panels: Sequence[Panel], path: Path) -> None:
    """Writes the picture.

    Raises:
        InvalidInput: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 4.6), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for i, line in enumerate(panel.lines):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(*zip(*line.points, strict=True) if line.points else ((), ()), color=colour,
                      label=line.legend)
            if line.mark is not None:
                axes.plot([line.mark[0]], [line.mark[1]], "o", mfc="white", mec=colour)
        if panel.target:
            axes.axhline(panel.target, color="#777777", linestyle="--", linewidth=1)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, xscale="log",
                 yscale="log")
        for shown, axis in zip((axes.xaxis, axes.yaxis), axes_of(panel, (0, 1), (0, 1)),
                               strict=True):
            shown.set_ticks(axis.ticks(), [tick_text(value) for value in axis.ticks()])
            shown.set_ticks([], minor=True)
        axes.grid(color="#e4e4e4")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    try:
        with replacing_output(path) as target:
            figure.savefig(target, dpi=120, format="png")
    except OSError as error:
        raise InvalidInput(f"--plot {path}: {error.strerror}") from None
