"""How many single actions of a client are at the broker: on a real client and a real broker driver.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from helpers.link_rig import DEADLINE_S, LinkRig, link_rig

from tangram_hpc.broker import turns
from tangram_hpc.client.future import Future
from tangram_hpc.client.submission_credit import counts
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.event import ActionSubmitted
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ClientClosed
from tangram_hpc.protocol import message as ms

CREDIT = 5


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkRig]:
    monkeypatch.setattr(turns, "CREDIT", CREDIT)
    monkeypatch.setattr(turns, "CREDIT_OF_NODE", 0)
    with link_rig(tmp_path) as rig:
        yield rig


def known(rig: LinkRig) -> set[int]:
    """The actions that the broker has and whose results are not acknowledged."""
    return set(rig.broker.scheduler.ledger.actions)


def submitted(rig: LinkRig, count: int) -> list[Future]:
    """Single actions, of which the broker has as many as it takes by now."""
    futures = [rig.client.submit(["true"]) for _ in range(count)]
    rig.until(lambda: len(known(rig)) >= CREDIT, "the broker has as many as it takes")
    rig.client.ask("info")  # whatever was sent before has arrived by now
    return futures


def end_one(rig: LinkRig) -> None:
    """The worker ends an action, if one runs."""
    ended = {message.lease for message in rig.worker.all(ms.StartAttempt)} & set(
        rig.broker.scheduler.ledger.leases)
    if ended:
        rig.worker_says(ms.Finished(min(ended), Outcome(ActionState.COMPLETED), True))


def test_what_is_beyond_the_credit_waits_at_the_client_and_follows_in_order(rig: LinkRig) -> None:
    futures = submitted(rig, 3 * CREDIT)
    assert known(rig) == {future.action for future in futures[:CREDIT]}
    seen: list[int] = []
    while not futures[-1].done():
        end_one(rig)
        with rig.changed:
            seen += sorted(known(rig).difference(seen))
            assert len([entry for entry in rig.broker.scheduler.ledger.actions.values()
                        if entry.reply is None]) <= CREDIT
    assert all(future.exception() is None for future in futures)
    assert seen == [future.action for future in futures]


def test_what_placement_tells_apart_is_not_held_back(rig: LinkRig) -> None:
    submitted(rig, 3 * CREDIT)
    session = rig.client.session()
    others = [rig.client.submit(["true"], trajectory="t"),
              rig.client.submit(["true"], gpus=1, trusted=True),
              rig.client.submit(["true"], cpus=2), rig.client.submit(["true"], cpus=(1, 2)),
              rig.client.submit(["true"], mem=1), session.submit(["true"])]
    rig.until(lambda: {one.action for one in others} <= known(rig), "the broker has the others")
    assert len(known(rig)) == CREDIT + len(others)


def test_the_time_at_the_client_is_time_in_the_queue(
        rig: LinkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's clock stands still, so nobody waits there."""
    monkeypatch.setattr(turns, "CREDIT", 1)
    with rig.new_client() as client:
        first, second = client.submit(["true"]), client.submit(["true"])
        began = time.monotonic()
        time.sleep(.1)
        waited_s = time.monotonic() - began
        while not second.done():
            end_one(rig)
        assert first.details is not None and second.details is not None
        assert first.details.queue_s == 0
        assert waited_s <= second.details.queue_s <= second.details.act_s
        mean_s = client.metrics(prefix="")["tools/queue_s"]
        assert mean_s == pytest.approx(second.details.queue_s / 2)


@pytest.mark.parametrize("more", [
    {"session": 1}, {"gpus": 1}, {"mem_mib": 1}, {"component": "cpu"}, {"trajectory": "t"},
    {"once": "name"}, {"degrees": (0,)}, {"degrees": (1, 2)}, {"key": "service:judge"}])
def test_only_plain_single_actions_may_be_held_back(more: dict[str, Any]) -> None:
    assert counts(Action(1, "plain", timeout_ns=1, attempts_max=3))
    assert not counts(Action(1, "other", **more))


def test_an_action_that_is_held_back_ends_at_the_client_when_it_is_cancelled(
        rig: LinkRig, tmp_path: Path) -> None:
    futures = submitted(rig, 2 * CREDIT)
    large = [rig.client.submit(["cat"], stdin=os.urandom(1 << 17)) for _ in "ab"]
    ended: list[Future] = []
    futures[CREDIT].add_done_callback(ended.append)
    for future in (futures[CREDIT], large[0]):
        assert future.cancel() and future.cancelled()
        assert not future.cancel(), "it has ended"
    assert ended == [futures[CREDIT]]
    others = [*futures[:CREDIT], *futures[CREDIT + 1:], large[1]]
    assert not any(future.done() for future in others)
    kept = [path for path in tmp_path.rglob("*") if path.stat().st_size > 1 << 17]
    assert len(kept) == 1, "what the cancelled one was to read is gone"
    while not large[1].done():
        end_one(rig)
    sent = [event.action.id for event in rig.broker.journal.events
            if isinstance(event, ActionSubmitted)]
    assert sent == [future.action for future in others]
    with pytest.raises(CancelledError):
        futures[CREDIT].result()


def test_a_broken_link_sends_nothing_beyond_the_credit_and_loses_nothing(rig: LinkRig) -> None:
    futures = submitted(rig, 3 * CREDIT)
    with rig.broken():
        futures += [rig.client.submit(["true"]) for _ in range(CREDIT)]
    rig.client.ask("info")
    assert known(rig) == {future.action for future in futures[:CREDIT]}
    while not futures[-1].done():
        end_one(rig)
    assert all(future.exception() is None for future in futures)


def test_a_client_that_closes_sends_none_of_the_actions_that_it_holds_back(
        rig: LinkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    futures = submitted(rig, 3 * CREDIT)
    closing, said_bye = threading.Thread(target=rig.client.close), threading.Event()
    wake = rig.channel.wake
    monkeypatch.setattr(rig.channel, "wake", lambda: (said_bye.set(), wake()))
    with rig.changed:  # so the client's thread finds the end of an action and the Bye together
        end_one(rig)
        before = known(rig)
        closing.start()
        assert said_bye.wait(DEADLINE_S)
    closing.join()
    assert known(rig) <= before
    assert all(isinstance(future.exception(), ClientClosed) for future in futures[CREDIT:])
    assert not any(isinstance(event, ActionSubmitted) and event.action.id not in before
                   for event in rig.broker.journal.events)


def test_a_larger_credit_is_told_by_the_next_pong(rig: LinkRig, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    futures = submitted(rig, 3 * CREDIT)
    monkeypatch.setattr(turns, "CREDIT", 2 * CREDIT)
    rig.until(lambda: len(known(rig)) > CREDIT, "a pong has told it")
    rig.client.ask("info")
    assert known(rig) == {future.action for future in futures[:2 * CREDIT]}


def test_a_broker_that_says_no_credit_gets_everything(rig: LinkRig, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    monkeypatch.setattr(turns, "CREDIT", 0)
    futures = submitted(rig, CREDIT)
    futures += [rig.client.submit(["true"]) for _ in range(2 * CREDIT)]
    rig.until(lambda: len(known(rig)) == len(futures), "the next pong lets all of them go")
