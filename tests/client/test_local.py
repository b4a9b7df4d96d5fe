"""The client against a real broker and worker on this machine, as a trainer's author uses it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import forked_start, forked_verb
from helpers.cluster_parts import broker_of, cut_link, environ_of, processes_of, workers_of

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.storage.access import Access, mark_ended, read_access, write_access

TANGRAM = [sys.executable, "-m", "tangram_hpc"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=4, mem_mib=4096, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def tangram(cluster: LocalCluster, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return forked_verb.tangram(*words, env={
        **os.environ, "TANGRAM_HOME": str(cluster.folder.parent.parent),
        "TANGRAM_ACCESS": str(cluster.access), **environ})


def one_line(told: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit status 2 and one clear line on stderr that holds these words."""
    assert told.returncode == 2, told
    assert told.stderr.count("\n") == 1 and told.stderr.startswith("tangram: error: "), told.stderr
    for word in words:
        assert word in told.stderr


def test_a_cluster_starts_beside_files_with_names_of_pythons_modules(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions find them, and only functions do."""
    for name in ("re", "random", "socket", "json", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "grading.py").write_text("def grade(): return 'good'")
    monkeypatch.chdir(tmp_path)

    def grade() -> Any:
        import grading  # type: ignore[import-not-found]

        return grading.grade()

    forked_start.uninstall()  # how a start of Python goes is what is tested
    with LocalCluster(cpus=1, mem_mib=1024, home=tmp_path / "home", http=True) as c:
        assert c.submit(["echo", "fine"]).result(timeout=60).text == "fine\n"
        assert c.submit(grade).result(timeout=60) == "good"


def test_a_package_of_links_puts_no_module_of_it_beside_those_of_others(tmp_path: Path) -> None:
    """As in a view of Spack, which has a link for each file."""
    whole = Path(tangram_hpc.__file__).parent
    shutil.copytree(whole, tmp_path / "tangram_hpc", copy_function=os.symlink,
                    ignore=shutil.ignore_patterns("__pycache__"))
    shown = subprocess.run([sys.executable, tmp_path / "tangram_hpc/start_module.py", "site"],
                           check=True, capture_output=True, text=True).stdout
    assert "sys.path = [" in shown
    assert f"'{whole}'" not in shown


# ---- submit ------------------------------------------------------------------------------------


def test_commands_return_output_exit_code_signal_and_timeout(cluster: LocalCluster) -> None:
    result = cluster.submit(["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in").result()
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"in", b"err\n")
    assert not result.ok
    assert cluster.submit("echo $A $TANGRAM_CPUS", env={"A": "x"}, cpus=2).result().text == "x 2\n"
    killed = cluster.submit("kill -9 $$").result()
    assert (killed.signal, killed.returncode) == (9, -9)
    late = cluster.submit(["sleep", "60"], timeout=0.2).result()
    assert late.state is tangram_hpc.ActionState.TIMEOUT
    with pytest.raises(tangram_hpc.ActionFailed, match="exit code 3"):
        result.check()
    future = cluster.submit(["true"], files={"a": b"1"}, name="mine")
    future.result()
    told = future.details
    assert told.state is tangram_hpc.ActionState.COMPLETED and told.node and told.cores
    assert told.act_s >= told.exec_s + told.queue_s and told.isolation != ""


def test_functions_return_values_and_raise_remote_errors(cluster: LocalCluster) -> None:
    base = 10
    assert cluster.submit(lambda x, y=1: base + x + y, 5, kwargs={"y": 2}).result() == 17
    array = np.arange(100_000, dtype=np.float64)  # over the inline limit, both ways
    back = cluster.submit(lambda a: a * 2, array).result()
    assert (back == array * 2).all()
    with pytest.raises(tangram_hpc.RemoteError, match="ZeroDivisionError"):
        cluster.submit(lambda: 1 / 0).result()
    with pytest.raises(tangram_hpc.UntrustedResult, match="trusted=True"):
        cluster.submit(lambda: {1, 2}).result()
    assert cluster.submit(lambda: {1, 2}, trusted=True).result() == {1, 2}
    with pytest.raises(tangram_hpc.ActionFailed):
        cluster.submit(lambda: os._exit(3)).result()


def test_futures_work_with_map_as_completed_wait_and_await(cluster: LocalCluster) -> None:
    assert list(cluster.map(pow, [2, 3, 4], [2, 2, 2])) == [4, 9, 16]
    futures = [cluster.submit(pow, 2, n) for n in range(20)]
    assert {f.result() for f in tangram_hpc.as_completed(futures, timeout=30)} == {
        2**n for n in range(20)}
    done, _ = concurrent.futures.wait(futures, timeout=30)
    assert len(done) == 20

    async def several() -> list[int]:
        got = await asyncio.gather(*(cluster.submit(pow, 3, n) for n in range(5)))
        async for future in tangram_hpc.as_completed_async([cluster.submit(pow, 3, 5)]):
            got.append(future.result())
        return got

    assert asyncio.run(several()) == [3**n for n in range(6)]


def test_cancel_ends_running_and_waiting_actions(cluster: LocalCluster) -> None:
    running = cluster.submit(["sleep", "60"], cpus=4)
    time.sleep(0.3)  # it must be first, whatever the placer thinks of its length
    waiting = cluster.submit(["true"], cpus=4)
    time.sleep(0.3)
    assert waiting.cancel() and running.cancel()
    for future in (waiting, running):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(30)
    assert not running.cancel()
    assert cluster.submit(["true"], cpus=4).result(30).ok  # the cores came back


def test_output_streams_while_it_runs(cluster: LocalCluster) -> None:
    pieces: list[tuple[float, int, bytes]] = []
    first = threading.Event()

    def on_output(stream: int, data: bytes) -> None:
        pieces.append((time.monotonic(), stream, data))
        first.set()

    future = cluster.submit("echo one; sleep 0.5; echo two >&2", on_output=on_output)
    assert first.wait(30) and not future.done()
    future.result(30)
    assert [(s, d) for _, s, d in pieces] == [(1, b"one\n"), (2, b"two\n")]


def test_an_on_output_that_raises_is_reported_and_not_called_again(
        cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[bytes] = []

    def on_output(stream: int, data: bytes) -> None:
        calls.append(data)
        raise KeyError("mine")

    result = cluster.submit("echo one; sleep 0.2; echo two", on_output=on_output).result(30)
    assert result.ok and calls == [b"one\n"]
    assert [record.getMessage().endswith("its on_output raised this and is called no more")
            for record in caplog.records] == [True] and "KeyError: 'mine'" in caplog.text


def test_a_session_keeps_files_and_runs_its_actions_in_order(cluster: LocalCluster) -> None:
    with cluster.session(mem="64M", name="t") as s:
        s.write("dir/a.txt", "hello").result()
        assert s.exec("cat dir/a.txt; echo more >> dir/a.txt").result().check().text == "hello"
        assert s.read("dir/a.txt").result() == b"hellomore\n"
        with pytest.raises(tangram_hpc.ActionFailed, match="no such file"):
            s.read("nowhere").result()
        order = [s.exec(f"echo {n} >> order") for n in range(5)]
        concurrent.futures.wait(order)
        assert s.exec("cat order").result().text.split() == ["0", "1", "2", "3", "4"]
    s.closed.result(30)
    with pytest.raises(tangram_hpc.SessionLost, match="closed"):
        s.submit(["true"]).result(30)

    async def together() -> str:
        async with cluster.session() as a:
            await a.write("x", b"y")
            return (await a.exec("cat x")).text

    assert asyncio.run(together()) == "y"


def test_infeasible_requests_are_refused_at_once(cluster: LocalCluster) -> None:
    with pytest.raises(tangram_hpc.InfeasibleRequest, match=r"cpus: 99 .* largest node has 4"):
        cluster.submit(["true"], cpus=99).result(30)
    with pytest.raises(tangram_hpc.InfeasibleRequest, match="mem: 999999"):
        cluster.session(mem=999999).opened.result(30)
    for wrong, named in (({"cpus": 0}, "cpus"), ({"mem": "much"}, "mem"),
                         ({"timeout": 0}, "timeout"), ({"cpus": (4, 1)}, "cpus"),
                         ({"stdin": 5}, "stdin")):
        with pytest.raises(tangram_hpc.InvalidInput, match=named):
            cluster.submit(["true"], **wrong)
    with pytest.raises(tangram_hpc.InvalidInput, match="empty"):
        cluster.submit([])


@pytest.mark.parametrize(("call", "told"), [
    (lambda c: c.submit(len, [], trusted="false"), "trusted: 'false' is neither True nor False"),
    (lambda c: c.submit(["true"], trusted="no"), "trusted: 'no' is neither"),
    (lambda c: c.submit(["true"], real_user="no"), "real_user: 'no' is neither"),
    (lambda c: c.direct(trusted="no"), "trusted: 'no' is neither"),
    (lambda c: c.submit(["true"], mem="1e99G"), "mem: '1e99G' is not an amount of memory"),
    (lambda c: c.session(mem=1 << 63), "mem: 9223372036854775808 is not an amount of memory"),
    (lambda c: c.call([], "score"), r"service: \[\] is not a text"),
    (lambda c: c.tool_returned([], "t", "search", 3), r"pool: \[\] is not a text"),
    (lambda c: c.tool_returned("p", "t", "search", 3, []), r"status: \[\] is not one of"),
    (lambda c: c.trajectory_ended({}, "t"), "pool: {} is not a text"),
    (lambda c: c.endpoint("e", cache="9"), "cache: '9' is not a whole number"),
    (lambda c: c.endpoint("e", cache_s="9"), "cache_s: '9' is not a number of seconds"),
    (lambda c: c.endpoint("e", single_flight="no"), "single_flight: 'no' is neither"),
    (lambda c: c.ask("info", timeout_s="9"), "timeout_s: '9' is not a number of seconds"),
    (lambda c: c.ask("info", timeout_s=float("inf")), "timeout_s: inf is not"),
    (lambda c: c.metrics(prefix=None), "prefix: None is not a text"),
    (lambda c: c.attach(name="s", token="t", timeout_s=None), "timeout_s: None is not"),
])
def test_what_an_argument_cannot_be_is_said_at_once(
        cluster: LocalCluster, call: Callable[[tangram_hpc.Client], object], told: str) -> None:
    with pytest.raises(tangram_hpc.InvalidInput, match=told):
        call(cluster)


@pytest.mark.parametrize(("wrong", "told"), [
    ({"home": ["x"]}, r"home: \['x'\] is not the path of a folder"),
    ({"job": 4711}, "job: 4711 is not a text"), ({"job": "lr=1,bs=2"}, "job: .* is not a job id"),
])
def test_home_and_job_of_a_cluster_are_checked(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(tangram_hpc.InvalidInput, match=told):
        LocalCluster(cpus=1, **wrong)


def test_a_cluster_that_was_not_started_says_what_to_write() -> None:
    with pytest.raises(AttributeError, match=r"no 'submit' before start\(\) .*`with LocalCluster"):
        LocalCluster(cpus=1).submit("true")


def test_times_of_a_port_are_checked(cluster: LocalCluster) -> None:
    with cluster.session() as session:
        for wrong in ({"timeout": "9"}, {"timeout": -1}, {"wait_s": None}):
            with pytest.raises(tangram_hpc.InvalidInput, match="is not a number of seconds"):
                session.connect(8000, **wrong)
        with pytest.raises(tangram_hpc.InvalidInput, match="wait_s: None"):
            session.forward(8000, wait_s=None)


def test_connect_takes_none_for_what_is_not_given(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `connect(job=args.job)` and `connect(tenant=os.environ.get(...))` do."""
    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    none: Any = None
    with tangram_hpc.connect(job=none, address=none, name=none, tenant=none) as client:
        assert client.submit("echo x").result().text == "x\n"


@pytest.mark.parametrize(("wrong", "told"), [
    ({"name": 3}, "name: 3 is not a text"), ({"job": 4711}, "job: 4711 is not a text"),
    ({"address": b"unix:/x"}, "address: b'unix:/x' is not a text"),
    ({"tenant": 3}, "tenant: 3 is not a text"), ({"name": "\udcff"}, "name: .* is not UTF-8"),
    ({"access": 3}, "access: 3 is not the path of a file"),
])
def test_arguments_of_connect_are_checked(
        cluster: LocalCluster, wrong: dict[str, object], told: str) -> None:
    """A name that was a number ended the client's thread, and was said after 30 s to be a job that
    has ended.
    """
    with pytest.raises(tangram_hpc.InvalidInput, match=told):
        tangram_hpc.connect(**{"access": cluster.access, **wrong})


@pytest.mark.parametrize(("wrong", "told"), [
    ({"placer": "foo"}, "placer 'foo' is not known"), ({"cpus": -1}, "`cpus`"),
    ({"cpus": "a"}, "`cpus`"), ({"mem_mib": -5}, "`mem_mib`"), ({"workers": 0}, "workers: 0 is"),
    ({"isolaton": "bwrap"}, "isolaton: .*did you mean `isolation`"),
    ({"home": "/proc/none"}, "home: cannot make /proc/none"),
    ({"scratch": "/proc/none"}, "did not start: scratch /proc/none"),
])
def test_a_wrong_argument_of_a_local_cluster_is_named(
        wrong: dict[str, Any], told: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(tangram_hpc.TangramError, match=told) as error:
        LocalCluster(**{"home": tmp_path, **wrong}).start()
    assert "\n" not in str(error.value) and time.monotonic() - began < 20


def test_a_client_in_a_forked_child_says_so_and_harms_nobody(cluster: LocalCluster) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        told = []
        for call in (lambda: cluster.submit("true"), lambda: cluster.ask("info"), cluster.session):
            try:
                call()
            except tangram_hpc.BrokerUnreachable as error:
                told.append("forked" in str(error))
        assert cluster.client is not None
        cluster.client.close()
        os.write(theirs, json.dumps(told).encode())
        os._exit(0)
    os.close(theirs)
    assert select.select([ours], [], [], 20)[0], "it hangs"
    assert json.loads(os.read(ours, 100)) == [True, True, True]
    os.waitpid(child, 0)
    assert cluster.submit("echo 1").result(20).text == "1\n"


def test_three_thousand_functions_return_the_right_values(cluster: LocalCluster) -> None:
    futures = [cluster.submit(lambda n: n * n, n) for n in range(3000)]
    assert [f.result(60) for f in futures] == [n * n for n in range(3000)]
    info = cluster.ask("info")
    assert info["cpus_free"] == 4 and info["mem_mib_free"] == 4096


# ---- faults ------------------------------------------------------------------------------------


def test_a_dead_clients_idle_session_ends_after_its_grace_and_a_working_one_after_its_work(
        tmp_path: Path) -> None:
    with LocalCluster(cpus=2, home=tmp_path, grace_s=1.5) as c:
        code = ("import tangram_hpc, time, sys\n"
                "c = tangram_hpc.connect()\n"
                "idle, works = c.session(), c.session(name='works')\n"
                "idle.opened.result(); works.opened.result()\n"
                "works.exec('sleep 5; echo end > reward', name='reward')\n"
                "c.submit(['sleep', '100'], name='loose'); c.ask('info')\n"
                "print('up', flush=True); time.sleep(100)")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                                 env={**os.environ, "TANGRAM_ACCESS": str(c.access)})
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        child.kill()
        child.wait()
        time.sleep(0.5)
        assert c.ask("info")["sessions"] == 2  # still there within the grace
        seen, deadline = {2}, time.monotonic() + 30
        while (left := c.ask("info")["sessions"]) and time.monotonic() < deadline:
            seen.add(left)
            time.sleep(0.05)
        info = c.ask("info")
        assert (info["sessions"], info["cpus_free"], seen) == (0, 2, {1, 2})
        told = json.loads(tangram(c, "acct", "-j", c.job, "--json").stdout)
        assert {a["name"]: a["state"] for a in told["actions"]} == {
            "reward": "COMPLETED", "loose": "CANCELLED"}  # no sandbox dies under its reward


def test_a_lost_connection_loses_and_repeats_no_action(tmp_path: Path) -> None:
    """The client's socket breaks in mid-flight: it comes back and nothing runs twice."""
    with LocalCluster(cpus=2, home=tmp_path) as c, c.session() as s:
        futures = [s.submit(f"echo {n} >> log; sleep 0.02") for n in range(40)]
        for _ in range(4):
            time.sleep(0.12)
            cut_link(c.client)
        concurrent.futures.wait(futures, timeout=60)
        assert all(f.result(1).ok for f in futures)
        assert s.exec("cat log").result().text.split() == [str(n) for n in range(40)]


def test_a_killed_worker_ends_or_repeats_its_actions(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, workers=2, home=tmp_path) as c:
        session = c.session()
        session.opened.result(30)
        once = [c.submit(["sleep", "3"], retries=0) for _ in range(2)]
        again = [c.submit(["sleep", "0.3"], retries=3) for _ in range(2)]
        time.sleep(0.5)
        victim = workers_of(c)[0]
        os.kill(victim.pid, signal.SIGKILL)
        ended = [f.exception(60) for f in once]
        assert sum(isinstance(e, tangram_hpc.ActionFailed) and "NODE_FAIL" in str(e)
                   for e in ended) == 1
        assert all(f.result(60).ok for f in again)
        states = {n["name"]: n["state"] for n in c.ask("nodes")["nodes"]}
        assert sorted(states.values()) == ["DOWN", "UP"]


def test_the_last_worker_is_started_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]
                                         ) -> None:
    """With it gone nothing could ever run; a session that was there is lost, and told so."""
    with LocalCluster(cpus=1, home=tmp_path) as c:
        session = c.session()
        assert session.exec("true").result(30).ok
        again, after = c.submit(["sleep", "0.5"], retries=1), c.submit(["echo", "after"])
        time.sleep(0.3)
        for _ in range(2):
            worker = workers_of(c)[0]
            os.kill(worker.pid, signal.SIGKILL)
            assert again.result(60).ok and after.result(60).text == "after\n"
            with pytest.raises(tangram_hpc.TangramError):
                session.exec("true").result(60)
            assert workers_of(c)[0].pid != worker.pid
            session, again = c.session(), c.submit(["true"])
            session.opened.result(60)
        kept = workers_of(c)
    assert [child.returncode for child in kept] == [0]
    assert capfd.readouterr().err.count("is left") == 2


