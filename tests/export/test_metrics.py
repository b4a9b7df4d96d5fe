"""`tangram export metrics`: figures of a real job as `info` has them, by file and by socket, and a
dashboard that asks only for what is exported.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.exported_job import exported_job
from helpers.silent_broker import IMPATIENT, silent

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from tangram_hpc import LocalCluster
from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput, TangramError
from tangram_hpc.export import metrics_socket
from tangram_hpc.export.metrics import DASHBOARD


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with exported_job(tmp_path_factory.mktemp("home"), 3) as client:
        yield client


@pytest.fixture(autouse=True)
def here(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What Prometheus's own parser reads, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, [])
        for sample in family.samples:
            found[family.name].append((sample.labels, sample.value))
    return found


def test_the_textfile_has_the_figures_of_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "tangram.prom"
    assert main(["export", "metrics", "-o", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) & 0o444 and list(tmp_path.iterdir()) == [file]
    found, info = samples(file.read_text()), cluster.ask("info")
    of_job = {"tangram_job": "4711"}
    for name, value in (("cpus_held", info["cpus"]), ("gpus_held", info["gpus"]),
                        ("mem_held_bytes", info["mem_mib"] << 20), ("nodes", info["nodes"]),
                        ("cpus_lent", 0), ("sessions", info["sessions"]), ("clients", 1)):
        assert found[f"tangram_{name}"] == [(of_job, value)], name
    assert found["tangram_service_resident"] == [(of_job | {"service": "judge"}, 1.0)]
    assert found["tangram_endpoint_rate"] == [(of_job | {"endpoint": "search"}, 50.0)]


def test_a_name_from_a_model_stays_inside_its_label(cluster: LocalCluster,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    name = 'x"}1{tangram_job="\\'
    cluster.register_service(name, {"backend": "fake"})
    assert main(["export", "metrics"]) == 0
    found = samples(capsys.readouterr().out)
    assert [labels["service"] for labels, _ in found["tangram_service_resident"]] == ["judge", name]
    assert len(found["tangram_cpus_held"]) == 1


def test_the_dashboard_asks_only_for_what_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "metrics"]) == 0
    exported = samples(capsys.readouterr().out)
    assert main(["export", "grafana"]) == 0
    board = json.loads(capsys.readouterr().out)
    assert board == json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set()
    for query in queries:
        name, labels = re.fullmatch(r"(\w+)\{(.*)\}", query).groups()
        asked.add(name)
        known = {label for labels_of, _ in exported[name] for label in labels_of}
        if known:  # a family without samples, such as waiting actions of an idle job
            assert set(re.findall(r"(\w+)=", labels)) <= known, query
    assert asked == set(exported)  # and shows all of it
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def scrape(path: Path, accept: str = "") -> tuple[str, str]:
    """What a scrape on a Unix socket answers: its head and its body."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(path))
        peer.sendall(f"GET /metrics HTTP/1.0\r\nAccept: {accept}\r\n\r\n".encode())
        answer = b""
        while data := peer.recv(65536):
            answer += data
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head, body


def until(done: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """What a function returns, as soon as that is true; the process must run until then."""
    end_s = time.monotonic() + 60
    while not (found := done()):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.05)
    return found


def listens(path: Path) -> bool:
    """Whether a server accepts connections; its socket is there a moment earlier."""
    with socket.socket(socket.AF_UNIX) as knock:
        return knock.connect_ex(str(path)) == 0


def exporter(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tangram_hpc", "export", "metrics", *words],
                            env=os.environ, stderr=subprocess.PIPE)


def test_a_socket_answers_its_owner_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as left:  # of a process that was killed
        left.bind(str(path))
    server = exporter("--listen", str(path))

    def answer() -> tuple[str, str] | None:
        try:
            return scrape(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None

    try:
        head, body = until(answer, server)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert " 200 " in head
        assert samples(body)["tangram_cpus_held"] == [({"tangram_job": "4711"}, 3.0)]
        head, body = scrape(path, "application/openmetrics-text; version=1.0.0")
        assert "application/openmetrics-text" in head and body.endswith("# EOF\n")
        assert main(["export", "metrics", "--listen", str(path)]) == 2  # somebody listens there
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert server.returncode == 143 and not path.exists()


def test_a_slow_connection_holds_up_no_scrape(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    server = exporter("--listen", str(path))
    try:
        until(lambda: listens(path), server)
        with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as slow:
            idle.connect(str(path))
            slow.connect(str(path))
            slow.sendall(b"GET /met")
            began = time.monotonic()
            assert " 200 " in scrape(path)[0]
            assert time.monotonic() - began < 20  # a silent peer is hung up on after 30 s
    finally:
        server.terminate()
        _, said = server.communicate(timeout=30)
    assert server.returncode == 143 and said == b""


@pytest.mark.parametrize("begun", ["GET /met", "GET /metrics\r\n", ""])
def test_a_request_that_ends_within_its_first_line_is_not_served(
        cluster: LocalCluster, tmp_path: Path, begun: str) -> None:
    path = tmp_path / "m.sock"
    server = exporter("--listen", str(path))
    try:
        until(lambda: listens(path), server)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(30)
            peer.connect(str(path))
            peer.sendall(begun.encode())
            peer.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: peer.recv(65536), b""))
        assert (b"505" in answer) is bool(begun) and b"tangram_" not in answer
        assert " 200 " in scrape(path)[0]
    finally:
        server.terminate()
        _, said = server.communicate(timeout=30)
    assert server.returncode == 143 and said == b""


