"""A shell keeps its state from one command to the next, whatever its commands do to it."""

from __future__ import annotations

import errno
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol.payload import (
    SHELL_ENDED,
    ErrorReturn,
    ExecCall,
    ShellCall,
    TerminalCall,
)
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox.process.unstartable import Unstartable
from tangram_hpc.sandbox.shells.terminal import Terminal
from tests.helpers.executor_rig import NOTHING
from tests.helpers.shell_rig import SHELL, make_session, shell_rig

__all__ = ["make_session", "shell_rig"]  # fixtures

SOON_NS = 300_000_000
BOTH = pytest.mark.parametrize("backend", ["bwrap", "process"])


@BOTH
@pytest.mark.parametrize("program", ["bash", "sh"])
def test_a_shell_keeps_its_state_and_no_command_breaks_it(
        make: Any, backend: str, program: str) -> None:
    rig = make(backend)
    assert rig.start(program=program).state is ActionState.COMPLETED
    rig.told("mkdir d; cd d; export A=1; B='x y'; f() { echo \"f:$1\"; }; alias say='echo said'")
    assert rig.told('basename "$PWD"; sh -c "echo $A"; echo "$B"; f 2; say it') == (
        b"d\n1\nx y\nf:2\nsaid it\n")
    assert rig.run("(exit 7)")[0].exit_code == 7
    assert rig.told("echo $?") == b"7\n"
    for wrong in ("echo 'open", "if )", "while true; do"):
        outcome, back = rig.run(wrong)
        assert (outcome.exit_code, outcome.state) == (2, ActionState.FAILED)
        assert back.stderr and not back.stdout
    assert rig.told("cat <<END\nnot ended") .rstrip() == b"not ended"
    assert rig.run("set -u; echo $nothing; echo not reached")[0].exit_code in (1, 2)
    assert b"u" in rig.told("echo $-; set +u")
    rig.told("exec 3>kept; echo one >&3")
    assert rig.told("echo two >&3; exec 3>&-; cat kept") == b"one\ntwo\n"
    rig.told("exec 4>&1 >file; echo hidden")
    assert rig.told("echo more; exec >&4; cat file") == b"hidden\nmore\n"
    assert rig.told("cat; read x || echo none") == b"none\n"
    assert rig.told("cat; echo; wc -c", stdin=b"a\0b") == b"a\0b\n0\n"
    assert rig.told("printf 'no newline'") == b"no newline"
    assert rig.told(r"printf '\000e 1 0 h\nh 1\n\001'") == b"\0e 1 0 h\nh 1\n\1"
    long = "# " + "x" * 300_000 + "\necho end of ${#A}"
    assert rig.told(long) == b"end of 1\n"
    assert rig.told("set -x; :; set +x; ls -A $TMPDIR") == b""
    assert rig.told("echo $A; echo $TANGRAM_CPUS") == b"1\n1\n"
    assert rig.told('[ -e "/dev/fd/253" ] || [ -e /dev/fd/9 ] || ls /proc/self/fd | wc -w') in (
        b"4\n", b"5\n")  # 0 1 2 and what ls opens: neither script nor control pipe


def test_a_low_limit_of_open_files_is_told_with_the_remedy(make: Any) -> None:
    rig = make("process")
    process = rig.executor._sessions.get(rig.session).process
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
    assert "bash needs a limit of 254 open files, and the worker has 64" in rig.start(
        program="bash").reason
    assert rig.start(program="sh").state is ActionState.COMPLETED


@pytest.mark.parametrize(("program", "names"), [
    ("bash", "printf eval . unset set export cd"), ("sh", "printf cd")])
