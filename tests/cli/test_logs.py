"""`tangram logs`: what real commands wrote, while they run and afterwards, without secrets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.cli import main
from tangram_hpc.cli.views import logs_verb
from tangram_hpc.cli.views.logs_verb import _last_lines, _Printer
from tangram_hpc.errors import AccessError, BrokerUnreachable
from tangram_hpc.storage.output_log import ERR, OUT, KeptPiece

JOB = "kept"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, home=tmp_path_factory.mktemp("home"), job=JOB, logs_mib=16) as client:
        yield client


@pytest.fixture(autouse=True)
def here(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(cluster.access.parents[2]))


def logs(*words: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run([sys.executable, "-m", "tangram_hpc", "logs", "-j", JOB, *words],
                          capture_output=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def kept(action: str, size: int) -> bytes:
    """Standard output of an action, as soon as so many bytes are kept."""
    end_s = time.monotonic() + 60
    while True:
        status, out, err = logs(action, "--stdout")
        if status == 0 and len(out) >= size:
            return out
        assert status in (0, 2) and time.monotonic() < end_s, (status, out, err)
        time.sleep(0.1)


def test_what_commands_wrote_is_kept_once(cluster: LocalCluster) -> None:
    with cluster.session() as session:
        quick = [session.exec(["sh", "-c", "echo out; echo err >&2"]) for _ in range(3)]
        slow = session.exec(["sh", "-c", "echo one; sleep 0.3; echo two; printf '\\377\\n'"])
        streamed = session.exec(["sh", "-c", "echo one; sleep 0.3; echo two"],
                                on_output=lambda *_: None)
        cut = session.exec(["sh", "-c", "seq 100000"], output_max=2048)
        for future in (*quick, slow, streamed, cut):
            future.result(60)
        silent = session.exec(["true"])
        silent.result(60)
    for future in quick:  # the last two were served in C
        assert kept(future.id, 4) == b"out\n"
        assert logs(future.id, "--stderr") == (0, b"", b"err\n")
    assert kept(slow.id, 10) == b"one\ntwo\n\xff\n"
    assert kept(streamed.id, 8) == b"one\ntwo\n"
    assert b"bytes of this stream were not kept" in kept(cut.id, 2048)
    assert logs(slow.id, "-n", "2", "--stdout")[1] == b"two\n\xff\n"
    status, out, err = logs(silent.id)
    assert (status, out) == (2, b"") and b"wrote nothing" in err and err.count(b"\n") == 1


def test_follow_shows_a_running_action_and_ends_with_it(cluster: LocalCluster, tmp_path: Path
                                                        ) -> None:
    running = cluster.submit(["sh", "-c", "echo begun; while [ ! -e go ]; do sleep 0.05; done; "
                                          "echo went"], cwd=str(tmp_path), trusted=True)
    follower = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "logs", "-f", "-j", JOB,
                                 running.id], stdout=subprocess.PIPE)
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"begun\n"  # it still runs
        assert not running.done()
        (tmp_path / "go").touch()
        running.result(60)
        assert follower.stdout.readline() == b"went\n"
        assert follower.wait(60) == 0 and follower.stdout.read() == b""
    finally:
        (tmp_path / "go").touch()
        follower.kill()
        follower.wait(60)


class Broker:
    """Answers from a list; an error is raised."""

    def __init__(self, *answers: dict[str, str] | Exception) -> None:
        self.answers, self.joined, self.left = list(answers), 0, 0

    def connect(self, job: str, name: str) -> Broker:
        self.joined += 1
        return self

    def ask(self, what: str, action: str) -> dict[str, str]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.left += 1


def test_follow_is_one_client_and_outlives_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = BrokerUnreachable("no answer")
    broker = Broker({"state": "RUNNING"}, {"state": "RUNNING"}, lost, {"state": "RUNNING"},
                    {"state": "COMPLETED"})
    monkeypatch.setattr(logs_verb, "connect_to", broker.connect)
    asking = logs_verb._Asking("4711", "1.1")
    assert [asking.is_over() for _ in range(5)] == [False] * 4 + [True]
    asking.close()
    assert (broker.joined, broker.left) == (2, 2)
    broker.answers = [lost, lost, AccessError("the job has ended")]
    assert not asking.is_over()
    monkeypatch.setattr(logs_verb, "_LOST_S", 0.0)
    assert asking.is_over() and asking.is_over()


def test_only_the_logs_of_nodes_where_the_action_ran_are_read(
        cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """Another node's log is damaged, of which a reader would tell."""
    ran = cluster.submit("echo here", trusted=True)
    assert ran.result(60).ok
    assert kept(ran.id, 5) == b"here\n"
    home = tmp_path / "home"
    shutil.copytree(cluster.access.parent, home / "jobs" / JOB, ignore=shutil.ignore_patterns(
        "*.sock", "lock"))
    other = home / "jobs" / JOB / "outputs" / "elsewhere"
    other.mkdir()
    (other / "1-0.out").write_bytes(b"no record" * 9)
    (other / "2-0.out").write_bytes(b"")
    monkeypatch.setenv("TANGRAM_HOME", str(home))
    assert main(["logs", "-j", JOB, ran.id]) == 0
    assert capsysbinary.readouterr() == (b"here\n", b"")
    (home / "jobs" / JOB / "journal").unlink()  # then all logs are read
    assert main(["logs", "-j", JOB, ran.id]) == 0
    told = capsysbinary.readouterr()
    assert told.out == b"here\n" and b"elsewhere" in told.err


