"""Parts of the E2B wire that need no server: images and amounts, records, first lines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI

from tangram_hpc import ActionFailed, ActionState, ClientClosed, ExecResult, InvalidInput
from tangram_hpc.http_api.e2b.control_routes import control_routes
from tangram_hpc.http_api.e2b.images import E2bOptions, Wanted, read_options, wanted
from tangram_hpc.http_api.e2b.processes import Processes
from tangram_hpc.http_api.e2b.records import RecordFolder, SandboxRecord
from tangram_hpc.http_api.e2b.running_command import CommandConfig, WireEvent
from tangram_hpc.http_api.e2b.sandboxes import SandboxRegistry
from tangram_hpc.http_api.e2b.started_command import (
    KILLED,
    LET_GO,
    Started,
    name_of,
    read_exit_code,
    read_first_line,
)
from tangram_hpc.http_api.e2b.wire_errors import ApiError, RpcError

# ---- images and amounts -------------------------------------------------------------------------


def options(*templates: str, images: tuple[str, ...] = ()) -> E2bOptions:
    return read_options("/base", templates, images, "image", False, 3600)


def test_only_what_the_server_offers_can_be_had() -> None:
    offered = options("py=python:3.12", images=("docker.io/swebench/*",))
    assert wanted(offered, "base", {}).image == "/base"
    assert wanted(offered, "py", {}).image == "python:3.12"
    assert wanted(offered, "py:default", {}).image == "python:3.12"
    task = "docker.io/swebench/sweb.eval.x86_64.t:latest"
    assert wanted(offered, task, {}).image == task
    assert wanted(offered, "base", {"image": task}).image == task
    for template, metadata in ((("/etc"), {}), ("base", {"image": "/etc"}), ("PY", {}),
                               ("py:v2", {}), ("base", {"image": "ghcr.io/" + task})):
        with pytest.raises(ApiError) as caught:
            wanted(offered, template, metadata)
        assert caught.value.status == 404
        assert "base, code-interpreter-v1, py" in caught.value.message


def test_amounts_are_read_from_the_metadata() -> None:
    assert wanted(options(), "base", {"cpus": "1-8", "memory": "2G", "size": "md"}) == Wanted(
        "base", "/base", (1, 8), "2G")
    assert wanted(options(), "base", {"cpus": "3"}).cpus == (3, 3)
    for metadata in ({"cpus": "0"}, {"cpus": "4-2"}, {"cpus": "all"}, {"cpus": "٣x"},
                     {"memory": "2T"}, {"memory": "-1"}):
        with pytest.raises(ApiError) as caught:
            wanted(options(), "base", metadata)
        assert caught.value.status == 400


@pytest.mark.parametrize("text", ["py", "=x", "a b=x"])
def test_a_template_that_cannot_be_read_is_one_clear_line(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--e2b-template: .* is not NAME=IMAGE"):
        options(text)
    with pytest.raises(InvalidInput, match="--e2b-longest: 0"):
        read_options("", (), (), "image", False, 0)


# ---- records ------------------------------------------------------------------------------------


def record(**fields: Any) -> SandboxRecord:
    return SandboxRecord(**{
        "id": "i" + "0" * 20, "owner": "a", "template": "base", "handle": "h",
        "access_token": "t", "metadata": {"k": "v"}, "cpus": (1, 2), "memory_mib": 0,
        "network": False, "started": 1.0, "ends": 2.0, "latest": 3.0, **fields})


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path / "e2b")
    assert folder.read(record().id) is None and list(folder.all()) == []
    folder.write(record())
    assert folder.read(record().id) == record() and list(folder.all()) == [record()]
    assert (tmp_path / "e2b").stat().st_mode & 0o077 == 0
    folder.remove(record().id)
    folder.remove(record().id)
    assert folder.read(record().id) is None


def test_a_record_that_others_may_read_or_that_is_damaged_is_none(tmp_path: Path) -> None:
    folder, path = RecordFolder(tmp_path), tmp_path / f"{record().id}.json"
    folder.write(record())
    path.chmod(0o644)
    assert folder.read(record().id) is None
    path.chmod(0o600)
    path.write_text(path.read_text()[:-10])
    assert folder.read(record().id) is None
    assert folder.read("../" + record().id) is None


def test_a_record_shows_no_token() -> None:
    assert "'t'" not in repr(record()) and "'h'" not in repr(record())


# ---- the end of a server ------------------------------------------------------------------------


def test_a_server_that_ends_waits_for_terminals_although_its_client_has_ended_their_sessions(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = []

    async def noted(self: Processes) -> None:
        settled.append(self)

    async def end() -> Processes:
        client: Any = SimpleNamespace(failure=ClientClosed("closed"))
        session: Any = SimpleNamespace(name="e2b-x", closed=Future())
        registry = SandboxRegistry(client, options(), RecordFolder(tmp_path))
        sandbox = registry._add(record(ends=time.time() + 1000), session, False)
        registry.leave()
        session.closed.set_result(None)
        await asyncio.sleep(0)
        assert list(registry.of("a")) == []
        await registry.settled()
        return sandbox.processes

    monkeypatch.setattr(Processes, "settled", noted)
    processes = asyncio.run(end())
    assert settled == [processes]


# ---- the end of a command ------------------------------------------------------------------------


def test_a_command_that_has_ended_is_not_kept_until_its_timeout() -> None:
    async def kept() -> bool:
        futures: list[Future[Any]] = []

        def begin(argv: list[str], *, on_output: Any, **others: Any) -> Future[Any]:
            on_output(1, b"12 /tmp/e2b/1\n")
            futures.append(Future())
            return futures[0]

        session: Any = SimpleNamespace(name="e2b-x", output_bound=1 << 20, exec_detachable=begin)
        process, _ = await Processes(session, (1, 1), False).start(
            CommandConfig("/bin/true"), False, 3600.0)
        seen = weakref.ref(process)
        futures.pop().set_exception(ActionFailed("it has ended"))
        await process.left.wait()
        del process
        await asyncio.sleep(0)
        gc.collect()
        return seen() is not None

    assert not asyncio.run(kept())


@pytest.mark.parametrize("over", [False, True], ids=["killed", "its time is over"])
def test_a_command_that_goes_to_the_background_as_it_is_killed_is_killed_there(over: bool) -> None:
    ran: list[str] = []

    class Asked(Future[Any]):
        def cancel(self) -> bool:  # a request, which comes too late here
            self.set_result(ExecResult(ActionState.FAILED, 140, LET_GO, b"", b"", (0, 0), ""))
            return True

    def begin(argv: list[str], *, on_output: Any, **others: Any) -> Future[Any]:
        on_output(1, b"12 /tmp/e2b/1\n")
        return Asked()

    def aside(argv: list[str], **others: Any) -> Future[Any]:
        ran.append(argv[2])
        ended: Future[Any] = Future()
        ended.set_result(ExecResult(ActionState.COMPLETED, 0, 0, b"", b"", (0, 0), ""))
        return ended

    async def none(*told: Any, **named: Any) -> tuple[()]:
        return ()

    async def kill() -> WireEvent | None:
        session: Any = SimpleNamespace(name="e2b-x", output_bound=1 << 20, listing=none,
                                       exec_detachable=begin, exec=aside, remove=none)
        processes = Processes(session, (1, 1), False)
        process, listener = await processes.start(
            CommandConfig("/bin/sleep"), False, 0.01 if over else None)
        if not over:
            await processes.signal(process, signal.SIGKILL)
        try:
            return await asyncio.wait_for(listener.get(), 5)
        except RpcError:
            while list(processes.all()):
                await asyncio.sleep(0.01)
            raise

    if over:
        with pytest.raises(RpcError, match="ran into its timeout"):
            asyncio.run(kill())
    else:
        told = asyncio.run(kill())
        assert told is not None and told["end"]["exitCode"] == KILLED
    assert ran == ["kill -s KILL -- -12"]


# ---- what a command's action tells ---------------------------------------------------------------


@pytest.mark.parametrize("line", ["", "x", "1 2", "a /tmp/1", "/tmp/1", "²  /tmp/1"])
def test_a_first_line_of_somebody_else_is_none(line: str) -> None:
    assert read_first_line(line.encode()) is None


def test_a_first_line_names_the_process_and_its_files() -> None:
    started = read_first_line(b"12 /tmp/a b/34")
    assert started == Started(12, "/tmp/a b/34")
    assert (started.folder, started.name) == ("/tmp/a b", "34")


@pytest.mark.parametrize(("data", "code"), [
    (b"", None), (b"1", None), (b"12\n", 12), (b"x\n", None)])
def test_an_exit_code_that_is_half_written_is_none(data: bytes, code: int | None) -> None:
    assert read_exit_code(data) == code


@pytest.mark.parametrize(("line", "name"), [
    ("pytest -q", "pytest"), ("cd /testbed && python -m x", "python"),
    ("A=1 /usr/bin/make", "make"),
    ("for i in 1; do :; done", "for"), ("", "bash"), ("$(x)", "bash")])
def test_a_command_is_named_by_its_first_program(line: str, name: str) -> None:
    assert name_of(["/bin/bash", "-l", "-c", line]) == name


@pytest.mark.parametrize("when", ["at once", "when it is cancelled"])
@pytest.mark.parametrize("key", [b"", b"again"])
def test_a_sandbox_that_is_ready_as_its_client_hangs_up_is_ended(when: str, key: bytes) -> None:
    """In Python 3.10 and 3.11 `wait_for` returns a result although it was cancelled."""
    ended: list[object] = []
    made, offered = object(), options()

    class Sandboxes:
        options = offered

        async def create(self, *told: object, **named: object) -> object:
            if when == "when it is cancelled":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            return made

        def end(self, sandbox: object) -> None:
            ended.append(sandbox)

    body = [{"type": "http.request", "body": b'{"templateID": "base"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def ask() -> None:
        app = FastAPI()
        app.include_router(control_routes(cast(Any, Sandboxes())))
        with contextlib.suppress(ApiError):
            await app({"type": "http", "method": "POST", "path": "/v2/sandboxes", "headers": [
                (b"content-type", b"application/json"), (b"idempotency-key", key)],
                "query_string": b"", "state": {"client": "alice"}}, receive, send)

    asyncio.run(ask())
    assert ended == ([] if key else [made])
