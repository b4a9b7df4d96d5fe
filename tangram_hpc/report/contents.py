"""Everything that a report says, as one object: what `tangram report --json` prints, and what the
page shows beside its plots.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..simulator.savings.savings import AS_RUN, RECORDED, Savings
from .advice import advice
from .reported_job import ReportedJob, classes, endpoints, headline, services, slowest
from .series import TimeSeries


def contents(report: ReportedJob, series: TimeSeries) -> dict[str, Any]:
    """Returns the object; units stand at the end of names."""
    return {"headline": headline(report), "advice": advice(report, series),
            "savings": _savings(report.savings), "why_no_savings": report.why_no_savings,
            "classes": classes(report), "services": services(report),
            "endpoints": endpoints(report), "slowest": slowest(report)}


def _savings(found: Savings | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = [asdict(row) | {"act_growth": None if row.way in (RECORDED, AS_RUN)
                           else found.growth(row.way)} for row in found.rows]
    told = {"rows": rows, "assumptions": found.assumptions, "trajectories": found.trajectories,
            "actions": found.actions, "actions_of_job": found.actions_of_job}
    if found.tenants:
        told["tenants"] = [asdict(row) for row in found.tenants]
    return told
