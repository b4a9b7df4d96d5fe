"""Draws the plots of a report with Plotly. It is the only module that imports it, lazily.

Every plot has a bounded number of points, whatever the job had. Names are escaped, because Plotly
reads some HTML in texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidInput, how_to_install
from .labels import apart, label
from .lanes import OTHERS, Lanes
from .reported_job import PARTS, SECOND, ReportedJob
from .series import TimeSeries, part_histograms
from .waterfall import WAIT, Bar, slowest_trajectories

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# a palette that people with any colour vision can tell apart (Okabe and Ito, and lighter kin)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#882255",
           "#44aa99", "#999933", "#6699cc")
OTHER_COLOUR, IDLE_COLOUR, WAIT_COLOUR = "#777777", "#f2f4f6", "#c9ced3"
PART_COLOURS = dict(zip(PARTS, (WAIT_COLOUR, "#cc79a7", "#009e73", "#0072b2", "#e69f00"),
                        strict=True))
PART_TITLES = {"wait": "wait for units", "restore": "restore of service", "setup": "set-up",
               "run": "run on the node", "return": "return"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def graph_objects() -> Any:
    """Returns Plotly's module of figures.

    Raises:
        InvalidInput: Plotly is not installed.
    """
    try:
        import plotly.graph_objects as found
    except ImportError:
        raise InvalidInput("report: the plots need Plotly, which is not installed; "
                           f"`{how_to_install('report')}` installs it, and `--json` needs none"
                           ) from None
    return found


def all_plots(report: ReportedJob, series: TimeSeries, grid: Lanes) -> dict[str, Figure]:
    """Returns every plot of the report by its name; none if no action has ended."""
    if not report.ended:
        return {}
    fall = waterfall(report, grid.names)
    return {"timeline": timeline(grid), "load": load(series), "parts": act_parts(report),
            "means": class_parts(report), **({"waterfall": fall} if len(fall.data) else {})}


def write_pictures(plots: dict[str, Figure], folder: Path, suffix: str) -> list[Path]:
    """Writes each plot as a picture, `FOLDER/NAME.SUFFIX`; returns the paths.

    Raises:
        InvalidInput: Kaleido or the browser that it uses is not installed, or the folder cannot be
            written.
    """
    import plotly.io

    paths = [folder / f"{name}.{suffix}" for name in plots]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plotly.io.write_images([*plots.values()], paths, width=1200, scale=2)
    except OSError as error:
        raise InvalidInput(f"--{suffix} {folder}: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise InvalidInput(
            f"--{suffix}: the pictures need Kaleido (`{how_to_install('report-pictures')}`) and "
            f"Chrome or Chromium on the PATH; the page itself needs neither ({said})") from None
    return paths


def plotly_script() -> str:
    """Returns the text of plotly.js, which the page carries along."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def colour(names: list[str], name: str) -> str:
    """Returns the colour of a class of actions."""
    if name == WAIT:
        return WAIT_COLOUR
    if name not in names or name == OTHERS:
        return OTHER_COLOUR
    return COLOURS[names.index(name) % len(COLOURS)]


def _figure(traces: list[Any], height: int, **layout: Any) -> Figure:
    go = graph_objects()
    found: Figure = go.Figure(traces)
    found.update_layout(
        template="plotly_white", height=height, font={"family": _FONT, "size": 12},
        margin={"l": 64, "r": 16, "t": 64, "b": 44}, hoverlabel={"namelength": -1},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **layout)
    return found


def timeline(grid: Lanes) -> Figure:
    """Draws every core and GPU in time, coloured by class."""
    go = graph_objects()
    steps = len(grid.names) + 1
    shades = [IDLE_COLOUR, *(colour(grid.names, name) for name in grid.names)]
    scale = [[(n + edge) / steps, shade] for n, shade in enumerate(shades) for edge in (0, 1)]
    seconds = grid.since_s + grid.bin_s * (np.arange(grid.cells.shape[1]) + 0.5)
    heat = go.Heatmap(
        z=grid.cells, x=seconds, y=[label(row) for row in grid.rows], zmin=-0.5, zmax=steps - 0.5,
        colorscale=scale, showscale=False, hovertemplate="%{y} at %{x:.2f} s<extra></extra>")
    keys = [go.Scatter(x=[None], y=[None], mode="markers", name=label(shown), marker={
        "symbol": "square", "size": 11, "color": colour(grid.names, name)}, hoverinfo="skip")
        for name, shown in zip(grid.names, apart(grid.names), strict=True)]
    return _figure([heat, *keys], min(900, max(280, 160 + 11 * len(grid.rows))),
                   xaxis={"title": "seconds from the job's beginning"},
                   yaxis={"autorange": "reversed", "type": "category"}, showlegend=True)


