"""What ends without its caller's asking raises an error that says why, never `CancelledError`.

An awaited `CancelledError` cancels the task that awaits it: a trainer whose node failed would see
its own rollout task vanish, without a reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.builders import World
from helpers.cluster_parts import kill_broker, until, workers_of

import tangram_hpc
from tangram_hpc import as_completed, as_completed_async
from tangram_hpc.accounting.record import fold
from tangram_hpc.app.local import LocalCluster
from tangram_hpc.client.future import Future
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import (
    ActionFailed,
    BrokerUnreachable,
    InfeasibleRequest,
    SessionLost,
    TangramError,
)

LONG = ["sleep", "300"]
DEADLINE_S = 60


def runs(cluster: LocalCluster, count: int) -> bool:
    return cluster.ask("info")["actions"].get("RUNNING", 0) >= count


def error_of(future: Future) -> BaseException:
    """What awaiting it raises, in a task that must stay alive; as every other way says too."""
    async def awaited() -> BaseException:
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), DEADLINE_S)
        except BaseException as error:  # noqa: BLE001 - CancelledError is one
            return error
        raise AssertionError("it ended well")

    async def both() -> tuple[BaseException, list[Any]]:
        ended = [each async for each in as_completed_async([future])]
        return await awaited(), ended

    error, ended = asyncio.run(both())
    assert ended == [future] and list(as_completed([future], DEADLINE_S)) == [future]
    assert not future.cancelled(), "it was cancelled, though nobody asked for that"
    assert future.exception(0) is error
    with pytest.raises(type(error)):
        future.result(0)
    assert isinstance(error, TangramError), repr(error)
    return error


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=1, home=tmp_path_factory.mktemp("home"), warm=1) as c:
        yield c


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[LocalCluster]:
    """One of which parts are killed."""
    with LocalCluster(cpus=1, workers=2, home=tmp_path, grace_s=0.5, warm=0) as c:
        yield c


# ---- a node fails ------------------------------------------------------------------------------


def test_a_session_lost_with_its_node_raises_in_running_and_waiting_actions(
        fragile: LocalCluster) -> None:
    """With the session, its node and what happened to that; the caller's own task goes on."""
    with fragile.session() as s:
        running, waiting = s.exec(LONG, name="first"), s.exec(["true"], name="second")
        plain = fragile.submit(LONG, retries=0, name="third")
        until(lambda: runs(fragile, 2), "two actions to run")
        workers = {f"local{n}": child for n, child in enumerate(workers_of(fragile))}

        async def trainer() -> BaseException | None:
            async def rollout() -> None:
                await waiting
            task = asyncio.ensure_future(rollout())
            await asyncio.sleep(0)
            workers[s.node].kill()
            done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
            assert done and not task.cancelled(), "the caller's own task was cancelled"
            return task.exception()

        error = asyncio.run(trainer())
        assert error is error_of(waiting)
        for each, name in ((error, "second"), (error_of(running), "first")):
            assert isinstance(each, SessionLost), repr(each)
            assert s.id in str(each) and s.node in str(each) and name in str(each)
        later = error_of(s.exec(["true"]))
        assert isinstance(later, SessionLost) and s.node in str(later)
        for worker in workers.values():
            worker.kill()
        lost = error_of(plain)
        assert isinstance(lost, ActionFailed) and "NODE_FAIL: node local" in str(lost)


# ---- a session ends ----------------------------------------------------------------------------


def test_a_closed_session_raises_in_running_and_waiting_actions(cluster: LocalCluster) -> None:
    s = cluster.session()
    s.opened.result(DEADLINE_S)
    running, waiting = s.exec(LONG), s.exec(LONG)
    until(lambda: runs(cluster, 1), "an action to run")
    s.close()
    for future in (running, waiting):
        error = error_of(future)
        assert isinstance(error, SessionLost)
        assert f"session {s.id} was closed by its client" in str(error)


def test_an_expired_session_says_why_to_later_actions(cluster: LocalCluster) -> None:
    with cluster.session(idle_s=0.1) as s:
        assert s.closed.result(DEADLINE_S) == "idle for 0.1 s"
        error = error_of(s.exec(["true"]))
        assert isinstance(error, SessionLost) and "idle for 0.1 s" in str(error)
        assert s.id in str(error)


