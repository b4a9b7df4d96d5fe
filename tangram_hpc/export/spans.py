"""Sends the actions of a job as OpenTelemetry spans.

Each trajectory is a trace: its root span lasts from its first submission to its last result, and
each of its actions is a span below it. Actions without a trajectory are grouped by their session,
and actions without either are traces of their own.

Ids are digests of job, trajectory and action. So an export that is repeated, or that was cut off,
sends the same spans again, and a store that knows them keeps them once. The root span of a
trajectory that goes on is an exception: its id stays, and its end is the last result so far.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from typing import Any
from urllib.parse import urljoin

from ..accounting.fields import job_id
from ..accounting.record import ActionRecord
from ..domain.ids import show
from ..domain.states import ActionState
from ..errors import MissingExtra, TangramError, how_to_install

_BATCH = 512  # spans of one request, as OpenTelemetry's own batches
_PATH = "/v1/traces"  # what stands behind the address of a collector, by the standard of OTLP


def _digest(size: int, *words: str) -> int:
    text = "\0".join(words).encode("utf-8", "replace")
    return int.from_bytes(hashlib.sha256(text).digest()[:size], "big") or 1


def _group(r: ActionRecord) -> str:
    """The name of the trace that an action belongs to; empty for one of its own."""
    if r.action.trajectory_name:
        return f"trajectory {r.action.trajectory_name}"
    return f"session {show(r.action.session)}" if r.action.session else ""


def spans(records: Iterable[ActionRecord]) -> Iterator[Any]:
    """Yields the spans of actions that have ended, one `ReadableSpan` each, and the root span of
    each trace after its first action.

    Raises:
        MissingExtra: OpenTelemetry's SDK is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
    except ImportError:
        raise MissingExtra("export: spans need OpenTelemetry's SDK: "
                           f"{how_to_install('export')}") from None

    ended = [r for r in records if r.end_ns]
    limits: dict[tuple[str, str], tuple[int, int]] = {}
    for r in ended:
        if group := _group(r):
            first, last = limits.get((r.job, group), (r.submit_ns, r.end_ns))
            limits[r.job, group] = min(first, r.submit_ns), max(last, r.end_ns)

    def context(trace: int, span: int) -> Any:
        return SpanContext(trace, span, False, TraceFlags(TraceFlags.SAMPLED))

    resources = {job: Resource({"service.name": "tangram_hpc", "tangram.job": job})
                 for job in {r.job for r in ended}}
    for r in ended:
        group = _group(r)
        trace = _digest(16, r.job, group or show(r.action.id))
        root = context(trace, _digest(8, r.job, group, "root")) if group else None
        if root is not None and (span := limits.pop((r.job, group), None)):
            yield ReadableSpan(group, root, None, resources[r.job], start_time=span[0],
                               end_time=span[1], kind=SpanKind.INTERNAL)
        failed = r.state is not ActionState.COMPLETED
        reason = r.outcome.reason if r.outcome is not None else ""
        yield ReadableSpan(
            r.action.name or r.action.kind.value, context(trace, _digest(8, r.job, job_id(r))),
            root, resources[r.job], _attributes(r),
            [Event("units lent", timestamp=r.start_ns)] if r.start_ns else [],
            kind=SpanKind.INTERNAL, start_time=r.submit_ns, end_time=r.end_ns,
            status=Status(StatusCode.ERROR, f"{r.state.value} {reason}".strip()) if failed
            else Status(StatusCode.OK))


def _attributes(r: ActionRecord) -> dict[str, Any]:
    outcome = r.outcome
    found: dict[str, Any] = {
        "tangram.action": job_id(r), "tangram.kind": r.action.kind.value,
        "tangram.key": r.action.key, "tangram.state": r.state.value, "tangram.attempt": r.attempt,
        "tangram.cpus": r.cpus, "tangram.gpus": len(r.gpus),
        "tangram.planned_ns": r.planned_ns, "tangram.cpu_held_ns": r.cpu_held_ns,
        "tangram.trajectory": r.action.trajectory_name}
    if r.action.session:
        found["tangram.session"] = show(r.action.session)
    if r.node is not None:
        found["host.name"] = r.node.host
    if outcome is not None:
        found |= {"tangram.exec_ns": outcome.exec_ns, "tangram.cpu_ns": outcome.cpu_ns,
                  "tangram.restore_ns": outcome.restore_ns,
                  "process.exit.code": outcome.exit_status}
        if outcome.setup_ns >= 0:
            found["tangram.setup_ns"] = outcome.setup_ns
    return found


