"""Ports of sessions as a user sees them: streams, forwarded addresses, and everything that ends
them, against a real broker and worker and with real servers."""

from __future__ import annotations

import contextlib
import http.client
import os
import pickle
import signal
import socket
import stat
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.executor_rig import until

import tangram_hpc
from tangram_hpc import InvalidInput, LocalCluster, PortFailed
from tangram_hpc.client.network import forward as forwarding
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.port_flow import PIECE_MAX, STREAMS_MAX, WINDOW
from tangram_hpc.resources import process_tree

MIB = 1 << 20
# A server that answers each connection as the first line asks.
SERVER = r"""
import os, socketserver, threading
class Handler(socketserver.StreamRequestHandler):
    rbufsize = 0
    def handle(self):
        order = self.rfile.readline().split()
        if order[0] == b"echo":
            while data := self.connection.recv(65536):
                self.connection.sendall(data)
        elif order[0] == b"count":          # the length of what came, once it has all come
            total = 0
            while data := self.connection.recv(65536):
                total += len(data)
            self.connection.sendall(b"%d" % total)
        elif order[0] == b"flood":
            total = int(order[1])
            for sent in range(0, total, 65536):
                self.connection.sendall(b"x" * 65536)
                open("flooded", "w").write(str(sent + 65536))
        elif order[0] == b"deaf":
            threading.Event().wait()
        elif order[0] == b"die":
            os._exit(1)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 256
Server(("127.0.0.1", 7000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, mem_mib=4000, warm=1, home=tmp_path_factory.mktemp("home")) as c:
        if "bwrap" not in c.ask("nodes")["nodes"][0]["untrusted"]:
            pytest.skip("bwrap does not work here, so a sandbox has no network of its own")
        yield c


def serving(cluster: LocalCluster, **options: Any) -> Any:
    session = cluster.session(backend="bwrap", background="run", files={"serve.py": SERVER},
                              **options)
    session.exec("python3 serve.py >log 2>&1 &").result()
    return session


@pytest.fixture(scope="module")
def session(cluster: LocalCluster) -> Iterator[Any]:
    with serving(cluster) as one:
        yield one


def read_all(stream: Any) -> bytes:
    data = bytearray()
    while piece := stream.recv(MIB):
        data += piece
    return bytes(data)


def test_bytes_arrive_as_they_were_sent_and_each_side_ends_for_itself(session: Any) -> None:
    sent = os.urandom(3 * MIB + 17)
    with session.connect(7000, wait_s=20) as stream:
        writer = threading.Thread(target=lambda: (
            stream.sendall(b"echo\n" + sent), stream.shutdown(socket.SHUT_WR)))
        writer.start()
        assert read_all(stream) == sent
        writer.join()
        assert stream.recv(1) == b""
    with session.connect(7000) as stream:
        stream.sendall(b"count\n")
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
        assert stream.recv(100) == b"%d" % len(sent)
        with pytest.raises(PortFailed, match="has ended the stream"):
            stream.send(b"more")


def test_what_was_sent_before_close_still_arrives(session: Any) -> None:
    with session.connect(7000, wait_s=20) as stream:
        stream.sendall(b"count\n" + b"x" * WINDOW)
    # nothing tells the client; the server's other connections go on
    with session.connect(7000) as stream:
        stream.sendall(b"echo\nstill there")
        assert stream.recv(100) == b"still there"


def test_a_port_without_a_server_refuses_and_a_slow_one_is_waited_for(session: Any) -> None:
    with pytest.raises(PortFailed, match="port 7001: Connection refused") as error:
        session.connect(7001)
    assert error.value.code == "ECONNREFUSED" and isinstance(error.value, ConnectionError)
    later = "import socket; socket.create_server(('', 7002)).accept()[0].send(b'late')"
    session.exec(f'(sleep 0.5; python3 -c "{later}") >/dev/null 2>&1 &').result()
    with session.connect(7002, wait_s=30) as stream:
        assert stream.recv(10) == b"late"


@pytest.mark.parametrize("port", [0, -1, 65536, "80", True, None])
def test_what_is_no_port_is_refused(session: Any, port: Any) -> None:
    for call in (session.connect, session.forward):
        with pytest.raises(InvalidInput, match="port: "):
            call(port)


def test_http_clients_work_over_a_stream_a_port_and_a_unix_socket(session: Any) -> None:
    session.write("page.txt", b"hello" * 100_000).result()
    session.exec("python3 -m http.server 8000 >/dev/null 2>&1 &").result()
    web = http.client.HTTPConnection("sandbox")
    web.sock = session.connect(8000, wait_s=20)
    for _ in range(2):
        web.request("GET", "/page.txt", headers={"Connection": "keep-alive"})
        assert web.getresponse().read() == b"hello" * 100_000
        web.sock = web.sock or session.connect(8000)
    web.close()
    with session.forward(8000) as local:
        for _ in range(3):
            assert urllib.request.urlopen(f"{local.url}/page.txt").read() == b"hello" * 100_000
        assert local.address == f"127.0.0.1:{local.port}" and local.path == ""
    with pytest.raises(OSError):
        socket.create_connection((local.host, local.port), 5)
    with session.forward(8000, unix=True) as local:
        assert stat.S_IMODE(os.stat(local.path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(local.path)).st_mode) == 0o700
        over = socket.socket(socket.AF_UNIX)
        over.connect(local.path)
        over.sendall(b"GET /page.txt HTTP/1.0\r\n\r\n")
        assert over.makefile("rb").read().endswith(b"\r\n\r\n" + b"hello" * 100_000)
        with pytest.raises(InvalidInput, match="url: a Unix socket has none"):
            assert local.url
    assert not os.path.exists(local.path)


def test_a_client_that_does_not_read_holds_its_server_back_alone(session: Any) -> None:
    total = 64 * MIB
    with session.connect(7000, wait_s=20) as stream:
        stream.sendall(b"flood %d\n" % total)
        sizes = [0, -1]

        def stopped() -> bool:
            told = session.exec("cat flooded 2>/dev/null || echo 0").result().text
            sizes.append(int(told or 0))
            return sizes[-1] == sizes[-2] == sizes[-3] > 0

        until(stopped, "the server waits")
        assert sizes[-1] < 16 * MIB  # what the kernel buffers, and the window
        assert len(stream._received) <= WINDOW
        with session.connect(7000) as other:  # neither the session nor other streams wait
            other.sendall(b"echo\nquick")
            assert other.recv(100) == b"quick"
        assert len(read_all(stream)) == total


def test_a_server_that_does_not_read_holds_its_client_back(session: Any) -> None:
    with session.connect(7000, wait_s=20) as stream:
        stream.sendall(b"deaf\n")
        stream.settimeout(2)
        with pytest.raises(TimeoutError, match="nothing moved within 2 s"):
            stream.sendall(b"x" * (64 * MIB))
        with pytest.raises(TimeoutError):
            stream.recv(1)
    assert session.exec("echo ok").result().text == "ok\n"


@pytest.mark.attack("rank", "memory")
def test_a_stream_that_sends_without_credit_ends_and_its_client_stays(cluster: LocalCluster,
                                                                      session: Any) -> None:
    stream = session.connect(7000, wait_s=20)
    stream.sendall(b"deaf\n")
    # more than the kernel buffers hold, because the worker gives credit for what it could write
    for _ in range(64 * MIB // PIECE_MAX):
        stream._sender.send_of_stream(stream._number, ms.StreamData(stream._number),
                                      b"x" * PIECE_MAX)
    with pytest.raises(PortFailed, match="more than it had credit for") as error:
        stream.recv(1)
    assert error.value.code == "EPROTO"
    assert cluster.ask("info")


def test_a_server_that_dies_ends_its_streams(cluster: LocalCluster) -> None:
    with serving(cluster) as session:
        one, other = session.connect(7000, wait_s=20), session.connect(7000)
        one.sendall(b"echo\na")
        assert one.recv(1) == b"a"
        other.sendall(b"die\n")
        for stream in (one, other):
            with contextlib.suppress(PortFailed):  # an orderly end, or a broken one
                assert read_all(stream) == b""
        # the kernel may close the sockets of a dead process in any order, the listening one last
        until(lambda: refuses(session), "the port is refused")


def refuses(session: Any) -> bool:
    try:
        session.connect(7000).close()
    except PortFailed as error:
        return "refused" in str(error)
    return False


def test_the_end_of_a_session_ends_its_streams_and_forwards(cluster: LocalCluster) -> None:
    session = serving(cluster)
    stream, local = session.connect(7000, wait_s=20), session.forward(7000)
    through = socket.create_connection((local.host, local.port))
    through.sendall(b"echo\nhello")
    assert through.recv(5) == b"hello"
    session.close()
    with pytest.raises(PortFailed):
        assert stream.recv(1)
    with pytest.raises(ConnectionResetError):  # an orderly end would look like the whole answer
        through.recv(1)
    session.closed.result(20)
    with pytest.raises(tangram_hpc.SessionLost):
        session.connect(7000)
    local.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees which init belongs to which sandbox")
def test_an_init_that_dies_ends_its_streams_and_the_session_goes_on(cluster: LocalCluster) -> None:
    with serving(cluster) as session:
        stream = session.connect(7000, wait_s=20)
        kill_init_beside(session)
        with pytest.raises(PortFailed) as error:
            stream.recv(1)
        assert error.value.code == "ECONNRESET"
        assert session.exec("echo again").result().text == "again\n"
        with pytest.raises(PortFailed, match="refused"):
            session.connect(7000)


def kill_init_beside(session: Any) -> None:
    """Kills the init that shares the network namespace of a program of a session."""
    session.exec("sleep 98765 & ").result()
    here = process_tree.descendants(os.getpid())
    names = {pid: process_tree.read(f"/proc/{pid}/cmdline") or b"" for pid in here}
    (program,) = [pid for pid, name in names.items() if b"98765" in name]
    # the init forks a child, which has its name, to stop the program; parents come before children
    init = next(pid for pid in here if process_tree.read(f"/proc/{pid}/comm") == b"tangram-init\n"
                and network_of(pid) == network_of(program))
    os.kill(init, signal.SIGKILL)


def network_of(pid: int) -> str:
    """The network namespace of a process; empty when the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_many_streams_at_once(session: Any) -> None:
    with session.forward(7000, wait_s=20) as local:
        def one(number: int) -> bool:
            with socket.create_connection((local.host, local.port)) as through:
                data = b"%d " % number * 10_000
                threading.Thread(target=through.sendall, args=(b"echo\n" + data,)).start()
                got = bytearray()
                while len(got) < len(data):
                    got += through.recv(MIB)
                return bytes(got) == data

        with ThreadPoolExecutor(100) as pool:
            assert all(pool.map(one, range(2 * STREAMS_MAX)))
    streams = [session.connect(7000, wait_s=20) for _ in range(STREAMS_MAX)]
    with pytest.raises(PortFailed, match=f"has {STREAMS_MAX} streams open") as error:
        session.connect(7000)
    assert error.value.code == "EMFILE"
    for stream in streams:
        stream.close()
    with session.connect(7000, wait_s=20) as stream:
        stream.sendall(b"echo\nroom again")
        assert stream.recv(100) == b"room again"


