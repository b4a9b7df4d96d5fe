"""Writes the page: one HTML file that shows the whole report without a network.

Its policy for contents (`Content-Security-Policy`) forbids the browser to fetch anything, so that
even a name that got through all escapes could reach nobody. The data of the plots is JSON in which
no character can end its element.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from ..accounting.fields import job_id
from ..simulator.savings.savings import (
    AS_RUN,
    FCFS,
    JOBS,
    RECORDED,
    SERVICES,
    STATIC,
)
from . import figures
from .contents import contents
from .labels import apart, label, plain_tail
from .lanes import Lanes
from .reported_job import HOUR, PARTS, ReportedJob, attempts, unmeasured
from .series import TimeSeries
from .waterfall import ACTIONS_MAX, TRAJECTORIES_MAX

_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
           "img-src data: blob:; font-src data:")


def page(report: ReportedJob, series: TimeSeries, grid: Lanes, plots: dict[str, Any]) -> str:
    """Returns the page.

    Args:
        report: The job.
        series: Its curves in time.
        grid: Its timeline; it may show a part of the time only.
        plots: What `figures.all_plots` makes of these.
    """
    told = contents(report, series)
    head, job = told["headline"], label(told["headline"]["job"])
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>tangram report {job}</title><style>{_file('page.css')}</style></head><body><main>",
        _head(head, job, sum(r.cpu_held_ns for r in attempts(report)) / HOUR),
        _advice(told["advice"]), _savings(told, report),
        *_plot_sections(plots, grid, series.bin_s, told, unmeasured(report)),
        _tables(told, report),
        "</main>", _json_element("plots", {n: json.loads(f.to_json()) for n, f in plots.items()}),
        _json_element("classes", apart(grid.names)),
        _json_element("figures", told)]
    if plots:
        parts += [f"<script>{text}</script>" for text in (figures.plotly_script(),
                                                          _file("page.js"))]
    return "\n".join([*parts, "</body></html>\n"])


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _json_element(name: str, value: Any) -> str:
    text = json.dumps(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


# ---- the head -----------------------------------------------------------------------------------


def _when(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).isoformat(" ", "seconds")


def span(seconds: float | None) -> str:
    """Returns a time as people read it."""
    if seconds is None:
        return "–"
    if seconds < 1:
        ms = seconds * 1000
        return f"{ms:.0f} ms" if ms >= 10 or ms < 0.05 else f"{ms:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _head(head: dict[str, Any], job: str, ended_core_h: float) -> str:
    """Returns the figures and bars. The CPU time used is known of attempts that have ended, so it
    is compared with the core-hours of these alone.
    """
    state = label(head["state"]) + (f" ({label(head['reason'], 120)})" if head["reason"] else "")
    told = [("mean ACT", span(head["act_mean_s"]), "act_mean_s"),
            ("median ACT", span(head["act_p50_s"]), "act_p50_s"),
            ("95th percentile", span(head["act_p95_s"]), "act_p95_s"),
            ("actions", f"{head['actions']:,}", "actions"),
            ("job", span(head["elapsed_s"]), "elapsed_s"),
            ("nodes", str(head["nodes"]), "nodes")]
    states = ", ".join(f"{count:,} {label(name)}" for name, count in head["states"].items())
    bars = [_bar("CPUs lent to actions", head["cpu_lent_core_h"], head["cpu_held_core_h"],
                 "core", "held")]
    if head["cpu_used_core_h"]:
        bars.append(_bar("CPU time used", head["cpu_used_core_h"], ended_core_h, "core", "lent"))
    if head["gpu_held_gpu_h"]:
        bars.append(_bar("GPUs busy", head["gpu_lent_gpu_h"], head["gpu_held_gpu_h"], "GPU",
                         "held"))
    return (f"<h1>Job {job}</h1><p class='soft'>{state} · user {label(head['user'] or '-')} · "
            f"{_when(head['start_ns'])} to {_when(head['end_ns'])} · {head['cpus']:,} CPUs, "
            f"{head['gpus']:,} GPUs · placer {label(head['placer'])}</p><section>"
            "<div class='grid'>" + "".join(
                f"<div class='figure'><b id='{key}'>{value}</b><span>{name}</span></div>"
                for name, value, key in told)
            + f"</div><p class='soft'>{states or 'no actions'}</p>" + "".join(bars) + "</section>")


def _bar(name: str, part: float, whole: float, unit: str, of: str) -> str:
    share = part / whole if whole > 0 else 0.0
    wide, (times, per) = min(1.0, share), (1, "h") if whole >= 1 else (3600, "s")
    return (f"<div class='bar'><span>{name}</span><i><u style='width:{wide:.1%}'></u></i>"
            f"<span>{share:.1%} · {part * times:,.2f} of {whole * times:,.2f} {unit}-{per} {of}"
            "</span></div>")


def _advice(sentences: Sequence[str]) -> str:
    if not sentences:
        return ("<section><h2>Advice</h2><p>No rule of this report found anything to change."
                "</p></section>")
    return "<section><h2>Advice</h2><ul>" + "".join(
        f"<li>{label(text, 1000)}</li>" for text in sentences) + "</ul></section>"


# ---- tables -------------------------------------------------------------------------------------


def _table(columns: Sequence[tuple[str, str, str]], rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table. Each column has a title, a key, and a format: `text`, `note` (which may take
    several lines), `link` (to the element that the row's `log` names), `span` or one of Python's.
    """
    heads = "".join(f"<th class='{'text' if form in ('text', 'note', 'link') else ''}'>{title}</th>"
                    for title, _, form in columns)

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = row[key]
        if form == "link":
            shown, place = label(str(value), 160), row["log"]
            if place is not None:
                shown = f"<a href='#{place}'>{shown}</a>"
            return f"<td class='text'>{shown}</td>"
        if form in ("text", "note"):
            return f"<td class='{form}'>{label(str(value), 160)}</td>"
        shown = "–" if value is None else span(value) if form == "span" else format(value, form)
        return f"<td>{shown}</td>"

    body = "".join("<tr>" + "".join(cell(row, key, form) for _, key, form in columns) + "</tr>"
                   for row in rows)
    return f"<div class='wide'><table><tr>{heads}</tr>{body}</table></div>"


