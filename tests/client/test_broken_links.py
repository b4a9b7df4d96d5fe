"""What a client has sent arrives once, although its connection breaks and comes back: on a real
client and a real broker driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any

import pytest
from helpers.link_rig import LinkRig, link_rig
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.client.session import Session
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import BrokerUnreachable, InvalidInput, SessionLost
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.input_flow import DATA, HANGUP, RESIZE, SIGNAL, WINDOW
from tangram_hpc.protocol.unconfirmed import UnconfirmedMessages

WAIT_S = 30


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LinkRig]:
    with link_rig(tmp_path) as rig:
        yield rig


def opened(rig: LinkRig, **options: Any) -> Session:
    """A session of the rig's client on the rig's worker."""
    session = rig.client.session(**options)
    rig.until(lambda: session.spec.id in rig.broker.scheduler.ledger.sessions, "it is requested")
    rig.worker_says(ms.SandboxUp(session.spec.id))
    session.opened.result(WAIT_S)
    return session


def events(rig: LinkRig, kind: type) -> list[Any]:
    return [event for event in rig.broker.journal.events if isinstance(event, kind)]


@pytest.mark.parametrize("way", ["queued", "lost on its way"])
def test_a_session_that_is_closed_while_the_link_is_broken_is_closed(rig: LinkRig, way: str
                                                                     ) -> None:
    session = opened(rig)
    if way == "queued":
        with rig.broken():
            session.close()
    else:
        rig.channel.deaf = True
        session.close()
        with rig.broken():
            pass
    rig.until(lambda: rig.worker.all(ms.CloseSandbox), "the sandbox is closed")
    rig.worker_says(ms.SandboxDown(session.spec.id, ""))
    assert session.closed.result(WAIT_S) == ""
    assert len(events(rig, ev.SessionClosing)) == 1


def test_messages_without_an_answer_arrive_once(rig: LinkRig) -> None:
    """Some before the break, some on their way, some while the link is broken."""
    client, session = rig.client, opened(rig, idle_s=1000)
    client.register_service("s", {"backend": "fake", "degrees": [1]})
    client.register_rollouts("pool", {"buckets": [{"services": ["s"]}]})
    client.tool_returned("pool", "t", "first", 1)
    session.renew()
    rig.until(lambda: events(rig, ev.SessionRenewed), "it is renewed")
    rig.channel.deaf = True
    client.tool_returned("pool", "t", "second", 2)
    session.renew()
    with rig.broken():
        client.tool_returned("pool", "t", "third", 3)
        client.trajectory_ended("pool", "t")
    rig.until(lambda: events(rig, ev.TrajectoryEnded), "the end is reported")
    assert [event.tool for event in events(rig, ev.ToolReturned)] == ["first", "second", "third"]
    assert len(events(rig, ev.SessionRenewed)) == 2


def test_a_request_to_end_the_broker_survives_a_broken_link(rig: LinkRig) -> None:
    with rig.broken():
        rig.client.shutdown_broker("done")
    rig.until(lambda: rig.broker.broker.ended, "the broker ends")


def test_a_client_that_is_closed_while_it_reconnects_says_goodbye(rig: LinkRig) -> None:
    def close() -> None:
        rig.client._connection._closing = True  # what `close` does first

    with rig.broken():
        rig.on_dial = close
    rig.until(lambda: rig.channel.peer.peer.said_bye or rig.client.failure, "it has ended")
    assert rig.channel.peer.peer.said_bye


def test_a_client_that_is_closed_just_after_it_has_sent_says_goodbye(rig: LinkRig) -> None:
    closer = Thread(target=rig.client.close)

    def close() -> None:
        rig.on_sent = lambda: None
        closer.start()
        with pytest.raises(BrokerUnreachable, match="was closed"):
            while True:
                rig.client.submit(["true"])

    rig.on_sent = close
    rig.client.submit(["true"])
    rig.until(lambda: rig.client.failure, "it has ended")
    closer.join(WAIT_S)
    assert rig.channel.peer.peer.said_bye


def test_a_question_is_asked_again(rig: LinkRig) -> None:
    rig.channel.deaf = True
    request, answer = rig.client._connection.begin(lambda request: ms.Query(request, "info"))
    with rig.broken():
        pass
    assert answer.result(WAIT_S)
    assert not rig.client._connection._questions, request


def test_a_client_attached_to_a_session_closes_it_and_leaves_while_the_link_is_broken(
        rig: LinkRig) -> None:
    session = opened(rig, shared=True)
    with rig.new_client() as guest:
        attached = guest.attach(session.handle(may_close=True))
        with rig.broken():
            attached.close()
            attached.detach()
        rig.until(lambda: events(rig, ev.SessionClosing), "it is closed")
        assert "closed by client 2" in events(rig, ev.SessionClosing)[0].reason


def pty_of(rig: LinkRig) -> tuple[Any, int]:
    """A terminal whose command runs on the rig's worker, and the number of its lease."""
    pty = rig.client.pty(["cat"])
    (start,) = rig.until(lambda: rig.worker.all(ms.StartAttempt), "it starts")
    rig.worker_says(ms.AttemptsStarted((start.lease,)))
    return pty, start.lease


