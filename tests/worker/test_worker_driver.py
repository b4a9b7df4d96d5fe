"""The worker's driver: messages become orders to the executor, reports become messages, and each
loop turn sends one frame."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.worker_rig import DONE, SPEC, Hand, Orders, Rig, Wire

from tangram_hpc.app.loop import LoopTimer
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ProtocolError
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.liveness import PING_S
from tangram_hpc.protocol.payload import ExecCall, decode, encode
from tangram_hpc.resources.cpu import affinity
from tangram_hpc.sandbox.manager.sandbox_executor import SandboxExecutor
from tangram_hpc.storage.store import FolderStore
from tangram_hpc.worker.driver import REPORT_S, SIGNAL_S, WorkerDriver


def test_the_worker_driver_passes_each_order_to_the_executor_once() -> None:
    rig = Rig()
    assert rig.wire.said() == [ms.WorkerHello(ms.PROTOCOL_VERSION, "7", SPEC)]
    rig.start(1)
    rig.start(1)
    rig.driver.receive(ms.KillAttempt(2, ActionState.CANCELLED), None)
    rig.driver.receive(ms.KillAttempt(1, ActionState.CANCELLED, "why"), None)
    rig.driver.receive(ms.Resize(1, (0, 1)), None)
    rig.driver.receive(ms.OpenSandbox(SessionSpec(5)), None)
    rig.driver.receive(ms.CloseSandbox(5), None)
    assert [one[0] for one in rig.orders.got] == [
        "start", "kill", "resize", "open_session", "close_session"]
    assert rig.orders.got[1] == ("kill", 1, ActionState.CANCELLED, "why")
    rig.driver.finished(1, DONE, None, False)
    rig.start(1)  # something of it may still be there
    rig.driver.receive(ms.KillAttempt(1, ActionState.CANCELLED), None)
    assert len(rig.orders.got) == 5
    rig.driver.released(1)


def test_reports_of_one_loop_turn_are_sent_in_one_frame() -> None:
    rig = Rig()
    before = len(rig.wire.frames)
    for lease in range(5):
        rig.start(lease)
        rig.driver.finished(lease, DONE, b"x" * lease or None, True)
    rig.driver.session_up(9)
    rig.driver.session_down(9, "gone")
    rig.driver.output(3, 1, b"piece")
    assert len(rig.wire.frames) == before
    rig.hand.turn()
    assert len(rig.wire.frames) == before + 1
    frame = rig.wire.frames[-1]
    assert frame[0] == (ms.Finished(0, DONE, True, 0), None)
    assert frame[4] == (ms.Finished(4, DONE, True, 1), b"xxxx")
    assert [m for m, _ in frame[5:]] == [ms.SandboxUp(9), ms.SandboxDown(9, "gone"),
                                         ms.Output(3, 1)]


def test_attempts_still_running_at_the_report_interval_are_reported_started() -> None:
    rig = Rig()
    for lease in (1, 2, 3):
        rig.start(lease)
        rig.driver.started(lease)
    rig.driver.finished(2, DONE, None, True)
    rig.hand.turn(REPORT_S)
    rig.hand.turn(REPORT_S)
    assert [m for m in rig.wire.said()
            if isinstance(m, ms.AttemptsStarted)] == [ms.AttemptsStarted((1, 3))]


def test_a_silent_worker_sends_pings_and_answers_them() -> None:
    rig = Rig()
    rig.hand.turn(3 * PING_S)
    assert rig.wire.said().count(ms.Ping()) == 2
    rig.driver.receive(ms.Ping(7), None)
    rig.driver.receive(ms.Pong(0), None)
    rig.hand.turn(PING_S)
    assert rig.wire.said()[-1] == ms.Pong(7)


@pytest.mark.parametrize("last", [ms.Shutdown("done"), ms.PeerRefused("done"), None])
def test_a_shutdown_refusal_or_lost_link_closes_the_worker_once(last: ms.Message | None) -> None:
    rig = Rig()
    rig.start(1)
    if last is None:
        rig.driver.lost("done")
    else:
        rig.driver.receive(last, None)  # type: ignore[arg-type]
    assert rig.orders.got[-1] == ("close",) and rig.wire.closed and rig.ended == ["done"]
    rig.driver.lost("again")
    rig.driver.finished(1, DONE, None, True)
    rig.hand.turn(10)
    assert rig.ended == ["done"] and len(rig.wire.said()) == 1


@pytest.mark.parametrize("how,payload", [
    ({}, None),  # the execution process was killed
    *((how, payload) for payload in (None, b"what it had written") for how in (
        {"signal": 15}, {"exit_code": 143}, {"signal": 9}, {"exit_code": 137}))])
def test_commands_that_slurm_ends_before_the_worker_leaves_are_not_reported(
        how: dict[str, int], payload: bytes | None) -> None:
    """scancel, a preemption and a time limit end the commands first. Their ends must not be
    reported as ends of the commands' own making."""
    rig = Rig()
    for lease in (1, 2):
        rig.start(lease)
    rig.driver.finished(1, Outcome(ActionState.FAILED, **how), payload, False)
    rig.driver.released(1)
    rig.hand.turn(0.05)
    rig.driver.leave("it left: SIGTERM")
    rig.driver.finished(2, DONE, None, True)  # what the executor says of it is nobody's any more
    rig.hand.turn(10)
    assert rig.wire.said()[1:] == [ms.Leaving("it left: SIGTERM")]
    assert rig.orders.got[-1] == ("close",) and rig.wire.closed
    assert rig.ended == ["it left: SIGTERM"]


