"""Recorded requests of the real SDK are sent again in their order, and each answer is checked.

The requests are in `tests/data/e2b_requests.json`; `tests/helpers/e2b_recorder.py` notes them anew.
`test_e2b_sdk.py` runs the SDK itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tangram_hpc import LocalCluster
from tests.helpers.e2b_player import Answer, Player, Process, noted


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Answer]]]:
    """The answers to all noted requests, by step."""
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        player = _Playing.of(cluster)
        for request in noted():
            player.step(request)
        player.join()
        yield player.answers


class _Playing(Player):
    """Plays the scenario; threads follow the background commands."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answers: dict[str, list[Answer]] = {}
        self._threads: list[threading.Thread] = []

    def step(self, request: dict[str, Any]) -> None:
        name = request["step"]
        if name == "server":
            self.join()  # as the client did, which waited for the command of "background"
        if name in ("background", "server", "cat", "pty", "server-connect"):
            return self._in_background(name, request)
        if name == "signed":
            text = f"/tmp/a/new:read::{self.known['TOKEN']}"
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            self.known["SIGNATURE"] = "v1_" + digest.rstrip("=").replace("+", "%2B")
        if name == "fork-read":
            twin = self.answers["fork"][0].json[0]["sandbox"]
            self._box = dict(self.known)
            self.known |= {"ID": twin["sandboxID"], "TOKEN": twin["envdAccessToken"]}
        if name == "pause":
            self.known = self._box
        told = self.play(request)
        self.answers.setdefault(name, []).append(told)
        if name == "create":
            self.known |= {"ID": told.json["sandboxID"], "TOKEN": told.json["envdAccessToken"]}
        if name == "watch":
            self.known["WATCHER"] = told.json["watcherId"]

    def _in_background(self, name: str, request: dict[str, Any]) -> None:
        process = Process(self.open(
            request["method"], request["path"], self._body(request),
            **{key: self._filled(value) for key, value in request["headers"].items()}))
        self.known["PID"] = str(process.pid)
        thread = threading.Thread(
            target=lambda: self.answers.setdefault(name, []).append(process.end()))
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive()


def test_a_sandbox_is_made_and_told(answers: dict[str, list[Answer]]) -> None:
    (made,) = answers["create"]
    assert made.status == 201 and made.json["templateID"] == "base"
    assert made.json["envdVersion"] == "0.5.7"
    (info,) = answers["get-info"]
    told = info.json
    assert told["sandboxID"] == made.json["sandboxID"] and told["state"] == "running"
    assert told["metadata"] == {"task": "a b", "cpus": "1-2"} and told["cpuCount"] == 2
    assert [each["sandboxID"] for each in answers["listing"][0].json] == [told["sandboxID"]]
    assert answers["listing-others"][0].json == []
    assert "envdAccessToken" not in told


def test_commands_give_output_and_exit_codes(answers: dict[str, list[Answer]]) -> None:
    (run,) = answers["run"]
    assert run.output() == b"hi 1 2\n/session\n" and run.output("stderr") == b"err\n"
    assert run.exit_code == 0 and run.messages[-1] == {}
    (failed,) = answers["run-fails"]
    assert failed.output() == b"before\n" and failed.exit_code == 3
    assert answers["run-cwd"][0].output() == b"/tmp\n"
    (no_cwd,) = answers["run-no-cwd"]
    assert no_cwd.error == {"code": "invalid_argument", "message": "cwd '/nowhere' does not exist"}
    (late,) = answers["run-timeout"]
    assert late.exit_code is None and late.messages[-1]["error"]["code"] == "deadline_exceeded"
    assert answers["run-streams"][0].output() == b"1\n2\n"
    parts = [each for each in answers["run-streams"][0].events if "data" in each]
    assert len(parts) == 2, "output travels while its command runs"


def test_a_command_goes_to_the_background_when_another_one_comes(
        answers: dict[str, list[Answer]]) -> None:
    assert answers["beside"][0].output() == b"beside\n"
    (loop,) = answers["background"]
    assert loop.output() == b"1\n2\n3\n" and loop.exit_code == 4
    (listed,) = answers["list"]
    (one,) = listed.json["processes"]
    assert one["pid"] == loop.events[0]["start"]["pid"]
    assert one["config"]["args"][-1].startswith("for i in 1 2 3")