def test_functions_and_aliases_with_the_names_of_builtins_do_not_stop_a_shell(
        make: Any, program: str, names: str) -> None:
    rig = make("process")
    rig.start(program=program)
    rig.told("; ".join(f"alias {name}='echo alias'" for name in names.split() if name != "."))
    functions = "; ".join(f"{name}() {{ echo mine; }}" for name in names.split())
    rig.told(f"\\command unalias -a\n{functions}")
    outcome, back = rig.run("cd; (exit 3)")
    assert (outcome.exit_code, back.stdout) == (3, b"mine\n")
    assert rig.told("echo $? $__tangram_code; printf x") == b"3\nmine\n"


@BOTH
@pytest.mark.parametrize("program", ["bash", "sh"])
def test_neither_prompts_nor_lines_of_the_shells_own_are_in_its_output(
        make: Any, backend: str, program: str) -> None:
    """`. venv/bin/activate` sets PS1; a function and a sourced file may switch tracing on."""
    rig = make(backend)
    rig.start(program=program)
    rig.told("echo 'set -x; A=1' >traced; echo 'set -v' >verbose; on() { set -x; }; "
             "PS1='(venv) ' PS2='> ' PS0='run ' PROMPT_COMMAND='echo prompt'; export PS1")
    for text, said in (("echo one\necho two", b"one\ntwo\n"), (". ./verbose", b""), ("on", b""),
                       ("echo traced; set +xv", b"traced\n"), ("echo end; (exit 3)", b"end\n")):
        outcome, back = rig.run(text)
        assert back.stdout == said
        lines = back.stderr.decode().splitlines()
        assert all(line == text or line.startswith("+") for line in lines), lines
        assert not any("tangram" in line or "printf" in line for line in lines), lines
    assert outcome.exit_code == 3
    assert rig.told("echo $? ${-##*[xv]*}").startswith(b"3 ")
    assert rig.run(". ./traced")[1].stderr.strip(b"+ \n") == b"A=1"


@BOTH
def test_set_e_and_exit_end_the_shell_with_their_status(make: Any, backend: str) -> None:
    rig = make(backend)
    rig.start()
    rig.told("set -e; X=5")
    assert rig.told("true; echo $X") == b"5\n"
    outcome, back = rig.run("false; echo not reached")
    assert (outcome.exit_code, back.stdout) == (1, b"")
    assert outcome.reason == "the shell ended with exit status 1 during this command"
    for _ in range(2):
        outcome, back = rig.run("echo more")
        assert outcome.state is ActionState.FAILED and isinstance(back, ErrorReturn)
        assert back.kind == SHELL_ENDED
        assert back.text == ("shell: it has ended (ended with exit status 1); open another one, or "
                             "open it with restart=True")
    assert rig.told("echo new$X", start=True) == b"new\n"
    outcome, _ = rig.run("exit 3")
    assert outcome.exit_code == 3
    assert rig.told("echo again", start=True) == b"again\n"
    outcome, _ = rig.run("kill -9 $$")
    assert outcome.signal == 9
    assert b"killed by signal 9" in rig.run("echo")[1].text.encode()
    assert rig.told("exec true", start=True) == b""
    assert isinstance(rig.run("echo")[1], ErrorReturn)
    assert isinstance(rig.run("echo", shell=99)[1], ErrorReturn)
    rig.told("echo", start=True)
    closes = "for f in /proc/$$/fd/*; do n=${f##*/}; [ $n -gt 2 ] && eval \"exec $n>&-\"; done"
    outcome, _ = rig.run(closes)  # it closed what it is reached by: the session goes on
    assert "the shell" in outcome.reason
    assert rig.told("echo on", start=True) == b"on\n"


@BOTH
def test_background_jobs_live_on_and_their_output_comes_with_the_next_command(
        make: Any, backend: str) -> None:
    rig = make(backend)
    rig.start()
    assert rig.told("(sleep 0.2; echo late; sleep 60) & echo now; J=$!") == b"now\n"
    time.sleep(0.5)  # it is stopped, so nothing happens
    assert rig.told("sleep 0.5; echo next") == b"late\nnext\n"
    assert b"Running" in rig.told("jobs")
    assert rig.told("kill $J; wait $J; echo $?") == b"143\n"
    rig.told("yes & Y=$!")  # fills the pipe between commands
    assert rig.told("kill -9 $Y; wait $Y 2>/dev/null; echo done").endswith(b"done\n")
    assert rig.told("echo clean") == b"clean\n"


