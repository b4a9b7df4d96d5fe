"""Background processes with cores of their own, in real sandboxes: what they use without a lease,
and how leases begin and end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.executor_rig import NOTHING
from helpers.hostile_rig import Arena
from helpers.hostile_rig import arena as new_arena

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ShellCall
from tangram_hpc.resources import process_tree

TICKS = os.sysconf("SC_CLK_TCK")
LOOP = "(setsid sh -c 'while :; do :; done' >/dev/null 2>&1 &)"
BURN = """import sys, time
while time.process_time() < float(sys.argv[1]):
    pass
"""
HOG = "import time\nheld = bytearray(300 << 20)\nwhile True: time.sleep(0.001)\n"
# clone(CLONE_VFORK): the parent waits in the kernel, as for a disk, until its child has ended
IN_KERNEL = """import ctypes, os, platform, time
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
if ctypes.CDLL(None).syscall(number, 0x4000 | 17, 0, 0, 0, 0) == 0:
    while not os.path.exists("go"):
        time.sleep(0.02)
    os._exit(0)
"""


@pytest.fixture(scope="module", params=[
    "process-affinity", "bwrap-", pytest.param("bwrap-affinity", marks=pytest.mark.long),
    pytest.param("process-counted", marks=pytest.mark.long)])
def arena(request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    backend, enforcement = request.param.split("-")
    with new_arena(backend, tmp_path_factory.mktemp("arena"), enforcement) as made:
        yield made


@pytest.fixture
def session(arena: Arena) -> Iterator[int]:
    before = arena.photo()
    number = arena.open(background="run")
    yield number
    if number not in arena.rig.down:
        arena.close(number)
    arena.settles(before)


def left(arena: Arena, session: int, word: bytes) -> list[int]:
    """The processes of a session with this word in their command lines."""
    init = arena.rig.executor._sessions.get(session).process  # type: ignore[union-attr]
    assert init is not None
    return [pid for pid in process_tree.descendants(init.pid)
            if word in (process_tree.read(f"/proc/{pid}/cmdline") or b"")]


def running_loops(arena: Arena, session: int) -> list[int]:
    """The process of LOOP. While it becomes another program it has no command line for a moment."""
    found: list[int] = []

    def there() -> bool:
        found[:] = left(arena, session, b"while")
        return bool(found)

    arena.rig.until(there)
    return found


def stopped(arena: Arena, pids: list[int]) -> None:
    states: list[str] = []

    def all_stopped() -> bool:
        states[:] = [process_tree.state(pid) for pid in pids]
        return set(states) == {"T"}

    arena.rig.until(all_stopped, states)


def ticks(pids: list[int]) -> int:
    return sum(process_tree.cpu_ns(pid) for pid in pids) * TICKS // 10**9


def asks(arena: Arena, session: int) -> int:
    return arena.rig.events.count(("wants", session))


def asked(arena: Arena, session: int, before: int = 0) -> None:
    arena.rig.until(lambda: asks(arena, session) > before)


def passes(arena: Arena, seconds: float) -> None:
    """Lets the executor work for so long."""
    until = time.monotonic() + seconds
    arena.rig.until(lambda: time.monotonic() >= until)


def lent(arena: Arena, session: int, **action: object) -> int:
    return arena.rig.begin(NOTHING, Kind.BACKGROUND, session=session, **action)  # type: ignore[arg-type]


def kill(arena: Arena, lease: int, state: ActionState) -> Outcome:
    arena.rig.loop.call_soon(arena.rig.executor.kill, lease, state, "for the test")
    return arena.rig.end(lease)[0]


def test_a_busy_loop_is_stopped_without_a_lease_and_runs_with_one(arena: Arena, session: int
                                                                  ) -> None:
    assert arena.rig.shell(LOOP, session=session)[0].state is ActionState.COMPLETED
    asked(arena, session)
    loops = running_loops(arena, session)
    stopped(arena, loops)
    assert ticks(loops) <= TICKS // 5, "it had no lease"
    stopped_at = ticks(loops)
    passes(arena, 1.0)
    assert ticks(loops) == stopped_at, "it takes nothing while it waits for cores"
    lease = lent(arena, session)
    arena.rig.until(lambda: ticks(loops) > stopped_at + TICKS // 5)
    before = asks(arena, session)
    outcome = kill(arena, lease, ActionState.PREEMPTED)
    assert outcome.state is ActionState.PREEMPTED and outcome.cpu_ns >= 150_000_000, outcome
    asked(arena, session, before)
    stopped(arena, loops)
    assert arena.rig.shell("true", session=session)[0].state is ActionState.COMPLETED


def test_processes_that_wait_are_not_stopped_and_wake_in_time(arena: Arena, session: int) -> None:
    assert arena.rig.shell("(sh -c 'sleep 0.7; touch done; exec sleep 1000' >/dev/null 2>&1 &)",
                           session=session)[0].state is ActionState.COMPLETED
    arena.rig.until(lambda: len(left(arena, session, b"sleep")) > 0)
    arena.rig.until(lambda: bool(list(arena.rig.scratch.rglob("done"))))

    def sleeps() -> bool:
        """`sleep 1000` has its words before its loader has run, which may have to wait for a core,
        and its shell has them too until it becomes `sleep`."""
        states = [process_tree.state(pid) for pid in left(arena, session, b"sleep\x001000")]
        return states == ["S"]

    arena.rig.until(sleeps)
    passes(arena, 0.5)
    before = asks(arena, session)
    passes(arena, 1.0)
    assert asks(arena, session) == before, "a process that sleeps asks for nothing"
    assert sleeps()


def test_a_lease_ends_by_itself_and_says_what_was_used(arena: Arena, session: int) -> None:
    arena.rig.file("burn.py", BURN.encode(), session=session)
    arena.rig.shell("(python3 burn.py 0.4 >/dev/null 2>&1 && touch done &)", session=session)
    asked(arena, session)
    outcome = arena.rig.end(lent(arena, session))[0]
    assert list(arena.rig.scratch.rglob("done"))
    assert outcome.state is ActionState.COMPLETED and not outcome.reason
    assert outcome.cpu_ns >= 250_000_000, outcome
    assert outcome.exec_ns > 250_000_000, outcome
    assert outcome.isolation and outcome.enforcement


def test_a_lease_goes_on_while_a_process_waits_in_the_kernel(arena: Arena, session: int) -> None:
    arena.rig.file("in_kernel.py", IN_KERNEL.encode(), session=session)
    arena.rig.shell("(python3 in_kernel.py >/dev/null 2>&1 &)", session=session)
    lease = lent(arena, session)
    arena.rig.until(lambda: "D" in {process_tree.state(pid)
                                    for pid in left(arena, session, b"in_kernel")})
    passes(arena, 0.3)
    assert left(arena, session, b"in_kernel") and lease not in arena.rig.done, "it waits still"
    next(arena.rig.scratch.rglob("in_kernel.py")).with_name("go").touch()
    assert arena.rig.end(lease)[0].state is ActionState.COMPLETED


def test_a_lease_for_processes_that_are_gone_ends_at_once(arena: Arena, session: int) -> None:
    assert arena.rig.end(lent(arena, session))[0].state is ActionState.COMPLETED


def test_an_action_runs_beside_the_processes_and_they_ask_again(arena: Arena, session: int) -> None:
    arena.rig.shell(LOOP, session=session)
    asked(arena, session)
    lease = lent(arena, session)
    arena.rig.until(lambda: ("started", lease) in arena.rig.events)
    kill(arena, lease, ActionState.PREEMPTED)
    loops, before = running_loops(arena, session), asks(arena, session)
    used = ticks(loops)
    outcome, back = arena.rig.shell("sleep 0.5; echo right", session=session)
    assert back.stdout == b"right\n" and ticks(loops) > used
    assert outcome.state is ActionState.COMPLETED
    asked(arena, session, before)


@pytest.mark.parametrize("beside", ["nothing", "an open shell"])
def test_memory_that_breaks_the_sessions_limit_ends_all_background_processes(
        arena: Arena, beside: str) -> None:
    before = arena.photo()
    session = arena.open(background="run", mem_mib=128)
    if beside == "an open shell":  # the shell lives on, and the lease ends all the same
        opened = arena.rig.begin(ShellCall("open", 7, start=True), Kind.EXEC, session=session)
        assert arena.rig.end(opened)[0].state is ActionState.COMPLETED
    arena.rig.file("hog.py", HOG.encode(), session=session)
    arena.rig.shell("(python3 hog.py >/dev/null 2>&1 &)", session=session, mem_mib=1024)
    outcome = None
    for _ in range(50):  # the lease ends when nothing can run, and the hog grows only with one
        outcome = arena.rig.end(lent(arena, session))[0]
        if outcome.state is not ActionState.COMPLETED or not left(arena, session, b"hog"):
            break
        passes(arena, 0.05)
    assert outcome is not None and outcome.state is ActionState.OUT_OF_MEMORY, outcome
    assert outcome.reason.startswith("mem:")
    assert left(arena, session, b"hog") == []
    assert arena.rig.shell("true", session=session)[0].state is ActionState.COMPLETED
    arena.close(session)
    arena.settles(before)


def test_a_cancelled_lease_kills_the_processes(arena: Arena, session: int) -> None:
    arena.rig.shell(f"{LOOP}; {LOOP}", session=session)
    asked(arena, session)
    lease = lent(arena, session)
    arena.rig.until(lambda: ("started", lease) in arena.rig.events)
    outcome = kill(arena, lease, ActionState.CANCELLED)
    assert (outcome.state, outcome.reason) == (ActionState.CANCELLED, "for the test")
    assert left(arena, session, b"while") == []


def test_the_end_of_the_session_ends_the_lease_and_accounts_it(arena: Arena, session: int) -> None:
    arena.rig.shell(LOOP, session=session)
    asked(arena, session)
    lease = lent(arena, session)
    loops = running_loops(arena, session)
    arena.rig.until(lambda: ticks(loops) > TICKS // 5)
    arena.close(session)
    outcome = arena.rig.end(lease)[0]
    assert outcome.state is ActionState.CANCELLED and outcome.cpu_ns > 100_000_000, outcome
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in loops)


def test_while_files_are_copied_nothing_runs_and_afterwards_it_goes_on(arena: Arena, session: int
                                                                       ) -> None:
    arena.rig.shell(f"touch now; {LOOP}", session=session)
    asked(arena, session)
    before = asks(arena, session)
    fork = arena.open(background="run", origin=session)
    loops = running_loops(arena, session)
    stopped(arena, loops)
    assert arena.rig.shell("ls now", session=fork)[0].state is ActionState.COMPLETED
    asked(arena, session, before)
    used = ticks(loops)
    lease = lent(arena, session)
    arena.rig.until(lambda: ticks(loops) > used + TICKS // 20)
    kill(arena, lease, ActionState.PREEMPTED)
    arena.close(fork)
