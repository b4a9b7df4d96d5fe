"""Everything that a report says, as one object: what `tangram report --json` prints, and what the
page shows beside its plots.
"""

from __future__ import annotations

from typing import Any

from .advice import advice
from .reported_job import ReportedJob, endpoints, headline, services, slowest
from .series import TimeSeries


def contents(report: ReportedJob, series: TimeSeries) -> dict[str, Any]:
    """Returns the object; units stand at the end of names."""
    return {"headline": headline(report), "advice": advice(report, series),
            "savings": report.savings.to_json() if report.savings is not None else None,
            "why_no_savings": report.why_no_savings,
            "classes": report.classes, "services": services(report),
            "endpoints": endpoints(report), "slowest": slowest(report)}

