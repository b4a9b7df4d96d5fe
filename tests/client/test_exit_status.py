"""Nothing but a completed action looks like a success: exit codes, truth of results, exceptions.

A reward that is written as `r.exit_code == 0`, or as `if r`, must not pay work that was ended.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc.app.local import LocalCluster
from tangram_hpc.cli import main as cli
from tangram_hpc.client.future import Future
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ENDED, ActionState

S = ActionState
HUNGRY = [sys.executable, "-c", "x = bytearray(300 << 20); import time; time.sleep(60)"]
# name -> command, its options, state, exit code
ENDS: dict[str, tuple] = {
    "fine": (["true"], {}, S.COMPLETED, 0),
    "wrong": ("exit 3", {}, S.FAILED, 3),
    "broken": ("kill -SEGV $$", {}, S.FAILED, 139),
    "loop": (["sleep", "60"], {"timeout": 0.2}, S.TIMEOUT, 124),
    "polite-loop": ("trap 'exit 0' TERM; while :; do sleep 0.02; done", {"timeout": 0.2},
                    S.TIMEOUT, 124),
    "hungry": (HUNGRY, {"mem": 50}, S.OUT_OF_MEMORY, 137),
    "not-there": (["no-such-program"], {}, S.FAILED, 127),
    "not-there-by-path": (["/no/such/program"], {}, S.FAILED, 127),
    "not-a-program": (["/etc/passwd"], {}, S.FAILED, 126),
    "a-folder": (["/usr"], {}, S.FAILED, 126),
    "nowhere": (["true"], {"cwd": "/no/such/folder"}, S.FAILED, 126),
    "killed": ("kill -KILL $$", {}, S.FAILED, 137),
    "kills-its-shell": (["sh", "-c", "sh -c 'kill -9 $$'; exit $?"], {}, S.FAILED, 137),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(cpus=2, home=home, devices="fake:1", kill_wait_s=0.5) as c:
        yield c


@pytest.fixture(scope="module")
def ended(cluster: LocalCluster) -> dict[str, Future]:
    """One action of each end, over."""
    futures = {name: cluster.submit(work, name=name, **options)
               for name, (work, options, _, _) in ENDS.items()}
    for future in futures.values():
        future.result(60)
    return futures


@pytest.mark.parametrize("name", ENDS)
def test_only_a_completed_command_has_exit_code_0_and_is_true(ended: dict[str, Future], name: str
                                                             ) -> None:
    """The exit code, the truth of a result and its state say the same."""
    result, (_, _, state, code) = ended[name].result(), ENDS[name]
    assert (result.state, result.exit_code) == (state, code), result
    assert bool(result) is result.ok is (state is S.COMPLETED)
    assert (result.returncode == 0) is (state is S.COMPLETED)


def test_a_session_command_that_times_out_has_status_124(cluster: LocalCluster) -> None:
    with cluster.session() as s:
        late = s.exec("trap 'exit 0' TERM; while :; do sleep 0.02; done", timeout=0.2).result(60)
        assert (late.state, late.exit_code, bool(late)) == (S.TIMEOUT, 124, False), late
        assert s.exec(["true"]).result(60)


def test_accounting_and_explain_show_the_exit_code_of_the_result(
        cluster: LocalCluster, ended: dict[str, Future], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """`tangram acct --json` has the exit code of the result; the column ExitCode is sacct's
    `code:signal`, and 0:0 for nothing but COMPLETED."""
    monkeypatch.setenv("TANGRAM_HOME", str(cluster.folder.parent.parent))
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    assert cli(["acct", "-j", cluster.job, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["actions"]}
    assert {name: rows[name]["exit_code"] for name in ENDS} == {n: e[3] for n, e in ENDS.items()}
    assert cli(["acct", "-j", cluster.job, "-P", "-n", "-o", "JobName,ExitCode"]) == 0
    column = dict(line.split("|") for line in capsys.readouterr().out.splitlines())
    assert column["broken"] == "0:11" and column["wrong"] == "3:0"
    assert column["polite-loop"] == "124:0" and column["hungry"] == "137:9"
    assert [name for name in ENDS if column[name] == "0:0"] == ["fine"]
    assert cli(["explain", "-j", cluster.job, ended["polite-loop"].id]) == 0
    assert "exit code 124" in capsys.readouterr().out


def test_a_function_out_of_time_raises_a_timeout_error(cluster: LocalCluster) -> None:
    """With the function's name, its limit and what it used."""
    def polite() -> None:
        import os
        import signal

        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(60)

    for work in (polite, lambda: time.sleep(60)):
        with pytest.raises(TimeoutError, match=r"slow.*TIMEOUT.*limit of 0.3 s") as caught:
            cluster.submit(work, timeout=0.3, name="slow").result(60)
        error = caught.value
        assert isinstance(error, tangram_hpc.ActionTimeout | tangram_hpc.ActionFailed)
        assert (error.name, error.limit_s) == ("slow", 0.3) and error.used_s >= 0.3


