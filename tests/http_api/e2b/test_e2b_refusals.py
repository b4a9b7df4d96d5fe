"""Requests of the E2B wire that are wrong, foreign, unauthenticated, too large, slow or cut off:
each is refused clearly, and none disturbs a sandbox."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_hpc import LocalCluster
from tangram_hpc.http_api.e2b.images import E2bOptions, wanted
from tangram_hpc.http_api.e2b.wire_errors import ApiError
from tests.helpers.e2b_player import Player, framed
from tests.helpers.http_serving import Serving

KEYS = {"alice": "a" * 20, "bob": "b" * 20}


@pytest.fixture(scope="module")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Player, Player]]:
    """Two clients of one server, each with a sandbox."""
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(cpus=2, home=home) as cluster, Serving(
            cluster, "--keys", str(keys(home))) as server:
        alice, bob = (Player(server.url, key) for key in KEYS.values())
        alice.create()
        bob.create()
        yield alice, bob


def keys(home: Path) -> Path:
    path = home / "keys"
    path.touch(0o600)
    path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    return path


# ---- authorization -----------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"X_API_KEY": "c" * 20}], ids=["no key", "unknown key"])
def test_without_a_key_nothing_of_the_control_plane_is_answered(
        players: tuple[Player, Player], headers: dict[str, str]) -> None:
    alice, _ = players
    for method, path in (("POST", "/v2/sandboxes"), ("GET", "/v2/sandboxes"),
                         ("GET", f"/sandboxes/{alice.known['ID']}"),
                         ("GET", "/templates/aliases/base")):
        told = alice.send(method, path, b"{}", **headers)
        assert told.status == 401 and told.json["code"] == 401 and "key" in told.json["message"]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/templates/aliases/a%0Ab", 404), ("GET", "/sandboxes/1/2/3", 404),
    ("GET", "/volumes", 404), ("GET", "/templates", 405), ("PATCH", "/sandboxes/1", 405)])
def test_a_request_without_a_route_is_refused_in_the_form_of_the_wire(
        players: tuple[Player, Player], method: str, path: str, status: int) -> None:
    told = players[0].control(method, path)
    assert told.status == status and told.json["code"] == status
    assert told.json["message"].startswith(f"{method} {path[:9]}")
    assert "this server does not serve this" in told.json["message"]
    assert ("allow" in told.headers) == (status == 405)


@pytest.mark.parametrize("method, path", [
    ("GET", "metrics"), ("PUT", "network"), ("POST", "snapshots")])
def test_what_is_not_served_does_not_say_that_the_sandbox_is_gone(
        players: tuple[Player, Player], method: str, path: str) -> None:
    told = players[0].control(method, f"/sandboxes/{players[0].known['ID']}/{path}", {})
    assert told.status == 501 and told.json["message"].startswith(f"{path}: this server does not")
    assert players[0].control(method, f"/sandboxes/none/{path}", {}).status == 404


@pytest.mark.parametrize(("path", "key"), [
    ("/v3/templates", "name"), ("/v2/templates", "alias"), ("/templates", "alias")])
def test_the_refusal_to_build_a_template_names_it_and_the_remedy(
        players: tuple[Player, Player], path: str, key: str) -> None:
    told = players[0].control("POST", path, {key: "harbor-0af1:r5"})
    assert told.status == 501 and told.json["code"] == 501
    assert told.json["message"].startswith("template 'harbor-0af1:r5': this server builds no")
    assert "--e2b-template NAME=IMAGE" in told.json["message"]


@pytest.mark.parametrize(("wanted", "remedy"), [
    ({"volumeMounts": [{"name": "v", "path": "/data"}]}, "write the files into the sandbox"),
    ({"autoPause": True}, "create them with on_timeout 'kill'")])
def test_a_sandbox_that_would_lose_its_files_is_not_made(players: tuple[Player, Player],
                                                         wanted: dict[str, Any], remedy: str
                                                         ) -> None:
    before = players[0].control("GET", "/v2/sandboxes").json
    told = players[0].control("POST", "/v2/sandboxes", {"templateID": "base", **wanted})
    assert told.status == 501 and told.json["message"].startswith(f"{next(iter(wanted))}: ")
    assert remedy in told.json["message"]
    assert players[0].control("GET", "/v2/sandboxes").json == before


@pytest.mark.parametrize("filters", [
    {"denyOut": ["0.0.0.0/0"]}, {"rules": {"a.org": []}}, {"egressProxy": {"address": "a:1"}}])
def test_a_sandbox_has_no_network_that_its_client_wants_filtered(tmp_path: Path,
                                                                 filters: dict[str, Any]) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as cluster, Serving(
            cluster, "--e2b-network") as server:
        player = Player(server.url, server.key)
        wanted = {"templateID": "base", "network": {"allowOut": ["1.1.1.1"], **filters}}
        told = player.control("POST", "/v2/sandboxes", wanted)
        assert told.status == 501 and told.json["message"].startswith("network: ")
        for rest in ({"allow_internet_access": False}, {"network": {"allowPublicTraffic": False}}):
            assert player.control("POST", "/v2/sandboxes", {**wanted, **rest}).status == 201


@pytest.mark.attack("rank", "sessions")
def test_a_client_sees_its_own_sandboxes_only(players: tuple[Player, Player]) -> None:
    alice, bob = players
    assert [each["sandboxID"] for each in bob.control("GET", "/v2/sandboxes").json] == [
        bob.known["ID"]]
    for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "/timeout", {"timeout": 9}),
            ("POST", "/connect", {"timeout": 9}), ("POST", "/fork", {}), ("POST", "/pause", {})):
        told = bob.control(method, f"/sandboxes/{alice.known['ID']}{path}", body)
        assert told.status == 404, (method, path)
    assert alice.run("echo alive").output() == b"alive\n"


@pytest.mark.attack("session", "sessions")
@pytest.mark.attack("rank", "sessions")
def test_only_a_sandboxs_own_token_reaches_it(players: tuple[Player, Player]) -> None:
    alice, bob = players
    for headers in ({"X_Access_Token": ""}, {"X_Access_Token": bob.known["TOKEN"]},
                    {"X_Access_Token": "", "X_API_KEY": alice.key},
                    {"X_Access_Token": "", "E2b_Sandbox_Id": ""}):
        for method, path in (("GET", "/files?path=/etc/passwd"), ("GET", "/health"),
                             ("POST", "/process.Process/List")):
            told = alice.data(method, path, b"{}", **headers)
            assert told.status == 401 and told.json["code"] == "unauthenticated"
    assert alice.data("GET", "/health").status == 204


def test_a_token_finds_the_sandbox_that_an_older_sdk_does_not_name(players: tuple[Player, Player]
                                                                  ) -> None:
    for player in players:  # as the SDK before 2.26 calls a sandbox to which it has connected
        path = f"/tmp/{player.known['ID']}"
        assert player.data("POST", f"/files?path={path}", b"mine", E2b_Sandbox_Id="").status == 200
        assert player.data("GET", f"/files?path={path}").body == b"mine"


def test_an_unknown_sandbox_is_gone(players: tuple[Player, Player]) -> None:
    for number in ("i" + "0" * 20, "../x", "x" * 5000):
        told = players[0].data("GET", "/health", E2b_Sandbox_Id=number)
        assert told.status == 502 and told.json["message"] == "The sandbox was not found"
    for path in ("/health", "/files?path=/etc/passwd"):  # of a token alone that is nobody's
        told = players[0].data("GET", path, E2b_Sandbox_Id="", X_Access_Token="x" * 32)
        assert told.status == 502 and told.json["message"] == "The sandbox was not found"


def test_a_port_of_a_sandbox_is_not_served_and_told_so(players: tuple[Player, Player]) -> None:
    for headers in ({}, {"X_Access_Token": ""}):
        for port, path in (("3000", "/execute"), ("3000", "/"), ("49999", "/kernels")):
            told = players[0].data("POST", path, b"{}", E2b_Sandbox_Port=port, **headers)
            assert told.status == 501 and f"port {port} of the sandbox" in told.json["message"]
    told = players[0].data("POST", "/execute", b"{}", E2b_Sandbox_Port="49999",
                           E2b_Sandbox_Id="i" + "0" * 20)
    assert told.status == 502 and told.json["message"] == "The sandbox was not found"
    assert players[0].data("GET", "/health", E2b_Sandbox_Port="49983").status == 204


@pytest.mark.parametrize("query", [
    "path=/tmp/x&signature=v1_x", "path=/tmp/x&signature=", "signature=v1_x",
    "path=/tmp/x&signature=v1_x&signature_expiration=x", "path=&path=/tmp/x&signature=v1_x"])
@pytest.mark.attack("network", "files")
def test_a_wrong_signature_opens_nothing(players: tuple[Player, Player], query: str) -> None:
    assert players[0].send("GET", f"/files?{query}").status == 401


@pytest.mark.parametrize("more", ["&path=/etc/passwd", "&path=", "&signature=v1_x"])
def test_a_signed_url_with_a_word_twice_opens_nothing(
        players: tuple[Player, Player], more: str) -> None:
    """The authorization and the route could otherwise read different values."""
    alice = players[0]
    raw = hashlib.sha256(f"/tmp/pub:read::{alice.known['TOKEN']}".encode()).digest()
    sign = f"v1_{base64.b64encode(raw).decode().rstrip('=')}"
    query = f"/files?path=/tmp/pub&signature={urllib.parse.quote(sign)}"
    assert alice.send("GET", query, b"").status in (200, 404)
    assert alice.send("GET", query + more, b"").status == 401


@pytest.mark.parametrize(("image", "offered"), [
    ("{}/images/one", True), ("{}/images/../home", False), ("{}/images/link", False),
    ("oci:{}/images/../home", False), ("{}/home", False), ("docker.io/swe/one:1", True),
    ("docker.io/swe/../one", False), ("{}/images/..", False)])
def test_a_client_names_only_images_that_a_pattern_offers(
        tmp_path: Path, image: str, offered: bool) -> None:
    for name in ("real/one", "home"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images").symlink_to(tmp_path / "real")
    (tmp_path / "real/link").symlink_to(tmp_path / "home")
    options = E2bOptions(images=(f"{tmp_path}/images/*", f"oci:{tmp_path}/images/*",
                                 "docker.io/swe/*"))
    named = image.format(tmp_path)
    if offered:
        assert wanted(options, "base", {"image": named}).image == named
    else:
        with pytest.raises(ApiError, match="not found: this server offers"):
            wanted(options, "base", {"image": named})


def test_a_signature_is_for_one_file_one_verb_and_one_time(players: tuple[Player, Player]) -> None:
    alice, _ = players
    alice.data("POST", "/files?path=/tmp/s", b"s", Content_Type="application/octet-stream")

    def ask(verb: str, signed: str, path: str, expires: str, told: str, method: str = "GET") -> int:
        import hashlib

        parts = [signed, verb, "", alice.known["TOKEN"], *([expires] if expires else [])]
        digest = base64.b64encode(hashlib.sha256(":".join(parts).encode()).digest()).decode()
        sign = "v1_" + digest.rstrip("=").replace("+", "%2B").replace("/", "%2F")
        more = f"&signature_expiration={told}" if told else ""
        return alice.send(method, f"/files?path={path}&signature={sign}{more}", b"").status

    assert ask("read", "/tmp/s", "/tmp/s", "", "") == 200
    assert ask("read", "/tmp/s", "/tmp/s", "9999999999", "9999999999") == 200
    for wrong in (("write", "/tmp/s", "/tmp/s", "", ""), ("read", "/tmp/t", "/tmp/s", "", ""),
                  ("read", "/tmp/s", "/tmp/s", "1", "1"), ("read", "/tmp/s", "/tmp/s", "1", "99")):
        assert ask(*wrong) == 401, wrong
    assert ask("read", "/tmp/s", "/tmp/s", "", "", "POST") == 401


# ---- malformed requests -------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "word"), [
    (b"", "body"), (b"{", "JSON"), (b"[]", "JSON object"), (b'{"templateID": 1}', "templateID"),
    (b'{"timeout": -1}', "timeout"), (b'{"timeout": 0}', "timeout"),
    (b'{"timeout": 86401}', "--e2b-longest"), (b'{"metadata": {"a": 1}}', "metadata.a"),
    (b'{"envVars": {"a\\u0000": "1"}}', "env"), (b'{"metadata": {"cpus": "9999"}}', ""),
    (b'{"metadata": {"memory": "999999G"}}', "")])
def test_a_creation_that_is_wrong_is_refused_by_name(
        players: tuple[Player, Player], body: bytes, word: str) -> None:
    told = players[0].send("POST", "/v2/sandboxes", body, X_API_KEY=players[0].key,
                           Content_Type="application/json")
    if told.status == 201:  # amounts are refused when the first command asks for them
        assert word == ""
        players[0].control("DELETE", f"/sandboxes/{told.json['sandboxID']}")
        return
    assert told.status == 400 and told.json["code"] == 400 and word in told.json["message"]


@pytest.mark.parametrize(("message", "word"), [
    ({}, "cmd"), ({"process": {"cmd": ""}}, "cmd"), ({"process": {"cmd": "a\0b"}}, "null"),
    ({"process": {"cmd": "true", "args": "x"}}, "list"),
    ({"process": {"cmd": "true", "envs": []}}, "object"),
    ({"process": {"cmd": "true", "envs": {"A": 1}}}, "texts"),
    ({"process": {"cmd": "true", "args": ["x" * 200000]}}, "131072"),
    ({"process": {"cmd": "true", "args": ["\ud800"]}}, "texts"),
    ({"process": {"cmd": "/no/such/program"}, "stdin": False}, ""),
    ({"process": {"cmd": "pwd", "cwd": "/no/folder"}}, "cwd '/no/folder' does not exist"),
    ({"process": {"cmd": "pwd", "cwd": "/etc/passwd"}}, "cannot be entered: Not a directory"),
    ({"process": {"cmd": "bash"}, "pty": {"size": {"rows": 0, "cols": 1}}}, "rows, cols"),
    ({"process": {"cmd": "bash"}, "pty": {}}, "rows and cols")])
def test_a_command_that_cannot_be_is_refused(players: tuple[Player, Player], message: Any,
                                             word: str) -> None:
    told = players[0].stream("process.Process/Start", message)
    if not word:  # its shell says so, as for any program
        assert told.exit_code == 127
        return
    assert told.error["code"] == "invalid_argument" and word in told.error["message"]


def test_calls_for_what_is_not_there_are_refused(players: tuple[Player, Player]) -> None:
    alice, _ = players
    for name, message, code in (
            ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": 9}, "not_found"),
            ("process.Process/SendSignal", {"process": [], "signal": "SIGNAL_SIGKILL"},
             "not_found"),
            ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGINT"},
             "invalid_argument"),
            ("process.Process/SendInput", {"process": {"pid": 1}, "input": {}}, "not_found"),
            ("process.Process/Update", {"process": {"tag": "x"}}, "not_found"),
            ("filesystem.Filesystem/Stat", {"path": ""}, "invalid_argument"),
            ("filesystem.Filesystem/Stat", {"path": "/none"}, "not_found"),
            ("filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, "invalid_argument"),
            ("filesystem.Filesystem/ListDir", {"path": "/", "depth": 1000}, "invalid_argument"),
            ("filesystem.Filesystem/Move", {"source": "/none", "destination": "/tmp/x"},
             "not_found"),
            ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "x"}, "not_found")):
        told = alice.call(name, message)
        assert told.json.get("code") == code, (name, message, told.body)


@pytest.mark.parametrize(("query", "name"), [
    ("limit=x", "limit"), ("limit=", "limit"), ("limit=0", "limit"), ("limit=-1", "limit"),
    ("limit=1001", "limit"), ("limit=1.5", "limit"), ("limit=" + "9" * 5000, "limit"),
    ("nextToken=-1", "nextToken"), ("nextToken=" + "9" * 30, "nextToken"), ("order=up", "order"),
    ("state=", "state"), ("state=running,lost", "state"), ("startedAfter=now", "startedAfter"),
    ("startedAfter=10000-01-01T00:00:00Z", "startedAfter"), ("metadata=x", "metadata"),
    ("limit=1&limit=2", "limit"), ("metadata=a%3D1&metadata=b%3D1", "metadata"),
    ("template=base&template=base", "template"), ("other=1&other=1", "other")])
def test_a_query_that_is_wrong_is_refused_by_name(players: tuple[Player, Player], query: str,
                                                  name: str) -> None:
    told = players[0].control("GET", f"/v2/sandboxes?{query}")
    assert told.status == 400, told.body
    assert told.json["code"] == 400 and told.json["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("query", [
    "", "limit=1000&nextToken=0", "order=asc", "state=running,paused", "metadata=",
    "startedAfter=0001-01-01T00:00:00", "startedAfter=0001-01-01T00:00:00%2B23:59",
    "startedAfter=2026-01-01T00:00:00Z", "template=base", "other=1"])
def test_a_query_that_is_right_finds_the_sandbox(players: tuple[Player, Player], query: str
                                                 ) -> None:
    told = players[0].control("GET", f"/v2/sandboxes?{query}")
    assert [each["sandboxID"] for each in told.json] == [players[0].known["ID"]]


@pytest.mark.parametrize("query", ["path=/tmp/a&path=/tmp/b", "path=/tmp/a&path=/tmp/a",
                                   "path=/tmp/a&username=user&username=root"])
def test_a_file_that_is_named_twice_is_refused(players: tuple[Player, Player], query: str) -> None:
    for method in ("GET", "POST"):
        told = players[0].data(method, f"/files?{query}", b"")
        assert told.status == 400 and "it is given 2 times" in told.json["message"]


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 100000, b'{"timeout": ' + b"9" * 5000 + b"}"],
                         ids=["no text", "deep", "a long number"])
def test_a_body_that_cannot_be_read_is_refused_in_e2bs_form(players: tuple[Player, Player],
                                                            body: bytes) -> None:
    told = players[0].send("POST", "/v2/sandboxes", body, X_API_KEY=players[0].key,
                           Content_Type="application/json")
    assert told.status == 400 and told.json["code"] == 400
    assert told.json["message"].startswith("body: ")


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "body"), [
    ("application/json", b"{}"), ("application/connect+proto", framed({})),
    ("application/connect+json", framed({})[:-1]), ("application/connect+json", b""),
    ("application/connect+json", struct.pack(">BI", 0, 2**31)),
    ("application/connect+json", framed({}) + framed({}))],
    ids=["unary", "protobuf", "cut off", "empty", "huge", "two messages"])
def test_a_stream_that_is_malformed_is_refused(players: tuple[Player, Player], kind: str,
                                               body: bytes) -> None:
    told = players[0].data("POST", "/process.Process/Start", body, Content_Type=kind)
    assert told.error["code"] in ("invalid_argument", "resource_exhausted")
    assert (told.status == 200) == kind.endswith("connect+json"), "a stream tells its error itself"


@pytest.mark.parametrize(("headers", "body", "status"), [
    ({"Content_Type": "multipart/form-data"}, b"x", 400),
    ({"Content_Type": "multipart/form-data; boundary=b"}, b"--b\r\n", 400),
    ({"Content_Type": "multipart/form-data; boundary=b"}, b"--b--", 400),
    ({"Content_Encoding": "gzip"}, b"no gzip", 400), ({"Content_Encoding": "br"}, b"", 415)])
def test_an_upload_that_is_malformed_is_refused(players: tuple[Player, Player],
                                                headers: dict[str, str], body: bytes,
                                                status: int) -> None:
    told = players[0].data("POST", "/files?path=/tmp/u", body, **headers)
    assert told.status == status and told.json["code"] == status
    assert players[0].data("GET", "/files?path=/tmp/u").status == 404


def test_a_path_without_a_plain_file_is_the_clients_mistake(players: tuple[Player, Player]) -> None:
    alice, _ = players
    line = "ln -sf circle /tmp/circle; mkfifo /tmp/pipe"
    alice.data("POST", "/process.Process/Start", framed(
        {"process": {"cmd": "bash", "args": ["-c", line]}}),
        Content_Type="application/connect+json")
    for path in ("/dev/zero", "/dev/null", "/tmp/circle", "/tmp/pipe", "/tmp"):
        assert alice.data("GET", f"/files?path={path}").status == 400, path


def test_a_body_that_is_too_large_or_cut_off_is_refused_at_once(players: tuple[Player, Player]
                                                               ) -> None:
    alice, _ = players
    told = alice.data("POST", "/files?path=/tmp/l", b"", Content_Length=str(1 << 40))
    assert told.status == 413
    host, port = alice.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=100) as link:
        link.sendall(f"POST /files?path=/tmp/cut HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
                     f"E2b-Sandbox-Id: {alice.known['ID']}\r\n"
                     f"X-Access-Token: {alice.known['TOKEN']}\r\n\r\nhalf".encode())
    assert alice.data("GET", "/files?path=/tmp/cut").status == 404


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([
    "/v2/sandboxes", "/sandboxes/x/timeout", "/process.Process/Start", "/process.Process/SendInput",
    "/process.Process/StreamInput", "/process.Process/Update", "/filesystem.Filesystem/Stat",
    "/filesystem.Filesystem/WatchDir", "/files?path=%00", "/files"]),
    st.binary(max_size=40) | st.dictionaries(
        st.sampled_from(["process", "path", "timeout", "input", "pty", "depth", "metadata"]),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
        max_size=3),
    st.sampled_from(["application/json", "application/connect+json", "text/plain",
                     "multipart/form-data; boundary=b"]))
def test_random_requests_are_answered_by_a_refusal(players: tuple[Player, Player], path: str,
                                                   body: Any, kind: str) -> None:
    alice, _ = players
    data = body if isinstance(body, bytes) else (
        framed(body) if "connect" in kind else json.dumps(body).encode())
    told = alice.data("POST", path, data, Content_Type=kind, X_API_KEY=alice.key,
                      Connect_Timeout_Ms="50")
    assert told.status != 500, told.body
    if path == "/v2/sandboxes" and told.status == 201:
        alice.control("DELETE", f"/sandboxes/{told.json['sandboxID']}")
