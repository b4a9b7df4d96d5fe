"""The listener for direct calls: one peer that has proven the key gets in, nobody else does, and
afterwards nothing listens any more."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import until
from helpers.own_address import own_address

from tangram_hpc.app import direct_transport
from tangram_hpc.errors import AccessError, BrokerUnreachable
from tangram_hpc.protocol import auth
from tangram_hpc.transport.socket.dial import dial
from tangram_hpc.transport.socket.direct_listener import SocketDirectListener

HOST = own_address("")
needs_network = pytest.mark.skipif(not HOST, reason="this machine has the loopback only")


@pytest.fixture
def listener(short_folder: Path, monkeypatch: pytest.MonkeyPatch
             ) -> Iterator[SocketDirectListener]:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    one = SocketDirectListener("job", HOST)
    yield one
    one.close()
    until(lambda: not os.listdir(short_folder), "its folder is gone")


def by(listener: SocketDirectListener, scheme: str) -> str:
    return next(each for each in listener.addresses if each.startswith(scheme))


@pytest.mark.parametrize("scheme", ["unix", pytest.param("tls", marks=needs_network)])
def test_a_peer_with_the_key_gets_in_and_then_nothing_listens(
        listener: SocketDirectListener, scheme: str) -> None:
    there = dial([by(listener, scheme)], listener.key, "job")
    here = listener.accepted.result(60)
    assert here is not None
    got = bytearray(2)
    for sender, receiver in ((there, here), (here, there)):
        sender.send(b"ab")
        assert receiver.receive_into(memoryview(got)) == 2 and got == b"ab"
    for address in listener.addresses:
        def refused(address: str = address) -> bool:
            try:
                dial([address], listener.key, "job").close()
            except (BrokerUnreachable, AccessError):
                return True
            return False
        until(refused, f"nothing listens at {address}")
    there.close()
    here.close()


@pytest.mark.attack("network", "sessions", "results")
@pytest.mark.attack("user", "sessions", "results")
def test_who_does_not_prove_the_key_gets_nothing_and_delays_nobody(listener: SocketDirectListener
                                                                  ) -> None:
    path = by(listener, "unix").removeprefix("unix:")
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    for address in listener.addresses:
        for key, job in ((b"\0" * 32, "job"), (listener.key, "another job")):
            with pytest.raises(AccessError):
                dial([address], key, job)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for sock in silent:
        sock.connect(path)
        assert len(sock.recv(auth.GREETING)) == auth.GREETING
    assert not listener.accepted.done()
    there = dial([by(listener, "unix")], listener.key, "job")
    assert listener.accepted.result(2) is not None, "it did not wait for the silent ones"
    for sock in silent:
        sock.settimeout(60)
        assert sock.recv(1) == b""
        sock.close()
    there.close()


@needs_network
def test_a_message_that_came_together_with_the_one_before_is_not_waited_for(
        listener: SocketDirectListener) -> None:
    there = dial([by(listener, "tls")], listener.key, "job")
    here = listener.accepted.result(60)
    assert here is not None and not there.readable(0)
    here.send(b"ab")
    assert there.readable(60)
    got = bytearray(1)
    assert there.receive_into(memoryview(got)) == 1
    assert there.readable(0), "the other byte lies in the record that was read"
    assert there.receive_into(memoryview(got)) == 1 and not there.readable(0)
    here.close()
    assert there.readable(60) and there.receive_into(memoryview(got)) == 0
    there.close()


def test_the_key_is_another_one_for_each_listener(listener: SocketDirectListener) -> None:
    other = SocketDirectListener("job")
    assert len(listener.key) == 32 and other.key != listener.key
    with pytest.raises(AccessError):
        dial(other.addresses, listener.key, "job")
    other.close()


def test_closing_ends_the_wait_and_the_thread(listener: SocketDirectListener) -> None:
    for _ in range(2):
        listener.close()
    assert listener.accepted.result(60) is None
    until(lambda: not any(t.name == "tangram-direct" for t in threading.enumerate()),
          "its thread has ended")


def test_of_two_peers_the_first_one_is_taken(listener: SocketDirectListener) -> None:
    first = dial([by(listener, "unix")], listener.key, "job")
    assert listener.accepted.result(60) is not None
    with pytest.raises((BrokerUnreachable, AccessError, OSError)):
        second = dial([by(listener, "unix")], listener.key, "job")
        second.sock.settimeout(60)
        assert second.sock.recv(1) != b"", "it was closed"
        raise AssertionError("a second peer was taken")
    first.close()


def test_where_no_folder_can_be_made_there_is_no_unix_address(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / ("x" * 120), tmp_path / "absent"):
        if len(folder.name) > 100:
            folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        one = SocketDirectListener("job")
        assert one.addresses == ()
        one.close()
        until(lambda folder=folder: not folder.exists() or not os.listdir(folder),
              "nothing is left")


@pytest.mark.parametrize(("broker", "host"), [
    ((), ""), (("unix:/run/b",), ""), (("unix:/run/b", "tcp:127.0.0.1:7"), ""),
    (("tls:localhost:7#aa",), ""), (("tls:[::1]:7#aa",), ""),
    pytest.param(("unix:/run/b", f"tls:{HOST}:7#aa"), HOST, marks=needs_network)])
def test_a_client_listens_on_the_network_only_if_nodes_may_be_other_hosts(
        broker: tuple[str, ...], host: str) -> None:
    assert direct_transport.own_address(broker) == host
