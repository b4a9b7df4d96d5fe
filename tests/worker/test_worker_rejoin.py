"""A worker whose connection is lost goes on, and tells a broker that came back what it missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.worker_rig import DONE, SPEC, Rig, Wire

from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ProtocolError
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.liveness import PING_S
from tangram_hpc.storage.spill_files import FolderSpillFiles
from tangram_hpc.worker import driver as driver_module
from tangram_hpc.worker.driver import REPORT_S
from tangram_hpc.worker.kept_sessions import ENDS_MAX


def rig_with(*leases: int) -> Rig:
    """A worker on which these leases run."""
    rig = Rig("me")
    for lease in leases:
        rig.start(lease)
    return rig


def started(rig: Rig) -> list[int]:
    return [one[1].lease for one in rig.orders.got if one[0] == "start"]


def hello_of(wire: Wire) -> Any:
    hello = wire.said()[0]
    assert isinstance(hello, ms.WorkerHello)
    return hello


def test_the_first_hello_has_a_name_and_no_number_and_later_ones_have_both() -> None:
    rig = Rig("me")
    assert hello_of(rig.wire) == ms.WorkerHello(ms.PROTOCOL_VERSION, "7", SPEC, "me", 0)
    rig.driver.connection_lost("it died")
    assert hello_of(rig.dial()) == ms.WorkerHello(ms.PROTOCOL_VERSION, "7", SPEC, "me", 1)


def test_nothing_is_written_to_a_lost_link_and_no_output_is_repeated() -> None:
    rig = rig_with(1)
    rig.driver.started(1)
    sent = len(rig.wire.said())
    rig.driver.connection_lost("it died")
    rig.driver.output(1, 1, b"lost")
    rig.driver.session_up(5)
    rig.driver.finished(1, DONE, b"p", True)
    rig.hand.turn(3 * PING_S)
    assert len(rig.wire.said()) == sent and not rig.wire.queued and not rig.wire.closed
    assert not rig.driver.connected and not rig.ended
    assert not [one for one, _ in rig.come_back() if isinstance(one, ms.Output)]


def test_unconfirmed_results_are_sent_again_in_order_and_confirmed_ones_are_forgotten() -> None:
    rig = rig_with(1, 2, 3, 4)
    for lease in (3, 1, 2):
        rig.driver.finished(lease, DONE, b"%d" % lease, True)
    rig.driver.receive(ms.Confirmed((1,)), None)
    rig.driver.connection_lost("it died")
    rig.driver.finished(4, DONE, None, True)
    again = [(ms.Finished(3, DONE, True, 1), b"3"), (ms.Finished(2, DONE, True, 1), b"2"),
             (ms.Finished(4, DONE, True, 0), None)]
    assert rig.come_back() == again
    rig.driver.connection_lost("and again")
    assert rig.come_back() == again, "sent is not confirmed"
    rig.driver.receive(ms.Confirmed((3, 2, 4)), None)
    rig.driver.connection_lost("and again")
    assert hello_of(wire := rig.dial()).leases == ()
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn()
    assert len(wire.said()) == 1


def test_new_reports_flow_as_usual_after_the_welcome() -> None:
    rig = rig_with(1)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == []
    wire: Any = rig.driver._broker._link
    rig.driver.output(1, 1, b"x")
    rig.driver.finished(1, DONE, None, True)
    rig.hand.turn()
    assert wire.said()[1:] == [ms.Output(1, 1), ms.Finished(1, DONE, True, 0)]


def test_the_hello_lists_all_leases_and_sessions_that_the_broker_may_ask_about() -> None:
    rig = rig_with(1, 2, 3, 4)
    rig.start(5, after=1)  # queued
    rig.driver.finished(2, DONE, None, False)  # is being cleaned up
    rig.driver.finished(3, DONE, None, True)  # kept
    rig.driver.finished(4, DONE, None, True)
    rig.driver.receive(ms.Confirmed((4,)), None)
    for session in (10, 11, 12):
        rig.driver.receive(ms.OpenSandbox(SessionSpec(session)), None)
    rig.driver.session_up(11)
    rig.driver.session_down(12, "")
    rig.driver.connection_lost("it died")
    hello = hello_of(rig.dial())
    assert sorted(hello.leases) == [1, 2, 3, 5] and sorted(hello.sessions) == [10, 11, 12]


def test_queued_leases_start_and_are_not_given_back_without_a_broker() -> None:
    rig = rig_with(1)
    rig.start(2, after=1)
    rig.start(3, after=2)
    rig.driver.connection_lost("it died")
    rig.hand.turn(1)  # much longer than a lease waits behind another one with a broker
    rig.driver.finished(1, DONE, None, True)
    rig.hand.turn()
    assert started(rig) == [1, 2]
    rig.driver.finished(2, DONE, None, True)
    rig.hand.turn()
    assert started(rig) == [1, 2, 3]
    assert sorted(hello_of(rig.dial()).leases) == [1, 2, 3]


def test_leases_are_given_back_again_once_a_broker_is_there() -> None:
    rig = rig_with(1)
    rig.start(2, after=1)
    rig.driver.connection_lost("it died")
    rig.hand.turn(1)
    wire = rig.dial()
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn(1)
    assert ms.Returned((2,)) in wire.said()


def test_reports_are_repeated_in_the_order_that_the_broker_expects() -> None:
    rig = rig_with(1, 2, 3)
    for session in (10, 11, 12, 13):
        rig.driver.receive(ms.OpenSandbox(SessionSpec(session)), None)
    rig.driver.started(1)
    rig.driver.finished(2, DONE, b"two", True)
    rig.driver.session_up(10, "digest")
    rig.driver.session_packed(13, "files")
    rig.driver.session_up(12)
    rig.driver.session_down(12, "gone")
    rig.orders.snapshots = [ms.SnapshotReport("s", "held", 10, "img", "digest", 3)]
    rig.driver.input_credit(1, 7)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == [
        (ms.AttemptsStarted((1,)), None), (ms.SandboxUp(10, "digest"), None),
        (ms.SandboxPacked(13, "files"), None), (ms.SandboxDown(12, "gone"), None),
        (ms.SnapshotReport("s", "held", 10, "img", "digest", 3), None),
        (ms.InputCredit(1, 7), None), (ms.Finished(2, DONE, True, 1), b"two")]
    rig.hand.turn(REPORT_S)
    wire: Any = rig.driver._broker._link
    assert wire.said().count(ms.AttemptsStarted((1,))) == 1, "its start was told already"


def test_a_lease_released_without_a_broker_is_told_as_clean() -> None:
    rig = rig_with(1, 2)
    rig.driver.finished(1, DONE, b"one", False)
    rig.driver.connection_lost("it died")
    rig.driver.finished(2, DONE, None, False)
    rig.driver.released(1)
    rig.driver.released(2)
    assert rig.come_back() == [(ms.Finished(1, DONE, True, 1), b"one"),
                               (ms.Finished(2, DONE, True, 0), None)]


def test_a_lease_released_before_its_broker_died_is_told_as_clean() -> None:
    rig = rig_with(1)
    rig.driver.finished(1, DONE, None, False)
    rig.driver.released(1)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == [(ms.Finished(1, DONE, True, 0), None)]


def test_what_changes_between_hello_and_welcome_is_told_after_the_welcome() -> None:
    rig = rig_with(1, 2, 3, 4)
    rig.driver.finished(1, DONE, None, False)
    rig.driver.receive(ms.Confirmed((1,)), None)
    rig.driver.finished(2, DONE, None, False)
    rig.driver.connection_lost("it died")
    wire = rig.dial()
    rig.driver.released(1)  # the hello says that it is held
    rig.driver.released(2)
    rig.driver.returned(3)
    rig.driver.finished(4, DONE, None, True)
    rig.hand.turn()
    assert len(wire.said()) == 1
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn()
    assert wire.said()[1:] == [ms.Released(1), ms.Returned((3,)), ms.Finished(2, DONE, True, 0),
                               ms.Finished(4, DONE, True, 0)]


def test_reports_between_a_hello_and_a_second_loss_are_not_told_twice() -> None:
    rig = rig_with(1)
    rig.driver.connection_lost("it died")
    rig.dial()
    rig.driver.returned(1)
    rig.driver.connection_lost("and again")
    assert hello_of(wire := rig.dial()).leases == ()
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn()
    assert len(wire.said()) == 1, "the hello has told it"


def test_credit_is_repeated_with_the_input_that_has_come() -> None:
    rig = rig_with(1, 2, 3)
    for lease in (1, 2, 3):
        rig.driver.input_credit(lease, 10)
    data = memoryview(b"seven..")
    rig.driver.receive(ms.Input(1, input_flow.DATA, 0, 0, 1), data)
    rig.driver.receive(ms.Input(2, input_flow.DATA, 0, 0, 1), memoryview(b"0123456789"))
    rig.driver.finished(3, DONE, None, True)
    rig.driver.receive(ms.Confirmed((3,)), None)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == [(ms.InputCredit(1, 10, 7), None), (ms.InputCredit(2, 10, 10), None)]


def test_port_streams_end_with_the_connection() -> None:
    rig = Rig()
    for stream in (1, 2, 3):
        rig.driver.receive(ms.OpenStream(stream, 5, 80), None)
    rig.driver.receive(ms.StreamEnded(2), None)
    rig.driver.stream(ms.StreamEnded(3))
    rig.orders.got.clear()
    rig.driver.connection_lost("it died")
    assert rig.orders.got == [
        ("carry", ms.StreamEnded(1, "connect: it died", "ECONNRESET"), b"")]
    rig.driver.stream(ms.StreamData(1), b"late")
    assert rig.come_back() == []
    rig.orders.got.clear()
    rig.driver.connection_lost("and again")
    assert rig.orders.got == []


def test_a_session_that_moved_away_and_came_back_is_only_up() -> None:
    rig = Rig()
    for _ in range(2):
        rig.driver.receive(ms.OpenSandbox(SessionSpec(5)), None)
        rig.driver.session_up(5)
        rig.driver.receive(ms.PackSandbox(5), None)
        rig.driver.session_packed(5, "files")
    rig.driver.receive(ms.OpenSandbox(SessionSpec(5)), None)
    rig.driver.connection_lost("it died")
    assert hello_of(rig.dial()).sessions == (5,)
    rig.driver.connection_lost("it died")
    rig.driver.session_up(5)
    assert rig.come_back() == [(ms.SandboxUp(5), None)]


def test_a_session_requested_while_its_sandbox_is_closed_waits_for_the_end_of_that() -> None:
    rig = Rig("me")
    opened, close = ms.OpenSandbox(SessionSpec(5)), ms.CloseSandbox(5)

    def orders() -> list[str]:
        names = {"open_session": "open", "close_session": "close"}
        return [names[one[0]] for one in rig.orders.got if one[0] in names]

    rig.driver.receive(opened, None)
    rig.driver.session_up(5)
    for order in (close, opened, opened):  # the third one is a repetition
        rig.driver.receive(order, None)
    assert orders() == ["open", "close"]
    rig.driver.session_down(5, "")
    assert orders() == ["open", "close", "open"]
    rig.driver.connection_lost("it died")
    assert rig.come_back() == []  # it is open, and not ready yet
    rig.driver.session_up(5)
    # a close that comes while the session waits to be opened is carried out, and told, too
    for order in (close, opened, close):
        rig.driver.receive(order, None)
    rig.driver.session_down(5, "")
    assert orders()[3:] == ["close", "close", "open", "close"]
    rig.driver.session_down(5, "")
    assert len(orders()) == 7
    rig.driver.connection_lost("and again")
    assert rig.come_back() == [(ms.SandboxDown(5, ""), None)]


def test_only_the_last_ends_of_sandboxes_are_kept() -> None:
    rig = Rig()
    for session in range(1, ENDS_MAX + 3):
        rig.driver.session_down(session, "")
    rig.driver.session_down(3, "once more")
    rig.driver.connection_lost("it died")
    told = [one.session for one, _ in rig.come_back()]
    assert told == [*range(4, ENDS_MAX + 3), 3]


def test_orders_that_come_twice_reach_the_executor_once_or_do_no_harm() -> None:
    rig = rig_with(1, 2)
    rig.start(3, after=1)
    rig.driver.finished(2, DONE, b"two", True)
    rig.driver.receive(ms.OpenSandbox(SessionSpec(5)), None)
    rig.driver.session_up(5)
    rig.driver.connection_lost("it died")
    rig.come_back()
    for lease in (1, 2):
        rig.start(lease)
    rig.start(3, after=1)
    assert started(rig) == [1, 2], "the end of lease 2 is known"
    rig.driver.receive(ms.OpenSandbox(SessionSpec(5)), None)
    rig.driver.connection_lost("it died")
    assert (ms.SandboxUp(5), None) in rig.come_back(), "a repeated order changes nothing"


@pytest.mark.parametrize("answer", [ms.PeerRefused("no such node"), ms.WorkerWelcome(2, "/store")])
def test_a_worker_that_is_not_taken_back_ends_everything(answer: Any) -> None:
    rig = rig_with(1)
    rig.start(2, after=1)
    rig.driver.finished(1, DONE, None, False)
    rig.driver.connection_lost("it died")
    wire = rig.dial()
    rig.driver.receive(answer, None)
    assert rig.orders.got[-1] == ("close",) and len(rig.ended) == 1 and rig.driver.fenced
    assert wire.closed and len(wire.said()) == 1 and not wire.queued, "its reports are void"
    rig.hand.turn(10)
    assert started(rig) == [1] and len(wire.said()) == 1


def test_a_worker_refused_at_its_first_hello_is_not_fenced() -> None:
    rig = Rig()
    rig.driver.receive(ms.PeerRefused("done"), None)
    assert rig.ended == ["done"] and not rig.driver.fenced and rig.driver.refusal == "done"


@pytest.mark.parametrize("joining", [False, True])
@pytest.mark.parametrize("how", ["lost", "stop", "leave"])
def test_a_worker_without_a_broker_can_end(how: str, joining: bool) -> None:
    rig = rig_with(1)
    rig.start(2, after=1)
    rig.driver.connection_lost("it died")
    wire = rig.dial() if joining else Wire()
    getattr(rig.driver, how)("over")
    assert rig.orders.got[-1] == ("close",) and rig.ended == ["over"] and not rig.driver.fenced
    rig.driver.connection_lost("late")
    rig.driver.rejoin(late := Wire())
    rig.hand.turn(10)
    assert not late.said() and not late.queued and not rig.hand.calls
    assert not [one for one in wire.said() if isinstance(one, ms.Finished | ms.Returned)]


@pytest.mark.parametrize(("how", "told"), [("leave", False), ("stop", True), ("fenced", False)])
def test_ends_in_the_closing_executor_are_told_only_to_a_broker_that_waits_for_them(
        how: str, told: bool) -> None:
    rig = rig_with(1, 2)
    rig.driver.finished(2, DONE, None, False)

    def close() -> None:
        rig.driver.finished(1, Outcome(ActionState.CANCELLED), None, True)
        rig.driver.released(2)

    rig.orders.close = close  # type: ignore[attr-defined]
    wire = rig.wire
    if how == "fenced":
        rig.driver.connection_lost("it died")
        wire = rig.dial()
        rig.driver.receive(ms.PeerRefused("no such node"), None)
    else:
        rig.hand.turn()
        getattr(rig.driver, how)("over")
    ends = [one for one, _ in wire.queued] + wire.said()
    assert (ms.Finished(1, Outcome(ActionState.CANCELLED), True) in ends) == told
    assert (ms.Released(2) in ends) == told


def test_a_lost_connection_of_an_ended_worker_is_ignored() -> None:
    rig = Rig()
    rig.driver.receive(ms.OpenStream(1, 5, 80), None)
    rig.driver.stop("over")
    rig.driver.connection_lost("late")
    assert rig.orders.got[-1] == ("close",)


def test_a_second_welcome_over_one_connection_repeats_nothing() -> None:
    rig = rig_with(1)
    rig.driver.started(1)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == [(ms.AttemptsStarted((1,)), None)]
    wire: Any = rig.driver._broker._link
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.driver.receive(ms.WorkerWelcome(2, "/store"), None)
    rig.hand.turn()
    assert len(wire.said()) == 2 and not rig.ended


def test_results_that_a_second_loss_interrupts_are_all_sent_again(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "RESEND_BYTES", 1)
    rig = rig_with(1, 2, 3)
    for lease in (1, 2, 3):
        rig.driver.finished(lease, DONE, None, True)
    rig.driver.connection_lost("it died")
    assert rig.come_back() == [(ms.Finished(1, DONE, True, 0), None)]
    rig.driver.connection_lost("and again")
    rig.hand.turn(1)
    wire = rig.dial()
    rig.hand.turn(1)
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn(1)
    assert [one.lease for one in wire.said()[1:]] == [1, 2, 3]


def test_an_order_before_the_second_welcome_is_a_protocol_error() -> None:
    rig = rig_with(1)
    rig.driver.connection_lost("it died")
    rig.dial()
    with pytest.raises(ProtocolError, match="before the welcome"):
        rig.driver.receive(ms.Resize(1, (0,)), None)


def test_a_worker_lost_before_its_first_welcome_joins_as_a_new_one() -> None:
    rig = Rig(joins=False)
    rig.driver.connection_lost("it died")
    wire = rig.dial()
    assert hello_of(wire).node == 0
    rig.driver.receive(ms.WorkerWelcome(9, "/store"), None)
    assert rig.driver.joined and rig.driver.welcome == ms.WorkerWelcome(9, "/store")


def test_pings_are_sent_and_answered_between_hello_and_welcome() -> None:
    rig = Rig()
    rig.driver.connection_lost("it died")
    wire = rig.dial()
    rig.driver.receive(ms.Ping(4), None)
    rig.hand.turn(3 * PING_S)
    assert wire.said()[1] == ms.Pong(4) and wire.said().count(ms.Ping()) >= 1


def test_an_end_by_sigterm_is_told_after_the_welcome_too() -> None:
    rig = rig_with(1, 2)
    killed = Outcome(ActionState.FAILED, signal=15)
    rig.driver.finished(1, killed, None, True)
    rig.driver.connection_lost("it died")
    assert hello_of(rig.dial()).leases == (1, 2)
    rig.hand.turn(10)
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn()
    wire: Any = rig.driver._broker._link
    assert wire.said()[-1] == ms.Finished(1, killed, True, 0)


def test_kept_results_are_sent_again_in_frames_at_the_pace_of_the_connection(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "RESEND_BYTES", 3000)
    spill = FolderSpillFiles(tmp_path / "results")
    rig = Rig("me", spill)
    monkeypatch.setattr(rig.driver._kept, "_memory_max", 2500)
    rig.driver.connection_lost("it died")
    for lease in range(1, 8):
        rig.driver._open.add(lease)
        rig.driver.finished(lease, DONE, bytes([lease]) * 1000, lease != 7)
    assert [file.stat().st_size for file in (tmp_path / "results").iterdir()] == [5000]
    wire = rig.dial()
    wire.unsent = 10_000
    rig.driver.receive(ms.WorkerWelcome(1, "/store"), None)
    rig.hand.turn(1)
    assert len(wire.frames) == 1, "the connection takes no more"
    wire.unsent = 0
    rig.hand.turn(driver_module.RESEND_S)
    rig.driver.released(7)  # its result is still to come
    rig.hand.turn(1)
    assert [len(frame) for frame in wire.frames[1:]] == [3, 3, 1]
    ends = [envelope for frame in wire.frames[1:] for envelope in frame]
    assert ends == [(ms.Finished(lease, DONE, True, 1), bytes([lease]) * 1000)
                    for lease in range(1, 8)]
    rig.driver.receive(ms.Confirmed(tuple(range(1, 8))), None)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_worker_refuses_a_broker_that_was_superseded_by_one_that_it_has_seen() -> None:
    """It was continued after another one had taken the job, and has not noticed yet."""
    rig = Rig("me", joins=False)
    rig.driver.receive(ms.WorkerWelcome(1, "/store", epoch=2), None)
    rig.start(1)
    rig.driver.connection_lost("it died")
    old = rig.dial()
    rig.driver.receive(ms.WorkerWelcome(1, "/store", epoch=1), None)
    assert old.closed and not rig.driver.connected and not rig.ended and not rig.driver.fenced
    rig.driver.finished(1, DONE, None, True)
    assert len(old.said()) == 1, "it was told nothing but the hello"
    rig.dial()
    rig.driver.receive(ms.WorkerWelcome(1, "/store", epoch=3), None)
    assert rig.driver.joined and started(rig) == [1]
