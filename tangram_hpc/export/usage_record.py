"""Writes action records as usage records of the Open Grid Forum.

The format is Usage Record 1.0 (GFD-R-P.98), which grid accounting such as APEL and SGAS reads. Each
action is one `JobUsageRecord`. An element that the format has no value for is left out, and nothing
is estimated: energy and GPUs have no place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import IO
from xml.sax.saxutils import escape, quoteattr

from ..accounting.fields import job_id
from ..accounting.record import ActionRecord
from ..domain.states import ActionState

NAMESPACE = "http://schema.ogf.org/urf/2003/09/urf"
# the words of the format for how a job ended
_STATUS = {ActionState.COMPLETED: "completed", ActionState.CANCELLED: "aborted",
           ActionState.TIMEOUT: "aborted", ActionState.FAILED: "failed",
           ActionState.OUT_OF_MEMORY: "failed", ActionState.NODE_FAIL: "failed",
           ActionState.PREEMPTED: "suspended"}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_usage_records(records: Iterable[ActionRecord], file: IO[str], now_ns: int) -> int:
    """Writes the records of actions that have ended; returns how many there were.

    Args:
        records: the actions.
        file: where to write.
        now_ns: the time at which the records are made, epoch ns.
    """
    file.write('<?xml version="1.0" encoding="UTF-8"?>\n'
               f'<urf:UsageRecords xmlns:urf="{NAMESPACE}">\n')
    count = 0
    for r in records:
        if r.end_ns:
            file.write(_record(r, _when(now_ns)))
            count += 1
    file.write("</urf:UsageRecords>\n")
    return count


def _record(r: ActionRecord, made: str) -> str:
    outcome, node = r.outcome, r.node
    found = [
        f"<urf:RecordIdentity urf:createTime={quoteattr(made)} "
        f"urf:recordId={quoteattr(_plain('tangram-' + job_id(r)))}/>",
        f"<urf:JobIdentity>{_tag('LocalJobId', job_id(r))}</urf:JobIdentity>",
        f"<urf:UserIdentity>{_tag('LocalUserId', r.user)}</urf:UserIdentity>",
        _tag("JobName", r.action.name) if r.action.name else "",
        _tag("Status", _STATUS.get(r.state, "failed")),
        _tag("WallDuration", _span(r.elapsed_ns)),
        _tag("CpuDuration", _span(outcome.cpu_ns)) if outcome is not None else "",
        _tag("StartTime", _when(r.start_ns)) if r.start_ns else "",
        _tag("EndTime", _when(r.end_ns)),
        _tag("Host", node.host, ' urf:primary="true"') if node is not None else "",
        _tag("Queue", node.component) if node is not None and node.component else "",
        _tag("Memory", str(outcome.maxrss_kib), ' urf:metric="max" urf:storageUnit="KB"')
        if outcome is not None and outcome.maxrss_kib else "",
        _tag("Processors", str(r.cpus)) if r.cpus else "",
    ]
    return f"<urf:JobUsageRecord>{''.join(found)}</urf:JobUsageRecord>\n"


def _tag(name: str, text: str, attributes: str = "") -> str:
    return f"<urf:{name}{attributes}>{escape(_plain(text))}</urf:{name}>"


def _plain(text: str) -> str:
    """A text with only characters that XML may hold."""
    return _NOT_XML.sub("\ufffd", text)


def _span(ns: int) -> str:
    """A duration of XML Schema, such as PT1.500000000S. It is exact: programs add up the CPU times
    of many actions, each of which may be shorter than a millisecond.
    """
    return f"PT{ns // 10**9}.{ns % 10**9:09d}S"


def _when(ns: int) -> str:
    at = datetime.fromtimestamp(ns // 10**9, timezone.utc)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{ns // 10**6 % 1000:03d}Z"
