"""A broker that is killed at any moment and is back within the grace costs only a pause.

The swarm (`tests/swarm`) kills brokers among many other things. Here nothing else happens, so more
can be asked: no session is lost, no action runs twice, and none fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from swarm import people
from swarm.job import Job
from swarm.plan import Plan
from swarm.run import Ended, play
from swarm.world import GRACE_S, S

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState

KILLS = {"kill_broker": 15.0, "kill_at_write": 10.0}


def plain(seed: int, turns: int = 0, **rates: float) -> Plan:
    return Plan(seed, rates, turns)


def told(ended: Ended) -> None:
    assert not ended.law, f"{ended.text}\n" + "\n".join(ended.log[-40:])


@pytest.mark.parametrize("seed", range(6))
def test_a_broker_killed_at_any_moment_loses_and_repeats_nothing(seed: int) -> None:
    def nothing_was_lost(job: Job) -> None:
        assert job.struck["kill_broker"] and len(job.laws.submissions) > 20
        assert max(map(len, job.laws.executions.values())) == 1, "an action ran twice"
        for one in job.laws.submissions.values():
            assert one.state() in (ActionState.COMPLETED, ActionState.FAILED,
                                   ActionState.CANCELLED), one
        events = job.events_of_journal()
        assert not any(isinstance(event, ev.NodeLost) for event in events)

    told(play(plain(seed, 400, **KILLS), at_the_end=nothing_was_lost))


def played(seed: int, story: Callable[[Job], None], workers: int = 2, clients: int = 2) -> Job:
    """Plays a story in a job without any faults but its own, and then to its end."""
    jobs: list[Job] = []

    def before(job: Job) -> None:
        jobs.append(job)
        story(job)

    told(play(Plan(seed, {}, 0, workers, clients), before_the_end=before))
    return jobs[0]


def pass_s(job: Job, seconds: float) -> None:
    until = job.now + int(seconds * S)
    while job.now < until:
        while job.step():
            pass
        job.pass_time()


def kill_and_start(job: Job) -> None:
    job.kill_broker(job.serving, "killed")
    while job.serving is None:
        job.pass_time()
        job.step()


def test_an_action_that_was_cancelled_is_killed_by_the_next_broker() -> None:
    def story(job: Job) -> None:
        client = job.clients[0]
        job.do(client, lambda: client.submit(Kind.EXEC, "a", 1, 0))
        pass_s(job, 1)
        (one,) = client.open_ones()
        job.do(client, lambda: client.cancel(one))
        job.disk.armed = "after"  # the journal has it, and no worker hears of it
        pass_s(job, 10)
        assert one.future.cancelled()

    played(1, story)


def test_a_client_that_does_not_come_back_ends_after_its_grace() -> None:
    """Also if an action waits in its session, whose call the next broker does not have."""
    def story(job: Job) -> None:
        client = job.clients[0]
        job.do(client, lambda: client.open_session(SessionSpec(0, mem_mib=10)))
        (session,) = client.sessions
        job.sessions_opened[session] = client.sessions[session].record.spec
        for token in "ab":  # the second one waits for the first
            job.do(client, lambda token=token: client.submit(
                Kind.EXEC, token, 1, 0, session=session))
        job.do(client, lambda: client.submit(Kind.EXEC, "c", 1, 0))
        pass_s(job, 1)
        people.work_goes_on(job)
        pass_s(job, 1)
        assert len(job.ledger().sessions[session].leases) == 1
        number = client.number
        job.replace_client(client)
        kill_and_start(job)
        pass_s(job, GRACE_S - 5)
        assert job.ledger().sessions and number in job.ledger().clients
        people.work_goes_on(job)
        pass_s(job, 20)
        assert not job.ledger().sessions
        assert number not in job.ledger().clients

    played(1, story)


def test_what_a_lost_node_had_ends_when_the_grace_is_over() -> None:
    """A worker that dies together with its broker: its actions run again elsewhere, its session is
    lost, and a result that had not reached its client is told as a failure of the node."""
    def story(job: Job) -> None:
        client = job.clients[0]
        for n in range(6):
            job.do(client, lambda n=n: client.submit(Kind.EXEC, f"a{n}", 1, 2))
        pass_s(job, 1)
        dying = next(worker for worker in job.workers if worker.executor.running)
        lease = next(iter(dying.executor.running))
        job.do(dying, lambda: dying.executor.finish(lease))
        client.stopped_until = job.now + 2 * S  # it gets no result
        pass_s(job, 0.5)
        job.blame(dying)
        job.workers.remove(dying)
        dying.alive = False
        before = job.now
        kill_and_start(job)
        while client.open_ones():
            people.work_goes_on(job)
            pass_s(job, 1)
        assert job.now - before >= GRACE_S * S
        states = sorted(one.state().value for one in client.submissions)
        assert states in (["COMPLETED"] * 5 + ["NODE_FAIL"], ["COMPLETED"] * 6)

    played(1, story, clients=1)


@pytest.mark.parametrize("declared_again", [False, True])
def test_a_grant_that_a_client_holds_is_counted_by_the_next_broker(declared_again: bool) -> None:
    """The endpoints of the config file are declared at each start."""
    def story(job: Job) -> None:
        client = job.clients[0]
        for n in range(4):
            job.do(client, lambda n=n: client.ask_grant(f"g{n}"))
        pass_s(job, 1)
        assert job.ledger().endpoints["e"].busy == 2
        if declared_again:
            kill_and_start(job)
            pass_s(job, 5)
        assert job.ledger().endpoints["e"].busy == 2
        assert len(client.granted()) == 2

    played(1, story)
