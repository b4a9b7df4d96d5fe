"""The executor with real processes: whatever an action does, its outcome is right, its worker goes
on, and nothing of it stays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.executor_rig import SECRETS, Rig, alive

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import INLINE_MAX
from tangram_hpc.protocol.payload import (
    ErrorReturn,
    ExecCall,
    ExecReturn,
    FileCall,
    FileReturn,
    ValueReturn,
)
from tangram_hpc.resources import process_tree


def test_a_command_returns_its_output_exit_code_and_signal(rig: Rig) -> None:
    outcome, back = rig.exec("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (outcome.state, outcome.exit_code, outcome.signal) == (ActionState.FAILED, 3, 0)
    assert (back.stdout, back.stderr, back.cut) == (b"out\n", b"err\n", (0, 0))
    outcome, _ = rig.exec("true")
    assert outcome.state is ActionState.COMPLETED and outcome.exec_ns > 0
    assert outcome.isolation == "process"
    assert outcome.enforcement == rig.executor.enforcement
    outcome, _ = rig.shell("kill -SEGV $$")
    assert (outcome.state, outcome.exit_code, outcome.signal) == (ActionState.FAILED, 0, 11)
    assert "SIGSEGV" in outcome.reason


@pytest.mark.parametrize("compiled", [True, False])
def test_a_session_whose_directory_a_command_removes_goes_on(tmp_path: Path, compiled: bool
                                                             ) -> None:
    rig = Rig(tmp_path, compiled=compiled)
    rig.open()
    rig.shell("ls", session=1)  # the compiled loop learns from it
    assert rig.shell("rm -rf ~", session=1)[0].state is ActionState.COMPLETED
    assert rig.shell("pwd", session=1, cwd="/tmp")[1].stdout == b"/tmp\n"
    assert rig.shell("pwd", session=1)[0].reason.startswith("cwd: the session's own directory: No")
    rig.shell("mkdir ~; cd ~; echo kept >new", session=1, cwd="/")
    assert rig.shell("ls; cat new", session=1)[1].stdout == b"new\nkept\n"
    rig.shell("rm -rf ~; mkdir ~; cd ~; echo kept >other", session=1)
    assert rig.shell("ls", session=1)[1].stdout == b"other\n"
    rig.close()


def test_a_program_that_cannot_start_fails_with_127_or_126_as_in_a_shell(rig: Rig) -> None:
    for argv, code, text in (
        (("no-such-program",), 127, "no program 'no-such-program' in PATH"),
        (("/etc/passwd",), 126, "Permission denied"),
        (("/no/such",), 127, "No such file"),
        (("/no/../bin/true",), 127, "not in the sandbox, so name it '/bin/true'"),
        (("/no/../bin/no",), 127, "cannot run '/no/../bin/no': No such file or directory"),
        (("a\0b",), 126, "null"),
        (("/bin/true", "a\0b"), 126, "null"),
    ):
        outcome, _ = rig.exec(*argv)
        assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, code), outcome
        assert text in outcome.reason
    outcome, _ = rig.exec("true", cwd="nowhere")
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("cwd: nowhere")
    outcome, _ = rig.exec("true", shell="true")
    assert outcome.state is ActionState.FAILED and "exactly one" in outcome.reason
    outcome, _, _ = rig.end(rig.begin(ValueReturn(b""), Kind.EXEC))
    assert outcome.state is ActionState.FAILED and "ValueReturn" in outcome.reason


def test_a_relative_folder_in_path_begins_where_the_command_runs(rig: Rig) -> None:
    rig.open()
    rig.shell("mkdir -p bin d/bin; printf '#!/bin/sh\necho of d' >d/bin/p; printf 'x' >bin/q; "
              "chmod +x d/bin/p bin/q", session=1)
    inside = {"session": 1, "cwd": "d", "env": {"PATH": "bin:/usr/bin:/bin"}}
    outcome, back = rig.exec("p", **inside)
    assert (outcome.exit_code, back.stdout) == (0, b"of d\n"), outcome
    outcome, _ = rig.exec("q", **inside)
    assert (outcome.exit_code, outcome.reason) == (127, "argv: no program 'q' in PATH")


def test_a_script_without_an_interpreter_line_runs_in_a_shell(rig: Rig) -> None:
    _, back = rig.shell("printf 'echo $1' >s; chmod +x s; env -i PATH=$PATH; exec 3>&-; ./s hi")
    rig.open()
    rig.shell("printf 'echo $1' >s; chmod +x s", session=1)
    outcome, back = rig.exec("./s", "hi", session=1)
    assert (outcome.exit_code, back.stdout) == (0, b"hi\n"), outcome


def test_a_command_gets_its_stdin_cwd_and_files_and_nothing_of_earlier_actions(rig: Rig) -> None:
    big = os.urandom(300_000)
    outcome, back = rig.shell("cat; wc -c <../a/b; pwd", stdin=big, cwd="d",
                              files={"a/b": b"12345", "d/x": b""})
    assert outcome.exit_code == 0, (outcome, back.stderr)
    assert back.stdout.startswith(big) and back.stdout[len(big):].startswith(b"5\n/")
    assert back.stdout.endswith(b"/d\n")
    rig.shell("echo x >$TMPDIR/x")
    _, back = rig.shell("cat; ls -A; ls -A $TMPDIR")
    assert back.stdout == b""  # no stdin, and nothing of the actions before
    outcome, back = rig.exec("true", files={"/dev/null/x": b""})
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("files: /dev/null/x")
    assert back == ExecReturn()  # with a payload it is not held back as if SIGTERM had ended it


def test_the_environment_names_the_granted_cpus_and_gpus_and_holds_no_secret(rig: Rig) -> None:
    _, back = rig.exec("env", env={"MINE": "1"}, cores=rig.cores)
    env = dict(line.split("=", 1) for line in back.stdout.decode().splitlines())
    units = str(len(rig.cores))
    assert env["TANGRAM_CPUS"] == env["OMP_NUM_THREADS"] == units
    assert env["MAKEFLAGS"] == f"-j{units}" and env["PYTEST_XDIST_AUTO_NUM_WORKERS"] == units
    assert env["MINE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["TMPDIR"].endswith("/tmp") and env["HOME"].endswith("/home") and "PATH" in env
    assert not SECRETS.keys() & env.keys()
    _, back = rig.exec("/usr/bin/env", env={"A": "b"}, clean_env=False, gpus=(1, 3))
    told = sorted(back.stdout.split())
    assert told[:3] == [b"A=b", b"CUDA_VISIBLE_DEVICES=1,3", b"TANGRAM_CPUS=1"]
    assert told[3].startswith(b"TANGRAM_CPUS_FILE=/") and told[4:] == [b"TANGRAM_CPUS_MAX=1"]
    seen = rig.value(lambda: dict(os.environ))
    assert not SECRETS.keys() & seen.keys() and seen["TANGRAM_CPUS"] == "1"


def test_a_command_inherits_no_descriptor_and_default_signal_settings(rig: Rig) -> None:
    program = ("import os, json; print(json.dumps([sorted(os.listdir('/proc/self/fd')),"
               "open('/proc/self/status').read()]))")
    _, back = rig.exec(sys.executable, "-c", program)
    fds, status = json.loads(back.stdout)
    assert fds == ["0", "1", "2", "3"]  # 3 is the listing itself
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["SigBlk"], 16) == 0
    # a Python program ignores SIGPIPE and SIGXFSZ by itself, so a `cat` shows what was inherited
    _, back = rig.exec("cat", "/proc/self/status")
    fields = dict(line.split(":\t", 1) for line in back.stdout.decode().splitlines() if ":\t" in
                  line)
    library = 3 << 31  # the C library's own signals 32 and 33, which its spawn ignores
    assert int(fields["SigIgn"], 16) & ~library == 0 and int(fields["SigBlk"], 16) == 0


def test_processes_are_bound_to_the_granted_cores_and_moved_at_a_resize(rig: Rig) -> None:
    if not rig.executor.pinned or len(rig.cores) < 2:
        pytest.skip("needs two cores")
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    for cores in (rig.cores[1:], rig.cores, rig.cores[:1]):
        _, back = rig.exec(sys.executable, "-c", show, cores=cores)
        assert json.loads(back.stdout) == sorted(cores)
        assert rig.value(lambda: sorted(os.sched_getaffinity(0))) == sorted(rig.cores[:1])
    program = ("import os, time, threading; os.fork()\n"
               "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
               "open(f'up{os.getpid()}', 'w'); time.sleep(60)")
    rig.open()
    lease = rig.begin(ExecCall(argv=(sys.executable, "-c", program)), Kind.EXEC, session=1)
    home = next(rig.scratch.glob("worker-*"))
    rig.until(lambda: len(list(home.glob("*/home/up*"))) == 2)
    pids = [int(path.name[2:]) for path in home.glob("*/home/up*")]
    rig.loop.call_soon(rig.executor.resize, lease, rig.cores)
    rig.until(lambda: all(os.sched_getaffinity(t) == set(rig.cores)
                          for pid in pids for t in process_tree.threads(pid)))
    rig.loop.call_soon(rig.executor.kill, lease, ActionState.CANCELLED, "enough")
    assert rig.end(lease)[0].state is ActionState.CANCELLED


def test_cpus_beyond_the_machines_cores_are_counted_and_not_bound(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cores=tuple(range(64)), enforcement="counted")
    assert not rig.executor.pinned
    outcome, back = rig.exec("printenv", "TANGRAM_CPUS", cores=tuple(range(40, 56)))
    assert (outcome.enforcement, back.stdout) == ("counted", b"16\n")
    leases = [rig.begin(ExecCall(argv=("sleep", "0.05")), Kind.EXEC) for _ in range(80)]
    assert all(rig.end(lease)[0].state is ActionState.COMPLETED for lease in leases)
    rig.close()


def test_the_cpus_file_always_holds_the_current_number_of_cpus(tmp_path: Path) -> None:
    rig = Rig(tmp_path, cores=tuple(range(64)))
    text = 'while :; do n=$(cat $TANGRAM_CPUS_FILE); echo $n >> seen; [ $n = 0 ] && exit; done'
    rig.open()
    lease = rig.begin(ExecCall(shell=text), Kind.EXEC, session=1, cores=tuple(range(5)))
    seen = lambda: next(iter(rig.scratch.glob("worker-*/*/home/seen")), None)  # noqa: E731
    for units in (5, 16, 0):
        if units != 5:
            rig.loop.call_soon(rig.executor.resize, lease, tuple(range(units)))
        rig.until(lambda n=units: seen() is not None and f"{n}" in seen().read_text().split())
    outcome, _, _ = rig.end(lease)
    assert outcome.state is ActionState.COMPLETED
    assert rig.shell("cat $TANGRAM_CPUS_FILE", cores=(1, 2))[1].stdout == b"2\n"
    rig.close()
    assert not list(rig.scratch.glob("**/cpus"))


def test_output_beyond_the_limit_is_cut_and_the_cut_bytes_are_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, output_max=100_000)
    outcome, back = rig.shell("head -c 30000000 /dev/zero; head -c 100001 /dev/zero >&2; echo x")
    assert outcome.exit_code == 0
    assert (len(back.stdout), len(back.stderr)) == (100_000, 100_000)
    assert back.cut == (30_000_000 + 2 - 100_000, 1)
    rig.close()


@pytest.mark.parametrize("command", [
    "head -c 300000 /dev/zero; printf end", "i=0; while [ $i -lt 3000 ]; do echo line $i; "
    "i=$((i+1)); done; printf end"])
def test_a_call_limits_its_output_and_chooses_head_tail_or_both(rig: Rig, command: str) -> None:
    rig.open()
    whole = rig.shell(command, session=1, output_max=1 << 20)[1]
    assert whole.cut == (0, 0) and whole.stdout.endswith(b"end")
    size = len(whole.stdout)
    for most in (1, 1001, size - 1, size):
        kept = {keep: rig.shell(command, session=1, output_max=most, keep=keep)[1]
                for keep in ("head", "tail", "both")}
        first = most - most // 2
        assert kept["head"].stdout == whole.stdout[:most]
        assert kept["tail"].stdout == whole.stdout[-most:]
        assert kept["both"].stdout == (whole.stdout if most == size else
                                       whole.stdout[:first] + whole.stdout[size - most // 2:])
        assert {back.cut for back in kept.values()} == {(size - most, 0)}
    assert rig.shell("echo x", session=1)[1].stdout == b"x\n"
    outcome, _ = rig.shell("echo x", session=1, output_max=(64 << 20) + 1)
    assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, 126)
    assert outcome.reason.startswith("output_max: 67108865 bytes are more than the site's bound")


def test_streamed_output_arrives_while_the_command_runs(rig: Rig) -> None:
    rig.open()
    call = ExecCall(shell="echo one; echo two >&2; while [ ! -e go ]; do sleep 0.01; done; echo 3",
                    stream=True)
    lease = rig.begin(call, Kind.EXEC, session=1)
    rig.until(lambda: sum(len(data) for _, data in rig.pieces.get(lease, [])) == 8)
    assert lease not in rig.done
    rig.file("go", b"")
    assert rig.end(lease)[1] == ExecReturn()
    joined = {s: b"".join(d for n, d in rig.pieces[lease] if n == s) for s in (1, 2)}
    assert joined == {1: b"one\n3\n", 2: b"two\n"}


@pytest.mark.parametrize("ignore", ["", "trap '' TERM; "])
def test_a_timeout_ends_the_whole_process_tree(rig: Rig, ignore: str) -> None:
    began = time.monotonic()
    outcome, back = rig.shell(ignore + "sleep 1000 & echo $!; while :; do sleep 1000; done",
                              timeout_ns=200_000_000)
    assert outcome.state is ActionState.TIMEOUT and "0.2 s" in outcome.reason
    assert outcome.signal == (signal.SIGKILL if ignore else signal.SIGTERM)
    assert outcome.exec_ns >= 200_000_000 and time.monotonic() - began < 20
    assert not alive(int(back.stdout))


def test_a_kill_ends_running_and_waiting_leases_and_ignores_unknown_ones(rig: Rig) -> None:
    rig.open()
    lease = rig.begin(ExecCall(argv=("sleep", "1000")), Kind.EXEC, session=1)
    behind = rig.begin(ExecCall(argv=("sleep", "1000")), Kind.EXEC, session=1)
    rig.until(lambda: ("started", lease) in rig.events)
    for one in (behind, lease, 99):
        rig.loop.call_soon(rig.executor.kill, one, ActionState.PREEMPTED, "its node is needed")
    assert rig.end(behind)[0].state is ActionState.PREEMPTED
    outcome = rig.end(lease)[0]
    assert (outcome.state, outcome.reason) == (ActionState.PREEMPTED, "its node is needed")
    assert ("started", behind) not in rig.events
    assert rig.exec("true", session=1)[0].state is ActionState.COMPLETED


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        open(sys.argv[1], "w").write(str(os.getpid()))
        os.fork()
        while True: time.sleep(1)
    os._exit(0)
while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()): time.sleep(0.01)
"""


