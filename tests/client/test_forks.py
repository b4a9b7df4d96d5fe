"""A process that forks keeps all that it owns, and its children can have a client of their own.

pytest-xdist, torch's DataLoader and `multiprocessing` fork the process that holds the cluster or
the client. Whatever such a child does with its copies of them, nothing of the parent's may end.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_parts import processes_of, until

import tangram_hpc
from tangram_hpc.app.local import LocalCluster
from tangram_hpc.errors import BrokerUnreachable, InvalidInput, TangramError

DEADLINE_S = 60


def in_child(work: Callable[[], Any]) -> str:
    """What this returned or raised in the child of a fork, which must end by itself."""
    heard, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - the parent judges it
            said = f"{type(error).__name__}: {error}"
        os.write(told, said.encode())
        os._exit(0)
    os.close(told)
    try:
        ready = select.select([heard], [], [], DEADLINE_S)[0]
        if not ready:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert ready, "the child hung"
        return os.read(heard, 65536).decode()
    finally:
        os.close(heard)


def script(text: str, home: Path) -> subprocess.Popen[str]:
    """A process of its own that runs this, its output piped. From 3.12 on Python warns of each fork
    beside threads, and those are what is tested here.
    """
    environ = {**os.environ, "TANGRAM_HOME": str(home)}
    quiet = "ignore:This process (pid=:DeprecationWarning"
    return subprocess.Popen([sys.executable, "-W", quiet, "-c", textwrap.dedent(text)], env=environ,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), grace_s=0.5) as c:
        yield c


def works(cluster: LocalCluster) -> bool:
    return cluster.submit(["echo", "fine"]).result(DEADLINE_S).text == "fine\n"


# ---- the parent keeps what is its own ----------------------------------------------------------


def test_a_child_that_leaves_the_block_ends_nothing_of_its_parents(tmp_path: Path) -> None:
    """By the block's end, by `close`, or by the collector."""
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        client, parts = cluster.client, [child.pid for child in processes_of(cluster)]
        assert client is not None
        with cluster.session() as s:
            s.write("kept", "files")

            def leaves() -> str:
                cluster.__exit__(None, None, None)
                cluster.close()
                s.__exit__(None, None, None)
                client.close()
                gc.collect()
                return "left"

            assert in_child(leaves) == "left"
            assert all(alive(pid) for pid in parts), "a part of the parent's cluster was ended"
            assert works(cluster) and s.read("kept").result(DEADLINE_S) == b"files"
            assert in_child(lambda: in_child(leaves)) == "left"  # a child's child
            assert works(cluster)


def test_a_child_that_exits_inside_the_block_ends_nothing_of_its_parents(tmp_path: Path) -> None:
    """`sys.exit` leaves every block, runs what atexit holds, and collects; `os._exit` does not."""
    parent = script("""
        import os, sys, time, tangram_hpc
        with tangram_hpc.LocalCluster(cpus=2) as c, c.session() as s:
            future = c.submit(["sleep", "300"])
            for leave in (sys.exit, os._exit):
                pid = os.fork()
                if not pid:
                    leave(7)
                end = time.monotonic() + 30
                while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    assert time.monotonic() < end, "the child hung"
                    time.sleep(0.01)
                assert os.waitstatus_to_exitcode(ended[1]) == 7
                print(c.submit(["echo", "fine"]).result(30).text, end="")
            assert s.exec("true").result(30).state.value == "COMPLETED"
            assert future.cancel()
        """, tmp_path)
    try:
        out, err = parent.communicate(timeout=2 * DEADLINE_S)
    finally:
        os.killpg(parent.pid, signal.SIGKILL) if parent.poll() is None else None
    assert (parent.returncode, out, err) == (0, "fine\nfine\n", "")