@BOTH
def test_background_end_kills_leftovers_but_never_shells(make: Any, backend: str) -> None:
    rig = make(backend, background="end")
    rig.start()
    rig.start(8)
    rig.told("A=1; sleep 60 & echo $! > job")
    rig.told("B=2", shell=8)
    gone = "grep -qs 'State:.[RSDT]' /proc/$(cat job)/status || echo gone"  # or a zombie
    assert rig.shell(f"sleep 60 & {gone}", session=rig.session)[1].stdout == b"gone\n"
    assert rig.told(f"echo $A; {gone}") == b"1\ngone\n"
    assert rig.told("echo $A$B", shell=8) == b"2\n"
    outcome = rig.end(rig.begin(ExecCall(shell="sleep 60"), Kind.EXEC, session=rig.session,
                                timeout_ns=SOON_NS))[0]
    assert outcome.state is ActionState.TIMEOUT
    assert rig.told("echo $A") == b"1\n"


@BOTH
@pytest.mark.parametrize("program", ["bash", "sh"])
def test_interrupt_ends_the_command_and_not_the_shell(make: Any, backend: str,
                                                      program: str) -> None:
    rig = make(backend)
    rig.start(program=program)
    rig.told("X=5; sleep 60 & J=$!")
    for text in ("sleep 60; echo no", "while :; do :; done; echo no", "(sleep 60); echo no",
                 "f() { while :; do sleep 1; done; }; f; echo no", "echo $(sleep 60); echo no"):
        # a subshell that is just starting may take the signal for itself, as with ^C
        for wait in (0.15,) if "(sleep" in text else (0.0, 0.15):
            lease = rig.begin_run(text)
            if wait:
                began = time.monotonic()
                rig.until(lambda began=began, wait=wait: time.monotonic() - began > wait)
            rig.give(lease, input_flow.SIGNAL, number=2)
            outcome, back, _ = rig.end(lease)
            assert (outcome.exit_code, back.stdout) == (130, b""), text
            assert rig.told("echo $X; kill -0 $J && echo there") == b"5\nthere\n"
    lease = rig.begin_run("trap 'echo trapped' INT; sleep 0.3; echo after")
    rig.until(lambda: ("started", lease) in rig.events)
    rig.give(lease, input_flow.SIGNAL, number=2)
    assert b"after" in rig.end(lease)[1].stdout or rig.done[lease][0].exit_code == 130


def test_interrupts_at_any_moment_lose_no_command(make: Any) -> None:
    """A signal that comes while the shell reads its script must not make it lose the next line."""
    rig = make("bwrap")
    rig.start()
    for number in range(60):
        lease = rig.begin_run(f"N={number}; :")
        began = time.monotonic()
        rig.until(lambda began=began, number=number:
                  time.monotonic() - began > number * 0.0001)
        if lease not in rig.done:
            rig.give(lease, input_flow.SIGNAL, number=2)
        assert rig.end(lease)[0].exit_code in (0, 130)
        assert rig.told("echo on") == b"on\n"


@BOTH
def test_at_its_time_limit_a_command_is_interrupted_then_killed(make: Any, backend: str) -> None:
    rig = make(backend)
    rig.start()
    rig.told("X=5")
    outcome, _ = rig.run("sleep 60; echo no", timeout_ns=SOON_NS)
    assert (outcome.state, outcome.exit_status) == (ActionState.TIMEOUT, 124)
    assert rig.told("echo $X") == b"5\n"
    # who ignores SIGINT is killed, and the shell goes on
    outcome, _ = rig.run("sh -c 'trap \"\" INT; sleep 60'; echo \"status $?\"",
                         timeout_ns=SOON_NS)
    assert outcome.state is ActionState.TIMEOUT and rig.told("echo $X") == b"5\n"
    # a shell that does not come back is killed too
    outcome, _ = rig.run("trap '' INT; while :; do :; done", timeout_ns=SOON_NS)
    assert outcome.state is ActionState.TIMEOUT
    assert rig.run("echo")[1].kind == SHELL_ENDED
    lease = rig.begin_run("sleep 60", start=True)
    rig.until(lambda: ("started", lease) in rig.events)
    rig.loop.call_soon(rig.executor.kill, lease, ActionState.CANCELLED, "by its client")
    assert rig.end(lease)[0].state is ActionState.CANCELLED
    assert rig.told("echo there") == b"there\n"


