"""Lives of sandboxes of the E2B wire: ends, other servers, keys, commands side by side."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_verb import tangram

from tangram_hpc import LocalCluster
from tests.helpers.e2b_player import Player, shell
from tests.helpers.http_serving import Serving


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        yield cluster


def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_sandbox_outlives_its_server_and_is_found_by_the_next_one(cluster: LocalCluster,
                                                                    tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice {'a' * 20}\nbob {'b' * 20}\n")
    with Serving(cluster, "--keys", str(keys)) as server:
        first = Player(server.url, "a" * 20)
        number = first.create(metadata={"task": "1"}, envVars={"X": "kept"})
        first.data("POST", "/files?path=/tmp/x", b"1", Content_Type="application/octet-stream")
    with Serving(cluster, "--keys", str(keys)) as server:
        second, stranger = Player(server.url, "a" * 20), Player(server.url, "b" * 20)
        assert stranger.control("POST", f"/v2/sandboxes/{number}/connect", {}).status == 404
        told = second.control("POST", f"/v2/sandboxes/{number}/connect", {"timeout": 200}).json
        assert told["envdAccessToken"] == first.known["TOKEN"]
        second.known = first.known
        assert second.run("cat /tmp/x; echo $X").output() == b"1kept\n"
        assert second.control("GET", f"/sandboxes/{number}").json["metadata"] == {"task": "1"}
        assert second.control("DELETE", f"/sandboxes/{number}").status == 204
        assert second.run("true").status == 502


def test_a_server_that_ends_says_so_on_its_streams_and_writes_no_traceback(
        cluster: LocalCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Serving(cluster, log=log) as server:
        player = Player(server.url, server.key)
        player.create()
        background = player.begin("exec sleep 1000")
        player.run("true")
        streams = [background, player.begin("exec sleep 1000")]
    for stream in streams:
        error = stream.end().messages[-1]["error"]
        assert error["code"] == "unavailable" and "this server ends" in error["message"]
    assert log.read_text() == ""


def test_a_download_that_fails_late_is_cut_off_and_told_in_one_line(
        cluster: LocalCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Serving(cluster, log=log) as server:
        player = Player(server.url, server.key)
        number = player.create()
        assert player.run("truncate -s 64M /tmp/large").exit_code == 0
        answer = player.begin_download("/tmp/large")
        player.run("rm /tmp/large")
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        assert player.control("DELETE", f"/sandboxes/{number}").status == 204
    (line,) = log.read_text().splitlines()
    assert "an answer was cut off: GET /files: '/tmp/large'" in line and number in line


def test_two_servers_of_a_job_share_their_sandboxes(cluster: LocalCluster) -> None:
    """A client is recognized by its name, and the token belongs to the sandbox, not to the
    server."""
    player = Player.of(cluster)
    number = player.create()
    with Serving(cluster) as server:
        other = Player(server.url, server.key, player.known)
        assert other.run("echo here").output() == b"here\n"
        assert player.control("DELETE", f"/sandboxes/{number}").status == 204
        until(lambda: other.data("GET", "/health").status == 502)


def test_a_sandbox_ends_when_its_time_is_over(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    number = player.create(timeout=1)
    until(lambda: player.data("GET", "/health").status == 502)
    assert player.control("GET", f"/sandboxes/{number}").status == 404


def test_a_new_time_counts_from_now_and_connecting_never_shortens_it(cluster: LocalCluster
                                                                    ) -> None:
    player = Player.of(cluster)
    number = player.create(timeout=600)

    def ends() -> str:
        return str(player.control("GET", f"/sandboxes/{number}").json["endAt"])

    first = ends()
    assert player.control("POST", f"/v2/sandboxes/{number}/connect", {"timeout": 5}).status == 200
    assert ends() == first
    assert player.control("POST", f"/v2/sandboxes/{number}/connect", {"timeout": 900}).status == 200
    later = ends()
    assert later > first
    assert player.control("POST", f"/sandboxes/{number}/timeout", {"timeout": 60}).status == 204
    assert ends() < first
    told = player.control("POST", f"/sandboxes/{number}/timeout", {"timeout": 86400 * 2})
    assert told.status == 400 and "--e2b-longest" in told.json["message"]
    assert player.control("POST", f"/sandboxes/{number}/timeout", {"timeout": 0}).status == 204
    assert player.data("GET", "/health").status == 502


def test_a_creation_that_is_tried_again_makes_one_sandbox(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    made = {player.control("POST", "/v2/sandboxes", {}, Idempotency_Key="k1").json["sandboxID"]
            for _ in range(3)}
    other = player.control("POST", "/v2/sandboxes", {}, Idempotency_Key="k2").json["sandboxID"]
    assert len(made) == 1 and other not in made
    for number in (*made, other):
        player.control("DELETE", f"/sandboxes/{number}")


def test_a_creation_or_a_fork_whose_client_gives_up_leaves_no_sandbox(tmp_path: Path) -> None:
    """They wait for the memory that the first sandbox holds."""
    with LocalCluster(cpus=1, mem_mib=1024, home=tmp_path, http=True) as cluster:
        player = Player.of(cluster)
        first = player.create(metadata={"memory": "700M"})
        wanted = {"templateID": "base", "metadata": {"memory": "700M"}}

        def waiting() -> int:
            return int(cluster.client.metrics("")["job/sessions_waiting"])

        for path, body, key in (
                ("/v2/sandboxes", wanted, {}), (f"/sandboxes/{first}/fork", {"count": 1}, {}),
                ("/v2/sandboxes", wanted, {"Idempotency_Key": "again"})):
            asked = player.open("POST", path, json.dumps(body).encode(), X_API_Key=player.key,
                                Content_Type="application/json", **key)
            until(lambda: waiting() == 1)
            asked.close()
            if not key:
                until(lambda: waiting() == 0, 30)  # 20 s before it would get 503
        player.control("DELETE", f"/sandboxes/{first}")
        until(lambda: waiting() == 0)
        kept = player.control("POST", "/v2/sandboxes", wanted, Idempotency_Key="again").json
        (listed,) = player.control("GET", "/sandboxes").json
        assert listed["sandboxID"] == kept["sandboxID"]


def test_lists_come_in_pages(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    made = [player.create(metadata={"pages": "1"}) for _ in range(3)]
    first = player.control("GET", "/v2/sandboxes?metadata=pages%3D1&limit=2&order=asc")
    token = first.headers["x-next-token"]
    rest = player.control(
        "GET", f"/v2/sandboxes?metadata=pages%3D1&limit=2&order=asc&nextToken={token}")
    assert [each["sandboxID"] for each in (*first.json, *rest.json)] == made
    assert "x-next-token" not in rest.headers
    for number in made:
        player.control("DELETE", f"/sandboxes/{number}")


def test_a_command_goes_on_when_its_stream_is_cut_and_can_be_followed_again(
        cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    player.create()
    process = player.begin("echo one; until [ -e /tmp/go ]; do sleep 0.1; done; echo two; exit 9")
    process.leave()
    player.run("touch /tmp/ready")
    assert [each["pid"] for each in player.call("process.Process/List", {}).json["processes"]] == [
        process.pid]
    player.run("(sleep 0.5; touch /tmp/go) >/dev/null 2>&1 &")
    told = player.stream("process.Process/Connect", {"process": {"pid": process.pid}})
    assert told.output().endswith(b"two\n") and told.exit_code == 9
    assert player.call("process.Process/List", {}).json["processes"] == []
    player.control("DELETE", f"/sandboxes/{player.known['ID']}")


@pytest.mark.parametrize(("cwd", "place"), [
    ("~", "/session"), ("~/folder", "/session/folder"), ("folder", "/session/folder"),
    ("~other", "/session/~other")])
def test_a_commands_directory_begins_at_that_of_the_session(cluster: LocalCluster, cwd: str,
                                                            place: str) -> None:
    player = Player.of(cluster)
    player.create()
    player.run("mkdir folder '~other'")
    told = player.stream("process.Process/Start", {"process": {
        "cmd": "/bin/pwd", "args": [], "envs": {}, "cwd": cwd}})
    assert told.output().decode() == f"{place}\n"
    player.control("DELETE", f"/sandboxes/{player.known['ID']}")


def test_a_timeout_ends_a_command_in_the_background_too(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    player.create()
    process = player.begin("exec sleep 1000", Connect_Timeout_Ms="1500")
    player.run("true")  # sends it to the background
    assert process.end().messages[-1]["error"]["code"] == "deadline_exceeded"
    until(lambda: player.run("pgrep -cx sleep").output() == b"0\n")
    player.control("DELETE", f"/sandboxes/{player.known['ID']}")


def test_much_output_of_a_background_command_arrives_whole(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    player.create()
    process = player.begin("sleep 0.3; head -c 3000000 /dev/zero | tr '\\0' x; echo e >&2")
    player.run("true")
    told = process.end()
    assert len(told.output()) == 3000000 and told.output("stderr") == b"e\n"
    assert told.exit_code == 0
    player.control("DELETE", f"/sandboxes/{player.known['ID']}")


def test_a_sandbox_that_ends_ends_the_streams_of_its_commands(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    player.create()
    process = player.begin("sleep 1000")
    player.control("DELETE", f"/sandboxes/{player.known['ID']}")
    error = process.end().messages[-1]["error"]
    assert error["code"] == "unavailable" and "sandbox was not found" in error["message"]


def test_each_command_is_an_action_with_a_record(cluster: LocalCluster) -> None:
    player = Player.of(cluster)
    number = player.create(metadata={"cpus": "2"})
    assert player.run("pytest --version >/dev/null 2>&1; nproc").exit_code == 0
    assert player.stream("process.Process/Start", shell("true")).exit_code == 0
    player.control("DELETE", f"/sandboxes/{number}")
    assert cluster.client is not None
    told = tangram("acct", "-j", cluster.client.job, "--json", check=True,
                   env={**os.environ, "TANGRAM_HOME": str(cluster.access.parents[2])})
    records = [each for each in json.loads(told.stdout)["actions"]
               if each["session_name"] == f"e2b-{number}" and each["kind"] != "background"]
    assert [(each["name"], each["state"], each["req_cpus"]) for each in records] == [
        ("pytest", "COMPLETED", 2), ("true", "COMPLETED", 2)]
