"""Sessions between their actions, on real processes: what they left running, how they outlive their
init, what a copy holds, and who gives way when memory runs out.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hostile_rig import BACKENDS, Arena
from helpers.hostile_rig import arena as new_arena

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall, ShellCall
from tangram_hpc.resources import memory, process_tree

_EXIT = 60 if platform.machine() == "x86_64" else 93  # the system call that ends one thread
LOOP = "for n in 1 2 3; do (setsid sh -c 'while :; do :; done' &) ; done"


@pytest.fixture(scope="module", params=BACKENDS)
def arena(request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with new_arena(request.param, tmp_path_factory.mktemp("arena"), "affinity") as made:
        yield made


def init_of(arena: Arena, session: int) -> int:
    process = arena.rig.session(session).process
    assert process is not None
    return process.pid


def ticks(pids: list[int]) -> int:
    """User and system time that these have used, in clock ticks."""
    total = 0
    for pid in pids:
        fields = (process_tree.read(f"/proc/{pid}/stat") or b"0) 0").rpartition(b")")[2].split()
        total += sum(map(int, fields[11:13]))
    return total


def background(arena: Arena, session: int) -> list[int]:
    found = [pid for pid in process_tree.descendants(init_of(arena, session))
             if b"while :" in (process_tree.read(f"/proc/{pid}/cmdline") or b"")]
    return found


def used_in(arena: Arena, session: int, seconds: float) -> int:
    pids = [*background(arena, session), init_of(arena, session)]
    before = ticks(pids)
    time.sleep(seconds)
    return ticks(pids) - before


def test_an_idle_session_uses_no_cpu_though_it_has_busy_loops(arena: Arena) -> None:
    before = arena.photo()
    session = arena.open(background="stop")
    outcome, _ = arena.rig.shell(LOOP, session=session)
    assert outcome.state is ActionState.COMPLETED
    assert len(background(arena, session)) == 3
    assert used_in(arena, session, 1.0) == 0
    lease = arena.rig.begin(ExecCall(argv=("sleep", "1")), Kind.EXEC, session=session)
    arena.rig.until(lambda: ("started", lease) in arena.rig.events)
    assert used_in(arena, session, 0.7) > 5, "they do not go on with the next action"
    arena.rig.end(lease)
    assert used_in(arena, session, 0.5) == 0
    arena.close(session)
    arena.settles(before)


def test_background_share_gets_little_cpu_time_and_background_end_none(arena: Arena) -> None:
    before = arena.photo()
    shared, ended = arena.open(background="share"), arena.open(background="end")
    for session in (shared, ended):
        assert arena.rig.shell(LOOP, session=session)[0].state is ActionState.COMPLETED
    assert background(arena, ended) == []
    per_second = os.sysconf("SC_CLK_TCK")
    used = used_in(arena, shared, 2.0)
    assert 0 < used < 2 * per_second * 0.3, used
    arena.close(shared)
    arena.close(ended)
    arena.settles(before)


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("how", ["stop", "share", "run"])
def test_an_action_that_is_stopped_takes_along_what_it_started_and_nothing_earlier(
        arena: Arena, how: str, shell: bool) -> None:
    """A server of an earlier action lives on, with the process that it starts meanwhile."""
    before = arena.photo()
    session = arena.open(background=how)
    beats = ("(setsid sh -c 'while :; do sleep 0.02; echo beat >>beats; done' >/dev/null 2>&1 &)\n"
             "until [ -s beats ]; do sleep 0.01; done")  # else it may be stopped before it begins
    assert arena.rig.shell(beats, session=session)[0].state is ActionState.COMPLETED
    (server,) = background(arena, session)
    if shell:  # the shells of a session are spared too
        opened = arena.rig.begin(ShellCall("open", 7, start=True), Kind.EXEC, session=session)
        assert arena.rig.end(opened)[0].state is ActionState.COMPLETED
    outcome, _ = arena.rig.shell(f"{LOOP}; exec sleep 100", session=session,
                                 timeout_ns=500_000_000)
    assert outcome.state is ActionState.TIMEOUT
    lease = arena.rig.begin(ExecCall(shell=f"{LOOP}; exec sleep 100"), Kind.EXEC, session=session)
    arena.rig.until(lambda: len(background(arena, session)) == 4)
    arena.rig.executor.kill(lease, ActionState.CANCELLED, "")
    assert arena.rig.end(lease)[0].state is ActionState.CANCELLED
    assert background(arena, session) == [server]
    counted, back = arena.rig.shell("wc -l <beats; sleep 0.5; wc -l <beats", session=session)
    assert counted.state is ActionState.COMPLETED
    first, last = map(int, back.stdout.split())
    assert last > first > 0, "the server stands still beside a later action"
    arena.close(session)
    arena.settles(before)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_process_whose_first_thread_has_ended_ends_with_its_stopped_action(
        arena: Arena, earlier: bool) -> None:
    """The kernel shows such a process as a zombie, while its other threads run on."""
    before = arena.photo()
    session = arena.open(background="run")
    if earlier:
        arena.rig.shell("sleep 4242 >/dev/null 2>&1 &", session=session)
    code = ("import os, threading, time, ctypes\n"
            "def write():\n"
            " while True: time.sleep(0.02); open('alive', 'a').write('x')\n"
            "if os.fork() == 0:\n"
            " os.setsid(); threading.Thread(target=write).start()\n"
            f" ctypes.CDLL(None).syscall({_EXIT})\n"
            "time.sleep(100)")
    outcome, _ = arena.rig.exec(sys.executable, "-c", code, session=session,
                                timeout_ns=1_500_000_000)
    assert outcome.state is ActionState.TIMEOUT
    _, back = arena.rig.shell("wc -c <alive; sleep 0.5; wc -c <alive", session=session)
    first, last = map(int, back.stdout.split())
    assert last == first > 0
    arena.close(session)
    arena.settles(before)


def test_a_cancellation_that_comes_too_late_ends_nothing_that_the_action_left(
        arena: Arena) -> None:
    before = arena.photo()
    session = arena.open(background="run")
    lease = arena.rig.begin(ExecCall(shell=f"{LOOP}; echo 1 >done"), Kind.EXEC, session=session)
    arena.rig.until(lambda: ("started", lease) in arena.rig.events)
    time.sleep(1)  # the action ends, and nobody reads that
    arena.rig.executor.kill(lease, ActionState.CANCELLED, "")
    assert arena.rig.end(lease)[0].state is ActionState.COMPLETED
    assert arena.rig.shell("true", session=session)[0].state is ActionState.COMPLETED
    assert len(background(arena, session)) == 3
    arena.close(session)
    arena.settles(before)


def test_a_session_outlives_its_init_a_bounded_number_of_times(arena: Arena) -> None:
    before = arena.photo()
    session, other = arena.open(), arena.open()
    arena.rig.file("kept", b"1", session=session)
    lease = arena.rig.begin(ExecCall(shell=f"{LOOP}; sleep 100"), Kind.EXEC, session=session)
    beside = arena.rig.begin(ExecCall(shell="sleep 0.5; echo right"), Kind.EXEC, session=other)
    arena.rig.until(lambda: len(background(arena, session)) >= 3)
    lost = background(arena, session)
    os.kill(init_of(arena, session), signal.SIGKILL)
    outcome = arena.rig.end(lease)[0]
    assert outcome.state is ActionState.FAILED and "init ended (signal 9" in outcome.reason
    assert arena.rig.shell("cat kept", session=session)[1].stdout == b"1"
    assert not any(process_tree.state(pid) not in "XZ" for pid in lost)
    assert arena.rig.end(beside)[1].stdout == b"right\n"
    arena.close(session)
    arena.close(other)
    arena.settles(before)


def test_a_fork_copies_all_files_and_changes_only_its_own(arena: Arena) -> None:
    before = arena.photo()
    origin = arena.open()
    made, _ = arena.rig.shell(
        "mkdir -p a/b empty shut; echo 1 >a/b/f; chmod 741 a/b/f; ln -s b/f a/link; ln -s /none "
        "gone; ln a/b/f a/hard; mkfifo pipe; truncate -s 20M sparse; echo x >shut/f; chmod 500 "
        "shut;"
        " printf x >'odd name\n\t*'; touch -d @1000000000 old; echo t >$TMPDIR/t", session=origin)
    assert made.state is ActionState.COMPLETED, made
    copy = arena.open(origin=origin)
    show = ("cat a/link a/hard $TMPDIR/t; stat -c %a a/b/f shut; "
            "stat -c '%Y' old; stat -c %h a/hard; "
            "stat -c %s sparse; du -m sparse | cut -f1; readlink gone; test -p pipe && "
            "test -d empty && cat odd*")
    (first, one), (second, two) = (arena.rig.shell(show, session=n) for n in (origin, copy))
    assert first.state is second.state is ActionState.COMPLETED, (first, one, second, two)
    assert one.stdout == two.stdout and one.stdout.startswith(b"1\n1\nt\n741\n500\n1000000000\n2\n")
    arena.rig.shell("echo changed >a/b/f; rm -f old", session=copy)
    assert arena.rig.shell("cat a/b/f; ls old", session=origin)[1].stdout == b"1\nold\n"
    arena.close(origin)
    assert arena.rig.shell("cat a/b/f", session=copy)[1].stdout == b"changed\n"
    arena.close(copy)
    arena.settles(before)


def test_a_session_over_its_disk_can_be_cleaned_by_hand(arena: Arena) -> None:
    before = arena.photo()
    session = arena.open(disk_mib=8)
    full, _ = arena.rig.shell("for n in 1 2 3 4; do head -c 4M /dev/zero >$n; done; sleep 20",
                              session=session)
    assert full.state is ActionState.FAILED and full.reason.startswith("disk: 16 MiB"), full
    refused, _ = arena.rig.file("x", b"x", session=session)
    assert refused.state is ActionState.FAILED and "8 MiB allowed" in refused.reason
    assert arena.rig.shell("sleep 1.2; rm 1 2 3", session=session)[0].state is ActionState.COMPLETED
    again, _ = arena.rig.shell("for n in 5 6 7; do head -c 4M /dev/zero >$n; done; sleep 20",
                               session=session)
    assert again.state is ActionState.FAILED and again.reason.startswith("disk:"), again
    arena.close(session)
    arena.settles(before)


def test_under_memory_pressure_the_action_furthest_above_its_request_is_killed(
        arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the reading of free memory is made up: the node's own must not really run out."""
    before = arena.photo()
    modest, greedy, idle = arena.open(mem_mib=300), arena.open(), arena.open(background="share")
    assert arena.rig.shell(LOOP, session=idle)[0].state is ActionState.COMPLETED
    small = arena.rig.begin(ExecCall(shell="sleep 3; echo right"), Kind.EXEC, session=modest)
    hoard = "python3 -c 'x = bytearray(200 << 20); import time; time.sleep(30)'"
    big = arena.rig.begin(ExecCall(shell=hoard), Kind.EXEC, session=greedy)
    arena.rig.until(lambda: sum(int((process_tree.read(f"/proc/{p}/statm") or b"0 0").split()[1])
                                for p in
                                process_tree.descendants(init_of(arena,
                                                                 greedy))) > (200 << 20) // 4096)
    monkeypatch.setattr(memory, "left_mib", lambda: 0)
    arena.rig.until(lambda: big in arena.rig.done)
    monkeypatch.undo()
    outcome = arena.rig.end(big)[0]
    assert outcome.state is ActionState.OUT_OF_MEMORY, outcome
    assert "the node ran out of memory" in outcome.reason
    assert used_in(arena, idle, 0.5) == 0, "what idles gives way first"
    outcome, back, _ = arena.rig.end(small)
    assert outcome.state is ActionState.COMPLETED and back.stdout == b"right\n"
    for session in (modest, greedy, idle):
        arena.close(session)
    arena.settles(before)
    assert Path(arena.rig.scratch).exists()