def test_a_function_out_of_memory_raises_a_memory_error(cluster: LocalCluster) -> None:
    def hungry() -> None:
        kept = bytearray(300 << 20)
        time.sleep(60)
        print(len(kept))

    with pytest.raises(MemoryError, match=r"large.*OUT_OF_MEMORY.*50 MiB") as caught:
        cluster.submit(hungry, mem=50, name="large").result(60)
    error = caught.value
    assert isinstance(error, tangram_hpc.ActionOutOfMemory | tangram_hpc.ActionFailed)
    assert (error.name, error.limit_mib) == ("large", 50)


def test_a_service_call_out_of_time_raises_a_timeout_error(cluster: LocalCluster) -> None:
    cluster.register_service("s", {"backend": "fake"})
    with pytest.raises(TimeoutError, match=r"s\.hang.*limit of 0.3 s") as caught:
        cluster.call("s", "hang", timeout=0.3).result(60)
    assert isinstance(caught.value, tangram_hpc.ActionFailed)


def test_a_request_out_of_time_raises_a_timeout_error(cluster: LocalCluster) -> None:
    endpoint = cluster.register_endpoint("api", concurrency=1)

    async def attempt() -> None:
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match="not served within its timeout") as caught:
        asyncio.run(endpoint.request(attempt, timeout=0.2, name="ask"))
    assert isinstance(caught.value, tangram_hpc.ActionFailed)
    assert (caught.value.name, caught.value.limit_s) == ("ask", 0.2)


def test_check_raises_the_errors_that_a_function_raises(ended: dict[str, Future]) -> None:
    with pytest.raises(TimeoutError):
        ended["polite-loop"].result().check()
    with pytest.raises(MemoryError):
        ended["hungry"].result().check()
    assert ended["fine"].result().check()


@pytest.mark.parametrize("state", sorted(ENDED))
def test_only_completed_has_exit_status_0(state: ActionState) -> None:
    """Whatever the processes did while they were ended."""
    for code, number in ((0, 0), (0, 9), (0, 15), (5, 0)):
        status = Outcome(state, exit_code=code, signal=number).exit_status
        assert (status == 0) is (state is S.COMPLETED) and 0 <= status < 256


def test_timeout_and_memory_errors_can_be_pickled() -> None:
    for kind in (tangram_hpc.ActionTimeout, tangram_hpc.ActionOutOfMemory):
        error = kind("action 1.2 (f): it took too much", None)
        error.name = "f"
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is kind and str(back) == str(error) and back.name == "f"


def test_a_failed_file_operation_keeps_its_number_in_a_pickle(cluster: LocalCluster) -> None:
    """As when a process of a pool raises it."""
    with cluster.session(trusted=True) as s:
        missing = s.read("nothing").exception()
        folder = s.read(".").exception()
    for error, kind, number in ((missing, FileNotFoundError, errno.ENOENT),
                                (folder, IsADirectoryError, errno.EISDIR)):
        for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert isinstance(each, kind) and each.errno == number and str(each) == str(error)
    assert tangram_hpc.FileFailed("no more is known").errno is None


def test_tangram_run_exits_with_the_results_exit_code(
        cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tangram run` and a result take the status from one place."""
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tangram_hpc.cli.run._stdin", bytes)
    assert cli(["run", "--", "sh", "-c", "kill -SEGV $$"]) == 139
    assert cli(["run", "-N", "1", "-n1", "--", "sh", "-c", "exit 7"]) == 7  # as scripts for srun
    assert cli(["run", "-t", "0.2", "--", "sh", "-c", ENDS["polite-loop"][0]]) == 124


@pytest.mark.parametrize(("output", "status", "told"), [
    (">/dev/full", "1", "tangram: error: a write failed: No space left on device; what went to "
                        "stdout or to a file is not complete\n"),
    ("| head -n 1 >/dev/null", "141", "")])
def test_a_run_whose_output_cannot_be_written_ends_and_is_no_success(
        cluster: LocalCluster, output: str, status: str, told: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'"$0" -m tangram_hpc run -- yes {output}; echo ${{PIPESTATUS[0]}}',
         sys.executable],
        env=os.environ | {"TANGRAM_ACCESS": str(cluster.access)}, text=True, capture_output=True,
        timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == (f"{status}\n", told)