def test_a_refused_session_raises_in_actions_that_waited_for_it(cluster: LocalCluster) -> None:
    s = cluster.session(mem="900T")
    error = error_of(s.exec(["true"]))
    assert "mem" in str(error) and s.id in str(error)
    with pytest.raises(InfeasibleRequest, match="mem"):
        s.opened.result(DEADLINE_S)


# ---- the client or the broker ends -------------------------------------------------------------


def test_closing_the_client_raises_in_open_futures(cluster: LocalCluster) -> None:
    """Also in who waits for a session's opening or an endpoint's slot; in other threads too."""
    client = tangram_hpc.connect(cluster.access)
    cluster.register_endpoint("api", concurrency=1)
    ends: list[BaseException] = []

    def takes_a_slot() -> None:
        try:
            with client.endpoint("api").slot():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is
            ends.append(error)

    with cluster.endpoint("api").slot():
        thread = threading.Thread(target=takes_a_slot)
        thread.start()
        future, s = client.submit(LONG), client.session()
        inside = s.exec(LONG)
        mine = client.submit(LONG)
        until(lambda: sum(client.ask("info")["actions"].values()) >= 5, "all to be submitted")
        mine.cancel()
        client.close()
        thread.join(DEADLINE_S)
    for each in (error_of(future), error_of(inside), ends[0]):
        assert isinstance(each, BrokerUnreachable) and "client was closed" in str(each), repr(each)
    with pytest.raises(concurrent.futures.CancelledError):  # its caller wanted that
        mine.result(0)
    with pytest.raises(BrokerUnreachable, match="client was closed"):
        client.submit(["true"])


def test_a_broker_that_dies_raises_in_open_futures(fragile: LocalCluster) -> None:
    with fragile.session() as s:
        inside, plain = s.exec(LONG), fragile.submit(LONG)
        kill_broker(fragile)
        for future in (inside, plain):
            error = error_of(future)
            assert isinstance(error, BrokerUnreachable) and fragile.job in str(error)


def test_a_future_that_its_caller_cancels_is_cancelled(cluster: LocalCluster) -> None:
    """By the future, and by the task that awaits it."""
    with cluster.session() as s:
        first, second = s.exec(LONG), s.exec(LONG)

        async def cancels() -> bool:
            task = asyncio.ensure_future(asyncio.wait_for(first, DEADLINE_S))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        assert asyncio.run(cancels())
        assert second.cancel()
        for future in (first, second):
            until(future.done, "the end")
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(0)
        assert s.exec(["true"]).result(DEADLINE_S).ok


# ---- each end has a reason ---------------------------------------------------------------------


def told(w: World, made: list[de.Decision]) -> list[str]:
    """The reasons of these ends; accounting has the same."""
    ends = [d for d in made if isinstance(d, de.ReplyToClient)]
    records = fold(w.events).records
    for end in ends:
        record = records[end.action]
        assert record.outcome is not None
        assert (record.state, record.outcome.reason) == (end.outcome.state, end.outcome.reason)
    return [end.outcome.reason for end in ends]


def test_an_action_that_ends_with_its_session_has_the_sessions_reason() -> None:
    """Its worker knows only that it was to close the session."""
    w = World()
    w.node()
    s = w.session(idle_ns=0)
    w.plan()
    w.happen(ev.SessionReady(w.now, s))
    action, waiting = w.submit(session=s), w.submit(session=s)
    w.plan()
    made = w.happen(ev.SessionClosing(w.now, s, "node n1: its allocation ends in 30 s"))
    closed = Outcome(ActionState.CANCELLED, reason="its session was closed")
    made += w.happen(ev.LeaseFinished(w.now, w.lease_of(action), closed, True))
    assert {d.action for d in made if isinstance(d, de.ReplyToClient)} == {action, waiting}
    for reason in told(w, made):
        assert reason == "session 1.1 ended: node n1: its allocation ends in 30 s"


def test_an_action_given_back_after_it_was_ended_keeps_the_reason() -> None:
    """A lease that was queued behind another one, and never began."""
    w = World("elastic")
    w.happen(ev.BrokerStarted(0, "j", "elastic", "none"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", (0,), 64, ahead=8, backends=("model",),
                                          untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    _, second = w.submit(profile=Profile(1000)), w.submit(profile=Profile(1000))
    w.plan()
    lease = w.lease_of(second)
    assert lease and not w.ledger.leases[lease].begun
    w.happen(ev.ActionCancelled(w.now, second, "its client went away"))
    made = w.happen(ev.LeaseReturned(w.now, lease))
    assert told(w, made) == ["its client went away"]