@BOTH
def test_a_shell_is_stopped_between_commands_and_exec_runs_beside_it(make: Any,
                                                                    backend: str) -> None:
    rig = make(backend)
    rig.start()
    rig.told("X=1")
    pid = next(p for p in rig.processes()
               if b"--noprofile" in Path(f"/proc/{p}/cmdline").read_bytes())
    # the end of a command is told a moment before its shell is stopped
    rig.until(lambda: process_tree.state(pid) == "T")
    outcome, back = rig.shell("echo beside; cat", session=rig.session, stdin=b"me")
    assert back.stdout == b"beside\nme" and outcome.state is ActionState.COMPLETED
    assert rig.told("echo $X") == b"1\n"
    rig.end(rig.begin(ShellCall("close", SHELL), Kind.FILE, session=rig.session, cores=()))
    assert rig.run("echo")[1].text.startswith("shell: it has ended (it was closed)")
    rig.until(lambda: not os.path.exists(f"/proc/{pid}") or pid not in rig.processes())
    outcome = rig.end(rig.begin(NOTHING, Kind.EXEC, session=rig.session))[0]
    assert outcome.state is ActionState.COMPLETED


@BOTH
def test_a_command_sent_with_the_close_of_its_shell_never_reaches_it(make: Any,
                                                                    backend: str) -> None:
    rig = make(backend)
    for turn in range(5):
        rig.start(shell=turn)
        rig.told("sleep 60 & J=$!", shell=turn)
        leases = [rig.begin(ShellCall("close", turn), Kind.FILE, session=rig.session, cores=()),
                  rig.begin_run("echo reached", shell=turn),
                  rig.begin_run("echo new$J", shell=turn, start=True)]
        closed, refused, new = (rig.end(lease) for lease in leases)
        assert closed[0].state is ActionState.COMPLETED
        assert refused[1].kind == SHELL_ENDED and "it was closed" in refused[1].text
        assert new[1].stdout == b"new\n"


@BOTH
def test_a_shell_lost_with_its_init_is_reported(make: Any, backend: str) -> None:
    rig = make(backend)
    rig.start()
    rig.told("X=1; echo kept > file")
    lease = rig.begin_run("sleep 60")
    rig.until(lambda: ("started", lease) in rig.events)
    session = rig.executor._sessions.get(rig.session)
    os.kill(session.process.pid, 9)
    assert "init ended" in rig.end(lease)[0].reason
    outcome, back = rig.run("echo")
    assert outcome.state is ActionState.FAILED
    assert "it was lost when the sandbox's init ended" in back.text
    assert rig.told("echo ${X-none}; cat file", start=True) == b"none\nkept\n"


def test_shell_commands_have_figures_output_limits_and_resizes_like_other_commands(
        make: Any) -> None:
    rig = make("bwrap")
    rig.start()
    outcome, _ = rig.run("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done")
    assert outcome.cpu_ns > 20_000_000 and outcome.exec_ns > 20_000_000
    outcome, back = rig.run("head -c 3000000 /dev/zero; echo err >&2")
    assert len(back.stdout) == 1 << 20 and back.cut == (3000000 - (1 << 20), 0)
    lease = rig.begin_run("sleep 0.3; cat $TANGRAM_CPUS_FILE; echo $TANGRAM_CPUS", cores=rig.cores)
    rig.until(lambda: ("started", lease) in rig.events)
    rig.loop.call_soon(rig.executor.resize, lease, rig.cores[:1])
    assert rig.end(lease)[1].stdout == b"1\n2\n"
    rig.told("export OMP_NUM_THREADS=9")
    assert rig.told("echo $TANGRAM_CPUS $OMP_NUM_THREADS") == b"1 9\n"
    lease = rig.begin_run("echo one; sleep 0.1; echo two", stream=True)
    assert rig.end(lease)[1].stdout == b""
    assert b"".join(data for _, data in rig.pieces[lease]) == b"one\ntwo\n"


