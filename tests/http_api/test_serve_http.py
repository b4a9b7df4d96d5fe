"""`tangram serve http` as its clients meet it: real sockets, real sandboxes."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc import InvalidInput, LocalCluster
from tangram_hpc.http_api.rewards import load_function
from tangram_hpc.http_api.server import Where, bind
from tangram_hpc.stale_socket import free_path

REWARDS = '''
def exact(prompt, response, label):
    return float(response.strip() == str(label))

def broken(prompt, response, label):
    raise ValueError("no such rubric")

def vague(prompt, response, label):
    return "good"
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(cpus=2, home=home, http=True) as cluster:
        yield cluster


def send(cluster: LocalCluster, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Sends one request with the cluster's key; returns the status and the decoded answer."""
    assert cluster.http is not None
    return ask(cluster.http.url + path, body, **{"X-API-Key": cluster.http.key, **headers})


def ask(url: str, body: Any = None, context: ssl.SSLContext | None = None, **headers: str
        ) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=100, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def run(cluster: LocalCluster, code: str, language: str = "python", **fields: Any) -> Any:
    status, answer = send(cluster, "/run_code", {"code": code, "language": language, **fields})
    assert status == 200, answer
    return answer


# ---- /run_code ----------------------------------------------------------------------------------


def test_a_program_reads_its_input_and_files_and_its_output_comes_back(cluster: LocalCluster
                                                                      ) -> None:
    code = "import sys\nprint(input() + open('d/x').read())\nprint('e', file=sys.stderr)"
    answer = run(cluster, code, stdin="in ", files={"d/x": base64.b64encode(b"file").decode()})
    assert answer["status"] == "Success" and answer["message"] == ""
    result = answer["run_result"]
    assert result.pop("execution_time") > 0
    assert result == {"status": "Finished", "return_code": 0, "stdout": "in file\n",
                      "stderr": "e\n"}
    assert answer["compile_result"] is None and answer["executor_pod_name"] is None


@pytest.mark.parametrize(("code", "return_code"), [
    ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("1 +", 1)])
def test_a_program_that_fails_is_finished_with_its_code(cluster: LocalCluster, code: str,
                                                        return_code: int) -> None:
    answer = run(cluster, code)
    assert answer["status"] == "Failed" and answer["run_result"]["status"] == "Finished"
    assert answer["run_result"]["return_code"] == return_code


def test_a_program_that_runs_too_long_has_no_return_code(cluster: LocalCluster) -> None:
    answer = run(cluster, "print(1, flush=True)\nwhile True: pass", run_timeout=0.7)
    assert answer["status"] == "Failed"
    result = answer["run_result"]
    assert result["status"] == "TimeLimitExceeded" and result["return_code"] is None
    assert result["stdout"] == "1\n"


def test_how_much_output_was_left_out_is_told(cluster: LocalCluster) -> None:
    answer = run(cluster, "print('x' * (3 << 20))")["run_result"]
    assert (answer["status"], len(answer["stdout"])) == ("Finished", 1 << 20)
    left_out = f"{(2 << 20) + 1} bytes of stdout and 0 bytes of stderr were left out"
    assert answer["stderr"] == left_out
    answer = run(cluster, "import sys; print(' ^', file=sys.stderr); print('x' * (3 << 20))")
    assert answer["run_result"]["stderr"] == f" ^\n\n{left_out}"


def test_files_that_the_program_made_are_fetched(cluster: LocalCluster) -> None:
    code = "import os; os.mkdir('o'); open('o/x', 'wb').write(bytes(range(256)))"
    answer = run(cluster, code, fetch_files=["o/x", "nothing"])
    assert answer["status"] == "Success"
    assert {path: base64.b64decode(data) for path, data in answer["files"].items()} == {
        "o/x": bytes(range(256))}


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_a_program_is_compiled_with_its_files(cluster: LocalCluster) -> None:
    code = '#include "n.h"\n#include <cstdio>\nint main() { printf("%d", N); }'
    for number in ("7", "8"):  # another header makes another program
        header = base64.b64encode(f"#define N {number}\n".encode()).decode()
        answer = run(cluster, code, "cpp", compile_timeout=60, files={"n.h": header})
        assert (answer["status"], answer["run_result"]["stdout"]) == ("Success", number)


def test_a_compiled_program_says_how_its_compilation_went(cluster: LocalCluster) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    good = run(cluster, "#include <cstdio>\nint main() { int n; scanf(\"%d\", &n); "
                        "printf(\"%d\", n * n); }", "cpp", stdin="12", compile_timeout=60)
    assert (good["status"], good["run_result"]["stdout"]) == ("Success", "144"), good
    assert good["compile_result"]["return_code"] == 0
    bad = run(cluster, "int main() {", "cpp", compile_timeout=60)
    assert bad["status"] == "Failed" and bad["run_result"] is None
    assert bad["compile_result"]["return_code"] == 1 and "error" in bad["compile_result"]["stderr"]