_WAYS = {RECORDED: "as recorded", AS_RUN: "the same, simulated", FCFS: "first come, first served",
         STATIC: "one reservation per trajectory, same nodes",
         SERVICES: "each service on GPUs of its own",
         JOBS: "one job per trajectory, all at once"}


def _savings(told: dict[str, Any], report: ReportedJob) -> str:
    found = told["savings"]
    if found is None:
        why = label(told["why_no_savings"] or "it was not computed", 300)
        return (f"<section><h2>The same actions otherwise</h2><p class='soft'>Not shown: {why}."
                "</p></section>")
    rows = [row | {"way": _WAYS.get(row["way"], f"{row['way']} of the allocation"),
                   "note": row["why_not"]} for row in found["rows"]]
    table = _table([("", "way", "text"), ("placer", "policy", "text"), ("CPUs", "cpus", ","),
                    ("GPUs", "gpus", ","), ("mean ACT", "mean_act_s", "span"),
                    ("ACT against simulated", "act_growth", "+.0%"), ("step", "step_s", "span"),
                    ("core-h held", "held_core_h", ",.3f"),
                    ("GPU-h held", "held_gpu_h", ",.3f"), ("", "note", "note")], rows)
    said = "".join(f"<li>{label(text, 600)}</li>" for text in found["assumptions"])
    doubt = report.savings.doubt() if report.savings is not None else ""
    doubt = f" {doubt}" if doubt else ""
    return (f"<section id='savings'><h2>The same actions otherwise</h2><p class='soft'>"
            f"{found['actions']:,} actions of {found['trajectories']:,} trajectories, simulated "
            f"from their records.{doubt}</p>{table}{_tenants(found)}<details><summary>What this "
            f"rests on</summary><ul>{said}</ul></details></section>")


def _tenants(found: dict[str, Any]) -> str:
    """The table of tenants, if there are several."""
    rows = [row | {"jobs_cpus": row["jobs"]["cpus"], "jobs_act_s": row["jobs"]["mean_act_s"],
                   "jobs_core_h": row["jobs"]["held_core_h"],
                   "jobs_gpu_h": row["jobs"]["held_gpu_h"], "note": row["jobs"]["why_not"]}
            for row in found.get("tenants", ())]
    return "<h3>By tenant</h3>" + _table(
        [("tenant", "tenant", "text"), ("trajectories", "trajectories", ","),
         ("actions", "actions", ","), ("mean ACT", "mean_act_s", "span"),
         ("core-h of its actions", "used_core_h", ",.3f"),
         ("its part of the core-h held", "part_core_h", ",.3f"),
         ("core-h with one job per trajectory", "jobs_core_h", ",.3f"),
         ("GPU-h of its actions", "used_gpu_h", ",.3f"),
         ("GPU-h with one job per trajectory", "jobs_gpu_h", ",.3f"),
         ("CPUs of these jobs", "jobs_cpus", ","), ("their mean ACT", "jobs_act_s", "span"),
         ("", "note", "note")], rows) if rows else ""


# the heading of each part of the ACT, and how its keys begin
_PARTS = [({"setup": "set-up"}.get(part, part), part) for part in PARTS]