@pytest.mark.attack("session", "network")
def test_two_sandboxes_have_each_their_own_ports(cluster: LocalCluster, session: Any) -> None:
    with cluster.session(backend="bwrap") as other:
        with pytest.raises(PortFailed, match="refused"):
            other.connect(7000)
        session.connect(7000, wait_s=20).close()
        probe = "import socket; socket.create_connection(('127.0.0.1', 7000), 5)"
        assert "refused" in other.exec(["python3", "-c", probe]).result().stderr.decode()


def test_after_a_reconnect_old_streams_are_broken_and_new_ones_work(cluster: LocalCluster,
                                                                    session: Any) -> None:
    with tangram_hpc.connect(cluster.access, name="reconnects") as client, serving(client) as mine:
        stream, local = mine.connect(7000, wait_s=20), mine.forward(7000, wait_s=20)
        channel = client._connection._channel
        channel._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PortFailed, match="connect again"):
            stream.recv(1)
        with mine.connect(7000, wait_s=20) as again:
            again.sendall(b"echo\nback")
            assert again.recv(100) == b"back"
        assert client._connection._channel is not channel
        with local, socket.create_connection((local.host, local.port)) as through:
            through.sendall(b"echo\nforward too")
            assert through.recv(100) == b"forward too"


@pytest.mark.attack("rank", "network")
def test_an_attached_client_reaches_the_ports_until_it_detaches(cluster: LocalCluster) -> None:
    with (serving(cluster, shared=True) as mine,
          tangram_hpc.connect(cluster.access, name="scorer") as client):
        theirs = client.attach(mine.handle())
        stream = theirs.connect(7000, wait_s=20)
        stream.sendall(b"echo\nshared")
        assert stream.recv(100) == b"shared"
        theirs.detach()
        with pytest.raises(PortFailed):
            stream.recv(1)
        with tangram_hpc.connect(cluster.access, name="stranger") as stranger:
            stolen = stranger._connection.open_stream(mine._record, 7000)
            with pytest.raises(PortFailed, match="is not open to this client") as error:
                stolen.wait_open(20)
            assert error.value.code == "ENOENT"
        mine.connect(7000).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.attack("user", "network", "sessions")