@pytest.mark.parametrize(("language", "program", "code"), [
    ("bash", "bash", "echo $((6 * 7))"), ("perl", "perl", "print 42"),
    ("nodejs", "node", "console.log(42)")])
def test_other_languages_that_the_node_has_run(cluster: LocalCluster, language: str, program: str,
                                               code: str) -> None:
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not installed")
    assert run(cluster, code, language)["run_result"]["stdout"].strip() == "42"


def test_a_language_that_the_node_lacks_is_a_fault_of_the_sandbox(cluster: LocalCluster) -> None:
    if shutil.which("julia", path="/usr/local/bin:/usr/bin:/bin"):
        pytest.skip("julia is installed")
    answer = run(cluster, "1", "julia")
    assert answer["status"] == "SandboxError" and "julia" in answer["message"]


def test_more_memory_than_there_is_is_a_fault_of_the_sandbox(cluster: LocalCluster) -> None:
    answer = run(cluster, "1", memory_limit_MB=1 << 24)
    assert answer["status"] == "SandboxError" and "mem" in answer["message"]


def test_what_cannot_end_in_time_is_answered_with_504_before_its_client_gives_up(
        cluster: LocalCluster) -> None:
    """Both cores are taken for longer than the client's patience: its two limits and ten seconds.
    """
    assert cluster.client is not None
    busy = [cluster.client.submit(["sleep", "60"]) for _ in range(2)]
    try:
        until(lambda: actions(cluster, "RUNNING") == 2)
        body = {"code": "1", "language": "python", "compile_timeout": 0.1, "run_timeout": 0.1}
        request = urllib.request.Request(
            f"{cluster.http.url}/run_code", json.dumps(body).encode(),  # type: ignore[union-attr]
            {"Content-Type": "application/json",
             "X-API-Key": cluster.http.key})  # type: ignore[union-attr]
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10.2)
        assert caught.value.code == 504
        # the server cancels it over a connection of its own, which this client may overtake
        until(lambda: actions(cluster, "PENDING") == 0)
    finally:
        for each in busy:
            each.cancel()


def test_a_client_that_hangs_up_takes_its_program_along(cluster: LocalCluster) -> None:
    assert cluster.client is not None and cluster.http is not None
    host, port = cluster.http.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", f"/{cluster.http.key}/run_code", json.dumps(
        {"code": "import time; time.sleep(100)", "language": "python", "run_timeout": 100}),
        {"Content-Type": "application/json"})
    until(lambda: actions(cluster, "RUNNING") == 1)
    connection.close()
    until(lambda: actions(cluster, "RUNNING") == 0)


def actions(cluster: LocalCluster, state: str) -> int:
    assert cluster.client is not None
    return cluster.client.ask("info")["actions"].get(state, 0)


def until(holds: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_many_test_cases_of_one_program_each_get_their_own_answer(cluster: LocalCluster) -> None:
    """As verl's reward sends them: one request a test case, each on a connection of its own, the
    key in the URL."""
    assert cluster.http is not None
    url = cluster.http.url.replace("http://", f"http://any:{cluster.http.key}@")
    code = "print(int(input()) ** 2)"

    def case(number: int) -> str:
        user, _, rest = url.removeprefix("http://").partition("@")
        status, answer = ask(f"http://{rest}/run_code", {
            "code": code, "language": "python", "stdin": str(number), "compile_timeout": 60,
            "run_timeout": 60, "memory_limit_MB": 1024, "files": {}, "fetch_files": []},
            Authorization="Basic " + base64.b64encode(user.encode()).decode())
        return answer["run_result"]["stdout"].rstrip("\n") if status == 200 else str(status)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(case, range(32)))
    assert answers == [str(number ** 2) for number in range(32)]


@pytest.mark.parametrize(("body", "loc"), [
    ({}, ["body", "code"]), ({"code": 1, "language": "python"}, ["body", "code"]),
    ({"code": "SECRET", "language": "cobol"}, ["body", "language"]),
    ({"code": "SECRET", "language": "python", "run_timeout": -1}, ["body", "run_timeout"]),
    ({"code": "SECRET", "language": "python", "files": {"x": "SECRET!"}}, ["body", "files"]),
    ({"code": "SECRET\ud800", "language": "python"}, ["body", "code"]),
    ({"code": "1", "language": "python", "stdin": "SECRET\udfff"}, ["body", "stdin"])])
