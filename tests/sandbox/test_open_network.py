"""Sessions with an open network: which nodes give one, what is said where none does, how names are
looked up, and on a node of the test's own what code in such a session reaches."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.builders import World
from helpers.ordinary_user import NOBODY, other_users_python

from tangram_hpc import InvalidInput
from tangram_hpc.broker.message_validation import wrong_session
from tangram_hpc.cli.views.info_verb import network_lines
from tangram_hpc.client.request import session_spec
from tangram_hpc.doctor import isolation
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.isolation import backend_for, choose_isolation, networks
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.session import OPEN, SessionSpec
from tangram_hpc.protocol.process_frames import SandboxSpec
from tangram_hpc.sandbox.isolation import join, landlock
from tangram_hpc.sandbox.isolation.pause_process import PauseFailed
from tangram_hpc.sandbox.manager import network_probe
from tangram_hpc.sandbox.manager.backends import OPEN_NETWORK, Backends
from tangram_hpc.sandbox.network import fenced_routes, name_relay, open_network
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import misfit_of_session

TESTS = Path(__file__).resolve().parent.parent
SPEC = SessionSpec(1, network=OPEN)
BWRAP = NodeSpec("n", "h", (0,), 10, backends=("process", "bwrap"), untrusted=("bwrap", "process"))


# ---- choosing ----


def test_the_word_is_taken_and_kept_by_a_fork_and_a_move() -> None:
    spec = session_spec(SessionSpec(1), network="open")
    assert spec.network == OPEN and not wrong_session(spec)
    assert spec.for_fork().network == OPEN and spec.moved("x").network == OPEN
    assert session_spec(spec.for_fork(), mem=5).network == OPEN
    assert session_spec(spec.for_fork(), network=False).network is False


def test_only_a_node_whose_program_works_is_eligible() -> None:
    works = NodeSpec("n", "h", (0,), 10, backends=BWRAP.backends, untrusted=BWRAP.untrusted,
                     open_network="slirp4netns")
    assert backend_for(works, SPEC) == "bwrap" and backend_for(BWRAP, SPEC) == ""
    assert backend_for(BWRAP, SessionSpec(1)) == "bwrap"
    assert choose_isolation(("process", "podman"), SPEC) == ""
    assert networks(works.untrusted, works.open_network) == (
        "off", "loopback", "filtered", "open", "host")
    assert "open" not in networks(BWRAP.untrusted) + networks(("process",), "slirp4netns")


@pytest.mark.parametrize("backend, why", [
    ("", "network: no node has an open one (no tun here); or pass a list of names, or True"),
    ("podman", "network: podman has no open network; take bwrap, or pass a list of names")])
def test_a_job_without_such_a_node_refuses_with_the_reason_of_a_node(backend: str, why: str
                                                                     ) -> None:
    world = World()
    node = NodeSpec("n", "h", (0,), 10, backends=("bwrap", "podman"), untrusted=("bwrap", "podman"),
                    why_not_open="no tun here")
    world.happen(ev.NodeJoined(0, world.ledger.next_node, node))
    spec = SessionSpec(1, network=OPEN, backend=backend)
    assert misfit_of_session(world.ledger, make_placer("first-fit"), spec) == why


def test_a_worker_refuses_what_its_node_cannot_build() -> None:
    backends = Backends(("bwrap",), ("bwrap",), {OPEN_NETWORK: "no tun here"})
    with pytest.raises(InvalidInput, match=r"^network: an open one .* \(no tun here\)"):
        backends.box(SPEC)
    assert Backends(("bwrap",), ("bwrap",), open_network="slirp4netns").box(SPEC) == SandboxSpec(
        "bwrap", False, OPEN)


# ---- what a node lacks ----


def test_a_program_or_a_device_that_is_missing_is_named_with_the_remedy(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open_network, "_PATH", "/none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_network.why_not() == ("slirp4netns is not installed (apt-get install slirp4netns, "
                                      "dnf install slirp4netns)")
    (tmp_path / "slirp4netns").touch(0o755)
    monkeypatch.setattr(open_network, "_TUN", str(tmp_path / "tun"))
    assert open_network.why_not().endswith("tun (modprobe tun)")
    (tmp_path / "tun").mkdir()  # what even root cannot open to write
    assert "tun cannot be opened (Is a directory); the site can give it mode 0666" in (
        open_network.why_not())
    with pytest.raises(open_network.NoOpenNetwork, match="cannot be opened"):
        open_network.OpenNetwork(())


def test_a_network_namespace_of_somebody_else_is_left_alone() -> None:
    if os.getuid() == 0:
        pytest.skip("root owns the network of the machine")
    with pytest.raises(OSError, match=r"not permitted|denied"):
        fenced_routes.namespaces_of(os.getpid())


def test_the_doctor_says_what_a_node_lacks_and_what_it_has(monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    config = SimpleNamespace(isolation="", read_paths=(), scratch="")

    def told(**found: Any) -> str:
        monkeypatch.setattr(isolation.Backends, "probed", lambda *words: Backends(
            ("bwrap",), ("bwrap",), **found))
        return isolation.sandboxes(SimpleNamespace(config=config, environ={})).found

    assert "networks: off, loopback, filtered, host (open network: no tun here)" in told(
        why_not={OPEN_NETWORK: "no tun here"})
    assert "networks: off, loopback, filtered, open, host" in told(open_network="slirp4netns")


def test_info_says_which_nodes_lack_what() -> None:
    able = {"name": "a", "networks": ["off", "open"], "why_not_open": ""}
    lacks = {"name": "b", "networks": ["off"], "why_not_open": "no tun here"}
    assert network_lines([able]) == ["NETWORKS off, open"]
    assert network_lines([able, lacks]) == [
        "NETWORKS off, open  on a", "NETWORKS off  on b", 'NETWORKS no "open" on b: no tun here']


# ---- the test of a node ----


def test_a_failure_without_a_text_is_not_taken_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise PauseFailed("")

    monkeypatch.setattr(open_network, "why_not", lambda: "")
    monkeypatch.setattr(network_probe, "_built", fails)
    reason = network_probe.why_not_open(None, None, 1)  # type: ignore[arg-type]
    assert reason == "the test failed (PauseFailed)"


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Runs the attack in the node's own network, as if a stack carried everything."""
    monkeypatch.setattr(join, "enter", lambda *_: None)
    monkeypatch.setattr(network_probe, "DEVICE", "lo")
    monkeypatch.setattr(network_probe, "_address", lambda: "127.0.0.1")
    monkeypatch.setattr(network_probe, "_WAIT_S", 0)
    return lambda: network_probe._attacked(SimpleNamespace(inside=0))  # type: ignore[arg-type]


