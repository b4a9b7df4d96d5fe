"""^C in a call of a client, at each place where it can come: the client goes on, as in a notebook.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from functools import partial

import pytest
from helpers.interrupted import PLACES_MAX, interrupted, places

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.interrupts import InterruptibleLockOf314
from tangram_hpc.protocol.frame import Outbox, open_frame
from tangram_hpc.protocol.message import Input


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def goes_on(cluster: LocalCluster, place: int) -> None:
    """Each action that is submitted now gets its own result."""
    futures = [cluster.submit(pow, n, 2) for n in range(4)]
    assert [future.result(20) for future in futures] == [0, 1, 4, 9], f"^C at place {place}"


def awaits(cluster: LocalCluster) -> bool:
    """Whether the client still waits for an answer of the broker."""
    until = time.monotonic() + 10
    connection = cluster.client._connection
    while connection._awaits() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(connection._awaits())


def test_a_with_that_is_left_before_its_block_gives_its_lock_back() -> None:
    """As Python 3.14 leaves it at a ^C. Its end is asked for before the lock is taken."""
    lock = InterruptibleLockOf314()
    end = lock.__exit__
    assert lock.acquire()
    del end
    assert not lock._is_owned()
    with pytest.raises(ZeroDivisionError), lock, lock:
        assert lock._is_owned()
        raise ZeroDivisionError
    assert not lock._is_owned()


def test_after_an_interrupted_put_each_message_has_its_own_payload() -> None:
    outbox = Outbox()
    for place in places(lambda: outbox.put(Input(1, 0, n=1), b"first")):
        outbox.put(Input(2, 0, n=1), b"second")
        envelopes = open_frame(b"".join(outbox.take())[4:])
        told = [(message.id, bytes(payload)) for message, payload in envelopes]  # type: ignore
        assert told in ([(2, b"second")], [(1, b"first"), (2, b"second")]), place


def test_after_an_interrupted_submission_each_action_has_its_own_result(cluster: LocalCluster
                                                                        ) -> None:
    for place in places(lambda: cluster.submit(pow, 10, 2)):
        goes_on(cluster, place)
    assert not awaits(cluster), "an action that was not sent is waited for"


def test_after_an_interrupted_cancellation_the_client_goes_on(cluster: LocalCluster) -> None:
    running = [cluster.submit(time.sleep, 60)]
    for place in places(lambda: running[-1].cancel()):
        goes_on(cluster, place)
        running[-1].cancel()
        running.append(cluster.submit(time.sleep, 60))
    concurrent.futures.wait(running, 20)
    assert all(future.cancelled() for future in running)


def test_after_an_interrupted_renewal_the_client_goes_on(cluster: LocalCluster) -> None:
    with cluster.session() as session:
        for place in places(session.renew):
            goes_on(cluster, place)


def test_after_an_interrupted_wait_the_client_goes_on(cluster: LocalCluster) -> None:
    """The place just before the wait itself is left out: there, the standard library's condition is
    free already and its `with` raises RuntimeError."""
    for wait in (tangram_hpc.Future.result, tangram_hpc.Future.exception):
        for place in range(1, PLACES_MAX):
            call = partial(wait, cluster.submit(time.sleep, 0.02))
            try:
                if not interrupted(call, place):
                    break
            except RuntimeError as error:
                assert "un-acquired" in str(error)
            goes_on(cluster, place)


def test_after_an_interrupted_as_completed_the_client_goes_on(cluster: LocalCluster) -> None:
    def wait(futures: list[tangram_hpc.Future]) -> None:
        for each in tangram_hpc.as_completed(futures):
            assert each.done()

    for place in range(1, PLACES_MAX):
        futures = [cluster.submit(time.sleep, 0.01) for _ in range(3)]
        if not interrupted(partial(wait, futures), place):
            break
        goes_on(cluster, place)
        assert {future.result(20) for future in futures} == {None}
