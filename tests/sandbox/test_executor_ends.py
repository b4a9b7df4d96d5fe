"""Functions, and the ends of things: what dies, is killed or closed leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.executor_rig import Rig, alive, until
from helpers.ordinary_user import ordinary_user

from tangram_hpc.app.restarts import BROKEN_STATUS
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ScratchLost
from tangram_hpc.protocol.message import INLINE_MAX
from tangram_hpc.protocol.payload import (
    ErrorReturn,
    ExecCall,
    FunctionCall,
    Stored,
)
from tangram_hpc.protocol.value import decode_value, encode_value
from tangram_hpc.resources import memory, process_tree
from tangram_hpc.resources.cpu import affinity
from tangram_hpc.sandbox.files import scratch, small_copy


class Opaque:
    def __init__(self) -> None:
        self.x = 1


def test_functions_return_values_arrays_and_results_of_coroutines(rig: Rig) -> None:
    assert rig.value(lambda a, b: a + b, 2, 3) == 5
    nested = {"t": (1, [2.5, None]), 3: b"x", "big": 1 << 80, "neg": -(1 << 70), "e": ()}
    assert rig.value(lambda: nested) == nested
    array = rig.value(lambda n: np.arange(n, dtype="f4").reshape(2, -1)[:, ::2], 40_000)
    assert array.dtype == np.float32 and array.shape == (2, 10_000)
    assert array.flags.writeable and array[1, 1] == 20_002
    assert type(rig.value(lambda: np.float64(2.5))) is np.float64

    async def later(x: int) -> int:
        await asyncio.sleep(0.01)
        return x * 2

    assert rig.value(later, 21) == 42
    here = rig.value(os.getcwd)
    assert here.startswith(str(rig.scratch.resolve()))


def test_a_function_that_raises_fails_with_its_error_and_trace(rig: Rig) -> None:
    def fails() -> None:
        print("said before")
        raise KeyError("it")

    outcome, back, _ = rig.function(fails)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("KeyError")
    assert isinstance(back, ErrorReturn) and (back.kind, back.text) == ("KeyError", "'it'")
    assert "said before" in back.trace and "raise KeyError" in back.trace
    assert "runner.py" not in back.trace
    outcome, back, _ = rig.function(sys.exit, 3)
    assert (outcome.state, back.kind) == (ActionState.FAILED, "SystemExit")

    class Local:
        pass

    outcome, back, _ = rig.function(Local)
    assert back.kind == "UntrustedResult" and "Local" in back.text and "trusted=True" in back.text
    outcome, back, _ = rig.function(lambda: {(1, 2): 3})
    assert back.text.startswith("the result holds a dict with a key of type tuple, which only")
    outcome, back, _ = rig.function(lambda: {1, 2}, pickled=True)
    assert back.pickled and pickle.loads(back.data) == {1, 2}
    lease = rig.begin(FunctionCall("0" * 64, b""), Kind.FUNCTION)
    outcome = rig.end(lease)[0]
    assert outcome.state is ActionState.FAILED and "no payload" in outcome.reason


def test_a_child_that_a_function_forks_does_not_answer_for_it(rig: Rig) -> None:
    """`os.fork` with `sys.exit` in the child is what daemons and old test harnesses do."""
    def forks(leave: Any) -> int:
        child = os.fork()
        if child == 0:
            return leave()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fails() -> None:
        forks(lambda: {}["in the child"])
        raise ValueError("in the parent")

    for leave, status in ((lambda: sys.exit(7), 7), (sys.exit, 0), (lambda: sys.exit("text"), 1),
                          (lambda: 5, 0), (lambda: {}["absent"], 1)):
        assert rig.value(lambda leave=leave: forks(leave)) == status
    _, back, _ = rig.function(fails)
    assert back.kind == "ValueError" and "KeyError: 'in the child'" in back.trace


def test_a_runner_that_dies_fails_its_action_and_is_replaced(rig: Rig) -> None:
    outcome, back, _ = rig.function(os._exit, 9)
    assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, 9)
    assert outcome.reason == "the runner process ended (exit code 9)"
    import faulthandler

    outcome, back, _ = rig.function(faulthandler._sigsegv)  # type: ignore[attr-defined]
    assert outcome.signal == signal.SIGSEGV and "SIGSEGV" in outcome.reason
    assert back.kind == "RunnerDied" and "Segmentation fault" in back.trace
    assert rig.value(lambda: 1) == 1

    def hangs() -> None:
        os.closerange(3, 100)
        time.sleep(1000)

    outcome, _, _ = rig.function(hangs)
    assert outcome.state is ActionState.FAILED
    assert rig.value(lambda: 2) == 2


def test_a_function_over_its_timeout_ends_with_the_processes_it_started(
        rig: Rig, tmp_path: Path) -> None:
    outcome, _, _ = rig.function(time.sleep, 1000, timeout_ns=100_000_000)
    assert outcome.state is ActionState.TIMEOUT and "0.1 s" in outcome.reason
    note = tmp_path / "pid"

    def starts(path: str) -> None:
        with open(path, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
        if path.endswith("hang"):
            time.sleep(1000)

    hang = tmp_path / "hang"
    lease = rig.begin_function(starts, str(hang))
    rig.until(lambda: hang.exists() and hang.read_text() != "")
    rig.loop.call_soon(rig.executor.kill, lease, ActionState.CANCELLED, "")
    assert rig.end(lease)[0].state is ActionState.CANCELLED
    assert not alive(int(hang.read_text()))
    _, _, clean = rig.function(starts, str(note))
    assert clean and not alive(int(note.read_text())), "it is told when its children have ended"


def test_payloads_are_read_from_the_store_and_a_missing_one_is_named(rig: Rig) -> None:
    data = os.urandom(INLINE_MAX * 2)
    lease = rig.begin(ExecCall(argv=("cat",), stdin=data), Kind.EXEC, store=True)
    assert rig.end(lease)[1].stdout == data
    lease = rig.begin(Stored("0" * 64, 5), Kind.EXEC)
    assert "no payload" in rig.end(lease)[0].reason


def test_a_killed_init_fails_its_action_and_the_session_keeps_its_files(
        rig: Rig, tmp_path: Path) -> None:
    rig.open()
    note = tmp_path / "pid"
    text = f"echo kept >kept; setsid sleep 1000 & echo $! $PPID >{note}; wait"
    lease = rig.begin(ExecCall(shell=text), Kind.EXEC, session=1)
    rig.until(lambda: note.exists() and len(note.read_text().split()) == 2)
    child, init = map(int, note.read_text().split())
    os.kill(init, signal.SIGKILL)
    outcome = rig.end(lease)[0]
    assert outcome.state is ActionState.FAILED
    assert outcome.reason == "the sandbox's init ended (signal 9, SIGKILL)"
    assert not alive(child)
    # the session lives on with its files, until this happens too often
    assert rig.shell("cat kept", session=1)[1].stdout == b"kept\n"
    for _ in range(20):
        if 1 in rig.down:
            break
        rig.shell("kill -9 $PPID", session=1)
    assert "SIGKILL" in rig.down[1]


def test_a_session_that_is_closed_while_its_files_are_copied_ends_at_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of an image or of an origin's files may take minutes, and nobody wants it any more."""
    note, slow, programs = tmp_path / "pid", tmp_path / "slow", tmp_path / "bin"
    programs.mkdir()
    (programs / "cp").write_text(
        f'#!/bin/sh\n[ -e {slow} ] || exec {shutil.which("cp")} "$@"\n'
        f"echo $$ >{note}.new; mv {note}.new {note}; exec sleep 1000\n")
    (programs / "cp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    rig = Rig(tmp_path / "rig")
    try:
        rig.open(1, trusted=True)
        rig.shell(f"seq {small_copy.ENTRIES_MAX + 1} | xargs touch", session=1)
        slow.touch()
        rig.loop.call_soon(rig.executor.open_session, SessionSpec(2, origin=1, trusted=True))
        rig.until(note.exists)
        rig.loop.call_soon(rig.executor.close_session, 2)
        rig.until(lambda: 2 in rig.down)
        assert rig.down[2] == ""
        until(lambda: not alive(int(note.read_text())), "the copy has ended")
        assert rig.shell("ls | wc -l", session=1)[1].stdout.split() == [b"65"]
    finally:
        rig.close()
    assert rig.processes() == []


def test_a_killed_fork_server_fails_running_actions_and_is_replaced(
        rig: Rig, tmp_path: Path) -> None:
    rig.open()
    lease = rig.begin(ExecCall(argv=("sleep", "1000")), Kind.EXEC, session=1)
    rig.until(lambda: ("started", lease) in rig.events)
    os.kill(rig.executor.fork_server_pid, signal.SIGKILL)
    assert rig.end(lease)[0].state is ActionState.FAILED
    assert rig.exec("true")[0].state is ActionState.COMPLETED


def test_a_fork_server_that_removed_its_folder_as_it_ended_is_replaced(
        rig: Rig, tmp_path: Path) -> None:
    """Also if the worker learns only then that an action has failed: nobody else removed it."""
    [root] = rig.scratch.iterdir()
    call = f"echo $$ > {tmp_path}/pid; echo > {tmp_path}/up; exit 3"
    lease = rig.begin(ExecCall(shell=call), Kind.EXEC)
    rig.until(lambda: ("started", lease) in rig.events)
    until((tmp_path / "up").exists, "the command runs")
    until(lambda: not alive(int((tmp_path / "pid").read_text())), "it has failed")
    time.sleep(0.2)  # its init says so
    os.kill(rig.executor.fork_server_pid, signal.SIGTERM)
    until(lambda: not root.exists(), "the folder is gone")
    assert rig.end(lease)[0].state is ActionState.FAILED
    assert rig.exec("true")[0].state is ActionState.COMPLETED


WORKER = """
import asyncio, os, sys
from tangram_hpc.resources.cpu import affinity
from tangram_hpc.sandbox.manager.sandbox_executor import SandboxExecutor
from tangram_hpc.storage.store import FolderStore
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.protocol.message import StartAttempt
from tangram_hpc.protocol.payload import ExecCall, FunctionCall, encode
import cloudpickle, pickle, time
class Reports:
    def __getattr__(self, name): return lambda *args, **more: None
async def main():
    store = FolderStore(sys.argv[1] + "/store")
    executor = SandboxExecutor(Reports(), store, sys.argv[1] + "/scratch", affinity.usable())
    executor.open_session(SessionSpec(1, trusted=True))
    text = "trap '' TERM; setsid sleep 1000 & echo x >%s/up; while :; do sleep 1000; done"
    call = ExecCall(shell=text % sys.argv[1])
    executor.start(StartAttempt(1, Action(id=1, name="x", session=1), (0,)), encode(call))
    def hang(path):
        open(path, "w").close()
        while True: pass
    digest = store.put(cloudpickle.dumps(hang))
    call = FunctionCall(digest, pickle.dumps(((sys.argv[1] + "/up2",), {})))
    executor.start(StartAttempt(2, Action(id=2, name="x", kind=Kind.FUNCTION), (0,)), encode(call))
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_an_interrupt_of_the_fork_server_and_its_processes_ends_functions_only(
        rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    """`scancel --signal=INT` sends it to all processes of a step."""
    rig.shell("true")  # an init waits for the next command
    server = rig.executor.fork_server_pid
    rig.open()
    lease = rig.begin(ExecCall(argv=("sh", "-c", "until [ -e go ]; do sleep 0.01; done")),
                      Kind.EXEC, session=1)
    rig.until(lambda: ("started", lease) in rig.events)
    for pid in (server, *process_tree.children(server)):
        os.kill(pid, signal.SIGINT)
    assert rig.shell("echo on")[1].stdout == b"on\n"
    rig.file("go", b"")
    assert rig.end(lease)[0].state is ActionState.COMPLETED
    assert rig.executor.fork_server_pid == server

    def interrupted() -> str:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        return "nothing"

    assert rig.value(interrupted) == "KeyboardInterrupt"
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_worker_leaves_no_process_and_no_scratch(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)])
    until(lambda: (tmp_path / "up").exists() and (tmp_path / "up2").exists(), "the worker is up")
    beneath = process_tree.descendants(worker.pid)
    assert len(beneath) >= 5
    worker.kill()
    worker.wait()
    until(lambda: not any(map(alive, beneath)), "all beneath has ended")
    until(lambda: not (tmp_path / "scratch").exists(), "its scratch is gone")


def test_many_actions_leak_no_descriptor_process_or_memory(rig: Rig) -> None:
    rig.open()

    def fds(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def all_fds() -> list[int]:
        return [fds(os.getpid()), *(fds(p) for p in rig.processes() if os.geteuid() == 0)]

    def comm(pid: int) -> str:
        return Path(f"/proc/{pid}/comm").read_text().strip()

    def batch(n: int) -> None:
        for i in range(n):
            rig.begin(ExecCall(argv=("true",)), Kind.EXEC, session=i % 2)
            rig.begin_function(len, "x")
        last = rig.lease
        rig.until(lambda: len(rig.free) == last)

    batch(20)
    rig.until(lambda: len([h for h in map(comm, rig.processes()) if h == "tangram-runner"]) == 2)
    batch(20)
    before = sorted(all_fds())
    batch(250)
    rig.until(lambda: sorted(all_fds()) == before)
    assert all(o.state is ActionState.COMPLETED for o, _, _ in rig.done.values())


def test_closing_the_executor_cancels_running_actions(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    lease = rig.begin(ExecCall(shell="trap '' TERM; while :; do sleep 1000; done"), Kind.EXEC)
    rig.until(lambda: ("started", lease) in rig.events)
    beneath = rig.processes()
    rig.close()
    assert rig.done[lease][0].state is ActionState.CANCELLED
    assert not any(map(alive, beneath))


def test_scratch_is_removed_however_deep_or_closed_its_folders_are(tmp_path: Path) -> None:
    home = tmp_path / "s"
    scratch.make(str(home))
    deep = os.open(home, os.O_RDONLY)
    for _ in range(1200):  # deeper than a path can name and than we can recurse
        os.mkdir("dddd", dir_fd=deep)
        inner = os.open("dddd", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    (home / "link").symlink_to(tmp_path)
    (home / "shut").mkdir()
    (home / "shut" / "f").write_text("x")
    (home / "shut").chmod(0)
    assert scratch.remove(str(home)) and list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_scratch_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "s"
    target.mkdir(mode=0o755)
    link.symlink_to(target)
    assert scratch.remove(str(link)) and not link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o755


def test_only_plain_values_and_arrays_are_encoded() -> None:
    plain: tuple[Any, ...] = (
        None, True, -5, 2**63, -(2**64), 1.5, "ä", b"\0", [], (), {"a": (1, (2,))},
        {1: 2, b"k": None})
    for value in plain:
        back = decode_value(encode_value(value))
        assert back == value and type(back) is type(value)
    for array in (np.zeros((0, 3)), np.array(3), np.array(["ab", "c"]), np.asfortranarray(
            np.arange(6).reshape(2, 3)), np.array(["2020-01-01"], "M8[D]"), np.array([True])):
        back = decode_value(encode_value([array]))[0]
        assert back.dtype == array.dtype and back.shape == array.shape and (back == array).all()
    loop: list[Any] = []
    loop.append(loop)
    for bad in ({1}, Opaque(), np.array([object()]), np.zeros(1, "i4,f4"), {(1,): 2}, loop,
                np.ma.masked_array([1])):
        with pytest.raises(TypeError):
            encode_value(bad)


def test_usable_cores_and_memory_are_those_of_the_machine() -> None:
    cores = affinity.usable()
    assert set(cores) == os.sched_getaffinity(0)
    assert 0 < memory.total_mib() <= os.sysconf("SC_PHYS_PAGES") * 4096 >> 20
    assert affinity.describe(cores) == "affinity" and affinity.describe((9999,)) == "counted"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_the_executor_works_for_an_unprivileged_user() -> None:
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        import helpers.executor_rig as t
        rig = t.Rig(Path(sys.argv[1]))
        rig.open()
        outcome, back = rig.shell("setsid sleep 1000 & id -u", session=1)
        assert back.stdout == b"65534\\n", outcome
        assert rig.value(os.getuid) == 65534
        rig.close()
        print("fine")
    """)
    with ordinary_user() as user:
        done = user.run("-c", program, str(user.folder / "rig"), timeout_s=120)
        assert done.stdout == "fine\n", done.stderr


