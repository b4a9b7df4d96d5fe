"""A client that has lost its broker reads the access file anew: the next broker has other addresses
and another key."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest

from tangram_hpc.app.access_dial import AccessFileDialer
from tangram_hpc.app.connecting import connect, socket_dial
from tangram_hpc.client.client import Client
from tangram_hpc.errors import AccessError, BrokerUnreachable
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.access import Access, mark_ended, write_access
from tangram_hpc.storage.store import FolderStore
from tangram_hpc.transport.socket.asyncsock import Listener, SocketLink, listen_unix

WAIT_S = 30


class Doors:
    """Sockets that listen as brokers do, and the name of each one to which a peer has come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.came = folder, Queue[str]()
        self.converse: Callable[[SocketLink], None] | None = None  # instead of noting the name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, name: str, key: bytes) -> str:
        """Listens; returns the address."""
        path = self.folder / name

        async def listen() -> None:
            Listener(listen_unix(str(path)), key, "j",
                     self.converse or (lambda link: self.came.put(name)))

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(WAIT_S)
        return f"unix:{path}"

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    doors = Doors(tmp_path)
    yield doors
    doors.close()


def broker(doors: Doors, name: str, key: bytes) -> Access:
    return Access("j", (doors.open(name, key),), key, "/store")


def test_each_dial_reads_the_access_file_anew(doors: Doors, tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    one, two = broker(doors, "one", b"1" * 32), broker(doors, "two", b"2" * 32)
    dial = socket_dial(AccessFileDialer(path), "j")
    for written, name in ((one, "one"), (two, "two"), (None, "two")):
        if written is not None:
            write_access(path, written)
        dial().close()
        assert doors.came.get(timeout=WAIT_S) == name


@pytest.mark.parametrize("host", ["elsewhere", socket.gethostname()])
def test_a_broker_without_tcp_that_is_out_of_sight_is_an_error_naming_bind(
        tmp_path: Path, host: str) -> None:
    """From another host it can never be reached, so nobody waits for it to be started again; on the
    same host it may be back soon."""
    path, address = tmp_path / "access.json", f"unix:{tmp_path}/gone/broker.sock"
    patient = 30.0 if host == "elsewhere" else 0.5
    write_access(path, Access("j", (address,), b"1" * 32, "/store", host, 7, patient))
    begun = time.monotonic()
    with pytest.raises(AccessError, match="`bind`") as caught:
        connect(path)
    assert time.monotonic() - begun < 10 and "\n" not in str(caught.value)
    assert ("elsewhere" if host == "elsewhere" else address) in str(caught.value)


def test_an_address_of_the_users_own_stays_and_the_key_is_read_anew(doors: Doors, tmp_path: Path
                                                                    ) -> None:
    path = tmp_path / "access.json"
    other, mine = broker(doors, "other", b"1" * 32), broker(doors, "mine", b"2" * 32)
    dialer = AccessFileDialer(path, mine.addresses[0])
    write_access(path, Access("j", other.addresses, b"0" * 32, "/store"))
    dial = socket_dial(dialer, "j")
    with pytest.raises(AccessError, match="the key is wrong"):
        dial()
    write_access(path, Access("j", other.addresses, mine.key, "/store"))
    dial().close()
    assert doors.came.get(timeout=WAIT_S) == "mine" and doors.came.empty()
    write_access(path, Access("j", other.addresses, b"0" * 32, "/store"))
    with pytest.raises(BrokerUnreachable, match="the key is wrong"):
        dial()


def test_a_client_that_finds_no_broker_again_is_told_so(doors: Doors, tmp_path: Path) -> None:
    """A missing file, and one whose broker has ended, are no wrong input of the caller then."""
    path = tmp_path / "access.json"
    write_access(path, broker(doors, "one", b"1" * 32))
    dial = socket_dial(AccessFileDialer(path), "j")
    dial().close()
    path.unlink()
    with pytest.raises(BrokerUnreachable, match=r"job j: access file .*No such file"):
        dial()
    mark_ended(path, "j", "2026-01-01T00:00:00")
    with pytest.raises(BrokerUnreachable, match="has ended at 2026"):
        dial()


def test_a_broker_that_comes_back_may_end_one_handshake_but_not_two(doors: Doors, tmp_path: Path
                                                                    ) -> None:
    """A broker that is killed in the handshake looks like one that does not accept the key."""
    path = tmp_path / "access.json"
    one = broker(doors, "one", b"1" * 32)
    wrong = replace(one, key=b"0" * 32, back_within_s=WAIT_S)
    write_access(path, wrong)
    dialer = AccessFileDialer(path)
    with pytest.raises(BrokerUnreachable, match="the key is wrong"):
        dialer.dial()
    with pytest.raises(AccessError, match="the key is wrong"):
        dialer.dial()
    with pytest.raises(AccessError, match="the key is wrong"):
        AccessFileDialer(path).dial_patiently()
    threading.Timer(0.3, lambda: write_access(path, one)).start()
    write_access(path, replace(wrong, addresses=(f"unix:{tmp_path}/nobody",)))
    AccessFileDialer(path).dial_patiently().close()
    assert doors.came.get(timeout=WAIT_S) == "one"


def test_nobody_waits_for_a_broker_that_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    nowhere = Access("j", (f"unix:{tmp_path}/nobody",), b"1" * 32, "/store")
    write_access(path, nowhere)
    with pytest.raises(BrokerUnreachable, match="no broker answers"):
        AccessFileDialer(path).dial_patiently()
    write_access(path, replace(nowhere, back_within_s=WAIT_S))
    threading.Timer(0.2, lambda: mark_ended(path, "j", "2026-01-01T00:00:00")).start()
    with pytest.raises(AccessError, match="has ended at 2026"):
        AccessFileDialer(path).dial_patiently()


def test_a_client_refuses_a_broker_that_was_superseded_by_one_that_it_has_seen(tmp_path: Path
                                                                               ) -> None:
    """It was continued after another one had taken the job, and has not noticed yet."""
    welcomed, wires, epochs = Queue[int](), list[SocketLink](), iter([2, 1, 2])
    doors = Doors(tmp_path)

    def converse(link: SocketLink) -> None:
        def answer(message: ms.Message) -> None:
            if isinstance(message, ms.ClientHello):
                epoch = next(epochs)
                link.send(ms.Welcome(1, "j", str(tmp_path), "fcfs:1", "none", 60.0, False, 0,
                                     epoch))
                link.flush()
                welcomed.put(epoch)

        wires.append(link)
        link.attach(lambda message, data: answer(message), lambda: None, lambda reason: None)

    doors.converse = converse
    path = tmp_path / "access.json"
    write_access(path, broker(doors, "one", b"1" * 32))
    client = Client([socket_dial(AccessFileDialer(path), "j")], "j", FolderStore)
    try:
        assert welcomed.get(timeout=WAIT_S) == 2
        doors.call(wires[0].close)
        assert [welcomed.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
        until = time.monotonic() + WAIT_S
        while not client.via:
            assert time.monotonic() < until
        assert client.welcome is not None and client.welcome.epoch == 2
    finally:
        client.close()
        doors.close()