@BOTH
def test_a_wrong_shell_call_is_refused_in_one_line(make: Any, backend: str) -> None:
    rig = make(backend)
    assert rig.start(program="perl").reason.startswith("program: 'perl' is not one of bash")
    assert "it was not opened (program: 'perl' is not one of bash" in rig.run("echo")[1].text
    assert rig.start(cwd="nowhere").reason.startswith("cwd: nowhere:")
    assert "it was not opened (cwd: nowhere:" in rig.run("echo")[1].text
    assert rig.start(user="nobody-here").reason.startswith("user: 'nobody-here' is not the user")
    assert "it was not opened (user: 'nobody-here' is not" in rig.run("echo")[1].text
    assert "null byte" in rig.run("echo \0", start=True)[0].reason
    outcome = rig.end(rig.begin(ShellCall("open", 1, start=True), Kind.EXEC))[0]
    assert outcome.reason == "shell: it lives in a session; open one"


# ---- terminals ----


def test_a_shell_on_a_terminal_has_its_size_state_and_resizes(make: Any) -> None:
    rig = make("bwrap")
    assert rig.start(size=(30, 100)).state is ActionState.COMPLETED
    told = rig.told("test -t 0 && test -t 1 && test -t 2 && stty size; tty; X=5")
    assert told.splitlines() == [b"30 100", b"/dev/pts/0"]
    assert rig.run("sleep 60; echo no", timeout_ns=SOON_NS)[0].state is ActionState.TIMEOUT
    assert rig.told("echo $X; echo err >&2") == b"5\r\nerr\r\n"
    assert rig.told("cat", stdin=b"given") == b"given"
    lease = rig.begin_run("trap 'stty size; exit 4' WINCH; while :; do sleep 0.05; done")
    rig.until(lambda: ("started", lease) in rig.events)
    time.sleep(0.2)
    rig.give(lease, input_flow.RESIZE, number=50, other=60)
    outcome, back, _ = rig.end(lease)
    assert (outcome.exit_code, back.stdout.strip()) == (4, b"50 60")


def test_a_command_on_a_terminal_takes_what_it_has_credit_for(make: Any) -> None:
    rig = make("bwrap")
    call = TerminalCall(ExecCall(shell="stty raw; echo ready; sleep 0.3; head -c 100000 | wc -c; "
                                       "exit 3", stream=True))
    lease = rig.begin(call, Kind.EXEC, session=rig.session)
    rig.until(lambda: b"ready" in b"".join(data for _, data in rig.pieces.get(lease, ())))
    assert rig.credit[lease] == input_flow.WINDOW
    sent = 0
    while sent < 100_000:
        piece = min(input_flow.PIECE_MAX, rig.credit[lease] - sent, 100_000 - sent)
        if piece:
            rig.give(lease, input_flow.DATA, b"x" * piece)
            sent += piece
        else:
            rig.until(lambda sent=sent: rig.credit[lease] > sent)
    outcome, _, _ = rig.end(lease)
    assert outcome.exit_code == 3
    assert b"100000" in b"".join(data for _, data in rig.pieces[lease])


def test_a_terminal_is_not_silent_after_the_output_that_a_command_may_keep(make: Any) -> None:
    rig = make("bwrap")
    call = TerminalCall(ExecCall(shell="yes | head -c 1500000; echo end", stream=True))
    lease = rig.begin(call, Kind.EXEC, session=rig.session)
    assert rig.end(lease)[1].cut == (0, 0)
    assert b"".join(data for _, data in rig.pieces[lease]).endswith(b"end\r\n")


