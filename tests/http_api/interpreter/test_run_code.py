"""`run_code` of E2B's wire, in real sandboxes: what its clients send and read."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.http_api.interpreter.code_routes import CODE_MAX
from tests.helpers.e2b_player import Answer, Player


class Coder(Player):
    """A client of the port at which code is run."""

    def code(self, method: str, path: str, message: Any = None, **headers: str) -> Answer:
        body = None if message is None else json.dumps(message).encode()
        return self.data(method, path, body, **{
            "E2b_Sandbox_Port": "49999", "Content_Type": "application/json", **headers})

    def told(self, code: str, **fields: Any) -> list[dict[str, Any]]:
        answer = self.code("POST", "/execute", {"code": code, **fields})
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]

    def text(self, code: str, kind: str = "result", **fields: Any) -> str:
        return "".join(each["text"] for each in self.told(code, **fields) if each["type"] == kind)

    def error(self, code: str, **fields: Any) -> str:
        return "".join(each["name"] for each in self.told(code, **fields)
                       if each["type"] == "error")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), http=True) as cluster:
        yield cluster


@pytest.fixture
def coder(cluster: LocalCluster) -> Coder:
    made = Coder.of(cluster)
    made.create(templateID="code-interpreter-v1", metadata={"memory": "300M"})
    assert isinstance(made, Coder)
    return made


def test_code_keeps_its_variables_and_is_told_line_by_line(coder: Coder) -> None:
    told = coder.told("import os\nx = 20\nprint('hi')\nx + 1")
    assert [each["type"] for each in told] == [
        "started", "number_of_executions", "stdout", "result", "end_of_execution"]
    assert coder.text("x * 2 + 2") == "42" and coder.text("os.getcwd()") == "'/session'"
    assert coder.text("os.environ['A']", env_vars={"A": "b"}) == "'b'"
    assert coder.error("1 / 0") == "ZeroDivisionError"
    assert coder.text("s = '" + "y" * 300_000 + "'\nlen(s)", language="python") == "300000"


def test_commands_and_files_of_the_sandbox_are_beside(coder: Coder) -> None:
    coder.text("open('f', 'w').write('abc')")
    assert coder.run("cat f").output() == b"abc"
    found: list[list[dict[str, Any]]] = []
    call = threading.Thread(target=lambda: found.append(coder.told(
        "import time\nfor n in range(3): time.sleep(0.3); print(n)\n'end'")))
    call.start()
    time.sleep(0.3)
    assert coder.run("echo beside").output() == b"beside\n"
    assert coder.call("process.Process/List", {}).json == {"processes": []}
    call.join()
    assert "".join(each["text"] for each in found[0] if each["type"] == "stdout") == "0\n1\n2\n"
    assert found[0][-1]["type"] == "end_of_execution"


def test_contexts_are_made_listed_restarted_and_ended(coder: Coder) -> None:
    made = coder.code("POST", "/contexts", {"cwd": "/tmp"}).json
    assert (made["language"], made["cwd"]) == ("python", "/tmp")
    number = made["id"]
    assert coder.text("import os; x = 1; os.getcwd()", context_id=number) == "'/tmp'"
    assert coder.error("x") == "NameError" and coder.text("x", context_id=number) == "1"
    listed = coder.code("GET", "/contexts").json
    assert sorted(each["id"] for each in listed) == sorted(["default", number])
    assert coder.code("POST", f"/contexts/{number}/restart").status == 204
    assert coder.error("x", context_id=number) == "NameError"
    assert coder.code("DELETE", f"/contexts/{number}").status == 204
    for told in (coder.code("POST", "/execute", {"code": "1", "context_id": number}),
                 coder.code("DELETE", f"/contexts/{number}"),
                 coder.code("POST", "/contexts/..%2F..%2Ftmp/restart")):
        assert told.status == 404, told.body
    refused = coder.code("POST", "/contexts", {"cwd": "/nowhere"})
    assert refused.status == 400 and refused.json["message"].startswith("cwd: /nowhere")


def test_code_whose_client_has_gone_is_interrupted(coder: Coder) -> None:
    connection = coder.open("POST", "/execute", json.dumps({
        "code": "import time\ntry:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    x = 2"}
    ).encode(), **{**coder._own(), "E2b_Sandbox_Port": "49999",
                   "Content_Type": "application/json"})
    answer = connection.getresponse()
    assert b"started" in answer.readline() and b"number_of_executions" in answer.readline()
    connection.close()
    answer.close()
    assert coder.told("x")[-2] == {"type": "result", "is_main_result": True, "text": "2"}


def test_code_that_uses_up_the_memory_is_told(coder: Coder) -> None:
    assert coder.error("x = bytearray(2 << 30)") in ("KernelDied", "MemoryError", "CallFailed")
    assert coder.text("1") == "1"


def test_output_that_is_dropped_is_told(coder: Coder) -> None:
    told = coder.told("for n in range(80): print('y' * 1_000_000)")
    assert told[-1]["type"] == "error" and "bytes of stdout were dropped" in told[-1]["value"]


def test_what_is_not_served_is_told(coder: Coder) -> None:
    told = coder.code("POST", "/execute", {"code": "1", "language": "js"})
    assert told.status == 501 and told.json["message"].startswith("language: 'js'")
    told = coder.code("POST", "/execute", {"code": "x" * CODE_MAX})
    assert told.status == 413 and told.json["message"].startswith("code: ")
    assert coder.code("POST", "/execute", {"code": 5}).status == 422
    assert coder.code("GET", "/").status == 501 and coder.code("POST", "/execute", {}).status == 422


@pytest.mark.attack("session", "sessions")
@pytest.mark.attack("rank", "sessions")
def test_only_a_sandboxs_own_tokens_run_its_code(cluster: LocalCluster, coder: Coder) -> None:
    """The traffic token runs code, and does nothing else."""
    traffic = coder.control("POST", f"/v2/sandboxes/{coder.known['ID']}/connect", {}
                            ).json["trafficAccessToken"]
    other = Coder.of(cluster)
    other.create()
    for headers in ({}, {"X_API_KEY": coder.key}, {"X_Access_Token": other.known["TOKEN"]},
                    {"E2B_Traffic_Access_Token": coder.known["TOKEN"]}):
        told = coder.code("POST", "/execute", {"code": "1"}, **{"X_Access_Token": "", **headers})
        assert told.status == 401, headers
    only = {"X_Access_Token": "", "E2B_Traffic_Access_Token": traffic}
    assert coder.code("GET", "/contexts", **only).status == 200
    for port in ("49999", "49983", ""):
        for path in ("/process.Process/List", "/files?path=/etc/passwd"):
            told = coder.data("POST", path, b"{}", **{**only, "E2b_Sandbox_Port": port})
            assert told.status in (401, 501), (port, path)
    assert coder.send("POST", "/execute", b'{"code": "1"}', X_API_KEY=coder.key,
                      Content_Type="application/json").status == 404
