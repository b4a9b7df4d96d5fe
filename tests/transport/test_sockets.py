"""Listeners send nothing to a peer that has not proven the key; TCP and Unix sockets behave
alike."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.app.broker_process.refusal_log import RefusalLog
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import auth
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.frame import Inbox, Outbox
from tangram_hpc.storage.access import read_access, worker_file, write_access
from tangram_hpc.transport.socket import asyncsock, bulk_socket
from tangram_hpc.transport.socket.channel import SocketChannel
from tangram_hpc.transport.socket.dial import dial, prove
from tangram_hpc.transport.socket.socket_connection import SocketConnection


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), bind="127.0.0.1",
                      grace_s=3) as c:
        yield c


def tcp(cluster: LocalCluster) -> tuple[str, int]:
    address = next(a for a in read_access(cluster.access).addresses if a.startswith("tcp:"))
    host, port = address[4:].rsplit(":", 1)
    return host, int(port)


def knock(cluster: LocalCluster, answer: bytes) -> bytes:
    """The bytes that a peer gets after the greeting when it sends this answer."""
    with socket.create_connection(tcp(cluster), timeout=30) as sock:
        greeting = sock.recv(auth.GREETING)
        assert greeting.startswith(auth.MAGIC) and len(greeting) == auth.GREETING
        sock.sendall(answer)
        heard = b""
        while True:
            try:
                more = sock.recv(4096)
            except ConnectionResetError:
                return heard
            if not more:
                return heard
            heard += more


def test_a_client_connects_to_an_explicit_tcp_address(cluster: LocalCluster) -> None:
    host, port = tcp(cluster)
    with tangram_hpc.connect(cluster.access, address=f"tcp:{host}:{port}") as client:
        assert client.submit(pow, 2, 5).result(30) == 32
        big = "x" * 200_000  # through the store, both ways
        assert client.submit(["cat"], stdin=big).result(30).text == big
    with pytest.raises(InvalidInput, match="unix:PATH or tcp:HOST:PORT"):
        tangram_hpc.connect(cluster.access, address="http://x")
    with pytest.raises(tangram_hpc.AccessError, match="no broker answers"):
        tangram_hpc.connect(cluster.access, address="tcp:127.0.0.1:1")


@pytest.mark.attack("network", "broker", "keys")
@pytest.mark.attack("user", "broker")
def test_a_peer_without_the_key_gets_no_message(cluster: LocalCluster) -> None:
    known = read_access(cluster.access)
    ours = os.urandom(auth.NONCE)
    hello = Outbox()
    hello.put(ms.ClientHello(ms.PROTOCOL_VERSION, known.job, "intruder"))
    frame = b"".join(hello.take())
    for answer in (b"\0" * auth.ANSWER + frame, ours + ours + frame, frame + b"\0" * 200,
                   ours + auth.proof(b"x" * 32, "peer", ours, ours, known.job) + frame):
        assert knock(cluster, answer) == b""
    assert cluster.submit(pow, 2, 2).result(30) == 4


def told_by_broker(access: Path, message: ms.Message) -> str:
    """With which words the broker refuses the first message of a peer with this file's key."""
    known, outbox = read_access(access), Outbox()
    outbox.put(message)
    with dial(known.addresses, known.key, known.job).sock as sock:
        sock.settimeout(30)
        sock.sendall(b"".join(outbox.take()))
        ((told, _),) = Inbox().feed(sock.recv(4096))
        assert isinstance(told, ms.PeerRefused), told
        assert sock.recv(1) == b""
    return told.text


@pytest.mark.attack("rank", "keys")
def test_a_peer_is_what_its_key_says(cluster: LocalCluster) -> None:
    """A client's key opens no worker's place, and a worker's key sees no client's work."""
    job, workers = cluster.job, worker_file(cluster.access)
    assert workers.stat().st_mode & 0o777 == 0o600
    before = cluster.ask("info")
    node = ms.WorkerHello(ms.PROTOCOL_VERSION, job, NodeSpec("intruder", "", (0,), 100))
    said = told_by_broker(cluster.access, node)
    assert said == ("its key is that of a client, so it cannot join as a worker: a worker reads "
                    "worker.json in the job's folder")
    said = told_by_broker(workers, ms.ClientHello(ms.PROTOCOL_VERSION, job, "intruder"))
    assert said == ("its key is that of a worker, so it cannot join as a client: a client reads "
                    "access.json in the job's folder")
    with pytest.raises(tangram_hpc.TangramError, match="its key is that of a worker"):
        tangram_hpc.connect(workers).ask("info")
    copy = cluster.folder / "copy.json"  # what somebody has who was given the clients' file alone
    write_access(copy, read_access(cluster.access))
    worker = subprocess.run([sys.executable, "-m", "tangram_hpc", "worker", "--cpus", "1"],
                            env={**os.environ, "TANGRAM_ACCESS": str(copy)}, timeout=60,
                            capture_output=True, text=True, check=False)
    assert worker.returncode == 2 and worker.stderr == (
        f"tangram: error: job {job}: the broker refuses this worker: its key is that of a client, "
        "so it cannot join as a worker: a worker reads worker.json in the job's folder\n"), worker
    assert cluster.ask("info")["nodes"] == before["nodes"]
    log = (cluster.folder / "broker.log").read_text()
    assert log.count("cannot join as a worker") >= 2 and "tangram: broker: refused process " in log