@pytest.mark.parametrize("text", [b"", b"a line\n", b"no line end"])
def test_the_end_of_the_input_ends_one_program(make: Any, text: bytes) -> None:
    rig = make("bwrap")
    call = TerminalCall(ExecCall(shell="echo ready; cat; read -r next; echo [$next]", stream=True))
    lease = rig.begin(call, Kind.EXEC, session=rig.session)
    rig.until(lambda: b"ready" in b"".join(data for _, data in rig.pieces.get(lease, ())))
    rig.give(lease, input_flow.DATA, text)
    rig.give(lease, input_flow.HANGUP, b"")
    rig.give(lease, input_flow.DATA, b"more\n")
    assert rig.end(lease)[0].exit_code == 0
    assert b"[more]" in b"".join(data for _, data in rig.pieces[lease])


def test_an_end_of_the_input_that_waits_for_room_stays_before_what_follows_it() -> None:
    terminal, line = Terminal((24, 80), echo=False), b"line\n"
    sent = line * 40_000
    terminal.write(sent)
    assert terminal.waits_to_write
    terminal.hang_up()
    terminal.hang_up()
    terminal.write(b"more\n")
    got = b""
    while data := os.read(terminal.program, 1 << 16):
        got += data
        terminal.write_more()
    assert got == sent and os.read(terminal.program, 100) == b""
    assert os.read(terminal.program, 100) == b"more\n"
    terminal.close()


def test_a_resize_after_the_program_closed_its_terminal_is_harmless(make: Any) -> None:
    rig = make("bwrap")
    call = TerminalCall(ExecCall(shell="trap '' HUP; exec <&- >&- 2>&-; sleep 1; exit 5",
                                 stream=True))
    lease = rig.begin(call, Kind.EXEC, session=rig.session)
    rig.until(lambda: lease in rig.credit)
    for _ in range(10):
        rig.give(lease, input_flow.RESIZE, b"", 50, 60)
        end = time.monotonic() + 0.05
        rig.until(lambda end=end: time.monotonic() > end)
    assert rig.end(lease)[0].exit_code == 5, "its init is alive"


def test_a_program_that_closed_its_terminal_lives_on_and_may_open_it_again(make: Any) -> None:
    rig = make("bwrap")
    call = TerminalCall(ExecCall(shell="echo one; T=$(tty); exec <&- >&- 2>&-; "
                                       "sleep 0.5; exec >$T; echo two; exit 5", stream=True))
    lease = rig.begin(call, Kind.EXEC, session=rig.session)
    assert rig.end(lease)[0].exit_code == 5
    assert b"".join(data for _, data in rig.pieces[lease]) == b"one\r\ntwo\r\n"


def test_a_node_without_a_free_terminal_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def opening() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as the kernel says it

    monkeypatch.setattr(os, "openpty", opening)
    with pytest.raises(Unstartable, match="pty: no terminal is free on this node; end"):
        Terminal((24, 80), True)


def test_a_terminal_is_refused_with_the_remedy_where_there_is_none(make: Any) -> None:
    rig = make("process")
    assert rig.start(size=(24, 80)).reason == (
        "pty: this sandbox has no terminals (Permission denied); open the session with "
        "backend='bwrap' or, for code of your own, trusted=True")
    call = TerminalCall(ExecCall(argv=("true",), stream=True))
    assert "pty: this sandbox has no terminals" in rig.end(
        rig.begin(call, Kind.EXEC, session=rig.session))[0].reason
    # a file of its own in place of a terminal's device is of no use either
    trusted = make("process", trusted=True)
    assert trusted.start(size=(24, 80)).state is ActionState.COMPLETED
    assert trusted.told("test -t 0 && echo yes") == b"yes\r\n"
