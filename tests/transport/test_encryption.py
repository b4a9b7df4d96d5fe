"""TCP connections between hosts are encrypted: who sits between two sides reads nothing, changes
nothing, and cannot pass for either of them."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.own_address import own_address
from helpers.tcp_relay import Relay

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.app.access_dial import AccessFileDialer
from tangram_hpc.errors import AccessError
from tangram_hpc.protocol import auth
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.frame import Inbox, Outbox
from tangram_hpc.protocol.gradient_messages import Alive
from tangram_hpc.storage.access import read_access
from tangram_hpc.transport.pipes import SocketPipes
from tangram_hpc.transport.socket.bulk_socket import BulkLink, BulkListener, dial_bulk
from tangram_hpc.transport.socket.certificate import make_certificate
from tangram_hpc.transport.socket.dial import dial
from tangram_hpc.transport.socket.encryption import Encryption, dialling_context

HOST = own_address("")
needs_network = pytest.mark.skipif(not HOST, reason="this machine has the loopback only")
SECRET = "the words that nobody else may read"


# ---- the encryption itself ---------------------------------------------------------------------


def met(pieces: Callable[[bytes], list[bytes]] = lambda data: [data]
        ) -> tuple[Encryption, Encryption]:
    """Two ends whose handshake is over; its bytes travel in the given pieces."""
    ours = Encryption(dialling_context())
    theirs = Encryption(make_certificate().context, listening=True)
    to, back = ours.handshake(), b""
    while not (ours.established and theirs.established):
        back = b"".join(theirs.handshake(piece) for piece in pieces(to))
        to = b"".join(ours.handshake(piece) for piece in pieces(back))
    return ours, theirs


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 65_536, 3_000_000])
def test_what_is_sealed_is_opened_whatever_its_pieces(size: int) -> None:
    data = os.urandom(size)
    ours, theirs = met(lambda sent: [sent[i : i + 7] for i in range(0, len(sent), 7)])
    for one, other in ((ours, theirs), (theirs, ours)):
        sent = one.seal([b"", data[: size // 3], memoryview(data)[size // 3 :]])
        step = max(1, len(sent) // 13)
        read = b"".join(other.open(sent[i : i + step]) for i in range(0, len(sent), step))
        assert read == data
        assert len(sent) <= size + 64 + 22 * (size // 16_384 + 1)  # few records, none empty


@pytest.mark.attack("network", "results")
def test_a_changed_bit_is_an_error_wherever_it_is() -> None:
    for at in range(0, 8 * 60, 7):
        ours, theirs = met()
        sent = bytearray(ours.seal([SECRET.encode()]))
        sent[at // 8 % len(sent)] ^= 1 << at % 8
        try:
            read = theirs.open(bytes(sent))
        except OSError:
            continue
        assert read == b"", f"bit {at} was changed and nobody noticed"  # an incomplete record


@pytest.mark.parametrize("sent", [b"", b"the last words"])
def test_a_peer_that_ends_the_encryption_is_an_error_behind_its_last_words(sent: bytes) -> None:
    ours, theirs = met()
    end = ours.seal([sent])
    with suppress(ssl.SSLWantReadError):
        ours._tls.unwrap()
    end += ours.seal([])
    if sent:
        assert theirs.open(end) == sent
        end = b""
    with pytest.raises(ConnectionResetError, match="ended the encryption"):
        theirs.open(end)
    with pytest.raises(ConnectionResetError, match="ended the encryption"):
        theirs.read_into(memoryview(bytearray(10)))


# ---- broker, clients and workers -----------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), bind=HOST) as one:
        yield one


def by_network(path: Path) -> tuple[str, int, str]:
    """Host, port and certificate's fingerprint of the broker's TCP address."""
    (address,) = (a for a in read_access(path).addresses if not a.startswith("unix:"))
    told = re.fullmatch(r"tls:(.+):(\d+)#([0-9a-f]{64})", address)
    assert told is not None, address
    return told[1], int(told[2]), told[3]


@needs_network
@pytest.mark.attack("network", "keys", "results", "sessions")
def test_nobody_on_the_way_reads_a_command_its_result_or_the_key(cluster: LocalCluster) -> None:
    host, port, _ = by_network(cluster.access)
    relay = Relay(host, port)
    key = read_access(cluster.access).key
    with tangram_hpc.connect(cluster.access, address=f"tcp:127.0.0.1:{relay.port}") as client:
        told = client.submit(["echo", SECRET], name="a-secret-name").result(60).text
        assert told == SECRET + "\n"
        big = "x" * 60_000 + SECRET
        assert client.submit(["cat"], stdin=big).result(60).text == big
    for word in (SECRET.encode(), b"a-secret-name", key, auth.MAGIC):
        assert word not in relay.seen
    assert len(relay.seen) > 120_000


@needs_network
def test_encryption_off_is_a_setting_that_lets_others_read(tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_ENCRYPTION", "off")
    with LocalCluster(cpus=1, home=tmp_path, bind=HOST) as one:
        (address,) = (a for a in read_access(one.access).addresses if a.startswith("tcp:"))
        relay = Relay(HOST, int(address.rpartition(":")[2]))
        with tangram_hpc.connect(one.access, address=f"tcp:127.0.0.1:{relay.port}") as client:
            client.submit(["echo", SECRET]).result(60)
        assert SECRET.encode() in relay.seen


@needs_network
@pytest.mark.attack("network", "results", "broker")
def test_bytes_that_are_changed_on_their_way_end_the_connection_and_no_action(
        cluster: LocalCluster) -> None:
    host, port, _ = by_network(cluster.access)
    changed: list[bytes] = []

    def change(data: bytes) -> bytes:
        if armed.is_set() and len(data) > 60 and len(changed) < 3:
            changed.append(data)
            return data[:50] + bytes([data[50] ^ 1]) + data[51:]
        return data

    armed = threading.Event()
    relay = Relay(host, port, change)
    with tangram_hpc.connect(cluster.access, address=f"tcp:127.0.0.1:{relay.port}") as client:
        assert client.submit(pow, 2, 3).result(60) == 8
        armed.set()
        assert [client.submit(pow, 2, n).result(60) for n in range(20)] == [2 ** n
                                                                          for n in range(20)]
    assert changed


@needs_network
@pytest.mark.attack("network", "keys")
def test_an_impostor_with_another_certificate_gets_no_proof(cluster: LocalCluster) -> None:
    known, heard = read_access(cluster.access), list[bytes]()
    _, _, fingerprint = by_network(cluster.access)
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_for_the_broker() -> None:
        peer, _ = listener.accept()
        theirs = Encryption(make_certificate().context, listening=True)
        while not theirs.established:
            peer.sendall(theirs.handshake(peer.recv(1 << 16)))
        peer.sendall(theirs.seal([auth.MAGIC + bytes(auth.NONCE)]))
        with peer, suppress(ConnectionResetError):
            while data := peer.recv(1 << 16):
                heard.append(theirs.open(data))

    impostor = threading.Thread(target=pass_for_the_broker)
    impostor.start()
    with pytest.raises(AccessError, match="shows the certificate"):
        dial([f"tls:127.0.0.1:{listener.getsockname()[1]}#{fingerprint}"], known.key, known.job)
    impostor.join(30)
    listener.close()
    assert b"".join(heard) == b""


@needs_network
@pytest.mark.attack("network", "keys", "broker")
def test_a_broker_that_encrypts_talks_to_nobody_who_does_not(cluster: LocalCluster) -> None:
    host, port, _ = by_network(cluster.access)
    known, ours = read_access(cluster.access), os.urandom(auth.NONCE)
    with socket.create_connection((host, port), timeout=30) as sock:
        sock.sendall(ours + auth.proof(known.key, "peer", ours, ours, known.job))
        heard = b""
        with suppress(ConnectionResetError):
            while data := sock.recv(100):
                heard += data
        assert len(heard) < 20, heard  # an alert of TLS at most
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((host, port), timeout=30) as sock, \
            pytest.raises((ssl.SSLError, ConnectionError)):
        older.wrap_socket(sock)
    assert cluster.submit(pow, 2, 2).result(30) == 4


@needs_network
@pytest.mark.attack("network", "broker")
def test_a_stranger_that_ends_the_encryption_stops_nothing(cluster: LocalCluster) -> None:
    """As `curl`, `openssl s_client` and port scanners do, before they hang up."""
    host, port, _ = by_network(cluster.access)
    with socket.create_connection((host, port), timeout=30) as sock, \
            dialling_context().wrap_socket(sock) as encrypted:
        assert encrypted.recv(len(auth.MAGIC)) == auth.MAGIC
        encrypted.settimeout(0.5)
        with suppress(OSError):
            encrypted.unwrap()  # sends `close_notify`
        assert cluster.submit(pow, 2, 2).result(30) == 4


@needs_network
@pytest.mark.attack("network", "keys")
def test_the_certificate_is_another_one_for_each_broker(cluster: LocalCluster, tmp_path: Path
                                                        ) -> None:
    host, port, fingerprint = by_network(cluster.access)
    context = dialling_context()
    with socket.create_connection((host, port), timeout=30) as sock, \
            context.wrap_socket(sock) as encrypted:
        shown = encrypted.getpeercert(binary_form=True)
        assert encrypted.version() == "TLSv1.3" and shown is not None
    assert hashlib.sha256(shown).hexdigest() == fingerprint
    with LocalCluster(cpus=1, home=tmp_path, bind=HOST) as other:
        assert by_network(other.access)[2] != fingerprint


@needs_network
def test_a_gateway_hands_on_the_bytes_of_its_ranks_over_encrypted_connections(
        cluster: LocalCluster) -> None:
    """What a rank sends before its pipe is connected waits, and goes on encrypted."""
    host, port, _ = by_network(cluster.access)
    relay = Relay(host, port)
    known = read_access(cluster.access)
    dialler = AccessFileDialer(cluster.access, f"tcp:127.0.0.1:{relay.port}")
    pipes, inboxes, told = SocketPipes(dialler.dial), {1: Inbox(), 2: Inbox()}, list[object]()
    for rank in (1, 2):
        pipes.open(rank)
        for message in (ms.ClientHello(ms.PROTOCOL_VERSION, known.job, f"rank {rank}"), ms.Ping(7)):
            outbox = Outbox()
            outbox.put(message)
            pipes.write(rank, b"".join(outbox.take()))
    deadline = time.monotonic() + 60
    while sum(isinstance(each, ms.Pong) and each.stamp == 7 for each in told) < 2:
        assert time.monotonic() < deadline, told
        for rank, data, reason in pipes.wait(0.5):
            assert not reason, reason
            told += [message for message, _ in inboxes[rank].feed(data)]
    for rank in (1, 2):
        pipes.close(rank)
    assert b"rank 1" not in relay.seen and len(relay.seen) > 1000


# ---- large messages ----------------------------------------------------------------------------


@needs_network
def test_large_messages_travel_both_ways_at_once() -> None:
    data = [os.urandom(5_000_000) for _ in range(4)]

    def exchange(link: BulkLink, sent: list[bytes]) -> list[bytes]:
        link.most = 10_000_000
        sender = threading.Thread(target=lambda: [link.send(Alive(), piece[:7], piece[7:])
                                                  for piece in sent])
        sender.start()
        got = []
        for _ in data:
            told = link.receive()
            assert told is not None
            got.append(bytes(told[1]))
        sender.join(60)
        return got

    theirs: list[bytes] = []
    done = threading.Event()

    def serve(link: BulkLink) -> None:
        theirs.extend(exchange(link, data[::-1]))
        done.set()
        link.receive()  # until the other side has read everything

    listener = BulkListener(HOST, b"k" * 32, "job", serve)
    assert listener.address.startswith(f"tls:{HOST}:")
    link = dial_bulk((listener.address,), b"k" * 32, "job")
    assert exchange(link, data) == data[::-1]
    assert done.wait(60) and theirs == data
    with pytest.raises(AccessError):
        dial_bulk((listener.address,), b"x" * 32, "job")
    link.close()
    listener.close()