@pytest.mark.attack("network", "broker")
def test_who_does_not_prove_a_key_is_named_in_the_brokers_log(cluster: LocalCluster) -> None:
    with socket.create_connection(tcp(cluster), timeout=30) as sock:
        where = "{}:{}".format(*sock.getsockname())
        sock.sendall(b"\0" * auth.ANSWER)
        while sock.recv(4096):
            pass
    log = (cluster.folder / "broker.log").read_text()
    assert f"refused {where}: it does not hold a key of this start of the broker\n" in log


@pytest.mark.attack("network", "terminal", "disk")
@pytest.mark.attack("user", "disk")
def test_lines_about_refused_peers_are_rationed_and_escaped() -> None:
    now, out = [5.0], io.StringIO()
    log = RefusalLog(lambda: now[0], out)
    for _ in range(1000):
        log("10.0.0.9:7", "\x1b[2J\nno")
    lines = out.getvalue().splitlines()
    assert len(lines) == 20
    assert set(lines) == {"tangram: broker: refused 10.0.0.9:7: \\x1b[2J\\nno"}
    now[0] += 60
    log("", "late")
    assert out.getvalue().splitlines()[20:] == [
        "tangram: broker: refused a peer: late (and 980 more before, not listed)"]


@pytest.mark.attack("network", "broker")
def test_a_silent_peer_is_dropped(cluster: LocalCluster) -> None:
    with socket.create_connection(tcp(cluster), timeout=30) as sock:
        sock.recv(auth.GREETING)
        assert sock.recv(1) == b""  # after HANDSHAKE_S, and not before it proved anything


def _crowd(port: int, door: str, reset: bool) -> None:
    """Three unproven connections are allowed: of five silent ones the oldest two are reset, or
    closed, and a peer with the key gets in at once."""
    crowd = []
    for _ in range(5):
        crowd.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert crowd[-1].recv(auth.GREETING).startswith(auth.MAGIC)  # so it is being greeted
    for peer in crowd[:2]:
        if reset:
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        else:
            assert peer.recv(1) == b""
    dial((door,), b"k" * 32, "job").close()
    assert select.select(crowd[3:], [], [], 0)[0] == []  # two of these were left where they were
    for peer in crowd:
        peer.close()


@pytest.mark.attack("network", "broker")
@pytest.mark.attack("user", "broker")
def test_unproven_peers_do_not_block_a_peer_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncsock, "unproven_max", lambda: 3)

    async def serve() -> None:
        sock = asyncsock.listen_tcp("127.0.0.1")
        port = sock.getsockname()[1]
        let_in: list[object] = []
        listener = asyncsock.Listener(sock, b"k" * 32, "job", let_in.append)
        await asyncio.to_thread(_crowd, port, f"tcp:127.0.0.1:{port}", True)
        await _until(lambda: let_in)
        listener.close()

    asyncio.run(serve())