def test_a_killed_command_leaves_nothing_behind(answers: dict[str, list[Answer]]) -> None:
    assert answers["server-beside"][0].output() == b"2\n"
    (told,) = answers["server-kill"]
    assert (told.status, told.json) == (200, {})
    for stream in (*answers["server"], *answers["server-connect"]):
        assert stream.exit_code == 137 and stream.events[-1]["end"]["error"] == "signal: killed"
    assert answers["server-gone"][0].output() == b"0\n"
    (again,) = answers["server-kill-again"]
    assert again.status == 404 and again.json["code"] == "not_found"


def test_a_command_reads_what_is_sent(answers: dict[str, list[Answer]]) -> None:
    assert answers["cat"][0].output() == b"hello\ndone\n" and answers["cat"][0].exit_code == 0


def test_files_travel_in_every_form(answers: dict[str, list[Answer]]) -> None:
    assert answers["write"][0].json == [{"name": "b.txt", "type": "file", "path": "/tmp/a/b.txt"}]
    assert answers["read"][0].body == b"text"
    assert answers["read-missing"][0].status == 404
    assert "/tmp/a/none" in answers["read-missing"][0].json["message"]
    assert answers["write-relative"][0].json[0]["path"] == "/session/b.bin"
    assert answers["read-relative"][0].body == b"\x00\xff\r\n--"
    assert [each["path"] for each in answers["write-two"][0].json] == ["/tmp/x1", "/tmp/ä 2"]
    assert answers["read-two"][0].body == b"2"
    assert answers["read-gzip"][0].body == b"z" * 1000
    assert answers["signed"][0].body == b"1"


def test_folders_are_listed_made_moved_removed_and_watched(answers: dict[str, list[Answer]]
                                                          ) -> None:
    (listed,) = answers["ls"]
    (one,) = listed.json["entries"]
    assert (one["name"], one["type"], one["size"]) == ("b.txt", "FILE_TYPE_FILE", "4")
    assert answers["info"][0].json["entry"]["permissions"] == "-rw-r--r--"
    assert [each.status for each in answers["exists"]] == [200, 404]
    first, second = answers["mkdir"]
    assert first.status == 200 and second.json["code"] == "already_exists"
    assert answers["rename"][0].json["entry"]["path"] == "/tmp/m/x9"
    assert answers["remove"][0].status == 200
    watched = [each for each in answers["events"] if "events" in each.json]
    assert [(each["name"], each["type"]) for each in watched[-1].json["events"]] == [
        ("new", "EVENT_TYPE_CREATE"), ("new", "EVENT_TYPE_WRITE")]


def test_a_terminal_is_sized_written_to_and_read(answers: dict[str, list[Answer]]) -> None:
    (told,) = answers["pty"]
    assert b"30 90" in told.output("pty") and told.exit_code == 5


def test_forks_and_ends(answers: dict[str, list[Answer]]) -> None:
    assert answers["fork"][0].status == 201 and answers["fork-read"][0].body == b"z" * 1000
    assert answers["pause"][0].status == 501
    assert answers["no-template"][0].status == 404
    assert "base" in answers["no-template"][0].json["message"]
    assert [answers[name][0].status for name in ("kill", "kill-again")] == [204, 404]
    for name in ("run-after", "is-running-after"):
        assert answers[name][0].status == 502
        assert answers[name][0].json["message"] == "The sandbox was not found"


def test_every_request_of_the_sdk_has_an_answer_that_it_understands(
        answers: dict[str, list[Answer]]) -> None:
    """No route is missing, and nothing fails inside."""
    for name, told in answers.items():
        for each in told:
            assert each.status not in (500, 405, 422), (name, each.body)
            assert b'"Not Found"' not in each.body, name


def test_no_noted_request_holds_a_key() -> None:
    text = json.dumps(noted())
    assert '"x-api-key": "{KEY}"' in text and '"x-access-token": "{TOKEN}"' in text