def test_a_wrong_field_is_named_and_nothing_that_was_sent_is_repeated(
        cluster: LocalCluster, body: Any, loc: list[str]) -> None:
    status, answer = send(cluster, "/run_code", body)
    assert status == 422 and answer["detail"][0]["loc"] == loc
    assert "SECRET" not in json.dumps(answer)


@pytest.mark.parametrize("path", ["/run_code", "/sandboxes"])
def test_a_body_without_the_content_type_of_json_is_told_what_to_send(
        cluster: LocalCluster, path: str) -> None:
    """`curl -d` sends a form, and `requests.post(data=...)` names no type."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = send(cluster, path, {"code": "print(1)", "language": "python"}, **form)
    assert status in (400, 422) and "Content-Type: application/json" in json.dumps(answer)


@pytest.mark.attack("code", "files")
def test_a_path_that_leaves_the_directory_is_a_fault_of_the_sandbox(cluster: LocalCluster) -> None:
    """The program is not run where its files could not be written."""
    answer = run(cluster, "print(1)", files={"../x": ""})
    assert answer["run_result"]["stdout"] != "1\n" and answer["status"] != "Success"


def test_files_of_more_than_an_answer_may_hold_are_a_fault_of_the_sandbox(cluster: LocalCluster
                                                                        ) -> None:
    """A sparse file costs its program nothing, and each of its names counts."""
    code = "open('big', 'wb').truncate(40 << 20)"
    answer = run(cluster, code, fetch_files=["big", "./big"])
    assert answer["status"] == "SandboxError" and "64 MiB" in answer["message"]
    assert answer["files"] == {}


def test_a_path_is_never_answered_with_a_redirection_that_drops_its_key(cluster: LocalCluster
                                                                      ) -> None:
    assert cluster.http is not None
    assert ask(f"{cluster.http.url}/{cluster.http.key}/run_code/", {})[0] == 404


@pytest.mark.attack("network", "sessions")
def test_nobody_is_served_without_a_key(cluster: LocalCluster) -> None:
    assert cluster.http is not None
    for path in ("/v1/ping", "/run_code", "/openapi.json", "/docs"):
        assert ask(cluster.http.url + path)[0] == 401
    assert send(cluster, "/v1/ping") == (200, "pong")
    assert "/run_code" in send(cluster, "/openapi.json")[1]["paths"]


# ---- the server itself, and rewards -------------------------------------------------------------


class Server:
    """A `tangram serve http` with options of its own, against the cluster's broker."""

    def __init__(self, cluster: LocalCluster, *options: str, begin: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*begin, sys.executable, "-m", "tangram_hpc", "serve", "http", "--access",
             str(cluster.access), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.told = json.loads(line) if line else {}

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def test_rewards_are_scored_for_both_trainers(cluster: LocalCluster, tmp_path: Path) -> None:
    """OpenRLHF sends lists and reads an object; with several URLs, all but the first get empty
    lists. slime sends one sample and takes the answer's body for the reward."""
    module = tmp_path / "graders.py"
    module.write_text(REWARDS)
    server = Server(cluster, *[word for name in ("exact", "broken", "vague")
                               for word in ("--reward", f"{name}={module}:{name}")])
    url = f"{server.told['url']}/{server.told['key']}/reward"
    one = {"query": ["1+1=2"], "prompts": ["1+1="], "labels": ["2"]}
    assert ask(f"{url}/exact", one) == (200, {"rewards": 1.0, "scores": 1.0, "extra_logs": {}})
    two = {"query": ["a b", "a c"], "prompts": ["a ", "a "], "labels": ["b", "b"]}
    assert ask(f"{url}/exact", two)[1]["rewards"] == [1.0, 0.0]
    assert ask(f"{url}/exact", {"query": [], "prompts": [], "labels": []})[1]["rewards"] == []
    assert ask(f"{url}/exact", {"prompt": "1+1=", "response": "3", "label": "2"}) == (200, 0.0)
    status, answer = ask(f"{url}/broken", one)
    assert status == 500 and "ValueError: no such rubric" in answer["detail"]
    assert ask(f"{url}/vague", one)[0] == 500
    status, answer = ask(f"{url}/nothing", one)
    assert status == 404 and "known: broken, exact, vague" in answer["detail"]
    for wrong in ({}, {**one, "response": "x"}, {**one, "labels": []}):
        assert ask(f"{url}/exact", wrong)[0] == 422
    assert server.end() == (0, "")


def test_more_callers_are_answered_than_files_may_usually_be_open(cluster: LocalCluster) -> None:
    # not the limit of this process, which may have more files open from tests before
    server = Server(cluster, begin=["sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh"])
    where = urllib.parse.urlsplit(server.told["url"])
    with contextlib.ExitStack() as held:
        for _ in range(200):
            link = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            held.callback(link.close)
            link.request("GET", f"/{server.told['key']}/v1/ping")
            assert json.load(link.getresponse()) == "pong"  # and the connection stays open
    assert server.end() == (0, "")


def test_a_unix_socket_is_for_its_user_alone_and_goes_with_the_server(cluster: LocalCluster,
                                                                      tmp_path: Path) -> None:
    path, keys = tmp_path / "s", tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"verl {'k' * 20}\n")
    server = Server(cluster, "--unix", str(path), "--keys", str(keys))
    assert server.told == {"url": f"unix:{path}", "key": None}
    assert path.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        link.sendall(f"GET /{'k' * 20}/v1/ping HTTP/1.0\r\n\r\n".encode())
        link.settimeout(60)
        assert link.recv(4096).startswith(b"HTTP/1.1 200")
    assert server.end() == (0, "") and not path.exists()