@pytest.mark.parametrize("number", [15, 10, 12, 1], ids=["TERM", "USR1", "USR2", "HUP"])
def test_a_command_ended_by_a_signal_alone_is_reported_after_a_short_wait(number: int) -> None:
    rig = Rig()
    for lease in (1, 2, 3):
        rig.start(lease)
    killed = Outcome(ActionState.FAILED, signal=number)
    rig.driver.finished(1, killed, None, False)
    rig.driver.finished(2, killed, b"what it had written", False)
    rig.driver.released(2)
    rig.driver.finished(3, Outcome(ActionState.FAILED, exit_code=1), None, True)
    rig.hand.turn(0.01)
    ends = [m for m in rig.wire.said() if isinstance(m, ms.Finished)]
    assert [m.lease for m in ends] == [3]
    rig.hand.turn(SIGNAL_S + 0.01)
    rig.driver.released(1)
    rig.hand.turn(0.01)
    told = [m for m in rig.wire.said() if isinstance(m, ms.Finished | ms.Released)]
    assert told[1:] == [ms.Finished(1, killed, False, 0), ms.Finished(2, killed, True, 1),
                        ms.Released(1)]


def test_a_command_that_goes_to_the_background_is_reported_at_once() -> None:
    rig = Rig()
    rig.start(1)
    outcome = Outcome(ActionState.FAILED, signal=input_flow.DETACH, reason=input_flow.DETACHED)
    rig.driver.finished(1, outcome, b"what it had written", True)
    rig.hand.turn(0.01)
    assert ms.Finished(1, outcome, True, 1) in rig.wire.said()


@pytest.mark.parametrize("settles", [True, False])
def test_a_queued_attempt_starts_once_the_executor_has_settled(settles: bool) -> None:
    rig = Rig()
    rig.start(1)
    follow = rig.orders.got
    for lease in (2, 3):
        order = ms.StartAttempt(lease, Action(lease, "a"), (0,), after=lease - 1)
        rig.driver._queues.add(lease, lease - 1, (order, memoryview(b"p")))
        rig.driver._open.add(lease)
    rig.driver.finished(1, DONE, None, True, settles)
    assert [one[0] for one in follow] == ["start"]  # it may be in the middle of something
    if settles:
        assert not [call for call in rig.hand.calls if call[1] == rig.driver._begin_due]
        rig.driver.settled()
    else:
        rig.hand.turn()
    assert [(one[0], one[1].lease) for one in follow] == [("start", 1), ("start", 2)]
    rig.driver.settled()
    rig.hand.turn()
    assert len(follow) == 2, "the third attempt waits for the second"
    rig.driver.finished(2, DONE, None, True)
    rig.driver.settled()  # told without a promise, and yet settled: it begins, once
    rig.hand.turn()
    assert [one[1].lease for one in follow] == [1, 2, 3]


def test_a_message_not_meant_for_a_worker_is_a_protocol_error() -> None:
    rig = Rig()
    with pytest.raises(ProtocolError, match="Bye"):
        rig.driver.receive(ms.Bye(), None)
    early = WorkerDriver("7", SPEC, Wire(), Hand(), lambda r, w: Orders(),
                         lambda reason: None)
    with pytest.raises(ProtocolError, match="before the welcome"):
        early.receive(ms.StartAttempt(1, Action(1, "a"), (0,)), None)


def test_the_worker_driver_runs_a_command_with_the_real_executor(tmp_path: Path) -> None:
    async def main() -> list[tuple[Any, Any]]:
        loop, wire, ended = asyncio.get_running_loop(), Wire(), asyncio.Event()

        def make(reports: Any, welcome: ms.WorkerWelcome) -> SandboxExecutor:
            return SandboxExecutor(reports, FolderStore(welcome.store), tmp_path / "scratch",
                                   affinity.usable(), SandboxSettings(
                                       kill_wait_s=welcome.kill_wait_s,
                                       output_max=welcome.output_max))

        driver = WorkerDriver("7", SPEC, wire, LoopTimer(loop), make, lambda _: ended.set())
        driver.start()
        driver.receive(ms.WorkerWelcome(1, str(tmp_path / "store"), output_max=3), None)
        for lease, argv in ((1, ("echo", "hello")), (2, ("sleep", "1000"))):
            driver.receive(ms.StartAttempt(lease, Action(lease, "a"), (0,)),
                           memoryview(encode(ExecCall(argv=argv))))
        while not (2 in begun(wire.said()) and any(type(m) is ms.Finished for m in wire.said())):
            await asyncio.sleep(0.01)
        driver.receive(ms.Shutdown("done"), None)
        await asyncio.wait_for(ended.wait(), 30)
        return [envelope for frame in wire.frames for envelope in frame]

    def begun(messages: list[Any]) -> list[int]:
        return [n for m in messages if isinstance(m, ms.AttemptsStarted) for n in m.leases]

    envelopes = asyncio.run(main())
    ends = {m.lease: (m.outcome.state, p) for m, p in envelopes if isinstance(m, ms.Finished)}
    assert ends[1][0] is ActionState.COMPLETED and ends[2][0] is ActionState.CANCELLED
    back = decode(ends[1][1])
    assert (back.stdout, back.cut) == (b"hel", (3, 0))  # type: ignore[union-attr]
    assert 2 in begun([m for m, _ in envelopes])  # on a loaded machine the other one may be, too
    assert not (tmp_path / "scratch").exists()


def test_a_signal_for_a_lease_that_is_returned_is_forgotten() -> None:
    rig = Rig()
    rig.start(1)
    rig.start(2, after=1)
    rig.driver.receive(ms.Input(2, input_flow.SIGNAL, 15), None)
    rig.driver.returned(1)
    rig.hand.turn()
    assert rig.wire.said()[-1] == ms.Returned((2, 1))
    assert not rig.driver._early
