"""Shells and terminals as a trainer's author uses them, against a real broker and worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import pickle
import pty as ptys
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import tangram_hpc
from tangram_hpc import ActionState, InvalidInput, LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.journal_segments import read_journals


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, mem_mib=2000, warm=1, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def test_a_command_of_a_shell_says_how_much_of_its_output_is_kept(cluster: LocalCluster) -> None:
    with cluster.session() as s, s.shell() as shell:
        kept = {keep: shell.run("printf 0123456789", output_max=4, keep=keep).result().stdout
                for keep in ("head", "tail", "both")}
        assert kept["head"] == b"0123" and kept["tail"] == b"6789"
        assert kept["both"].startswith(b"01") and kept["both"].endswith(b"89")
        assert shell.run("printf 0123456789").result().stdout == b"0123456789"
        with pytest.raises(InvalidInput, match="keep: 'tail' cannot be had of output that is str"):
            shell.run("true", keep="tail", on_output=print)
        told = shell.run("true", output_max=1 << 40).result()
        assert told.exit_code == 126 and "output_bound" in told.reason


def test_the_end_of_a_shell_is_not_cancelled_by_that_of_its_session(cluster: LocalCluster) -> None:
    async def in_a_loop() -> None:
        with cluster.session(name="async") as s:
            async with s.shell() as shell:
                await shell.run("true")

    with cluster.session(name="with") as s, s.shell() as shell:
        shell.run("true").result()
    asyncio.run(in_a_loop())
    ends = [record.state for record in fold(read_journals(cluster.folder)).records.values()
            if record.action.name == "shell close"]
    assert ends[-2:] == [ActionState.COMPLETED] * 2


def test_a_shell_whose_session_ends_before_it_logs_nothing(cluster: LocalCluster) -> None:
    """asyncio logs the error of a future that nobody has looked at."""
    logged: list[dict[str, object]] = []

    async def in_a_loop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: logged.append(told))
        async with cluster.session() as s, s.shell() as shell:
            await shell.run("true")
            s.close()
        gc.collect()

    asyncio.run(in_a_loop())
    assert not logged


def test_a_shell_keeps_folder_and_variables_between_commands(cluster: LocalCluster) -> None:
    with cluster.session(env={"A": "1", "B": "1"}) as s:
        with s.shell(env={"B": "2"}) as shell:
            assert shell.run("cd /tmp; C=3; echo $A $B").result().text == "1 2\n"
            assert shell.run("pwd; echo $C; cat", stdin="in").result().text == "/tmp\n3\nin"
            pieces: list[tuple[int, bytes]] = []
            told = shell.run("echo out; echo err >&2; exit 4",
                             on_output=lambda *piece: pieces.append(piece)).result()
            assert (told.exit_code, sorted(pieces)) == (4, [(1, b"out\n"), (2, b"err\n")])
            assert "the shell ended with exit status 4" in told.reason
            with pytest.raises(tangram_hpc.ShellEnded, match="ended with exit status 4") as error:
                shell.run("echo").result()
            assert "\n" not in str(error.value)
        with s.shell(restart=True, cwd="/tmp") as shell:
            shell.run("X=1; exit 1").result()
            assert shell.run("echo ${X-none} $PWD").result().text == "none /tmp\n"
            text = "#" * 200_000 + "\necho long"
            assert shell.run(text).result().text == "long\n"
        with pytest.raises(tangram_hpc.InvalidInput, match="it was closed"):
            shell.run("echo")

    async def at_once() -> str:
        async with cluster.session() as s, s.shell() as shell:
            return (await shell.run("echo $((6*7))")).text

    assert asyncio.run(at_once()) == "42\n"


def test_a_shell_survives_interrupt_timeout_and_cancel_and_ends_at_close(
        cluster: LocalCluster) -> None:
    with cluster.session() as s, s.shell() as shell, s.shell() as other:
        assert not other.interrupt() or other.opened.done()
        shell.run("X=5").result()
        first = shell.run("sleep 60; echo no")
        assert shell.interrupt()  # also before it has started
        assert (first.result(30).exit_code, first.result().stdout) == (130, b"")
        late = shell.run("sleep 60", timeout=0.2).result(30)
        assert (late.state, late.exit_code) == (tangram_hpc.ActionState.TIMEOUT, 124)
        gone = shell.run("sleep 60")
        gone.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            gone.result(30)
        assert shell.run("echo $X").result().text == "5\n"
        plain = s.exec("trap 'exit 9' USR1; echo up; while :; do sleep 0.02; done",
                       on_output=lambda stream, data: plain.interrupt(signal.SIGUSR1))
        assert plain.result(30).exit_code == 9 and not plain.interrupt()
        with pytest.raises(tangram_hpc.InvalidInput, match="signal 9 cannot be sent"):
            plain.interrupt(9)
        left = other.run("sleep 60")
        waits = shell.run("echo $X")
        other.close()
        assert waits.result(30).text == "5\n"
        with pytest.raises(concurrent.futures.CancelledError):
            left.result(30)


def test_an_empty_command_does_nothing(cluster: LocalCluster) -> None:
    """As a policy may give it; a shell at a keyboard takes it too."""
    with cluster.session() as s, s.shell() as shell:
        for empty in ("", " \n", "# nothing"):
            told = shell.run(empty).result(30)
            assert (told.exit_code, told.text) == (0, "")


@pytest.mark.parametrize(("call", "named"), [
    (lambda shell: shell.run(["ls"]), "command: .* is not a text"),
    (lambda shell: shell.run("a\0b"), "null byte"),
    (lambda shell: shell.run("a", stdin=5), "stdin"),
    (lambda shell: shell.resize(1, 1), "pty=True"),
    (lambda shell: shell.write("x"), "stdin="), (lambda shell: pickle.dumps(shell), "shell"),
    (lambda shell: shell.run("a", timeout=-1), "timeout"),
    (lambda shell: shell.run("a", on_output=1), "on_output")])
def test_a_wrong_shell_argument_is_refused_in_one_line(
        cluster: LocalCluster, call, named: str) -> None:
    with cluster.session() as s, s.shell() as shell:
        with pytest.raises(tangram_hpc.InvalidInput, match=named) as error:
            call(shell)
        assert "\n" not in str(error.value)


def test_a_shell_that_cannot_open_says_why(cluster: LocalCluster) -> None:
    with cluster.session() as s:
        with pytest.raises(tangram_hpc.ActionFailed, match="cwd: nowhere"), s.shell(cwd="nowhere"):
            raise AssertionError("it opened")
        with pytest.raises(tangram_hpc.InvalidInput, match="rows, cols: 0, 5 are not"):
            s.shell(pty=True, rows=0, cols=5)
        with pytest.raises(tangram_hpc.InvalidInput, match="rows, cols"):
            s.pty(["true"], rows="many")
    with pytest.raises(tangram_hpc.SessionLost):
        s.shell().opened.result(30)


def test_each_command_is_an_action_of_its_own(cluster: LocalCluster) -> None:
    with cluster.session() as s, s.shell() as shell:
        future = shell.run("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done", cpus=2, name="spin")
        future.result(30)
        details = future.details
        assert details is not None and len(details.cores) == 2
        assert details.cpu_s > 0.02 and details.exec_s > 0.02
        assert future.result().grants[0][1] == 2


# ---- terminals ----


# no shell: a `read` of dash ends at a signal with a trap, as at the end of the input
PROGRAM_ON_A_TERMINAL = """
import os, signal, sys
def size(*_):
    columns, rows = os.get_terminal_size()
    os.write(1, b"%d %d\\n" % (rows, columns))