def send(found: Iterable[Any], endpoint: str) -> int:
    """Sends spans to a collector by OTLP over HTTP; returns how many were sent.

    Args:
        found: the spans.
        endpoint: address of the collector, such as http://localhost:4318; empty for the variables
            of OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT and its companions).

    Raises:
        MissingExtra: the exporter is not installed.
        TangramError: the collector did not take a batch.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError:
        raise MissingExtra("export: spans need OpenTelemetry's exporter: "
                           f"{how_to_install('export')}") from None
    exporter: Any = OTLPSpanExporter(f"{endpoint.rstrip('/')}{_PATH}" if endpoint else None,
                                     session=_watched_session())
    sent, rest, said = 0, iter(found), _LastWords()
    logging.getLogger("opentelemetry").addHandler(said)
    try:
        while batch := list(islice(rest, _BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise TangramError(f"export: the collector {endpoint or '(OTEL_EXPORTER_OTLP_*)'} "
                                   f"took {sent} spans and not the next {len(batch)} "
                                   f"({said.words}); repeat the export when it can be reached")
            sent += len(batch)
    finally:
        logging.getLogger("opentelemetry").removeHandler(said)
        exporter.shutdown()
    return sent


def _watched_session() -> Any:
    """Returns a session for the exporter; None where OpenTelemetry's own variables name one.

    The exporter alone would lose spans in silence. It takes each status below 400 for success, as
    of a collector that redirects from http to https, and does not read which spans a collector
    rejects. It would also wait for ever: its timeout is that of each part of an answer.
    """
    if any(name.startswith("OTEL_PYTHON_EXPORTER_OTLP_HTTP_") for name in os.environ):
        return None
    import requests

    session: Any = requests.Session()
    session.hooks["response"].append(_require_all_taken)
    part_by_part = session.request

    def within_timeout(*args: Any, **options: Any) -> Any:
        found = Future[Any]()

        def ask() -> None:
            try:
                found.set_result(part_by_part(*args, **options))
            except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
                found.set_exception(error)

        threading.Thread(target=ask, name="collector", daemon=True).start()
        if not wait([found], options["timeout"]).done:
            raise requests.ReadTimeout(f"no whole answer came within {options['timeout']:g} s")
        return found.result()

    session.request = within_timeout
    return session


def _require_all_taken(answer: Any, *_: Any, **__: Any) -> None:
    """Raises TangramError for an answer of success by which spans would be lost."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    if 300 <= answer.status_code < 400:
        there = urljoin(answer.url, answer.headers.get("location", "")).removesuffix(_PATH)
        raise TangramError(f"the collector answers with status {answer.status_code} and the "
                           f"address {there}; give that one")
    if not answer.ok or "protobuf" not in answer.headers.get("content-type", ""):
        return
    with suppress(DecodeError):
        reply = trace_service_pb2.ExportTraceServiceResponse.FromString(answer.content)
        if (rejected := reply.partial_success.rejected_spans) > 0:
            why = " ".join(reply.partial_success.error_message.split())
            raise TangramError(f"the collector rejected {rejected} of them: "
                               f"{why or 'it gave no reason'}")


class _LastWords(logging.Handler):
    """Keeps the last two lines that a library logs: its last error of the network, and that it gave
    up. Without any handler, `logging` would print the lines on the terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=2)

    @property
    def words(self) -> str:
        """The lines as one, for an error."""
        return "; ".join(self._lines) or "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._lines.append(record.getMessage().rstrip("."))