def test_a_stack_is_safe_only_if_it_carries_and_the_attack_does_not_arrive(
        attack: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lets sandboxes reach the node's loopback" in attack()
    monkeypatch.setattr(network_probe, "_TRIES", ())
    assert attack() == ""


@pytest.mark.parametrize("lost", ["streams", "datagrams"])
def test_a_stack_that_carries_nothing_is_not_offered(
        attack: Callable[[], str], monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    def to_nobody(sockets: list[socket.socket]) -> list[int]:
        return [1 if lost == "streams" else sockets[0].getsockname()[1], 1]

    monkeypatch.setattr(network_probe, "_TRIES", ())
    monkeypatch.setattr(network_probe, "_ports", to_nobody)  # where nobody listens
    monkeypatch.setattr(network_probe, "_PATIENCE_S", 0.05)
    assert attack() == "slirp4netns carried nothing from a sandbox to 127.0.0.1 in 0.05 s"


def test_a_node_with_nothing_but_a_loopback_is_not_offered(
        attack: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_probe, "_address", lambda: "")
    assert "no IPv4 address but its loopback's" in attack()


# ---- the stack ----


def test_a_program_in_a_users_folder_can_be_run(tmp_path: Path) -> None:
    if not landlock.abi():
        pytest.skip("the kernel has no Landlock")
    program = tmp_path / "prefix" / "bin" / "slirp4netns"
    program.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath("/bin/true"), program)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "slirp4netns").symlink_to(program)
    code = ("import os\n"
            "from tangram_hpc.sandbox.network import open_network\n"
            "open_network._confine([])\n"
            "pid = os.posix_spawn(open_network._program(), ['slirp4netns'], {})\n"
            "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": str(linked), "PYTHONPATH": str(TESTS.parent)})
    assert done.returncode == 0, done.stderr