def test_a_killed_server_leaves_its_path_to_the_next_one_which_ends_with_its_terminal(
        cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "s"
    killed = Server(cluster, "--unix", str(path))
    killed.process.kill()
    killed.process.communicate(timeout=60)
    assert path.exists()
    server = Server(cluster, "--unix", str(path))
    assert server.told["url"] == f"unix:{path}"
    with pytest.raises(InvalidInput, match=r"--unix .*: another process listens there"):
        bind(Where(unix=str(path)))
    server.process.send_signal(signal.SIGHUP)
    assert server.process.communicate(timeout=60)[1] == "" and server.process.returncode == 0
    assert not path.exists()


def test_a_server_that_ends_leaves_the_path_to_one_that_has_begun_meanwhile(
        cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = Server(cluster, "--unix", str(path))
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        caller.sendall(f"POST /{before.told['key']}/run_code HTTP/1.1\r\nHost: x\r\n"
                       "Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode())
        caller.settimeout(60)
        assert b"100" in caller.recv(4096)  # it waits for the body
        before.process.send_signal(signal.SIGTERM)
        while _listens_at(path):
            time.sleep(0.02)
        after = Server(cluster, "--unix", str(path))
    before.process.communicate(timeout=60)
    assert _listens_at(path)
    assert after.end() == (0, "") and not path.exists()


def _listens_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        return path.exists() and link.connect_ex(str(path)) == 0


def test_of_servers_that_begin_at_once_at_a_killed_ones_path_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with free_path(path, "--unix"), pytest.raises(InvalidInput, match="begins or ends to listen"):
        bind(Where(unix=str(path)))


@pytest.mark.attack("network", "keys")
def test_tls_hides_the_key_on_the_way(cluster: LocalCluster, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    server = Server(cluster, "--tls-cert", str(cert), "--tls-key", str(key))
    assert server.told["url"].startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(cert))
    url = f"{server.told['url']}/v1/ping"
    assert ask(url, context=context, Authorization=f"Bearer {server.told['key']}") == (200, "pong")
    assert server.end()[0] == 0


@pytest.mark.parametrize(("where", "message"), [
    (Where("0.0.0.0"), "--host: name one address"), (Where("192.0.2.1"), "--host 192.0.2.1"),
    (Where(tls_cert="/dev/null"), "give both or neither"),
    (Where(tls_cert="/nowhere", tls_key="/nowhere"), "--tls-cert: /nowhere cannot be read"),
    (Where(unix="/nowhere/s"), "--unix /nowhere/s: No such file")])
def test_an_address_that_cannot_be_used_is_one_clear_line(where: Where, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        bind(where)


@pytest.mark.parametrize(("text", "message"), [
    ("exact", "neither MODULE:FUNCTION"), ("/nowhere.py:f", "there is no such file"),
    ("json:nothing", "json has no function 'nothing'"), ("nowhere.at_all:f", "No module named")])
def test_a_reward_function_that_is_not_there_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_function(text)


def test_a_wrong_option_ends_the_command_with_one_line(cluster: LocalCluster) -> None:
    server = Server(cluster, "--reward", "exact")
    status, err = server.process.wait(60), server.process.stderr.read()  # type: ignore[union-attr]
    assert (status, err) == (
        2, "tangram: error: --reward: 'exact' is not NAME=MODULE:FUNCTION\n")


def test_the_server_ends_when_its_broker_has_gone(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path / "home", grace_s=0.5) as cluster:
        server = Server(cluster)
    status = server.process.wait(60)
    err = server.process.stderr.read()  # type: ignore[union-attr]
    assert status == 1 and err.startswith("tangram: error: "), err