def test_a_daemon_is_killed_before_the_cores_are_released(rig: Rig, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    lease = rig.begin(ExecCall(argv=(sys.executable, "-c", DAEMON, str(note))), Kind.EXEC)
    outcome, _, clean = rig.end(lease)
    assert outcome.state is ActionState.COMPLETED and not clean
    assert rig.events.index(("finished", lease)) < rig.events.index(("released", lease))
    assert not alive(int(note.read_text()))
    assert rig.exec("true")[0].state is ActionState.COMPLETED


def test_an_action_ends_although_a_background_process_writes_on(rig: Rig) -> None:
    writer = "(trap '' PIPE; while :; do echo y; done) & exit 0"
    lease = rig.begin(ExecCall(shell=writer), Kind.EXEC)
    outcome, _, clean = rig.end(lease)
    assert outcome.state is ActionState.COMPLETED and not clean


@pytest.mark.parametrize("served", [0, 2])
def test_a_background_process_goes_on_that_writes_to_the_output_of_its_action(
        rig: Rig, served: int) -> None:
    """As `nohup server &` does: nobody reads what it writes, and it writes more than a pipe holds.
    What it wrote before its action ended is the action's output."""
    rig.open(background="share")
    for _ in range(served):  # by then the compiled loop serves the session
        rig.shell("true", session=1)
    _, back = rig.shell("(echo first; echo begun >up; until [ -e go ]; do sleep 0.01; done; "
                        "head -c 300000 /dev/zero; echo line >&2; echo end >ended) & "
                        "until [ -e up ]; do sleep 0.01; done", session=1)
    assert back is not None and back.stdout == b"first\n"
    _, back = rig.shell("touch go", session=1)
    assert back is not None and back.stdout == b""
    for _ in range(1000):
        if rig.file("ended")[0].state is ActionState.COMPLETED:
            break
        time.sleep(0.02)
    outcome, back = rig.shell("cat ended; exit 3", session=1)
    assert (outcome.exit_code, back and back.stdout) == (3, b"end\n"), "and its output is not ours"


def test_a_session_keeps_its_files_and_its_close_ends_its_processes(
        rig: Rig, tmp_path: Path) -> None:
    rig.open(1)
    rig.open(2)
    _, back = rig.shell("echo kept >f; mkdir -p deep/er; chmod 0 deep; pwd", session=1)
    home = Path(back.stdout.decode().strip())
    assert home.stat().st_mode & 0o777 == 0o700
    assert rig.shell("cat f", session=1)[1].stdout == b"kept\n"
    assert rig.shell("cat f", session=2)[0].exit_code == 1
    note = tmp_path / "pid"
    lease = rig.begin(ExecCall(shell=f"sleep 1000 & echo $! >{note}; wait"), Kind.EXEC, session=1)
    rig.until(lambda: note.exists() and note.read_text() != "")
    rig.loop.call_soon(rig.executor.close_session, 1)
    rig.until(lambda: 1 in rig.down)
    assert rig.down[1] == "" and rig.end(lease)[0].state is ActionState.CANCELLED
    assert not alive(int(note.read_text()))
    rig.until(lambda: not home.parent.exists())
    outcome, _ = rig.exec("true", session=1)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("session:")


def test_file_calls_read_and_write_through_links_within_the_session(rig: Rig) -> None:
    rig.open()
    data = os.urandom(INLINE_MAX * 3)
    assert rig.file("a/b/c", data)[0].state is ActionState.COMPLETED
    assert rig.shell("cat a/b/c", session=1)[1].stdout == data
    assert rig.file("a/b/c")[1].data == data
    assert rig.shell("cd a && ln -s b/../b/c link && ln -s $PWD/b abs", session=1)[0].exit_code == 0
    assert rig.file("a/link")[1].data == data
    assert rig.file("a/abs/c")[1].data == data
    outcome, back = rig.file("a/none")
    assert (outcome.state, outcome.reason) == (ActionState.FAILED, "no such file: a/none")
    assert back == ErrorReturn("ENOENT", "no such file: a/none")
    outcome, _, _ = rig.end(rig.begin(FileCall("x"), Kind.FILE, cores=()))
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("session:")


def test_file_paths_start_at_the_root_or_at_the_sessions_folder(rig: Rig, tmp_path: Path) -> None:
    rig.open()
    home = Path(rig.shell("pwd", session=1)[1].stdout.decode().strip())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("f")
    made = rig.shell(f"ln -s {outside} l1; ln -s l2/x l2; mkfifo fifo; mkdir -p d/e; "
                     "ln -s ./d l3; ln -s /proc/self/environ l4; "
                     "ln -s /proc/self/cwd l5; echo h >h", session=1)
    assert made[0].exit_code == 0
    for path in (f"{outside}/f", f"//{outside}/./f", "l1/f", "l1/../outside/f", f"d/../{'../' * 30}"
                 f"{outside}/f", "l3/e/../../l1/f"):
        assert rig.file(path)[1].data == b"f", path
    assert rig.file("d/../h")[1].data == rig.file(f"{home}/h")[1].data == b"h\n"
    assert int(rig.file("/proc/uptime")[1].data.split(b".")[0]) > 0  # has no size
    for path, code in {"no": "ENOENT", "d": "EISDIR", "/": "EISDIR", "": "EISDIR", "h/x": "ENOTDIR",
                       "l2": "ELOOP", "fifo": "EINVAL", "a\0b": "EINVAL", "l4": "EACCES",
                       "l5/no": "ENOENT", "/dev/null": "EINVAL", "d/..": "EISDIR"}.items():
        outcome, back = rig.file(path)
        assert outcome.state is ActionState.FAILED and back.kind == code, (path, back)
        assert "\n" not in outcome.reason
    assert rig.file(f"{outside}/new/g", b"g")[0].state is ActionState.COMPLETED
    assert (outside / "new/g").read_bytes() == b"g"


def _call(rig: Rig, path: str, **fields: Any) -> Any:
    return rig.end(rig.begin(FileCall(path, **fields), Kind.FILE, session=1, cores=()))[1]


def test_file_calls_move_remove_list_and_stat(rig: Rig, tmp_path: Path) -> None:
    rig.open()
    assert rig.shell("mkdir -p a/b/c; echo 1 >a/b/f; ln -s b a/l; chmod 0 a/b/c; "
                     f"ln -s {tmp_path} out", session=1)[0].exit_code == 0
    (tmp_path / "stays").write_text("s")
    entry = _call(rig, "a/b/f", op="stat").entries[0]
    assert (entry.name, entry.kind, entry.size, entry.uid) == ("f", "file", 2, os.getuid())
    assert 0 < entry.mtime_ns <= time.time_ns()
    link = _call(rig, "a/l", op="stat").entries[0]
    assert (link.kind, link.target) == ("link", "b")
    assert _call(rig, "a/l/", op="stat").entries[0].kind == "dir"
    assert [e.name for e in _call(rig, "a", op="list", depth=1).entries] == ["b", "l"]
    assert "b/f" in [e.name for e in _call(rig, "a", op="list").entries]
    assert _call(rig, "a/b", op="move", target="new/way") == FileReturn()
    assert rig.file("new/way/f")[1].data == b"1\n"
    assert _call(rig, "new/way/f", op="move", target="no/../new/f") == FileReturn()
    assert _call(rig, "a/l", op="stat").entries[0].kind == "link"  # it leads nowhere now
    assert _call(rig, "a/l", op="move", target="a").kind in ("EISDIR", "ENOTEMPTY")
    assert _call(rig, "none", op="move", target="x").kind == "ENOENT"
    assert _call(rig, "out", op="remove") == FileReturn() and (tmp_path / "stays").exists()
    assert _call(rig, "new", op="remove") == FileReturn()
    assert _call(rig, "new", op="stat").kind == "ENOENT"
    for path in ("", ".", "/", "a/.."):
        assert _call(rig, path, op="remove").kind == "EBUSY", path
    assert rig.shell("ls -A", session=1)[1].stdout.split() == [b"a", b"no"]


def test_a_file_is_written_and_read_in_parts_in_order(rig: Rig) -> None:
    rig.open()
    assert _call(rig, "f", data=b"12345", offset=0) == FileReturn()
    assert _call(rig, "f", data=b"678", offset=5) == FileReturn()
    assert _call(rig, "f", data=b"x", offset=5).kind == "EAGAIN"
    assert _call(rig, "g", data=b"x", offset=5).kind == "ENOENT"
    piece = _call(rig, "f", offset=3, length=4)
    assert (piece.data, piece.size) == (b"4567", 8)
    assert _call(rig, "f", offset=9, length=4).data == b""
    rig.shell("sleep 0.01; echo >>f", session=1)
    assert _call(rig, "f", length=0).stamp != piece.stamp