size()
signal.signal(signal.SIGWINCH, size)
os.write(1, b"up\\n")
for line in sys.stdin:
    os.write(1, f"<{line.strip()}>\\n".encode())
os.write(1, b"end\\n")
sys.exit(3)
"""


def test_a_program_on_a_terminal_reads_writes_and_is_resized(cluster: LocalCluster) -> None:
    with cluster.session(backend="bwrap") as s:
        with s.shell(pty=True, rows=30, cols=90) as shell:
            assert shell.run("stty size").result().text.split() == ["30", "90"]
        with s.pty(["python3", "-c", PROGRAM_ON_A_TERMINAL], rows=20, cols=70) as pty:
            seen = b""
            while b"up" not in seen:
                seen += pty.read(30)
            pty.resize(21, 71)
            while b"21 71" not in seen:
                pty.write("a\n")
                seen += pty.read(30)
            pty.write("ä\n")
            pty.hang_up()
            seen += b"".join(pty)
            assert b"20 70" in seen and "<ä>".encode() in seen and b"end" in seen
            assert (pty.wait(30), pty.read()) == (3, b"")
            with pytest.raises(tangram_hpc.InvalidInput, match="has ended"):
                pty.write("x")
        with s.pty("sleep 60") as pty:
            with pytest.raises(TimeoutError):
                pty.read(0.05)
            assert pty.interrupt() and pty.wait(30) == 130


def test_a_program_that_does_not_read_holds_its_writer_back(cluster: LocalCluster) -> None:
    with cluster.session(backend="bwrap") as s:
        with s.pty("stty raw; echo up; sleep 2; head -c 400000 | md5sum") as pty:
            seen = pty.read(30)
            with pytest.raises(TimeoutError, match="wait for the program to read"):
                pty.write(b"x" * 400_000, timeout=0.3)
            assert 200_000 < len(pty._unsent) < 400_000 - input_flow.WINDOW // 2
            seen += b"".join(pty)
        import hashlib

        assert hashlib.md5(b"x" * 400_000).hexdigest().encode() in seen


def test_input_beyond_the_credit_is_refused(
        cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    with cluster.session(backend="bwrap") as s, s.pty("stty raw; echo up; sleep 1") as pty:
        pty.read(30)
        connection = pty._connection
        for kind, number, data in ((input_flow.DATA, 0, b"x" * (input_flow.PIECE_MAX + 1)),
                                   (input_flow.SIGNAL, 9, None), (77, 0, None)):
            connection.send_input(pty.future.action, kind, number, 0, data)
        for _ in range(20):
            connection.send_input(pty.future.action, input_flow.DATA,
                                  data=b"y" * input_flow.PIECE_MAX)
        with connection._lock:
            connection._put(ms.Input((99 << 32) + 1, input_flow.SIGNAL, 2))
        assert pty.wait(30) == 0
    refused = [record.getMessage() for record in caplog.records if "Input:" in record.getMessage()]
    assert any("data: the action has credit" in line for line in refused)
    assert any("signal: 9 is not one of" in line for line in refused)
    assert any("kind: 77 is unknown" in line for line in refused)
    assert any("not this client's" in line for line in refused)


def test_run_pty_connects_two_terminals(cluster: LocalCluster) -> None:
    ours, theirs = ptys.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", "import sys; from tangram_hpc.cli import main; sys.exit(main())",
         "run", "--pty", "--", "sh", "-c", "stty size; read x; echo \"<$x>\"; cat; exit 1"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TANGRAM_ACCESS": str(cluster.access)})
    os.close(theirs)
    seen = b""

    def read_until(wanted: bytes, within_s: float = 60.0) -> None:
        nonlocal seen
        deadline = time.monotonic() + within_s
        while wanted not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 4096)

    read_until(b"24 80")
    os.write(ours, b"hello\r")
    read_until(b"<hello>")
    # `cat` must run before ^C comes: while dash 0.5.12 starts a command, it swallows a SIGINT that
    # the command should get, and waits for the command's end.
    os.write(ours, b"more\r")
    read_until(b"more\r\nmore\r\n")  # its echo, and what `cat` wrote
    os.write(ours, b"\x03")  # ^C goes to the program there
    try:
        assert program.wait(60) == 130
    except subprocess.TimeoutExpired:
        with contextlib.suppress(AssertionError, OSError):
            read_until(b"nothing more", 1.0)
        there = subprocess.run(["ps", "-eo", "pid,ppid,pgid,tpgid,stat,wchan:16,args"], text=True,
                               capture_output=True, check=False).stdout
        program.kill()
        raise AssertionError(f"^C ended nothing: {seen!r}\n{there}") from None
    os.close(ours)
    assert re.search(rb"hello\r\n<hello>", seen)  # echoed there, once
