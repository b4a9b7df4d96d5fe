"""A broker that runs for long keeps nothing of what came and went."""

from __future__ import annotations

from helpers.broker_rig import BrokerRig, action_of, serves

from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.state.ledger import LOST_MAX

S = 10**9


def test_near_deadlines_leave_no_wake_up_for_a_far_one_behind() -> None:
    rig = BrokerRig()
    client, worker = rig.client(), rig.worker()
    number = client.last(ms.Welcome).client

    def open_session(count: int, **fields: int) -> int:
        spec = SessionSpec(mint(number, count), mem_mib=1, **fields)
        client.say(ms.RequestSession(spec))
        rig.run(0.01)
        worker.say(ms.SandboxUp(spec.id))
        rig.run(0.01)
        return spec.id

    open_session(1, idle_ns=24 * 3600 * S)
    waiting = []
    for n in range(2, 102):
        session = open_session(n, ttl_ns=S // 10)
        rig.run(0.2)
        worker.say(ms.SandboxDown(session, ""))
        rig.run(0.01)
        waiting.append(len(rig._timers))
    assert len(rig.broker.scheduler.ledger.sessions) == 1
    assert max(waiting[50:]) <= max(waiting[:10]), waiting


def test_lost_nodes_are_forgotten_but_for_the_last_ones() -> None:
    rig = BrokerRig()
    client = rig.client()
    ledger = rig.broker.scheduler.ledger
    steady = rig.worker(name="steady")
    assert serves(rig, client, steady, 1)
    for n in range(3 * LOST_MAX):
        worker = rig.worker(name=f"n{n}")
        waits = action_of(client, 2 + n, degrees=(4,))
        client.say(ms.Submit(waits), b"call")  # it runs on one of the two, and may be lost with it
        worker.leave()
    rig.run(1.0)
    assert len(ledger.nodes) == LOST_MAX + 1
    assert next(iter(ledger.nodes.values())).spec.name == "steady"
    steady.leave()  # the node that joined first is lost last
    rig.run(1.0)
    again = rig.worker(name="again")
    rig.run(1.0)
    assert len(ledger.nodes) == LOST_MAX + 1
    assert not ledger.leases or all(lease.node == again.last(ms.WorkerWelcome).node
                                    for lease in ledger.leases.values())


def test_credit_that_comes_after_the_end_of_a_command_is_dropped() -> None:
    rig = BrokerRig()
    client, worker = rig.client(), rig.worker()
    action = action_of(client, 1)
    client.say(ms.Submit(action), b"call")
    lease = worker.last(ms.StartAttempt).lease
    worker.say(ms.InputCredit(lease, 100))
    worker.say(ms.Finished(lease, Outcome(ActionState.COMPLETED), clean=False))
    worker.say(ms.InputCredit(lease, 100))
    worker.say(ms.Released(lease))
    rig.run(0.1)
    assert [credit.total for credit in client.all(ms.InputCredit)] == [100]
    assert not rig.broker._input._window.granted()