def test_the_stack_does_not_inherit_the_sockets_of_the_name_relay(monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    def inside(network: int, owner: int, told: socket.socket) -> None:
        with socket.socket() as one, socket.socket() as other:
            socket.send_fds(told, [b"+"], [one.fileno(), other.fileno()])

    monkeypatch.setattr(fenced_routes, "_inside", inside)
    for each in fenced_routes.prepare(0, 0):
        with each:
            assert not each.get_inheritable()


# ---- names ----


@pytest.fixture
def resolvers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A resolver that answers queries turned round, and a relay that asks it second: at the first
    address nobody listens."""
    streams = socket.create_server(("127.0.0.1", 0))
    port = streams.getsockname()[1]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", port))

    def answer() -> None:
        query, asker = datagrams.recvfrom(1000)
        datagrams.sendto(query[::-1], asker)

    def carry() -> None:
        with suppress(OSError), streams.accept()[0] as line:  # shut down: nobody came
            line.sendall(line.recv(1000)[::-1])

    threads = [threading.Thread(target=work, daemon=True) for work in (answer, carry)]
    for thread in threads:
        thread.start()
    conf = tmp_path / "resolv.conf"
    conf.write_text("# ours\nsearch a.org b.org\nnameserver 127.0.0.9\nnameserver 127.0.0.1\n"
                    "options ndots:2\nsortlist 10.0.0.0\n")
    monkeypatch.setattr(name_relay, "RESOLV_CONF", str(conf))
    monkeypatch.setattr(name_relay, "_PORT", port)
    ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.bind(("127.0.0.1", 0))
    listener = socket.create_server(("127.0.0.1", 0))
    yield {"conf": conf, "relay": name_relay.NameRelay(ours, listener), "udp": ours,
           "tcp": listener}
    ours.sendto(b"", datagrams.getsockname())
    streams.shutdown(socket.SHUT_RDWR)
    for thread in threads:  # or it would go on with the descriptor of a later test
        thread.join(20)
    for each in (streams, datagrams, ours, listener):
        each.close()


def test_the_sandbox_asks_its_own_loopback_and_keeps_what_else_the_node_says(
        resolvers: dict[str, Any]) -> None:
    assert name_relay.resolv_conf() == (
        "nameserver 127.0.0.1\nsearch a.org b.org\noptions ndots:2\n")
    assert name_relay.resolvers() == ["127.0.0.9", "127.0.0.1"]
    resolvers["conf"].unlink()
    assert name_relay.resolvers() == ["127.0.0.1"]


def test_a_query_reaches_the_next_resolver_where_the_first_is_silent(resolvers: dict[str, Any]
                                                                     ) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(20)
        asker.sendto(b"query", resolvers["udp"].getsockname())
        resolvers["relay"].serve(resolvers["udp"].fileno())
        assert asker.recv(1000) == b"yreuq"


def test_a_query_by_tcp_is_carried_both_ways(resolvers: dict[str, Any]) -> None:
    with socket.create_connection(resolvers["tcp"].getsockname(), 20) as asker:
        resolvers["relay"].serve(resolvers["tcp"].fileno())
        asker.sendall(b"query")
        assert asker.recv(1000) == b"yreuq"


def test_a_relay_without_a_thread_drops_the_query_and_lives_on(
        resolvers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    relay = resolvers["relay"]
    monkeypatch.setattr(name_relay, "QUERIES_MAX", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with socket.create_connection(resolvers["tcp"].getsockname(), 20) as asker:
            relay.serve(resolvers["tcp"].fileno())
            assert asker.recv(1000) == b""
    test_a_query_by_tcp_is_carried_both_ways(resolvers)  # its place is free


def test_a_full_relay_is_not_asked_until_a_query_has_ended(
        resolvers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    relay, end = resolvers["relay"], threading.Event()
    monkeypatch.setattr(name_relay, "QUERIES_MAX", 1)
    monkeypatch.setattr(relay, "_ask", lambda *_: end.wait(20))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for query in (b"one", b"two"):
            asker.sendto(query, resolvers["udp"].getsockname())
            relay.serve(resolvers["udp"].fileno())  # the second stays in its socket
    assert resolvers["udp"].fileno() not in relay.fds()
    assert resolvers["tcp"].fileno() not in relay.fds()
    end.set()
    [freed] = relay.fds()
    assert select.select([freed], [], [], 20)[0]
    relay.serve(freed)
    assert resolvers["udp"].fileno() in relay.fds()
    assert resolvers["udp"].recv(100) == b"two"


# ---- a node of the test's own ----


def trial(who: str, home: Path, python: str) -> dict[str, Any]:
    """What happened to the sessions of a user on a node of the test's own."""
    if os.getuid() != 0:
        pytest.skip("only root can make a node of its own")
    if why := open_network.why_not():
        pytest.skip(why)
    packages = [p for p in sys.path if p.endswith("site-packages")]
    path = ":".join([str(TESTS.parent), str(TESTS), *packages])
    done = subprocess.run(
        ["unshare", "--net", "--mount", python, "-m", "helpers.open_network_trial",
         str(home), who], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": path})
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no node can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trial("root", tmp_path_factory.mktemp("node"), sys.executable)


@pytest.mark.long  # as root the same is in every run
def test_an_ordinary_user_has_the_same_where_the_device_is_open(told: dict[str, Any]) -> None:
    python = other_users_python()
    if not python:
        pytest.skip("no other user can run this Python")
    folder = Path(tempfile.mkdtemp(prefix="tangram-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    try:
        again = trial("nobody", folder, python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert again["networks"] == told["networks"] and again["private"] == []
    assert again == {**told, "outside": again["outside"]}
    assert sorted(again["outside"]) == ["tcp", "udp"]


def test_code_reaches_the_outside_by_tcp_udp_and_name(told: dict[str, Any]) -> None:
    assert "open" in told["networks"]
    inside = told["inside"]
    assert inside["tcp 198.51.100.1"] == "tcp answer"
    assert inside["udp 198.51.100.1"] == "udp answer"
    assert inside["name"] == "198.51.100.77", "the node's resolver is on its loopback"
    assert told["isolation"] == "bwrap+seccomp+open" and sorted(told["outside"]) == ["tcp", "udp"]


@pytest.mark.attack("code", "network")
def test_nothing_of_the_nodes_loopback_is_reached_by_any_address(told: dict[str, Any]) -> None:
    assert told["private"] == [], "a packet that is not answered has arrived too"
    assert told["metadata"] == [[], []]
    wrong = {name: said for name, said in told["inside"].items()
             if "198.51.100.1" not in name and name != "name" and not said.startswith("OSError")}
    assert wrong == {} and len(told["inside"]) == 29


@pytest.mark.attack("session", "network")
@pytest.mark.attack("network", "sessions")
def test_nobody_reaches_such_a_session_but_by_its_ports(told: dict[str, Any]) -> None:
    assert told["port"] == "connected" and 0 not in told["other"] and len(told["other"]) == 3


def test_a_fork_has_the_network_and_a_command_without_a_session_has_not(told: dict[str, Any]
                                                                        ) -> None:
    assert told["fork"] == "bwrap+seccomp+open" and told["plain"] == "bwrap+seccomp"


def test_an_image_that_is_written_finds_its_resolver(told: dict[str, Any]) -> None:
    assert told["rooted"] == "nameserver 127.0.0.1\nsearch trial.example\n"


def test_a_stack_that_dies_takes_its_sandbox_along_and_none_outlives_its_session(
        told: dict[str, Any]) -> None:
    assert told["again"] and not told["left"]
