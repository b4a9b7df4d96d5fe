"""Detachable commands in real sandboxes: what they print, how they end, and how they go on in the
background."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.executor_rig import Rig
from helpers.hostile_rig import reason_to_skip

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol.payload import DetachableCall, ExecCall, FileCall
from tangram_hpc.sandbox.shells.output_files import KEPT

MUCH = 3 << 20


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    one = Rig(tmp_path_factory.mktemp("detachable"), trusted=False, kill_wait_s=1000.0,
              output_bound=1 << 40)
    yield one
    one.close()


class Commands:
    """Detachable commands of one session."""

    def __init__(self, rig: Rig, session: int) -> None:
        self.rig, self.session = rig, session

    def begin(self, line: str, reads_input: bool = False, **fields: Any) -> int:
        call = ExecCall(argv=("/bin/bash", "-c", line), stream=True, **fields)
        return self.rig.begin(DetachableCall(call, reads_input), Kind.EXEC, session=self.session)

    def end(self, lease: int) -> tuple[Outcome, bytes, bytes]:
        """The outcome of a command, and what its action printed without the first line."""
        outcome = self.rig.end(lease)[0]
        return outcome, self.printed(lease).partition(b"\n")[2], self.printed(lease, 2)

    def run(self, line: str, **fields: Any) -> tuple[Outcome, bytes, bytes]:
        return self.end(self.begin(line, **fields))

    def printed(self, lease: int, stream: int = 1) -> bytes:
        return b"".join(data for number, data in self.rig.pieces.get(lease, ()) if number == stream)

    def first(self, lease: int) -> tuple[int, str]:
        """The process id and the path in a command's first line."""
        self.rig.until(lambda: b"\n" in self.printed(lease))
        pid, _, path = self.printed(lease).partition(b"\n")[0].decode().partition(" ")
        return int(pid), path

    def send(self, lease: int, number: int = signal.SIGUSR2) -> None:
        self.rig.loop.call_soon(self.rig.executor.give_input, lease, input_flow.SIGNAL, b"",
                                int(number), 0)

    def detach(self, lease: int) -> Outcome:
        self.send(lease)
        return self.rig.end(lease)[0]

    def file(self, path: str, **fields: Any) -> Any:
        return self.rig.end(self.rig.begin(FileCall(path, **fields), Kind.FILE,
                                           session=self.session, cores=()))[1]

    def read_when(self, path: str, holds: bytes) -> None:
        """Waits until a file has this content."""
        until = time.monotonic() + 60
        while getattr(told := self.file(path), "data", None) != holds:
            assert time.monotonic() < until, told
            time.sleep(0.02)


@pytest.fixture(scope="module", params=["process", "bwrap"])
def commands(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Commands]:
    if why := reason_to_skip(request.param):
        pytest.skip(why)
    number = max(rig.up, default=0) + 1
    rig.open(number, backend=request.param, background="run", disk_mib=4 << 20)
    yield Commands(rig, number)
    rig.loop.call_soon(rig.executor.close_session, number)
    rig.until(lambda: number in rig.down)


def test_output_is_passed_on_byte_for_byte(commands: Commands) -> None:
    for data in (b"", b"x", b"a\0b\0", b"x" * (1 << 16), b"y" * MUCH, bytes(range(256)) * 100):
        commands.file("data", data=data)
        outcome, out, err = commands.run("cat data >&2; cat data; exit 7", output_max=2 * MUCH)
        assert (outcome.exit_code, out, err) == (7, data, data), len(data)


def test_the_first_line_names_the_commands_process_which_leads_its_group(commands: Commands
                                                                        ) -> None:
    lease = commands.begin("echo $$ $(ps -o pgid= -p $$); [ -p /dev/stdout ] || echo file")
    outcome, out, _ = commands.end(lease)
    pid, path = commands.first(lease)
    assert outcome.state is ActionState.COMPLETED
    assert out == b"%d %d\nfile\n" % (pid, pid) and "/.detachable/" in path


@pytest.mark.parametrize(("line", "code", "number"), [
    ("exit 255", 255, 0), ("kill -9 $$", 0, 9), ("kill -USR2 $$", 140, 0)])
def test_an_end_is_told_and_only_a_detached_command_has_the_signal(
        commands: Commands, line: str, code: int, number: int) -> None:
    outcome, _, _ = commands.run(line)
    assert (outcome.state, outcome.exit_code, outcome.signal) == (ActionState.FAILED, code, number)


@pytest.mark.parametrize(("fields", "code", "why"), [
    ({"cwd": "/nowhere"}, 126, "cwd: /nowhere"), ({"argv": ("/no/such",)}, 127, "argv: ")])
def test_what_cannot_be_started_is_told_and_leaves_the_session_usable(
        commands: Commands, fields: dict[str, Any], code: int, why: str) -> None:
    call = ExecCall(**{"argv": ("true",), "stream": True, **fields})
    outcome = commands.rig.end(commands.rig.begin(DetachableCall(call), Kind.EXEC,
                                                  session=commands.session))[0]
    assert outcome.exit_code == code and outcome.reason.startswith(why)
    assert commands.run("echo here")[1] == b"here\n"