def test_another_user_of_the_machine_is_refused(session: Any) -> None:
    knock = ("import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
             "s.sendall(b'echo\\nhello'); print(s.recv(5))")
    with session.forward(7000, wait_s=20) as local:
        told = [subprocess.run(["/usr/bin/python3", "-c", knock, str(local.port)],
                               capture_output=True, text=True, user=user, check=False)
                for user in (65534, 0)]
        assert "ConnectionResetError" in told[0].stderr and not told[0].stdout
        assert told[1].stdout == "b'hello'\n"
        assert local.refused == 1


def test_a_connection_that_its_client_has_left_has_no_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        taken, peer = server.accept()
        assert forwarding._user_of(peer, server.getsockname()) == os.getuid()
        left.close()
        assert forwarding._user_of(peer, server.getsockname()) == -1
        taken.close()


def test_a_forward_that_cannot_listen_says_why(session: Any, tmp_path: Any) -> None:
    with session.forward(7000) as local:
        with pytest.raises(InvalidInput, match=rf"local_port: cannot listen on .*{local.port}"):
            session.forward(7000, local_port=local.port)
    for wrong, why in ((str(tmp_path / "no" / "s"), "No such file"),
                       (str(tmp_path / ("long" * 40)), "more than 100 bytes")):
        with pytest.raises(InvalidInput, match=f"unix: cannot listen on .*{why}"):
            session.forward(7000, unix=wrong)
    path = str(tmp_path / "mine")
    with session.forward(7000, unix=path, wait_s=20) as local:
        assert local.path == path and stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(InvalidInput, match="send its `address`"):
            pickle.dumps(local)
    assert not os.path.exists(path)


def test_a_stream_in_the_child_of_a_fork_is_unusable(session: Any) -> None:
    stream = session.connect(7000, wait_s=20)
    pid = os.fork()
    if pid == 0:
        try:
            stream.send(b"x")
        except PortFailed:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    stream.sendall(b"echo\nparent")
    assert stream.recv(100) == b"parent"
    stream.close()