def test_workers_that_end_at_once_are_not_started_again(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        monkeypatch.setitem(environ_of(c), "TANGRAM_SCRATCH", "/proc/nowhere")
        waits = c.submit(["sleep", "100"], retries=5)
        os.kill(workers_of(c)[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        said = ""
        while "not started again" not in said and time.monotonic() < deadline:
            time.sleep(0.1)
            said += capfd.readouterr().err
        with pytest.raises(tangram_hpc.BrokerUnreachable,
                           match=r"its workers ended: .*/proc/nowhere.*log\)"):
            waits.result(30)
    assert said.count("starting anew") == 3 and said.count("it is not started again") == 1


def test_a_broker_that_ends_says_so_and_leaves_a_tombstone(tmp_path: Path) -> None:
    c = LocalCluster(cpus=1, home=tmp_path).start()
    future = c.submit(["sleep", "100"])
    os.kill(broker_of(c).pid, signal.SIGTERM)
    assert isinstance(future.exception(30), tangram_hpc.BrokerUnreachable)
    for child in processes_of(c):
        assert child.wait(30) == 0
    with pytest.raises(tangram_hpc.AccessError, match="has ended"):
        tangram_hpc.connect(c.access)
    c.close()


@pytest.mark.parametrize("start", [
    "os.closerange(0, 3)", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"])
def test_it_starts_without_standard_streams_and_with_signals_ignored_or_blocked(
        tmp_path: Path, start: str) -> None:
    said = tmp_path / "said"
    code = (f"import os, pathlib, signal, sys\n{start}\nimport tangram_hpc\n"
            "with tangram_hpc.LocalCluster(cpus=1, home=sys.argv[1]) as c:\n"
            "    text = c.submit('kill -9 $$').result(60).reason\n"
            "pathlib.Path(sys.argv[2]).write_text(text)\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(said)], timeout=120)
    assert said.exists() and "SIGKILL" in said.read_text()


def test_all_processes_end_with_a_killed_parent(tmp_path: Path, short_folder: Path) -> None:
    code = ("import tangram_hpc, time\n"
            "c = tangram_hpc.LocalCluster(cpus=1).start()\n"
            "c.submit(['sleep', '4242'])\n"
            "time.sleep(0.5); print('up', flush=True); time.sleep(100)")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                             env={**os.environ, "TANGRAM_HOME": str(tmp_path / "home"),
                                  "TANGRAM_SCRATCH": str(short_folder)})
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    child.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        alive = subprocess.run(["pgrep", "-f", "sleep 4242"], capture_output=True, check=False)
        if alive.returncode and not list(short_folder.iterdir()):
            return
        time.sleep(0.1)
    raise AssertionError(f"left: {alive.stdout!r} {list(short_folder.iterdir())}")


def test_inside_a_slurm_job_the_scratch_is_the_jobs(
        short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's epilog finds the folders of a killed job by the number in their names."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_TMPDIR", str(short_folder))
    monkeypatch.delenv("TANGRAM_SCRATCH", raising=False)
    with LocalCluster(cpus=1, home=tmp_path):
        made = {folder.name.rpartition("-")[0] for folder in short_folder.iterdir()}
    assert made == {"tangram-broker-job4711", "tangram-worker-job4711"}
    assert list(short_folder.iterdir()) == []


# ---- the mouth ---------------------------------------------------------------------------------


def test_tangram_run_has_the_output_folder_and_status_of_srun(cluster: LocalCluster) -> None:
    told = tangram(cluster, "run", "-c", "2", "--", "sh", "-c",
                   "echo out $TANGRAM_CPUS; pwd; echo err >&2; exit 7")
    assert (told.returncode, told.stdout, told.stderr) == (7, f"out 2\n{os.getcwd()}\n", "err\n")
    assert tangram(cluster, "run", "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert tangram(cluster, "run", "-t", "0.2", "--", "sleep", "9").returncode == 124
    assert tangram(cluster, "run", "--", "no-such-program").returncode == 127
    much = tangram(cluster, "run", "--", "sh", "-c", "yes | head -c 2000000")
    assert much.returncode == 0 and len(much.stdout) == 1 << 20
    assert f"{2_000_000 - (1 << 20)} bytes of its output were not printed" in much.stderr


def test_run_is_cancelled_by_interrupt(cluster: LocalCluster, tmp_path: Path) -> None:
    started = tmp_path / "started"  # free CPUs would not tell: an earlier action may still hold one
    child = subprocess.Popen(
        [*TANGRAM, "run", "--", "sh", "-c", f"echo > {started}; exec sleep 777"],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TANGRAM_ACCESS": str(cluster.access)})
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "cancelled" in err
    while cluster.ask("info")["cpus_free"] < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert cluster.ask("info")["cpus_free"] == 4


def test_run_under_nohup_outlives_its_terminal(cluster: LocalCluster, tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    waits = f"echo > {started}; until [ -e {go} ]; do sleep 0.05; done; echo told"
    child = subprocess.Popen(
        ["nohup", *TANGRAM, "run", "--", "sh", "-c", waits],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TANGRAM_ACCESS": str(cluster.access)})
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    go.touch()
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (0, "told\n"), err


def test_acct_shows_every_action(cluster: LocalCluster) -> None:
    name = f"acct-{time.monotonic_ns()}"
    futures = [cluster.submit(["true"], name=name) for _ in range(50)]
    cluster.submit("exit 2", name=name).result()
    concurrent.futures.wait(futures)
    told = json.loads(tangram(cluster, "acct", "-j", cluster.job, "--json").stdout)
    rows = [a for a in told["actions"] if a["name"] == name]
    assert len(rows) == 51 and sum(a["state"] == "COMPLETED" for a in rows) == 50
    assert all(a["node"] and a["end_ns"] >= a["start_ns"] >= a["submit_ns"] for a in rows)
    table = tangram(cluster, "acct", "-P", "-n", "-s", "FAILED", "-o", "JobName,State,ExitCode")
    assert f"{name}|FAILED|2:0" in table.stdout.splitlines()
    wrong = tangram(cluster, "acct", "-s", "failed,DONE")
    assert wrong.returncode == 2
    assert "--state: 'DONE' is not the state of an action; choose from" in wrong.stderr
    lines = tangram(cluster, "acct").stdout.splitlines()
    assert "JobID" in lines[0]
    assert all(line.split()[0].startswith(f"{cluster.job}.") for line in lines[2:]), "cut short"
    assert tangram(cluster, "acct", "-n", "-o", "JobID%9").stdout.split()[0] == "local-20+"
    assert "nodes" in json.loads(tangram(cluster, "info", "--json").stdout)


def test_bad_input_is_one_line_and_status_2(cluster: LocalCluster, tmp_path: Path) -> None:
    one_line(tangram(cluster, "run", "-c", "99", "--", "true"), "cpus: 99", "largest node has 4")
    one_line(tangram(cluster, "run", "--", "true", TANGRAM_ACCESS=str(tmp_path / "no.json")),
             "no.json", "No such file")
    known = read_access(cluster.access)
    open_file = tmp_path / "open.json"
    write_access(open_file, known)
    open_file.chmod(0o644)
    one_line(tangram(cluster, "run", "--", "true", TANGRAM_ACCESS=str(open_file)), "0644", "chmod")
    wrong = tmp_path / "wrong.json"
    write_access(wrong, Access(known.job, known.addresses, b"x" * 32, known.store))
    one_line(tangram(cluster, "run", "--", "true", TANGRAM_ACCESS=str(wrong)), "key is wrong")
    ended = tmp_path / "ended.json"
    mark_ended(ended, "77", "2026-01-01T00:00:00")
    one_line(tangram(cluster, "run", "--", "true", TANGRAM_ACCESS=str(ended)), "77 has ended")
    one_line(tangram(cluster, "broker", TANGRAM_GRACE_S="soon"), "grace_s", "TANGRAM_GRACE_S")
    one_line(tangram(cluster, "run", "-c", "x", "--", "true"), "--cpus-per-task")
    one_line(tangram(cluster, "acct", "-j", "nowhere"), "nowhere")
    one_line(tangram(cluster, "acct", "-o", "Colour"), "Colour")
    one_line(tangram(cluster, "demo", "--problems", "0"), "--problems")
    assert cluster.submit(["true"]).result(30).ok  # and the broker lives on


def test_a_dead_brokers_access_file_is_reported(cluster: LocalCluster, tmp_path: Path) -> None:
    """A broker that was killed leaves no tombstone: the line says that nobody answers."""
    stale = tmp_path / "stale.json"
    write_access(stale, Access("77", ("unix:" + str(tmp_path / "gone.sock"), "tcp:127.0.0.1:9"),
                               b"x" * 32, ""))
    told = tangram(cluster, "run", "--", "true", TANGRAM_ACCESS=str(stale))
    one_line(told, "job 77", "ended")


def test_info_names_the_enforcement_of_actions(cluster: LocalCluster) -> None:
    future = cluster.submit(["true"], trusted=True)
    assert future.result().ok and future.details is not None
    rows = [line.split() for line in tangram(cluster, "info").stdout.splitlines()]
    (row,) = (row for row in rows if future.details.node in row[:1])
    assert future.details.enforcement and future.details.enforcement in row


@pytest.mark.parametrize("field", ["bind", "scratch"])
def test_a_broker_that_cannot_listen_says_why_and_leaves_nothing(
        tmp_path: Path, short_folder: Path, field: str) -> None:
    scratch = short_folder / ("x" * 110 if field == "scratch" else "x")  # too long for a socket
    scratch.mkdir()
    words = ["--bind", "203.0.113.7"] if field == "bind" else []  # nobody has this address
    told = forked_verb.tangram("broker", "--job", "j", *words, env={
        **os.environ, "TANGRAM_HOME": str(tmp_path / "home"), "TANGRAM_SCRATCH": str(scratch)})
    one_line(told, field)
    assert not list(scratch.iterdir())