def test_a_detached_command_goes_on_and_leaves_its_output_and_exit_code(commands: Commands) -> None:
    lease = commands.begin("echo one; until [ -e go ]; do sleep 0.02; done; echo two; exit 9")
    _, path = commands.first(lease)
    outcome = commands.detach(lease)
    assert outcome.state is ActionState.FAILED and outcome.signal == signal.SIGUSR2
    # another command runs beside it, and its own files are others
    assert commands.run("touch go; echo beside")[1] == b"beside\n"
    commands.read_when(f"{path}.code", b"9\n")
    assert commands.file(f"{path}.out").data == b"one\ntwo\n"
    assert commands.printed(lease).partition(b"\n")[2] in (b"", b"one\n")


def test_several_detached_commands_have_their_own_processes(commands: Commands) -> None:
    told = []
    for _ in range(3):
        lease = commands.begin("echo $$; exec sleep 1000")
        told.append(commands.first(lease))
        assert commands.detach(lease).signal == signal.SIGUSR2
    for pid, path in told:
        commands.read_when(f"{path}.out", b"%d\n" % pid)
    pid, path = told[1]
    assert commands.run(f"kill -s KILL -- -{pid}")[0].exit_code == 0
    commands.read_when(f"{path}.code", b"137\n")
    alive = " ".join(str(pid) for pid, _ in told)
    _, out, _ = commands.run(f"for p in {alive}; do kill -0 $p 2>/dev/null && echo $p; done; true")
    assert out == b"".join(b"%d\n" % pid for pid, _ in (told[0], told[2]))


def test_a_command_with_output_without_end_is_detached_at_once(commands: Commands) -> None:
    """Each look passes on a part, and so does the last one: else it would end after hours."""
    lease = commands.begin("truncate -s 1T /proc/self/fd/1; exec sleep 1000", output_max=1 << 40)
    commands.rig.until(lambda: len(commands.printed(lease)) > MUCH)
    passed: list[int] = []
    commands.rig.loop.call_soon(lambda: passed.append(len(commands.printed(lease))))
    assert commands.detach(lease).signal == signal.SIGUSR2
    assert len(commands.printed(lease)) - passed[0] < 16 << 20


def test_output_that_is_not_passed_on_is_not_read(commands: Commands) -> None:
    """A sparse file has any size at once, and to read it would take hours."""
    outcome, out, _ = commands.run("truncate -s 1T /proc/self/fd/1", output_max=1000)
    assert outcome.state is ActionState.COMPLETED and out == bytes(1000)
    assert commands.run("echo next")[1] == b"next\n"


def test_what_a_command_leaves_running_keeps_its_output_and_not_its_action(commands: Commands
                                                                          ) -> None:
    """Its writer sees no broken pipe, and writes into an emptied file."""
    line = "(trap 'echo late; exit' USR1; echo here >up; while :; do sleep 0.02; done) & echo $!"
    lease = commands.begin(line)
    outcome, out, _ = commands.end(lease)
    _, path = commands.first(lease)
    assert outcome.state is ActionState.COMPLETED
    commands.read_when("up", b"here\n")
    assert commands.run(f"kill -USR1 {int(out)}")[0].exit_code == 0
    commands.read_when(f"{path}.out", b"late\n")


def test_input_comes_by_a_fifo_until_it_is_removed(commands: Commands) -> None:
    lease = commands.begin("cat; echo done", reads_input=True)
    _, path = commands.first(lease)
    assert commands.detach(lease).signal == signal.SIGUSR2
    for word in ("hello", "again"):
        assert commands.run(f"echo {word} >{path}.in")[0].exit_code == 0
    commands.file(f"{path}.in", op="remove")
    commands.read_when(f"{path}.code", b"0\n")
    assert commands.file(f"{path}.out").data == b"hello\nagain\ndone\n"


def test_files_of_ended_commands_are_removed_later(commands: Commands) -> None:
    names = []
    for _ in range(KEPT + 3):
        lease = commands.begin("ls $TMPDIR/.detachable")
        _, out, _ = commands.end(lease)
        names.append(commands.first(lease)[1].rpartition("/")[2])
    assert [f"{name}.out" in out.decode() for name in names] == [False] * 2 + [True] * (KEPT + 1)


def test_a_stop_kills_at_once_what_ignores_sigterm(commands: Commands) -> None:
    """Without that, the rig's time between SIGTERM and SIGKILL would pass first."""
    call = ExecCall(argv=("/bin/bash", "-c", "trap '' TERM; sleep 1000"), stream=True)
    lease = commands.rig.begin(DetachableCall(call), Kind.EXEC, session=commands.session,
                               timeout_ns=1_000_000_000)
    assert commands.end(lease)[0].state is ActionState.TIMEOUT
    assert commands.run("echo next")[1] == b"next\n"


def test_a_folder_that_was_exchanged_spoils_only_its_own_session(commands: Commands) -> None:
    """A link in place of the folder leads where a program of the sandbox could write as well."""
    commands.run("echo x")
    commands.run('rm -rf "$TMPDIR/.detachable"; ln -s /proc/self "$TMPDIR/.detachable"')
    lease = commands.begin("echo x")
    outcome = commands.rig.end(lease)[0]
    assert outcome.exit_code == 126 and "cannot be made" in outcome.reason
    commands.rig.end(commands.rig.begin(
        ExecCall(shell='rm "$TMPDIR/.detachable"'), Kind.EXEC, session=commands.session))
    assert commands.run("echo x")[1] == b"x\n"
