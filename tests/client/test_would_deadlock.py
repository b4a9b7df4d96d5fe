"""Calls that would wait for their own thread for ever raise at once: those of a signal handler that
has interrupted a call of the same client, and waits in a callback on the client's own thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.interrupted import PLACES_MAX, handled

import tangram_hpc
from tangram_hpc import Client, LocalCluster, WouldDeadlock


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as c:
        yield c


@pytest.mark.parametrize("handler", ["submit", "cancel", "result", "session"])
def test_a_signal_handler_never_waits_for_the_call_that_it_interrupts(
        cluster: LocalCluster, handler: str) -> None:
    """At each place of a submission the handler's call either works or raises; both the submission
    and what the handler submitted have their own results."""
    client, submitted, refused = cluster.client, list[tangram_hpc.Future](), 0
    slow = cluster.submit(time.sleep, 0.3)

    def handle() -> None:
        nonlocal refused
        try:
            if handler == "submit":
                submitted.append(client.submit(pow, 5, 2))
            elif handler == "cancel":
                client.submit(pow, 5, 2).cancel()
            elif handler == "result":
                slow.result(0.001)
            else:
                client.session().close()
        except WouldDeadlock as error:
            assert "signal handler" in str(error)
            refused += 1
        except TimeoutError:
            pass

    for place in range(1, PLACES_MAX):
        slow = cluster.submit(time.sleep, 0.05) if slow.done() else slow
        came, future = handled(lambda: client.submit(pow, 3, 2), place, handle)
        if not came:
            break
        assert future.result(20) == 9, place
    assert {each.result(20) for each in submitted} <= {25}
    assert 0 < refused < place / 2


@pytest.mark.parametrize("call", [
    lambda client: client.submit(time.sleep, 0.02).result(20),
    lambda client: list(tangram_hpc.as_completed([client.submit(time.sleep, 0.02)], 20)),
    lambda client: client.metrics(),
], ids=["result", "as_completed", "metrics"])
def test_a_wait_in_a_signal_handler_ends_wherever_it_comes(
        cluster: LocalCluster, call: Callable[[Client], Any]) -> None:
    """Also where the interrupted call has something else that the client's thread needs, such as a
    future's condition: the handler's wait ends or raises, and the interrupted wait ends too."""
    client, told = cluster.client, list[str]()

    def handle() -> None:
        try:
            told.append(str(client.submit(pow, 5, 2).result(5)))
        except WouldDeadlock:
            told.append("refused")

    for place in range(1, PLACES_MAX):
        began = time.monotonic()
        came, _ = handled(lambda: call(client), place, handle)
        if not came:
            break
        assert time.monotonic() - began < 10, place
    assert set(told) == {"25", "refused"}


def told_on(client: Client, work: Callable[[], Any]) -> Any:
    """What a function does in a done callback of a client: its value, or the error that it raised;
    fails if neither is there within 5 s."""
    told: queue.Queue[Any] = queue.Queue()

    def callback(future: tangram_hpc.Future) -> None:
        assert threading.current_thread().name == "tangram-client"
        try:
            told.put(work())
        except Exception as error:  # noqa: BLE001 - it is what the test asks for
            told.put(error)

    client.submit(time.sleep, 0.1).add_done_callback(callback)
    return told.get(timeout=5)


def opened(client: Client) -> None:
    with client.session():
        pass


async def awaited(client: Client) -> None:
    await client.submit(time.sleep, 0.1)


async def awaited_as_completed(client: Client) -> None:
    async for _ in tangram_hpc.as_completed_async([client.submit(time.sleep, 0.1)]):
        pass


async def awaited_session(client: Client) -> None:
    async with client.session():
        pass


async def awaited_slot(client: Client) -> None:
    async with client.endpoint("none").slot():
        pass


@pytest.mark.parametrize("wait", [
    lambda client: client.submit(pow, 2, 2).result(),
    lambda client: client.submit(time.sleep, 0.1).result(1),
    lambda client: client.submit(time.sleep, 0.1).exception(),
    lambda client: list(tangram_hpc.as_completed([client.submit(time.sleep, 0.1)])),
    lambda client: client.ask("queue"),
    opened,
    lambda client: client.session().opened.result(),
    lambda client: asyncio.run(awaited(client)),
    lambda client: asyncio.run(awaited_as_completed(client)),
    lambda client: asyncio.run(awaited_session(client)),
    lambda client: asyncio.run(awaited_slot(client)),
    lambda client: client.pty("true").read(),
    lambda client: client.direct().call(pow, 3, 2),
], ids=["result", "timeout", "exception", "as_completed", "ask", "session", "opened", "await",
        "as_completed_async", "async_session", "async_slot", "pty", "direct"])
def test_a_wait_in_a_callback_raises(cluster: LocalCluster, wait: Callable[[Client], Any]) -> None:
    error = told_on(cluster.client, lambda: wait(cluster.client))
    assert isinstance(error, WouldDeadlock), error
    assert "callback" in str(error)
    assert cluster.submit(pow, 3, 2).result(20) == 9


def test_a_wait_for_a_port_in_a_callback_raises(cluster: LocalCluster) -> None:
    server = ("import socket, time; s = socket.create_server(('127.0.0.1', 8123)); "
              "print('ready', flush=True); c, _ = s.accept(); time.sleep(60)")
    ready = threading.Event()
    with tangram_hpc.connect(cluster.access) as client, client.session() as session:
        session.exec(["python3", "-c", server], on_output=lambda *_: ready.set())
        assert ready.wait(20)
        with session.connect(8123) as stream:
            assert isinstance(told_on(client, lambda: stream.recv(1)), WouldDeadlock)


def test_a_wait_in_on_output_raises_and_is_logged(cluster: LocalCluster,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    def hear(stream: int, data: bytes) -> None:
        cluster.submit(pow, 2, 2).result()

    assert cluster.submit(["echo", "a"], trusted=True, on_output=hear).result(20).ok
    assert "WouldDeadlock" in caplog.text


def test_what_a_callback_may_do(cluster: LocalCluster) -> None:
    """It may submit, look whether a future has ended, read one that has, wait for another client,
    and close its own."""
    client = cluster.client
    ended = client.submit(pow, 3, 2)
    assert ended.result(20) == 9
    assert told_on(client, ended.result) == 9
    assert isinstance(told_on(client, lambda: client.submit(time.sleep, 1).result(0)), TimeoutError)
    assert told_on(client, lambda: client.submit(pow, 5, 2)).result(20) == 25
    with tangram_hpc.connect(cluster.access) as other:
        assert told_on(client, lambda: other.submit(pow, 4, 2).result(20)) == 16
        assert told_on(other, other.close) is None


def test_a_thread_with_the_id_of_an_ended_clients_thread_is_told_of_the_end(
        cluster: LocalCluster) -> None:
    """Ids of threads are used again, mostly at once."""
    with cluster.session(shared=True) as session:
        handle = session.handle()
        client = tangram_hpc.connect(cluster.access)
        client.close()
        told = list[Any]()

        def attach() -> None:
            try:
                client.attach(handle)
            except tangram_hpc.TangramError as error:
                told.append(error)

        for _ in range(20):
            thread = threading.Thread(target=attach)
            thread.start()
            thread.join()
    assert {type(each) for each in told} == {tangram_hpc.ClientClosed}