def test_a_peer_that_made_room_for_others_is_not_told_that_its_key_is_wrong(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """It dials again then, as the ranks of a large job do that all connect at once."""
    monkeypatch.setattr(asyncsock, "unproven_max", lambda: 3)

    def dropped(ours: socket.socket, *others: socket.socket) -> None:
        for other in others[2:]:
            other.recv(auth.GREETING)  # so those before it have been dropped
        with pytest.raises(ConnectionResetError):
            prove(SocketConnection(ours), b"k" * 32, "job")
        for each in (ours, *others):
            each.close()

    async def serve() -> None:
        sock = asyncsock.listen_tcp("127.0.0.1")
        crowd = [socket.create_connection(sock.getsockname(), timeout=30) for _ in range(6)]
        listener = asyncsock.Listener(sock, b"k" * 32, "job", lambda link: None)
        await asyncio.to_thread(dropped, *crowd)
        listener.close()

    asyncio.run(serve())


async def _until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def test_unproven_peers_do_not_block_a_peer_at_a_bulk_listener(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_socket, "unproven_max", lambda: 3)
    let_in = threading.Event()
    listener = bulk_socket.BulkListener("127.0.0.1", b"k" * 32, "job", lambda link: let_in.set())
    _crowd(int(listener.address.rsplit(":", 1)[1]), listener.address, False)
    assert let_in.wait(30)
    listener.close()


@pytest.mark.attack("network", "broker")
def test_a_listener_without_descriptors_waits_and_accepts_later(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that cannot accept would otherwise be woken again and again."""
    full_until = time.monotonic() + 0.3

    class Full(socket.socket):
        turns = 0

        def accept(self) -> tuple[socket.socket, object]:
            Full.turns += 1
            if time.monotonic() < full_until:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def serve() -> None:
        plain = asyncsock.listen_tcp("127.0.0.1")
        sock = Full(fileno=plain.detach())
        port = sock.getsockname()[1]
        let_in: list[object] = []
        listener = asyncsock.Listener(sock, b"k" * 32, "job", let_in.append)
        door = (f"tcp:127.0.0.1:{port}",)
        (await asyncio.to_thread(dial, door, b"k" * 32, "job")).close()
        await _until(lambda: let_in)
        listener.close()

    asyncio.run(serve())
    assert 2 <= Full.turns < 50  # a listener that is woken each time looks some thousand times


def test_a_finalizer_may_wake_a_channel_whose_thread_wakes_it() -> None:
    here, there = socket.socketpair()
    channel = SocketChannel(here)

    def wake() -> None:
        with channel._wake_lock:  # where the finalizer interrupts `wake`
            channel.wake()

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    channel.close()
    there.close()


@pytest.mark.attack("user", "keys", "sessions")
def test_another_user_is_refused_on_the_unix_socket(cluster: LocalCluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to be somebody else")
    known = read_access(cluster.access)
    path = Path(next(a for a in known.addresses if a.startswith("unix:"))[5:])
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o711)
    path.chmod(0o666)  # even where the folder is open
    code = (f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r});\n"
            "print(s.recv(100))")
    told = subprocess.run([_anybodys_python(), "-c", code], capture_output=True, text=True,
                          timeout=30, check=False, user=65534)
    path.chmod(0o600)
    path.parent.chmod(0o700)
    assert told.stdout == "b''\n", told.stderr


def _anybodys_python() -> str:
    for candidate in (str(Path(sys.executable).resolve()), "/usr/bin/python3"):
        try:
            if subprocess.run([candidate, "-c", ""], user=65534, check=False,
                              capture_output=True).returncode == 0:
                return candidate
        except (PermissionError, FileNotFoundError):
            continue
    pytest.skip("no Python that every user may run")


@pytest.mark.attack("rank", "broker")
def test_a_peer_of_another_version_or_job_is_refused_with_the_reason(cluster: LocalCluster) -> None:
    from tangram_hpc.protocol.frame import Inbox
    from tangram_hpc.transport.socket.dial import dial

    known = read_access(cluster.access)
    for hello, said in ((ms.ClientHello(99, known.job, "u"), "protocol version 99"),
                        (ms.ClientHello(ms.PROTOCOL_VERSION, "other", "u"), "not other"),
                        (ms.Ping(1), "the first message must be a Hello")):
        sock = dial(known.addresses, known.key, known.job).sock
        outbox = Outbox()
        outbox.put(hello)
        sock.sendall(b"".join(outbox.take()))
        sock.settimeout(30)
        ((told, _),) = Inbox().feed(sock.recv(4096))
        assert isinstance(told, ms.PeerRefused) and said in told.text
        sock.close()


@pytest.mark.attack("rank", "broker")
def test_a_submit_without_its_payload_is_refused_and_the_connection_continues(
        cluster: LocalCluster) -> None:
    from tangram_hpc.domain.action import Action
    from tangram_hpc.domain.ids import mint
    from tangram_hpc.protocol.frame import Inbox
    from tangram_hpc.transport.socket.dial import dial

    known = read_access(cluster.access)
    with dial(known.addresses, known.key, known.job).sock as sock:
        sock.settimeout(30)
        inbox, told = Inbox(), list[object]()

        def say(message: ms.Message) -> None:
            outbox = Outbox()
            outbox.put(message)
            sock.sendall(b"".join(outbox.take()))
            told[:] = [m for m, _ in inbox.feed(sock.recv(1 << 16))]

        say(ms.ClientHello(ms.PROTOCOL_VERSION, known.job, "u"))
        welcome = told[0]
        assert isinstance(welcome, ms.Welcome)
        say(ms.Submit(Action(mint(welcome.client, 1), "x"), n=0))
        assert isinstance(told[0], ms.Rejected) and told[0].id == mint(welcome.client, 1)
        assert "without its payload" in told[0].text
        say(ms.Ping(7))
        assert told == [ms.Pong(7, credit=welcome.credit)] and welcome.credit > 0
    assert cluster.submit(pow, 2, 2).result(30) == 4


def test_a_link_that_is_closed_sends_what_was_flushed_and_drops_what_was_queued() -> None:
    """A broker that was superseded closes its links; its last orders must reach nobody."""
    async def heard(discards: bool) -> list[ms.Message]:
        ours, theirs = socket.socketpair()
        link = asyncsock.SocketLink(ours, asyncio.get_running_loop())
        link.send(ms.Ping(1))
        link.flush()
        link.send(ms.Ping(2))
        if discards:
            link.discard()
            link.send(ms.Ping(3))
            link.flush()
        link.close()
        with theirs:
            data = b"".join(iter(lambda: theirs.recv(4096), b""))
        return [message for message, _ in Inbox().feed(data)]

    assert asyncio.run(heard(False)) == [ms.Ping(1)]
    assert asyncio.run(heard(True)) == [ms.Ping(1), ms.Ping(3)]
