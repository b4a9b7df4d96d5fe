"""Sessions with a filtered network: the proxy against requests of every kind, and sandboxes that
try to get around it. Servers, sandboxes and clients are real; the test answers name lookups itself
where it needs a certain answer."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers.executor_rig import until
from helpers.own_address import own_address

from tangram_hpc import InvalidInput, LocalCluster
from tangram_hpc.domain.isolation import choose_isolation, networks
from tangram_hpc.domain.session import LOOPBACK, SessionSpec
from tangram_hpc.protocol.allow_list import AllowList, literal
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox.isolation import landlock
from tangram_hpc.sandbox.network import near_addresses, proxy
from tangram_hpc.sandbox.network.proxy import CONNECTIONS_MAX, Proxy

Lookup = Callable[[str, list[str]], None]


class Outside(BaseHTTPRequestHandler):
    """A server that answers with the request as it has received it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        told = f"{self.requestline}\n{self.headers}".encode() + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_POST

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def outside() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Outside)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def through() -> Iterator[Callable[..., Callable[[bytes], bytes]]]:
    """Starts a proxy with an allow-list; returns a function that sends a request to the proxy and
    reads the answer to its end."""
    listeners = []

    def start(*entries: str) -> Callable[[bytes], bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        served = Proxy(AllowList(entries), near_addresses.NearAddresses())
        threading.Thread(target=served.serve, args=(listener,), daemon=True).start()

        def ask(request: bytes) -> bytes:
            with socket.create_connection(listener.getsockname(), 20) as line:
                try:
                    line.sendall(request)
                    return line.makefile("rb").read()
                except ConnectionError:  # the proxy hung up before it had read everything
                    return b""

        return ask

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_the_proxy_goes_on_after_it_had_too_many_files_open(
        through: Callable[..., Callable[[bytes], bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """More failures than it may have connections at once."""
    left, accept = list(range(CONNECTIONS_MAX + 1)), socket.socket.accept

    def accepting(listener: socket.socket) -> Any:
        if left:
            left.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(proxy, "_PAUSE_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accepting)
    assert through("www.example.org")(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert left == []


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Lookup:
    """Answers for a name with one address after the other, the last one again and again."""
    real, answers = socket.getaddrinfo, dict[str, list[str]]()

    def answer(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host in answers:
            host = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return real(host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return answers.__setitem__


def test_plain_http_reaches_the_server_that_the_request_names(through: Any, outside: int) -> None:
    told = through(f"127.0.0.1:{outside}")(
        f"POST http://127.0.0.1:{outside}/a?b=1 HTTP/1.1\r\nHost: elsewhere.org\r\n"
        "Proxy-Authorization: secret\r\nConnection: keep-alive\r\nX-Own: 1\r\n"
        "Content-Length: 4\r\n\r\nbody".encode())
    head, _, got = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert got.startswith(b"POST /a?b=1 HTTP/1.1\n") and got.endswith(b"body")
    assert f"Host: 127.0.0.1:{outside}\n".encode() in got and b"X-Own: 1" in got
    assert b"elsewhere" not in got and b"secret" not in got and b"keep-alive" not in got


def test_a_tunnel_carries_bytes_both_ways(through: Any, outside: int) -> None:
    told = through(f"127.0.0.1:{outside}")(
        f"CONNECT 127.0.0.1:{outside} HTTP/1.1\r\n\r\n"
        "GET /in HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    established, _, rest = told.partition(b"\r\n\r\n")
    assert established == b"HTTP/1.1 200 Connection established"
    assert rest.startswith(b"HTTP/1.1 200 OK") and b"GET /in HTTP/1.1" in rest


@pytest.mark.parametrize("request_line", [
    "GET / HTTP/1.1", "GET https://a.org/ HTTP/1.1", "GET http:// HTTP/1.1",
    "CONNECT a.org HTTP/1.1", "CONNECT a.org:0 HTTP/1.1", "CONNECT a.org:99999 HTTP/1.1",
    "CONNECT :80 HTTP/1.1",
    "GET http://user@a.org/ HTTP/1.1", "GET http://a.org/ HTTP/2.0", "nonsense",
    "GET http://a.org/ HTTP/1.1\r\n folded: 1", "GET http://a.org/ HTTP/1.1\r\nno field",
    "GET http://a.org/ HTTP/1.1\r\na: b\nSmuggled: 1", "GET http://a.org\\@b.org/ HTTP/1.1"])
@pytest.mark.attack("code", "network")
def test_what_is_no_request_to_a_proxy_is_refused(through: Any, request_line: str) -> None:
    told = through("a.org", "b.org")(request_line.encode() + b"\r\n\r\n")
    assert told.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")) and b"tangram: " in told


def test_a_request_without_an_end_is_refused(through: Any) -> None:
    told = through("a.org")(b"GET http://a.org/ HTTP/1.1\r\n" + b"a: " + b"x" * 200_000)
    assert told.startswith(b"HTTP/1.1 400 ") or told == b""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1",
                                  "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]",
                                  "169.254.169.254", "localhost", "10.0.0.1"])
@pytest.mark.attack("code", "network")
def test_not_even_a_list_of_all_names_reaches_what_is_near(through: Any, outside: int, host: str
                                                           ) -> None:
    ask = through("*:*")
    for line in (f"CONNECT {host}:{outside} HTTP/1.1", f"GET http://{host}:{outside}/ HTTP/1.1"):
        assert ask(line.encode() + b"\r\n\r\n").startswith(b"HTTP/1.1 403 ")


@pytest.mark.attack("code", "network")
def test_a_name_that_leads_to_a_near_address_is_refused_until_that_is_listed(
        through: Any, outside: int, lookup: Lookup) -> None:
    line = f"GET http://mirror.org:{outside}/ HTTP/1.1\r\n\r\n".encode()
    lookup("mirror.org", ["127.0.0.1"])
    told = through(f"mirror.org:{outside}")(line)
    assert told.startswith(b"HTTP/1.1 403 ") and b"list the address too" in told
    assert through(f"mirror.org:{outside}", f"127.0.0.0/8:{outside}")(line).startswith(
        b"HTTP/1.1 200 ")
    assert through(f"127.0.0.0/8:{outside}")(line).startswith(b"HTTP/1.1 403 ")


@pytest.mark.attack("network", "network")
def test_a_second_answer_of_a_name_server_is_never_asked_for(
        through: Any, outside: int, lookup: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: a public address when it is checked, the loopback when it is used."""
    dialled = []
    monkeypatch.setattr(proxy, "_CONNECT_S", 0.2)
    monkeypatch.setattr(proxy, "_dial", lambda found, port: dialled.append(found) or _refuse())
    lookup("rebind.org", ["203.0.114.7", "127.0.0.1"])
    told = through(f"rebind.org:{outside}")(
        f"CONNECT rebind.org:{outside} HTTP/1.1\r\n\r\n".encode())
    assert told.startswith(b"HTTP/1.1 502 ")
    assert dialled == [[literal("203.0.114.7")]]


def _refuse() -> Any:
    raise proxy.Refused(502, "not dialled in a test")


def test_this_nodes_own_and_neighbouring_addresses_are_near() -> None:
    assert near_addresses.NearAddresses().has(literal("127.0.0.1"))
    assert not near_addresses.NearAddresses().has(literal("203.0.114.7"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.114.7", 9))
        except OSError:
            pytest.skip("this machine has no route, so it has no neighbours either")
        own = probe.getsockname()[0]
    assert near_addresses.NearAddresses().has(literal(own))


def test_neighbours_are_known_to_a_process_that_may_not_read_proc_any_more() -> None:
    """The proxy is such a process once it has confined itself."""
    program = ("from tangram_hpc.sandbox.isolation import landlock\n"
               "from tangram_hpc.sandbox.network import near_addresses as near\n"
               "made = near.NearAddresses()\n"
               "before = near._rows(made._routes)\n"
               "landlock.restrict(['/usr'], [], network=True)\n"
               "print(len(before) > 0, near._rows(made._routes) == before)")
    if landlock.abi() < 1:
        pytest.skip("this kernel has no Landlock")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False)
    assert done.stdout == "True True\n", done.stderr


def test_the_routes_without_a_gateway_are_neighbours(tmp_path: Any,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "route"
    rows = ["Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"]
    for destination, flags, mask in (("0.0.0.0", 3, "0.0.0.0"), ("198.51.0.0", 1, "255.255.0.0"),
                                     ("203.0.0.0", 3, "255.0.0.0")):
        raw = [f"{int.from_bytes(socket.inet_aton(one), sys.byteorder):08X}"
               for one in (destination, mask)]
        rows.append(f"eth0 {raw[0]} 00000000 {flags:04X} 0 0 0 {raw[1]} 0 0 0")
    table.write_text("\n".join(rows))
    monkeypatch.setattr(near_addresses, "_ROUTES", str(table))
    assert near_addresses.NearAddresses().has(literal("198.51.7.7"))
    assert not near_addresses.NearAddresses().has(literal("203.0.114.7"))


def test_more_connections_than_places_wait(through: Any, outside: int) -> None:
    ask, told = through(f"127.0.0.1:{outside}"), []
    line = f"GET http://127.0.0.1:{outside}/ HTTP/1.1\r\n\r\n".encode()
    crowd = [threading.Thread(target=lambda: told.append(ask(line)[:12]))
             for _ in range(2 * CONNECTIONS_MAX)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert told == [b"HTTP/1.1 200"] * len(crowd)


# ---- choosing ----


@pytest.mark.parametrize("network", [LOOPBACK, ("a.org",)])
def test_a_network_of_its_own_needs_a_backend_that_has_one(network: Any) -> None:
    spec = SessionSpec(1, network=network)
    assert choose_isolation(("process", "bwrap"), spec) == "bwrap"
    assert choose_isolation(("process",), spec) == ""
    assert choose_isolation(("process",), SessionSpec(1)) == "process"


def test_a_node_says_which_networks_it_has() -> None:
    assert networks(("process", "bwrap")) == ("off", "loopback", "filtered", "host")
    assert networks(("process",)) == ("off", "host") and networks(()) == ()


# ---- sandboxes ----

ATTACK = r"""
import ctypes, json, os, socket, sys, urllib.request
proxy = os.environ["http_proxy"].removeprefix("http://").split(":")
port, own, abstract = int(sys.argv[1]), sys.argv[2], sys.argv[3]
done = []
def attempt(name, work):
    try:
        done.append([name, repr(work())[:100]])
    except (OSError, AssertionError, IndexError):
        pass
def by_proxy(target):
    line = socket.create_connection((proxy[0], int(proxy[1])), 10)
    line.sendall(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
    told = line.recv(1000)
    assert told.startswith(b"HTTP/1.1 200"), told
    return told
def direct(family, kind, address):
    line = socket.socket(family, kind)
    line.settimeout(3)
    line.connect(address)
    if kind == socket.SOCK_DGRAM:
        line.send(b"x")
    return address
INET, INET6, UNIX = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
attempt("loopback", lambda: direct(INET, socket.SOCK_STREAM, ("127.0.0.1", port)))
attempt("loopback 6", lambda: direct(INET6, socket.SOCK_STREAM, ("::1", port)))
attempt("own address", lambda: direct(INET, socket.SOCK_STREAM, (own, port)))
attempt("public", lambda: direct(INET, socket.SOCK_STREAM, ("8.8.8.8", 53)))
attempt("public by UDP", lambda: direct(INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)))
attempt("abstract", lambda: direct(UNIX, socket.SOCK_STREAM, "\0" + abstract))
attempt("raw", lambda: socket.socket(INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
for target in (f"127.0.0.1:{port}", f"localhost:{port}", f"{own}:{port}", f"{sys.argv[4]}:{port}",
               f"[::1]:{port}", f"169.254.169.254:80", f"2130706433:{port}"):
    attempt("proxy " + target, lambda: by_proxy(target))
attempt("proxy's process", lambda: os.kill(1, 0) or [
    pid for pid in os.listdir("/proc") if pid.isdigit()
    and b"tangram-proxy" in open(f"/proc/{pid}/comm", "rb").read()][0])
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, mem_mib=4000, warm=0, home=tmp_path_factory.mktemp("home")) as c:
        if "filtered" not in c.ask("nodes")["nodes"][0]["networks"]:
            pytest.skip("no backend here has network namespaces")
        yield c


def test_code_reaches_what_is_listed_by_the_usual_variables(cluster: LocalCluster, outside: int
                                                            ) -> None:
    fetch = ("import urllib.request; urllib.request.proxy_bypass = lambda host: False\n"
             f"print(urllib.request.urlopen('http://127.0.0.1:{outside}/x').read().decode())")
    with cluster.session(network=[f"127.0.0.1:{outside}"]) as session:
        told = session.exec(["python3", "-c", fetch], env={"no_proxy": ""}).result()
        assert told.text.startswith("GET /x HTTP/1.1"), told
        assert told.isolation.startswith("bwrap+") and told.isolation.endswith("+filtered")
        env = session.exec("env").result().text
        assert "https_proxy=http://127.0.0.1:" in env and "HTTP_PROXY=http://127.0.0.1:" in env
        serve = (
            "import http.server as h, threading, urllib.request\n"
            "server = h.HTTPServer(('', 0), h.SimpleHTTPRequestHandler)\n"
            "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
            "address = 'http://sandbox:%s' % server.server_port\n"
            "print(urllib.request.urlopen(address).status)")
        own = session.exec(["python3", "-c", serve]).result()
        assert own.text == "200\n", own
    with cluster.session(network="loopback") as session:
        told = session.exec("env").result()
        assert "proxy" not in told.text and not told.isolation.endswith("filtered")


def test_httpx_makes_a_client_from_the_usual_variables(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads each entry of `no_proxy` as an address, and fails where it cannot."""
    httpx = pytest.importorskip("httpx")
    with cluster.session(network=["www.example.org"]) as session:
        for line in session.exec("env").result().text.splitlines():
            name, _, value = line.partition("=")
            if name.lower().endswith("_proxy"):
                monkeypatch.setenv(name, value)
    assert "sandbox" in os.environ["no_proxy"]
    httpx.Client().close()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.attack("code", "network")
def test_hostile_code_finds_no_other_way(cluster: LocalCluster, trusted: bool) -> None:
    name = f"tangram-{os.urandom(8).hex()}"
    with (socket.create_server(("", 0)) as node, socket.socket(socket.AF_UNIX) as abstract,
          cluster.session(network=["*:*"], trusted=trusted, files={"a.py": ATTACK}) as session):
        abstract.bind("\0" + name)
        abstract.listen()
        port = node.getsockname()[1]
        told = session.exec(["python3", "a.py", str(port), own_address("127.0.0.2"), name,
                             socket.gethostname()]).result()
        assert told.text == "[]\n", told


@pytest.mark.attack("session", "network")
@pytest.mark.attack("code", "broker")
def test_another_sandbox_and_the_broker_are_out_of_reach(cluster: LocalCluster) -> None:
    """A broker that listens on a port stands for `node` of the test above."""
    broker = json.loads(cluster.access.read_text())["addresses"][0].removeprefix("unix:")
    knock = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    serve = "python3 -m http.server 7777 >/dev/null 2>&1 &"
    with (cluster.session(network=["*:*"], background="run") as one,
          cluster.session(network=["*:*"], files={"a.py": ATTACK}) as other):
        one.exec(serve).result()
        one.connect(7777, wait_s=20).close()
        told = other.exec(["python3", "a.py", "7777", own_address("127.0.0.2"), "none",
                           socket.gethostname()]).result()
        assert told.text == "[]\n", told
        told = other.exec(["python3", "-c", knock, broker]).result()
        assert b"FileNotFoundError" in told.stderr, told


@pytest.mark.parametrize("served", [0, 3])
def test_a_proxy_that_dies_takes_its_sandbox_along_and_another_one_comes(
        cluster: LocalCluster, outside: int, served: int) -> None:
    """After some commands the compiled loop serves the sandbox and waits for the next one."""
    def proxies() -> list[int]:
        return [pid for pid in process_tree.descendants(os.getpid())
                if process_tree.read(f"/proc/{pid}/comm") == b"tangram-proxy\n"]

    with cluster.session(network=[f"127.0.0.1:{outside}"]) as session:
        session.write("kept", b"kept").result()
        for _ in range(served):
            session.exec("cat kept").result()
        before = proxies()
        for pid in before:
            os.kill(pid, 9)
        told = []
        ask = ("import os, socket; host, port = os.environ['http_proxy'][7:].split(':'); "
               "socket.create_connection((host, int(port))); print(open('kept').read())")

        def again() -> bool:  # the action that the init's end finds is lost with it
            told.append(session.exec(["/usr/bin/python3", "-c", ask]).result())
            return told[-1].text == "kept\n" and not {*proxies()} & {*before}

        assert before
        until(again, "another init with another proxy")
    session.closed.result(20)


@pytest.mark.parametrize(("wrong", "why"), [
    ("all", "neither True nor False, nor one of off, loopback, open, host"),
    ([], "1 to 256 entries"),
    (["a b"], "neither a name nor an address"), (3, "neither True nor False"), (b"x", "neither")])
def test_what_is_no_network_is_refused(cluster: LocalCluster, wrong: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"network: .*{why}"):
        cluster.session(network=wrong)


def test_a_backend_without_networks_is_refused_with_the_remedy(cluster: LocalCluster) -> None:
    session = cluster.session(network="loopback", backend="process", trusted=True)
    with pytest.raises(InvalidInput, match="network: process has no network of its own"):
        session.opened.result(20)