def test_a_nodes_own_limit_of_file_sizes_below_that_of_the_disk_is_kept(tmp_path: Path) -> None:
    """As where a site sets `ulimit -f`: a process may not raise it."""
    rig = Rig(tmp_path, trusted=False, disk_mib=64, compiled=False)
    try:
        most = 1 << 20
        resource.prlimit(rig.executor.fork_server_pid, resource.RLIMIT_FSIZE, (most, most))
        assert rig.shell("ulimit -f")[1].stdout.split() == [b"2048"]
        outcome, back = rig.shell("head -c 3000000 /dev/zero >large")
        assert outcome.exit_code == 153 and b"File size limit" in back.stderr
        assert rig.shell("echo on")[1].stdout == b"on\n"
    finally:
        rig.close()


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("session", [0, 1])
def test_a_worker_whose_folder_is_removed_ends_and_fails_no_action(
        session: int, warm: int, tmp_path: Path) -> None:
    """As by a site that cleans /tmp when another job of the same user ends. All that it starts
    would fail at once, and so would all that waits; when it ends, other nodes run that instead."""
    rig, seen = Rig(tmp_path, warm=warm), []
    try:
        if session:
            rig.open(session)
        assert rig.shell("true")[0].state is ActionState.COMPLETED
        rig.loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        [root] = rig.scratch.iterdir()
        until(lambda: shutil.rmtree(root, ignore_errors=True) or not root.exists(), "gone")
        lease = rig.begin(ExecCall(shell="true"), Kind.EXEC, session=session)
        rig.until(lambda: seen)
        assert isinstance(seen[0], ScratchLost) and seen[0].exit_status == BROKEN_STATUS
        assert str(root) in str(seen[0]) and lease not in rig.done and not rig.down
    finally:
        rig.executor.close()
        rig.loop.close()