def test_a_scrape_that_meets_the_end_of_the_job_ends_the_exporter(tmp_path: Path) -> None:
    path, ends = tmp_path / "m.sock", list[BaseException]()

    def serve() -> None:
        try:
            metrics_socket.serve_on(path, Ended(), lambda: False)
        except TangramError as error:
            ends.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    assert " 503 " in scrape(path)[0]
    thread.join(10)  # less than the time after which the broker is asked without a scrape
    assert len(ends) == 1 and not path.exists()


def test_the_file_goes_with_its_writer(cluster: LocalCluster, tmp_path: Path) -> None:
    file, link = tmp_path / "tangram.prom", tmp_path / "link"
    link.symlink_to(file)
    writer = exporter("-o", str(link), "-i", "60")
    try:
        until(file.exists, writer)
    finally:
        writer.terminate()
        writer.communicate(timeout=30)
    assert writer.returncode == 143 and list(tmp_path.iterdir()) == [link] and link.is_symlink()


def test_a_pipe_stays_when_its_writer_ends(cluster: LocalCluster, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = exporter("-o", str(pipe), "-i", "60")
    try:
        assert "tangram_cpus_held" in samples(pipe.read_text())
    finally:
        writer.terminate()
        writer.communicate(timeout=30)
    assert writer.returncode == 143 and pipe.is_fifo()


def test_exporters_outlive_the_silence_of_a_broker(cluster: LocalCluster, tmp_path: Path) -> None:
    file, path = tmp_path / "tangram.prom", tmp_path / "m.sock"
    patient = [subprocess.Popen([*IMPATIENT, "export", "metrics", *map(str, words)],
                                stderr=subprocess.PIPE, text=True)
               for words in (("-o", file, "-i", "0.1"), ("--listen", path))]
    writer, server = patient
    try:
        for shown, process in ((file, writer), (path, server)):
            until(shown.exists, process)
        with silent(cluster):
            assert " 503 " in scrape(path)[0]
            assert writer.stderr is not None and "asking again" in writer.stderr.readline()
            until(lambda: not file.exists(), writer)  # old figures do not stand for the present
        until(file.exists, writer)
        assert " 200 " in scrape(path)[0]
    finally:
        for process in patient:
            process.terminate()
            process.communicate(timeout=30)
    assert [process.returncode for process in patient] == [143, 143]


def test_an_exporter_outlives_a_file_system_that_takes_nothing(cluster: LocalCluster,
                                                               tmp_path: Path) -> None:
    (folder := tmp_path / "collector").mkdir()
    file = folder / "tangram.prom"
    writer = exporter("-o", str(file), "-i", "0.1")
    try:
        until(file.exists, writer)
        first = file.stat().st_mtime_ns
        until(lambda: file.stat().st_mtime_ns != first, writer)  # the first one has been written
        folder.rename(away := tmp_path / "away")
        assert writer.stderr is not None and b"trying again" in writer.stderr.readline()
        away.rename(folder)
        (folder / file.name).unlink()
        until(file.exists, writer)
    finally:
        writer.terminate()
        writer.communicate(timeout=30)
    assert writer.returncode == 143


class Ended:
    """A registry of a job that has ended."""

    def collect(self) -> list[Any]:
        raise TangramError("the job has ended")


def test_the_end_of_a_job_is_noticed_without_a_scrape(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_socket, "_ASK_S", 0.05)
    with pytest.raises(TangramError, match="has ended"):
        metrics_socket.serve_on(tmp_path / "m.sock", Ended(), lambda: False)
    assert not list(tmp_path.iterdir())


def test_a_socket_of_somebody_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(InvalidInput, match=r"m\.sock"):
            metrics_socket.serve_on(path, Ended(), lambda: False)
    assert path.exists()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waits:
        busy.bind(str(path))
        busy.listen(0)
        waits.connect(str(path))  # the queue is full
        with pytest.raises(InvalidInput, match="another process listens"):
            metrics_socket.serve_on(path, Ended(), lambda: False)
    assert path.exists()


def test_wrong_words_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                             ) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for words in (["-i", "1"], ["--listen", "x", "-o", "y"], ["--listen", str(file)],
                  ["-o", str(tmp_path / "no" / "folder")]):
        assert main(["export", "metrics", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
