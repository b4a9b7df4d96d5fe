"""When a client acknowledges results: on a real client and a real broker driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.link_rig import DEADLINE_S, LinkRig, link_rig

from tangram_hpc.client import connection
from tangram_hpc.client.future import Future
from tangram_hpc.domain.event import ActionAcknowledged
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LinkRig]:
    with link_rig(tmp_path) as rig:
        yield rig


def run_one(rig: LinkRig) -> Future:
    """Runs an action to its end, and returns it."""
    future = rig.client.submit(["true"])
    leases = rig.broker.scheduler.ledger.leases
    lease = rig.until(lambda: next((message.lease for message in rig.worker.all(ms.StartAttempt)
                                    if message.lease in leases), 0), "the action has started")
    rig.worker_says(ms.Finished(lease, Outcome(ActionState.COMPLETED), True))
    future.result(DEADLINE_S)
    return future


def known(rig: LinkRig) -> list[int]:
    """The actions that the broker keeps."""
    return sorted(rig.broker.scheduler.ledger.actions)


def told(rig: LinkRig) -> list[tuple[int, ...]]:
    """The actions of each acknowledgement."""
    return [event.actions for event in rig.broker.journal.events
            if isinstance(event, ActionAcknowledged)]


def test_one_call_after_the_other_is_acknowledged_together(
        rig: LinkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_ACK_LATE_S", DEADLINE_S)
    monkeypatch.setattr(connection, "_ACK_AFTER", 3)
    ended = [run_one(rig).action for _ in range(2)]
    assert known(rig) == ended and told(rig) == []
    ended.append(run_one(rig).action)
    rig.until(lambda: not known(rig), "the third is acknowledged with the others")
    assert told(rig) == [tuple(ended)]


def test_the_last_result_is_acknowledged_soon(rig: LinkRig) -> None:
    last = run_one(rig)
    rig.until(lambda: not known(rig), "the result is acknowledged although no other follows")
    assert told(rig) == [(last.action,)]


def test_a_client_that_closes_acknowledges_first(rig: LinkRig, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    monkeypatch.setattr(connection, "_ACK_LATE_S", DEADLINE_S)
    last = run_one(rig)
    assert told(rig) == []
    rig.client.close()
    assert told(rig) == [(last.action,)]
