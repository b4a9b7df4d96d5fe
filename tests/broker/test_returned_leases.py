"""Leases that a worker gives back: only those count that have neither begun nor ended."""

from __future__ import annotations

from helpers.broker_rig import BrokerRig, action_of

from tangram_hpc.accounting.record import fold
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms

DONE = Outcome(ActionState.COMPLETED)


def test_a_lease_that_runs_or_has_ended_cannot_be_returned() -> None:
    """Only a worker with an error does that. The broker, and accounting, must not end of it."""
    rig = BrokerRig()
    client, worker = rig.client(), rig.worker(1, ahead=4)
    rig.run(1.0)
    for number in (1, 2):
        client.say(ms.Submit(action_of(client, number, profile=Profile(1000))), b"call")
    rig.run(1.0)
    first, second = worker.all(ms.StartAttempt)
    assert second.after == first.lease
    worker.say(ms.Finished(second.lease, DONE, clean=False))
    worker.say(ms.Returned((second.lease, first.lease)))
    worker.say(ms.Released(second.lease))
    worker.say(ms.Finished(first.lease, DONE))
    rig.run(1.0)
    assert [each.outcome.state for each in client.all(ms.ActionResult)] == [DONE.state] * 2
    assert {r.state for r in fold(rig.journal.events).records.values()} == {DONE.state}
    assert not rig.scheduler.ledger.leases
