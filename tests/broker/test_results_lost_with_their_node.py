"""A result is lost with its node: its client, the next broker and accounting agree on its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.restart_rig import Job

from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.unacknowledged import RESULT_LOST
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms


def accounting_agrees(job: Job) -> None:
    """Every action ended in accounting as its client was told."""
    records = fold(job.committed).records
    for client in job.clients:
        for action, ends in client.told.items():
            if isinstance(ends[0], ms.ActionResult):
                assert records[action].state is ends[0].outcome.state


def ready(job: Job) -> None:
    while not all(client.welcomed for client in job.clients):
        job.step()


def run_to_the_end(job: Job) -> None:
    """Lets everything end that is open."""
    for _ in range(4000):
        job.settle()
        busy = False
        for worker in job.workers:
            for lease in list(worker.running):
                worker.finish(lease)
                busy = True
            for lease in list(worker.cleaning):
                worker.release(lease)
                busy = True
        if not busy and not any(client.pending for client in job.clients):
            return
        if not busy:
            job.pass_time(1)
    raise AssertionError("something never ended: "
                         + str([list(c.pending.values())[:3] for c in job.clients]))


def test_a_client_that_has_the_result_of_a_lost_node_keeps_it(tmp_path: Path) -> None:
    """Its acknowledgement did not arrive before the broker and the node died."""
    job = Job(tmp_path, 1)
    ready(job)
    job.settle()
    client = job.clients[0]
    client.submit()
    job.settle()
    (dying,) = (worker for worker in job.workers if worker.running)
    dying.finish(next(iter(dying.running)))
    while not client.told:
        job.step()
    assert client.wire is not None
    client.wire.up.clear()
    dying.dead = True
    job.kill_broker()
    while not any(isinstance(event, ev.NodeLost) for event in job.committed):
        job.pass_time(1)
    run_to_the_end(job)
    (ends,) = client.told.values()
    assert len(ends) == 1 and isinstance(ends[0], ms.ActionResult)
    assert ends[0].outcome.state is ActionState.COMPLETED
    accounting_agrees(job)


@pytest.mark.parametrize("told", [True, False])
def test_a_result_that_was_lost_with_its_node_is_lost_for_the_next_broker_too(
        tmp_path: Path, told: bool) -> None:
    """Whether the broker that saw the node's loss could still note the loss of the result or not,
    client and accounting are told the same end."""
    job = Job(tmp_path, 1)
    ready(job)
    job.settle()
    client = job.clients[0]
    client.submit()
    asked = dict(client.pending)
    job.settle()
    (dying,) = (worker for worker in job.workers if worker.running)
    dying.finish(next(iter(dying.running)))
    while dying.wire is not None and dying.wire.up:
        job.broker.receive(dying.wire.peer, *dying.wire.up.popleft())
    job.broker._run_cycle()  # the end is in the journal
    for wire in job.wires:
        wire.down.clear()
    dying.dead = True
    job.kill_broker()
    while not any(isinstance(event, ev.NodeLost) for event in job.committed):
        job.pass_time(1)
    (noted,) = (event for event in job.committed if isinstance(event, ev.ActionCancelled))
    assert noted.reason == RESULT_LOST
    if not told:  # the broker was killed before it wrote this, and so before it told anybody
        del job.committed[job.committed.index(noted):]
        client.pending.update(asked)
        client.told.clear()
    job.kill_broker()
    run_to_the_end(job)
    record = fold(job.committed).records[noted.action]
    assert record.state is ActionState.NODE_FAIL and record.outcome is not None
    assert record.outcome.reason == RESULT_LOST
    (ends,) = client.told.values()
    assert isinstance(ends[0], ms.ActionResult)
    assert ends[0].outcome.state is ActionState.NODE_FAIL