def test_a_secret_is_not_in_the_files(cluster: LocalCluster) -> None:
    value = "v3ry-s3cret-value"
    cluster.keep_secrets({"KEY": value})
    with cluster.session(secrets=["KEY"]) as session:
        shown = [session.exec(["sh", "-c", "echo [$KEY]"]) for _ in range(3)]
        split = session.exec(["sh", "-c", "printf v3ry-; sleep 0.2; printf s3cret-value; "
                                          "sleep 0.2; echo .$KEY"])
        for future in (*shown, split):
            assert value in future.result(60).text
    for future in shown:
        assert kept(future.id, 14) == b"[[secret KEY]]\n"
    assert kept(split.id, 26) == b"[secret KEY].[secret KEY]\n"
    files = list((cluster.access.parent / "outputs").rglob("*.out"))
    assert files and not [path for path in files if value.encode() in path.read_bytes()]


def test_a_worker_with_a_copy_of_the_access_file_writes_to_the_job_folder(
        cluster: LocalCluster, tmp_path: Path) -> None:
    copy = tmp_path / "worker.json"
    copy.touch(mode=0o600)
    copy.write_bytes(cluster.access.with_name("worker.json").read_bytes())
    worker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "worker", "--access", str(copy),
                               "--name", "far", "--cpus", "4"],
                              env=os.environ | {"TANGRAM_LOGS_MIB": "16"})
    try:
        end_s = time.monotonic() + 60
        while cluster.ask("info")["nodes"] < 2:
            assert time.monotonic() < end_s and worker.poll() is None
            time.sleep(0.05)
        run = cluster.submit(["echo", "far"], cpus=4, trusted=True)
        run.result(60)
        assert kept(run.id, 4) == b"far\n"
        assert [*tmp_path.iterdir()] == [copy]
    finally:
        worker.terminate()
        worker.wait(60)


def test_nothing_is_kept_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(1, home=tmp_path, job="off") as client:
        client.submit(["echo", "x"], trusted=True).result(60)
    assert not (tmp_path / "jobs" / "off" / "outputs").exists()
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert main(["logs", "-j", "off", "1.1"]) == 2
    assert "set `logs_mib`" in capsys.readouterr().err


def test_the_last_lines_are_those_of_each_stream() -> None:
    pieces = [KeptPiece(1, OUT, b"1\n2"), KeptPiece(1, ERR, b"e1\ne2\n"),
              KeptPiece(1, OUT, b"\n3\n4"), KeptPiece(1, OUT, b"5\n")]
    for count, out, err in ((0, b"", b""), (1, b"45\n", b"e2\n"), (2, b"3\n45\n", b"e1\ne2\n"),
                            (3, b"2\n3\n45\n", b"e1\ne2\n"), (9, b"1\n2\n3\n45\n", b"e1\ne2\n")):
        found = _last_lines(pieces, count)
        assert b"".join(p.data for p in found if p.stream == OUT) == out, count
        assert b"".join(p.data for p in found if p.stream == ERR) == err, count


def test_a_terminal_is_shown_escapes(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    run = cluster.submit(["printf", "a\\tb\\033[31m\\n"], trusted=True)
    run.result(60)
    kept(run.id, 8)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["logs", run.id, "-j", JOB, "--stdout"]) == 0
    assert capsys.readouterr().out == "a\tb\\x1b[31m\n"


def test_a_character_may_be_in_two_pieces(monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    printer = _Printer((1,))
    printer.show([KeptPiece(1, OUT, b"a\xc3"), KeptPiece(1, ERR, b"x"), KeptPiece(1, OUT, b"\xa9"),
                  KeptPiece(1, OUT, b"\xe2\x82")])
    printer.end()
    assert capsys.readouterr().out == "a\u00e9\ufffd"