def test_a_child_that_lives_on_does_not_keep_its_parents_cluster_alive(tmp_path: Path) -> None:
    """The cluster's parts end with the process that started them, also when that is killed."""
    parent = script("""
        import os, time, tangram_hpc
        with tangram_hpc.LocalCluster(cpus=1) as c:
            child = os.fork()
            if not child:
                time.sleep(300)
            print(child, *(part.pid for part in c._children), flush=True)
            time.sleep(300)
        """, tmp_path)
    assert parent.stdout is not None
    assert select.select([parent.stdout], [], [], DEADLINE_S)[0]
    child, *parts = (int(word) for word in parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait(DEADLINE_S)
        assert alive(child)
        until(lambda: not any(alive(pid) for pid in parts), "the cluster outlives its owner")
        assert alive(child)
    finally:
        for pid in (child, *parts):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_child_that_lives_on_does_not_keep_its_parents_session_open(cluster: LocalCluster,
                                                                     tmp_path: Path) -> None:
    """The broker sees that a client is gone although a child of it has a copy of its socket."""
    before = cluster.ask("info")["sessions"]
    parent = script(f"""
        import os, time, tangram_hpc
        c = tangram_hpc.connect({str(cluster.access)!r})
        with c.session() as s:
            child = os.fork()
            if not child:
                time.sleep(300)
            print(child, flush=True)
            time.sleep(300)
        """, tmp_path)
    assert parent.stdout is not None
    assert select.select([parent.stdout], [], [], DEADLINE_S)[0]
    child = int(parent.stdout.readline())
    try:
        assert cluster.ask("info")["sessions"] == before + 1
        parent.kill()
        parent.wait(DEADLINE_S)
        until(lambda: cluster.ask("info")["sessions"] == before, "its session stays")
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


# ---- what a child may do -----------------------------------------------------------------------


def test_every_use_of_an_inherited_client_is_one_error_whose_remedy_works(cluster: LocalCluster
                                                                          ) -> None:
    """It names both processes; what it says to call is called here, in the child."""
    uses: dict[str, Callable[[], Any]] = {
        "submit": lambda: cluster.submit(["true"]),
        "function": lambda: cluster.submit(pow, 2, 2),
        "map": lambda: list(cluster.map(pow, [2], [2])),
        "session": lambda: cluster.session(),
        "ask": lambda: cluster.ask("info"),
        "slot": lambda: cluster.endpoint("api").slot().__enter__(),
        "call": lambda: cluster.call("service", "score"),
        "shutdown": lambda: cluster.shutdown_broker(),
        "start": lambda: cluster.start(),
    }
    cluster.register_endpoint("api", concurrency=1)

    def child() -> str:
        for name, use in uses.items():
            try:
                use()
            except TangramError as error:
                said = str(error)
            else:
                return f"{name} was not refused"
            if f"process {os.getppid()}" not in said or f"process {os.getpid()}" not in said:
                return f"{name}: {said}"
            remedy = re.search(r"tangram_hpc\.connect\('[^']+'\)", said)
            if remedy is None:
                return f"{name} names no remedy: {said}"
        with eval(remedy[0], {"tangram_hpc": tangram_hpc}) as mine:
            return mine.submit(["echo", "mine"]).result(DEADLINE_S).text

    assert in_child(child) == "mine\n"
    assert works(cluster)


def test_open_futures_fail_at_once_in_a_child_and_go_on_in_its_parent(
        cluster: LocalCluster) -> None:
    """Also what another thread of the parent waits for, whose lock that thread may hold."""
    with cluster.session() as s:
        future, waits = s.exec("sleep 300"), s.exec("echo next")
        opening = cluster.session(mem="1M")
        opening.opened.result(DEADLINE_S)
        thread = threading.Thread(target=lambda: waits.result(DEADLINE_S))
        thread.start()

        def child() -> str:
            said = set()
            for each in (future, waits, opening.closed):
                try:
                    each.result()
                except BrokerUnreachable as error:
                    said.add(str(error))
            done = all(each.done() for each in tangram_hpc.as_completed([future, waits]))
            future.cancel()
            opening.close()
            s.close()
            return f"{len(said)} {done}"

        assert in_child(child) == "1 True"
        assert future.cancel() and waits.result(DEADLINE_S).text == "next\n"
        thread.join(DEADLINE_S)
        assert not opening.closed.done()
        opening.close()


def test_a_terminal_ends_at_once_in_a_child_and_goes_on_in_its_parent(
        cluster: LocalCluster) -> None:
    with cluster.session(trusted=True) as s, s.pty("stty raw -echo; echo up; cat") as pty:
        seen = b""
        while b"up" not in seen:
            seen += pty.read(DEADLINE_S)
        assert in_child(lambda: pty.read(5.0)) == "b''"
        pty.write(b"still here")
        while b"still here" not in seen:
            seen += pty.read(DEADLINE_S)


def dataset_worker(indices: Any, results: Any) -> None:
    """As a DataLoader's worker: begins, then serves indices until there is none."""
    with tangram_hpc.connect() as mine:
        while (index := indices.get()) is not None:
            results.put((index, mine.submit(pow, 2, index).result(DEADLINE_S)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_workers_connect_without_arguments(
        cluster: LocalCluster, method: str) -> None:
    """`connect()` finds the cluster of the process that started them, without an argument."""
    context = multiprocessing.get_context(method)
    indices, results = context.Queue(), context.Queue()
    workers = [context.Process(target=dataset_worker, args=(indices, results), daemon=True)
               for _ in range(2)]
    for worker in workers:
        worker.start()
    for index in [*range(8), None, None]:
        indices.put(index)
    assert dict(results.get(timeout=DEADLINE_S) for _ in range(8)) == {n: 2**n for n in range(8)}
    for worker in workers:
        worker.join(DEADLINE_S)
        assert worker.exitcode == 0
    assert works(cluster)


SCRIPT = """
import dataclasses, multiprocessing, sys
from tangram_hpc import LocalCluster, connect

@dataclasses.dataclass
class Setting:
    factor: int

def added(call, setting):
    return call() + setting.factor

def two():
    return 2

def work(way):
    with connect() as client, client.direct() as direct:
        assert direct.call(added, two, Setting(1)) == 3
        result = client.submit(added, two, Setting(5)).result()
        setting = client.submit(dataclasses.replace, Setting(1), kwargs={"factor": 3},
                                trusted=True).result()
        sys.stdout.write(f"{way}: {result}, {setting == Setting(3)}\\n")

if __name__ == "__main__":
    with LocalCluster(cpus=1):
        work("here")
        for way in ("fork", "spawn", "forkserver"):
            child = multiprocessing.get_context(way).Process(target=work, args=(way,))
            child.start()
            child.join()
"""


def test_functions_and_objects_of_a_script_are_sent_from_its_children_too(tmp_path: Path) -> None:
    """In a child that is not forked, the script's module has another name: `__mp_main__`."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False,
                          timeout=DEADLINE_S, env={**os.environ, "TANGRAM_HOME": str(tmp_path)})
    assert done.stdout.splitlines() == [
        f"{way}: 7, True" for way in ("here", "fork", "spawn", "forkserver")], done.stderr


def test_forks_while_other_threads_submit(cluster: LocalCluster) -> None:
    """A lock that is held at the instant of the fork holds nobody in the child."""
    over = threading.Event()
    done: list[int] = []

    def submits() -> None:
        while not over.is_set():
            done.append(cluster.submit(pow, 2, 3).result(DEADLINE_S))

    threads = [threading.Thread(target=submits) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            assert "was forked" in in_child(lambda: cluster.submit(["true"]))
    finally:
        over.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert done and set(done) == {8}


def test_neither_client_nor_cluster_is_sent_to_another_process(cluster: LocalCluster) -> None:
    """`spawn` would pickle them: the error says what to do there instead."""
    with cluster.session() as s:
        for each in (cluster, cluster.client, s):
            with pytest.raises(InvalidInput, match=r"another process; call tangram_hpc\.connect\("):
                pickle.dumps(each)


def test_connect_finds_the_latest_cluster_and_then_the_one_before(
        cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that closes its copy changes nothing of that; what somebody else set stays."""
    def job() -> str:
        with tangram_hpc.connect() as mine:
            return mine.job

    monkeypatch.setenv("TANGRAM_ACCESS", str(cluster.access))
    with LocalCluster(cpus=1, home=tmp_path) as second:
        assert job() == second.job
        assert in_child(second.close) == "None"
        assert job() == in_child(job) == second.job
    assert job() == cluster.job
    second.start()
    monkeypatch.setenv("TANGRAM_ACCESS", "/set/meanwhile")
    second.close()
    assert os.environ["TANGRAM_ACCESS"] == "/set/meanwhile"


def test_the_fork_recipe_of_the_docs_works(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "GETTING_STARTED.md").read_text()
    section = text.partition("### Processes that fork")[2]
    recipe = tmp_path / "recipe.py"
    recipe.write_text(section.partition("```python\n")[2].partition("```")[0])
    environ = {**os.environ, "TANGRAM_HOME": str(tmp_path)}
    told = subprocess.run([sys.executable, str(recipe)], env=environ, cwd=tmp_path, text=True,
                          capture_output=True, timeout=2 * DEADLINE_S, check=False)
    assert (told.returncode, told.stdout, told.stderr) == (0, "[2, 4, 8]\n", "")
