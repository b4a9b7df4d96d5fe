"""What the adapters of a process do when its broker is killed and the job goes on with another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.adapter_behaviours import eventually, kill_broker, next_broker, sessions_open

from tangram_hpc import BrokerUnreachable, LocalCluster, TangramError
from tangram_hpc.hooks.code_rewards import code_score
from tangram_hpc.hooks.process_client import SessionSlot, process_client, use_client

ADD = "```python\nimport time\ntime.sleep(1)\nprint(sum(map(int, input().split())))\n```"
TESTS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}


@pytest.fixture(name="first")
def first_broker(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(cpus=2, home=tmp_path, grace_s=2).start()
    yield cluster
    use_client(None)
    cluster.close()


def test_no_reward_is_lost_when_the_job_goes_on_with_another_broker(
        first: LocalCluster, tmp_path: Path) -> None:
    rewards: list[float] = []
    scorer = threading.Thread(target=lambda: rewards.append(asyncio.run(
        code_score(ADD, TESTS, patience_s=60))))
    scorer.start()
    assert eventually(lambda: first.ask("info")["cpus_free"] < 2)  # the cases run
    kill_broker(first)
    second = next_broker(tmp_path, first.job)
    try:
        scorer.join(90)
        assert rewards == [1.0]
    finally:
        second.close()


def test_the_next_session_is_one_of_the_next_broker(first: LocalCluster, tmp_path: Path) -> None:
    slot = SessionSlot()
    session, before = slot.open({}), process_client()
    assert session.exec("echo 1").result(60).ok
    kill_broker(first)
    with pytest.raises(TangramError):
        session.exec("echo 2").result(60)
    second = next_broker(tmp_path, first.job)
    try:
        assert slot.open({}).exec("echo 3").result(60).text == "3\n"
        assert process_client() is not before
    finally:
        slot.close()
        second.close()


def test_without_another_broker_the_reward_is_an_error_and_no_zero(first: LocalCluster) -> None:
    process_client()
    kill_broker(first)
    with pytest.raises(TangramError):
        asyncio.run(code_score(ADD, TESTS, patience_s=1))


def test_a_given_client_is_neither_replaced_nor_closed(first: LocalCluster) -> None:
    use_client(first.client)
    assert process_client() is first.client
    kill_broker(first)
    with pytest.raises(BrokerUnreachable):
        asyncio.run(code_score(ADD, TESTS, patience_s=60))
    assert process_client() is first.client


def test_a_collection_under_the_clients_lock_does_not_close_there(tmp_path: Path) -> None:
    """A garbage collection may begin while its thread holds the client's lock."""
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        use_client(cluster.client)
        owner = type("Owner", (), {})()
        slot = SessionSlot(owner)
        slot.open({}).opened.result(60)
        with cluster.client._connection._lock:
            del owner  # a call of `close` right here would wait for the lock for ever
        assert eventually(lambda: sessions_open(cluster) == 0)
        use_client(None)