def input_of(rig: LinkRig) -> tuple[bytes, list[int]]:
    """The bytes that the worker has got, and the kinds of all other input."""
    got = [(message, payload) for message, payload in rig.worker.heard
           if isinstance(message, ms.Input)]
    return (b"".join(payload or b"" for message, payload in got if message.kind == DATA),
            [message.kind for message, _ in got if message.kind != DATA])


def test_input_on_its_way_when_the_link_breaks_arrives_once_and_more_can_follow(rig: LinkRig
                                                                                ) -> None:
    pty, lease = pty_of(rig)
    rig.worker_says(ms.InputCredit(lease, WINDOW))
    pty.write(b"a" * 1000)
    rig.until(lambda: len(input_of(rig)[0]) == 1000, "the first bytes arrive")
    rig.channel.deaf = True
    pty.write(b"b" * (WINDOW - 1000))  # takes all credit
    pty.interrupt()
    with rig.broken():
        pty.hang_up()
    rig.until(lambda: len(input_of(rig)[0]) == WINDOW, "what was on its way arrives")
    rig.worker_says(ms.InputCredit(lease, WINDOW))
    pty.write(b"c")
    rig.until(lambda: len(input_of(rig)[0]) > WINDOW, "input goes on")
    data, others = input_of(rig)
    assert data == b"a" * 1000 + b"b" * (WINDOW - 1000) + b"c"
    assert sorted(others) == sorted([SIGNAL, HANGUP])


def test_each_end_of_the_input_stays_behind_what_was_written_before_it(rig: LinkRig) -> None:
    pty, lease = pty_of(rig)
    for text in (b"one\n", b"two\n"):
        pty.write(text)
        pty.hang_up()
    rig.worker_says(ms.InputCredit(lease, WINDOW))
    rig.until(lambda: input_of(rig)[1].count(HANGUP) == 2, "both ends arrive")
    got = [payload if message.kind == DATA else message.kind for message, payload
           in rig.worker.heard if isinstance(message, ms.Input)]
    assert got == [b"one\n", HANGUP, b"two\n", HANGUP]


def test_credit_that_comes_while_the_link_is_broken_is_not_lost(rig: LinkRig) -> None:
    pty, lease = pty_of(rig)
    with rig.broken():
        rig.worker_says(ms.InputCredit(lease, WINDOW))
        pty.write(b"x")
    rig.until(lambda: input_of(rig)[0] == b"x", "the input arrives")


def test_a_port_that_is_being_connected_gets_nothing_of_the_broken_link(rig: LinkRig) -> None:
    """The node's answer to the first attempt is on its way when the link comes back."""
    session, got = opened(rig), Queue[bytes]()

    def connect() -> None:
        with session.connect(7000, timeout=WAIT_S) as stream:
            got.put(stream.recv(100))

    Thread(target=connect, daemon=True).start()
    (first,) = rig.until(lambda: rig.worker.all(ms.OpenStream), "the first attempt")
    with rig.broken():
        pass
    second = rig.until(lambda: rig.worker.all(ms.OpenStream)[1:], "the second attempt")[0]
    for stream, data in ((first.stream, b"old"), (second.stream, b"new")):
        rig.worker_says(ms.StreamCredit(stream, 1000))
        rig.worker_says(ms.StreamData(stream), data)
    assert got.get(timeout=WAIT_S) == b"new"


def test_a_finalizer_may_close_a_session(rig: LinkRig) -> None:
    """It may interrupt a thread that holds the client's lock."""
    session = opened(rig)
    with rig.client._connection._lock:
        session.renew()
        session.close()
    rig.until(lambda: rig.worker.all(ms.CloseSandbox), "the sandbox is closed")
    assert len(events(rig, ev.SessionRenewed)) == 1