def _tables(told: dict[str, Any], report: ReportedJob) -> str:
    parts = [("Classes of actions", _table(
        [("class", "name", "text"), ("actions", "actions", ","), ("failed", "failed", ","),
         ("mean ACT", "act_mean_s", "span"), ("95 %", "act_p95_s", "span"),
         *((part, f"{key}_mean_s", "span") for part, key in _PARTS),
         ("core-h held", "cpu_core_h", ".3f"), ("core-h used", "cpu_used_core_h", ".3f"),
         ("GPU-h", "gpu_h", ".3f")], told["classes"][:50]), len(told["classes"]))]
    if told["services"]:
        parts.append(("Services", _table(
            [("service", "name", "text"), ("calls", "calls", ","), ("failed", "failed", ","),
             ("batches", "batches", ","), ("calls a batch", "batch_mean", ".2f"),
             ("restores", "restores", ","), ("restoring", "restore_s", "span"),
             ("mean ACT", "act_mean_s", "span"), ("95 %", "act_p95_s", "span"),
             ("wait", "wait_mean_s", "span"), ("run", "run_mean_s", "span"),
             ("GPU-h", "gpu_h", ".3f")], told["services"]), len(told["services"])))
    if told["endpoints"]:
        rows = [row | {"cost": row["cost_micro"] / 1e6} for row in told["endpoints"]]
        parts.append(("Endpoints", _table(
            [("endpoint", "name", "text"), ("calls", "calls", ","), ("failed", "failed", ","),
             ("refused", "refused", ","), ("mean ACT", "act_mean_s", "span"),
             ("95 %", "act_p95_s", "span"), ("wait", "wait_mean_s", "span"),
             ("run", "run_mean_s", "span"), ("cost", "cost", "g")], rows), len(rows)))
    logs = {job_id(r): f"log-{place}" for place, r in enumerate(report.slowest)
            if r.action.id in report.outputs}
    parts.append(("Slowest actions", _table(
        [("action", "action", "link"), ("class", "name", "text"), ("state", "state", "text"),
         ("node", "node", "text"), ("submitted at", "submit_s", "span"), ("ACT", "act_s", "span"),
         *((part, f"{key}_s", "span") for part, key in _PARTS), ("CPUs", "cpus", ","),
         ("GPUs", "gpus", ","), ("reason", "reason", "note")],
        [row | {"log": logs.get(row["action"])} for row in told["slowest"]]), 0))
    return "".join(f"<section><h2>{title}</h2>{table}" + (
        f"<p class='soft'>The first 50 of {count:,}.</p>" if count > 50 and title.startswith("Cl")
        else "") + "</section>" for title, table, count in parts) + _logs(report)


def _logs(report: ReportedJob) -> str:
    """Returns the ends of what the slowest actions wrote, to which their table links."""
    found = []
    for place, r in enumerate(report.slowest):
        if r.action.id in report.outputs:
            lines = "\n".join(escape(plain_tail(line, 400))
                              for line in report.outputs[r.action.id].splitlines())
            found.append(f"<h3 id='log-{place}'>{label(job_id(r))} {label(r.action.name)}</h3>"
                         f"<pre>{lines}</pre>")
    if not found:
        return ("<p class='soft'><code>tangram logs ACTION</code> prints what a command wrote, if "
                "the setting <code>logs_mib</code> keeps it; then the page shows it too.</p>")
    return ("<section id='logs'><h2>What the slowest actions wrote</h2><p class='soft'>The end of "
            "both streams; <code>tangram logs ACTION</code> prints all that is kept.</p>"
            + "".join(found) + "</section>")


# ---- plots --------------------------------------------------------------------------------------


def _plot_sections(plots: dict[str, Any], grid: Lanes, bin_s: float, told: dict[str, Any],
                   unmeasured_setups: int) -> list[str]:
    """Returns the plots, each with a line that says what was put together in it."""
    without = (f" The set-up of {unmeasured_setups:,} actions was not measured, and is part of "
               "their return." if unmeasured_setups else "")
    shared = (f"Each row is {grid.units} neighbouring units. " if grid.units > 1 else "")
    notes = {
        "timeline": ("Every core and GPU", "Drag over a part to see it larger; a double click "
                     f"shows all again. {shared}A cell is {span(grid.bin_s)} long and has the "
                     "colour of the action that held the unit longest in it. Shorter times: "
                     f"<code>tangram report {label(told['headline']['job'])} --window "
                     "FROM:TO</code>."),
        "load": ("In the course of time", f"Means of bins of {span(bin_s)}. An ACT stands where "
                 "its action ended."),
        "parts": ("Where the time of actions went", f"All {told['headline']['ended']:,} actions "
                  "that ended; a part of less than 0.1 ms counts in the first bar. Set-up: from "
                  "the order to the node until it ran. Return: the rest, mostly the result under "
                  f"way.{without}"),
        "means": ("Mean ACT by class", "The classes that held most CPU and GPU time."),
        "waterfall": ("Slowest trajectories", f"The {TRAJECTORIES_MAX} trajectories that took "
                      f"longest, with the first {ACTIONS_MAX} actions of each. Grey: waiting for "
                      "units. White: the policy thinks.")}
    return [f"<section><h2>{notes[name][0]}</h2><p class='soft'>{notes[name][1]}</p>"
            f"<div id='{name}' class='plot'></div>"
            + ("<div id='unit'></div>" if name == "timeline" else "") + "</section>"
            for name in plots]
