"""A broker that is killed at any moment and is back within the grace costs only a pause."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.restart_rig import GRACE_S, Job, S

from tangram_hpc.accounting.record import fold
from tangram_hpc.broker.unacknowledged import RESULT_LOST
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.states import ActionState, SessionState
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


def act(job: Job) -> None:
    """One thing that happens by chance."""
    rng = job.rng
    client, worker, chance = rng.choice(job.clients), rng.choice(job.workers), rng.random()
    if chance < 0.35 and client.number:
        session = rng.choice([0, *client.sessions]) if rng.random() < 0.6 else 0
        once = f"n{client.number}.{client.count}" if rng.random() < 0.2 and not session else ""
        client.submit(session, once)
    elif chance < 0.40 and client.number:
        client.open_session()
    elif chance < 0.44 and client.pending:
        client.cancel(rng.choice(list(client.pending)))
    elif chance < 0.47 and client.sessions and client.welcomed:
        client.release(rng.choice(list(client.sessions)))
    elif chance < 0.75 and worker.running:
        worker.finish(rng.choice(list(worker.running)), clean=rng.random() < 0.7)
    elif worker.cleaning:
        worker.release(rng.choice(list(worker.cleaning)))


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


def one_job(folder: Path, seed: int, steps: int, kills: float) -> Job:
    job = Job(folder, seed)
    ready(job)
    for _ in range(steps):
        if job.rng.random() < 0.3:
            act(job)
        else:
            job.step()
        if job.rng.random() < kills:
            dies = job.rng.choice(["", "before", "after"])
            if dies:
                job.journal.dies = dies
            else:
                job.kill_broker()
    run_to_the_end(job)
    return job


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_seeds_break_no_law(tmp_path: Path) -> None:
    for seed in range(1000, 2000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check_one_job(folder, seed)
        shutil.rmtree(folder)


# 1740: killed between the writes of spool and journal, when a named action was cancelled
@pytest.mark.parametrize("seed", [*range(40), 1740])
def test_a_broker_killed_at_any_moment_loses_and_repeats_nothing(tmp_path: Path, seed: int
                                                                 ) -> None:
    check_one_job(tmp_path, seed)


def check_one_job(tmp_path: Path, seed: int) -> None:
    job = one_job(tmp_path, seed, 1200, 0.015)
    assert job.kills
    told = {action: ends for client in job.clients for action, ends in client.told.items()}
    assert all(len(ends) == 1 for ends in told.values())
    lost = [why for client in job.clients for session, why in client.ended.items()
            if session not in client.released]
    assert not lost
    failed = {action: ends[0] for action, ends in told.items()
              if isinstance(ends[0], ms.ActionResult)
              and ends[0].outcome.state not in (ActionState.COMPLETED, ActionState.CANCELLED)}
    assert not failed
    assert max(job.executions.values()) == 1, "an action ran twice"
    accounting_agrees(job)
    ledger = job.broker.scheduler.ledger
    assert not ledger.away and not ledger.disconnected
    assert not ledger.leases
    assert sum(client_of(action) > 0 for action in told) > 50
    assert not any(isinstance(event, ev.NodeLost) for event in job.committed)
    job.pass_time(5)
    assert not any(worker.kept for worker in job.workers), "a result is kept for nobody"
    assert not any(entry.state is SessionState.CLOSING for entry in ledger.sessions.values())
    assert set(ledger.sessions) == {s for worker in job.workers for s in worker.sandboxes}


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


def test_an_action_that_was_cancelled_is_killed_by_the_next_broker(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    ready(job)
    job.settle()
    client = job.clients[0]
    client.submit()
    job.settle()
    client.cancel(next(iter(client.pending)))
    job.journal.dies = "after"  # the worker never hears of it
    job.settle()
    assert job.kills == 1
    (ends,) = client.told.values()
    assert ends[0].outcome.state is ActionState.CANCELLED


def test_a_client_that_does_not_come_back_ends_after_its_grace(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    ready(job)
    job.settle()
    gone = job.clients.pop()
    gone.submit()
    gone.open_session()
    job.settle()
    job.kill_broker()
    job.pass_time(GRACE_S - 3)
    assert job.broker.scheduler.ledger.sessions and any(w.running for w in job.workers)
    job.pass_time(10)
    assert not job.broker.scheduler.ledger.sessions
    assert not any(worker.running or worker.sandboxes for worker in job.workers)
    assert gone.number not in job.broker.scheduler.ledger.clients


def test_what_a_lost_node_had_ends_when_the_grace_is_over(tmp_path: Path) -> None:
    """A worker that dies together with its broker: its actions run again elsewhere, its sessions
    are lost, and a result that had not reached its client is told as a failure of the node."""
    job = Job(tmp_path, 1)
    ready(job)
    job.settle()
    client, dying = job.clients[0], job.workers[0]
    for _ in range(8):
        client.submit()
    client.open_session()
    job.settle()
    dying.finish(next(iter(dying.running)))  # the broker hears of it, and the client does not
    while dying.wire is not None and dying.wire.up:
        job.broker.receive(dying.wire.peer, *dying.wire.up.popleft())
    while job.timers and job.timers[0][0] <= job.now and not any(w.down for w in job.wires):
        job.timers.pop(0)[2]()
    for wire in job.wires:
        wire.down.clear()
    dying.dead = True
    job.kill_broker()
    before = job.now
    run_to_the_end(job)
    assert job.now - before >= GRACE_S * S
    states = sorted(ends[0].outcome.state.value for ends in client.told.values()
                    if isinstance(ends[0], ms.ActionResult))
    assert states == ["COMPLETED"] * 7 + ["NODE_FAIL"]
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