def test_a_finalizer_may_cancel_an_action_and_end_a_slot(rig: LinkRig) -> None:
    """As those of an iterator of `Client.map` and of a coroutine that nobody needs any more."""
    slot = rig.client.register_endpoint("search", concurrency=1).slot()
    slot.__enter__()
    waiting = rig.client.submit("true")
    with rig.client._connection._lock:
        assert waiting.cancel()
        slot.__exit__(None, None, None)
    rig.until(waiting.done, "the action is cancelled")
    assert waiting.cancelled()
    ledger = rig.broker.scheduler.ledger
    rig.until(lambda: not ledger.endpoints["search"].busy, "the slot is free")


def test_a_map_that_is_never_begun_or_is_refused_leaves_no_action(rig: LinkRig) -> None:
    iterator = rig.client.map(pow, [2, 3], [4, 5])
    rig.until(lambda: len(events(rig, ev.ActionSubmitted)) == 2, "both are submitted")
    del iterator
    rig.until(lambda: len(events(rig, ev.ActionCancelled)) == 2, "both are cancelled")
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        rig.client.map(len, [[1], Lock()])
    rig.until(lambda: len(events(rig, ev.ActionCancelled)) == 3, "the first one is cancelled")


def test_what_was_closed_comes_before_what_is_submitted_later(rig: LinkRig) -> None:
    session = opened(rig)
    with rig.client._connection._lock:
        session.close()
    with pytest.raises(SessionLost):
        session.exec("true").result(WAIT_S)


# ---- the count ---------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["send", "send", "arrive", "pong", "break"]), max_size=60))
def test_each_counted_message_arrives_once_and_in_order(steps: list[str]) -> None:
    """Messages and Pongs are lost at any place of a connection."""
    client, got = UnconfirmedMessages(), list[int]()
    way = list[int]()  # sent, and not there
    sent = 0
    for step in [*steps, "break", *["arrive"] * len(steps)]:
        if step == "send":
            client.add(ms.RenewSession(sent), None)
            way.append(sent)
            sent += 1
        elif step == "arrive" and way:
            got.append(way.pop(0))
        elif step == "pong":
            client.confirm(len(got))
        elif step == "break":
            way = [message.session for message, _ in client.missing(len(got))]  # type: ignore
        assert client.sent == sent
    assert got == list(range(sent))


def test_a_broker_that_counts_anew_gets_what_was_not_confirmed() -> None:
    client = UnconfirmedMessages()
    for number in range(5):
        client.add(ms.RenewSession(number), None)
    client.confirm(3)
    assert [message.session for message, _ in client.missing(0)] == [3, 4]  # type: ignore
    assert client.sent == 2
    client.confirm(1)
    assert [message.session for message, _ in client.missing(1)] == [4]  # type: ignore


def test_a_broker_that_did_not_count_gets_all_but_what_harms_twice() -> None:
    """It counts from 0 afterwards, and so does the client."""
    client = UnconfirmedMessages()
    sent: list[ms.Message] = [
        ms.RenewSession(1), ms.Input(1, DATA, n=1), ms.Input(1, SIGNAL, 2), ms.ReleaseSession(2),
        ms.Input(1, RESIZE, 24, 80), ms.Input(1, HANGUP), ms.RenewSession(3)]
    for message in sent:
        client.add(message, b"x" if message == sent[1] else None)
    client.confirm(1)
    kept = sent[3:]
    assert [message for message, _ in client.missing(-1)] == kept
    assert client.sent == len(kept)
    client.add(ms.Input(1, DATA, n=1), b"y")  # typed after the broker came back
    client.confirm(2)
    assert client.missing(3) == [(kept[3], None), (ms.Input(1, DATA, n=1), b"y")]
    assert [message for message, _ in client.missing(-1)] == kept[3:]


def test_little_is_kept_of_a_client_that_sends_much() -> None:
    client = UnconfirmedMessages()
    asked = [client.add(ms.Input(1, DATA, n=1), b"x" * 16384) for _ in range(8)]
    assert asked == [False, False, False, True] * 2
    assert not any(client.add(ms.RenewSession(1), None) for _ in range(63))
    assert client.add(ms.RenewSession(1), None)
