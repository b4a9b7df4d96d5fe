"""The actions of a job in other programs' formats: each once, with acct's figures."""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from helpers.recorded_job import busy_job, write_job

from tangram_hpc.cli import main
from tangram_hpc.cli.views import export_verb
from tangram_hpc.errors import InvalidInput
from tangram_hpc.export.usage_record import NAMESPACE


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TANGRAM_HOME with the job 4711 of a few hundred actions."""
    home = tmp_path_factory.mktemp("home")
    write_job(home, busy_job(300, 1, 4))
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(home))


def acct(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["acct", "-j", "4711", "--json"]) == 0
    return list(json.loads(capsys.readouterr().out)["actions"])


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", *words, "-j", "4711"]) == 0
    return capsys.readouterr().out


def test_a_table_has_the_figures_of_acct(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*csv.DictReader(io.StringIO(exported(capsys, "csv")))]
    wanted = acct(capsys)
    assert len(rows) == len(wanted) == 300
    for row, action in zip(rows, wanted, strict=True):
        for column, key in (("job_id", "job_id"), ("name", "name"), ("state", "state"),
                            ("submit_ns", "submit_ns"), ("end_ns", "end_ns"), ("cpu_ns", "cpu_ns"),
                            ("ncpus", "ncpus"), ("cpu_held_ns", "cpu_held_ns")):
            assert row[column] == str(action[key]), column


def test_parquet_has_the_rows_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                           ) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(capsys, "parquet", "-o", str(tmp_path / "a.parquet"))
    table = parquet.read_table(tmp_path / "a.parquet")
    rows = [*csv.DictReader(io.StringIO(exported(capsys, "csv")))]
    assert [{name: str(value) for name, value in row.items()} for row in table.to_pylist()] == rows
    assert str(table.schema.field("submit_ns").type) == "int64"


def test_parquet_goes_into_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(capsys, "parquet", "-o", str(tmp_path / "a.parquet"))
    command = [sys.executable, "-m", "tangram_hpc", "export", "parquet", "-j", "4711", "-o"]
    piped = subprocess.run([*command, "/dev/stdout"], stdout=subprocess.PIPE, check=True).stdout
    assert parquet.read_table(io.BytesIO(piped)) == parquet.read_table(tmp_path / "a.parquet")


def test_usage_records_are_xml_with_the_times_of_acct(capsys: pytest.CaptureFixture[str]) -> None:
    root = ET.fromstring(exported(capsys, "usage-record"))
    tag = f"{{{NAMESPACE}}}"
    wanted = [action for action in acct(capsys) if action["end_ns"]]
    assert root.tag == f"{tag}UsageRecords" and len(root) == len(wanted)
    # the order and the names of GFD-R-P.98; Status is the one element that must be there
    order = ["RecordIdentity", "JobIdentity", "UserIdentity", "JobName", "Status", "WallDuration",
             "CpuDuration", "StartTime", "EndTime", "Host", "Queue", "Memory", "Processors"]
    for record, action in zip(root, wanted, strict=True):
        names = [part.tag.removeprefix(tag) for part in record]
        assert names == [name for name in order if name in names] and "Status" in names
        text = {name: record.find(f"{tag}{name}").text for name in names}
        for name, key in (("WallDuration", "elapsed_ns"), ("CpuDuration", "cpu_ns")):
            if name in text:  # exact, since sums of short actions must be those of acct
                seconds = Decimal(text[name].removeprefix("PT").removesuffix("S"))
                assert seconds * 10**9 == action[key], name
        assert text["Host"] == action["host"]
        assert record.find(f".//{tag}LocalJobId").text == action["job_id"]


@pytest.mark.parametrize("form", ["csv", "parquet", "usage-record"])
def test_a_file_stays_until_the_new_one_is_complete(form: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet")
    file, words = tmp_path / "file", ["export", form, "-o", str(tmp_path / "file"), "-j"]
    file.write_text("last month")
    assert main([*words, "no-such-job"]) == 2

    def cut_off(args: argparse.Namespace, read: Any = export_verb._read_records) -> Iterator[Any]:
        yield from islice(read(args), 2)
        raise InvalidInput("the journal is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(export_verb, "_read_records", cut_off)
        assert main([*words, "4711"]) == 2
    assert "damaged" in capsys.readouterr().err
    assert file.read_text() == "last month" and [*tmp_path.iterdir()] == [file]
    link = tmp_path / "link"
    link.symlink_to("file")
    assert main(["export", form, "-o", str(link), "-j", "4711"]) == 0
    assert link.is_symlink() and len(file.read_bytes()) > 1000 and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_part_of_a_file(number: signal.Signals, tmp_path: Path) -> None:
    told = """if True:
        import os, sys
        from tangram_hpc.cli import main
        from tangram_hpc.cli.views import export_verb

        def killed(args, read=export_verb._read_records):
            for at, record in enumerate(read(args)):
                if at == 10:
                    os.kill(os.getpid(), int(sys.argv[2]))
                yield record

        export_verb._read_records = killed
        main(["export", "csv", "-j", "4711", "-o", sys.argv[1]])
        """
    file = tmp_path / "actions.csv"
    file.write_text("last month")
    ended = subprocess.run([sys.executable, "-c", told, str(file), str(int(number))], check=False)
    assert ended.returncode == 128 + number
    assert file.read_text() == "last month" and [*tmp_path.iterdir()] == [file]


def test_a_text_that_xml_cannot_hold_is_shown_otherwise() -> None:
    from tangram_hpc.export.usage_record import _tag

    assert ET.fromstring(_tag("JobName", "a\x00<b>&\ud800\x1b").replace("urf:", "")).text == (
        "a\ufffd<b>&\ufffd\ufffd")


class _Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP as a collector does."""

    bodies: list[bytes] = []
    status = 200
    drips = ""  # the part of its answer that comes byte by byte: head or body
    reply = b""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.bodies.append(body)
        self.send_response(self.status)
        if self.status == 308:
            self.send_header("Location", "https://other.example/v1/traces")
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "1000" if self.drips else str(len(self.reply)))
        if self.drips != "head":
            self.end_headers()
        with suppress(OSError):  # the client has gone
            for _ in range(1000 if self.drips else 0):
                self.wfile.write(b"a")
                time.sleep(0.05)
            self.wfile.write(self.reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[str]:
    """The address of a collector that runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_collector_that_answers_byte_by_byte_is_given_up(
        part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(_Collector, "drips", part)
    began = time.monotonic()
    with collecting() as url:
        assert main(["export", "otel", "-j", "4711", "--endpoint", url]) == 1
    assert 1 <= time.monotonic() - began < 20
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "took 0 spans and not the next" in error


def test_spans_that_a_collector_rejects_are_not_called_sent(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    for rejected, status in ((0, 0), (7, 1)):  # 0 with a text is a warning, by the standard
        partial = service.ExportTracePartialSuccess(rejected_spans=rejected, error_message="a\nb")
        reply = service.ExportTraceServiceResponse(partial_success=partial)
        monkeypatch.setattr(_Collector, "reply", reply.SerializeToString())
        with collecting() as url:
            assert main(["export", "otel", "-j", "4711", "--endpoint", url]) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert "took 0 spans" in error and "the collector rejected 7 of them: a b" in error


def test_each_action_is_a_span_below_its_trajectory(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setattr(_Collector, "bodies", [])
    with collecting() as url:
        for _ in range(2):
            exported(capsys, "otel", "--endpoint", url)
        monkeypatch.setattr(_Collector, "status", 400)  # one that is not tried again
        assert main(["export", "otel", "-j", "4711", "--endpoint", url]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "and not the next" in error and "code: 400" in error
        monkeypatch.setattr(_Collector, "status", 308)  # for the exporter success; not followed
        assert main(["export", "otel", "-j", "4711", "--endpoint", url]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "took 0 spans" in error
        assert "with status 308 and the address https://other.example; give that one" in error
    found: dict[bytes, list[Any]] = {}
    for body in _Collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    found.setdefault(span.span_id, []).append(span)
    spans = {number: same[0] for number, same in found.items()}
    assert all(span == same[0] for same in found.values() for span in same)  # sent twice alike
    wanted = [action for action in acct(capsys) if action["end_ns"]]
    by_action = {text.value.string_value: span for span in spans.values()
                 for text in span.attributes if text.key == "tangram.action"}
    assert sorted(by_action) == sorted(action["job_id"] for action in wanted)
    for action in wanted:
        span = by_action[action["job_id"]]
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (
            action["submit_ns"], action["end_ns"])
        if action["trajectory"] or action["session"]:
            root = spans[span.parent_span_id]
            assert root.trace_id == span.trace_id and not root.parent_span_id
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert root.end_time_unix_nano >= span.end_time_unix_nano
            if action["trajectory"]:
                assert root.name == f"trajectory {action['trajectory']}"