def load(series: TimeSeries) -> Figure:
    """Draws CPUs and GPUs that are lent and held, actions that wait, and the ACT, in time."""
    go = graph_objects()

    def line(name: str, values: Any, row: int, shade: str, **more: Any) -> Any:
        return go.Scatter(x=series.seconds, y=values, name=name, yaxis=f"y{row}",
                          line={"color": shade, "width": 1.5, **more.pop("line", {})},
                          **{"mode": "lines", **more})

    def act(name: str, values: Any, shade: str) -> Any:
        return line(name, values, 3, shade, mode="lines+markers", connectgaps=True,
                    line={"width": 1}, marker={"size": 3})

    lines = [line("CPUs held", series.cpus_held, 1, "#9aa4ad", line={"dash": "dot"}),
             line("CPUs lent", series.cpus_lent, 1, "#0072b2", fill="tozeroy"),
             line("actions waiting", series.waiting, 2, "#d55e00"),
             line("actions running", series.running, 2, "#009e73"),
             act("ACT, mean", series.act_mean, "#882255"),
             act("ACT, 95th percentile", series.act_p95, "#cc79a7")]
    if series.gpus_held.max(initial=0.0):
        lines += [line("GPUs held", series.gpus_held, 1, "#b7a98a", line={"dash": "dot"}),
                  line("GPUs lent", series.gpus_lent, 1, "#e69f00")]
    return _figure(lines, 660, xaxis={"title": "seconds from the job's beginning", "anchor": "y3",
                                     "range": [0, series.bin_s * len(series.seconds)]},
                   yaxis={"title": "CPUs, GPUs", "domain": [0.70, 1], "rangemode": "tozero"},
                   yaxis2={"title": "actions", "domain": [0.36, 0.64], "rangemode": "tozero"},
                   yaxis3={"title": "ACT, s", "domain": [0, 0.29], "rangemode": "tozero"},
                   hovermode="x unified")


def act_parts(report: ReportedJob) -> Figure:
    """Draws how many actions had a wait, a restore, a set-up, a run and a return of which length.
    """
    go = graph_objects()
    edges, counts = part_histograms(report)
    middles = np.sqrt(edges[:-1] * edges[1:])
    bars = [go.Bar(x=middles, y=count, width=np.diff(edges), name=PART_TITLES[part],
                   xaxis=f"x{n}", yaxis=f"y{n}", marker={"color": PART_COLOURS[part],
                                                         "line": {"width": 0}})
            for n, (part, count) in enumerate(zip(PARTS, counts, strict=True), 1)]
    axes: dict[str, Any] = {}
    for n, part in enumerate(PARTS):
        axes[f"xaxis{n + 1}"] = {"type": "log", "dtick": 2,
                                 "domain": [0.207 * n, 0.207 * n + 0.172],
                                 "title": f"{PART_TITLES[part]}, s", "anchor": f"y{n + 1}"}
        axes[f"yaxis{n + 1}"] = {"anchor": f"x{n + 1}", "title": "actions" if not n else None,
                                 "rangemode": "tozero"}
    return _figure(bars, 300, showlegend=False, bargap=0, **axes)


def class_parts(report: ReportedJob, count: int = 12) -> Figure:
    """Draws the mean ACT of the classes that held most, by its parts."""
    go = graph_objects()
    rows = report.classes[:count][::-1]
    shown = apart(row["name"] for row in rows)
    bars = [go.Bar(y=[label(name) for name in shown],
                   x=[row[f"{part}_mean_s"] for row in rows], name=PART_TITLES[part],
                   orientation="h", marker={"color": PART_COLOURS[part]}) for part in PARTS]
    return _figure(bars, 150 + 26 * len(rows), barmode="stack",
                   xaxis={"title": "mean ACT, s"}, yaxis={"type": "category"})


def waterfall(report: ReportedJob, names: list[str]) -> Figure:
    """Draws the trajectories that took longest, each from its first action."""
    go = graph_objects()
    chosen = slowest_trajectories(report, names)
    groups: dict[str, list[Bar]] = {}
    for bar in chosen.bars:
        groups.setdefault(bar.name, []).append(bar)
    bars = [go.Bar(
        y=[label(chosen.labels[bar.row]) for bar in group], x=[bar.long_ns / SECOND
                                                              for bar in group],
        base=[bar.from_ns / SECOND for bar in group], orientation="h", name=label(name),
        marker={"color": colour(names, name), "line": {"width": 0}},
        hovertemplate="%{y}: from %{base:.2f} s for %{x:.2f} s") for name, group in groups.items()]
    return _figure(bars, 160 + 22 * len(chosen.labels), barmode="overlay", bargap=0.25,
                   xaxis={"title": "seconds from the trajectory's first action"},
                   yaxis={"type": "category", "autorange": "reversed", "categoryorder": "array",
                          "categoryarray": [label(text) for text in chosen.labels]})
