"""Parts of the E2B wire that need no server: images and amounts, records, the launching program."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram_hpc import ClientClosed, InvalidInput
from tangram_hpc.http_api.e2b.command_launcher import (
    LET_GO,
    VARIABLES,
    Started,
    argv_of,
    name_of,
    read_exit_code,
    read_first_line,
)
from tangram_hpc.http_api.e2b.images import E2bOptions, Wanted, read_options, wanted
from tangram_hpc.http_api.e2b.processes import Processes
from tangram_hpc.http_api.e2b.records import RecordFolder, SandboxRecord
from tangram_hpc.http_api.e2b.sandboxes import SandboxRegistry
from tangram_hpc.http_api.e2b.wire_errors import ApiError

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
        assert caught.value.status == 404 and "base, py" in caught.value.message


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


# ---- the launching program ----------------------------------------------------------------------


def launched(tmp_path: Path, line: str, *, slot: int = 1, old: tuple[int, ...] = (),
             cwd: str = "", env: dict[str, str] | None = None) -> tuple[int, bytes, bytes]:
    """Runs a shell line by the launching program; returns its result without the watcher's line."""
    told = subprocess.run(
        argv_of(slot, old, cwd, False, ["/bin/bash", "-c", line]), capture_output=True,
        start_new_session=True, check=False, timeout=100,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **VARIABLES, **(env or {})})
    first, _, out = told.stdout.partition(b"\n")
    started = read_first_line(first)
    assert started is not None and started.folder == f"{tmp_path}/.e2b"
    return told.returncode, out, told.stderr


@pytest.mark.parametrize("data", [
    b"", b"x", b"\0", b"a\0b\0", b"x" * 4095, b"x" * 4095 + b"\0", b"x" * 4096, b"x" * 5000,
    b"y" * (3 << 20), bytes(range(256)) * 100, "äöü€".encode() * 2000, b"-n %s \\n\n\n"],
    ids=["empty", "one", "null", "nulls", "4095", "null at 4096", "4096", "5000", "pieces",
         "binary", "text", "escapes"])
def test_output_is_passed_on_byte_for_byte(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "data").write_bytes(data)
    line = f"cat {tmp_path}/data >&2; cat {tmp_path}/data; exit 7"
    assert launched(tmp_path, line) == (7, data, data)


@contextlib.contextmanager
def watched(tmp_path: Path, line: str) -> Iterator[tuple[subprocess.Popen[bytes], Started]]:
    """Runs a shell line by the launching program; its output after the first line is unread."""
    with subprocess.Popen(
            argv_of(1, (), "", False, ["/bin/bash", "-c", line]), stdout=subprocess.PIPE,
            start_new_session=True, bufsize=0,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **VARIABLES}) as watcher:
        assert watcher.stdout is not None
        started = read_first_line(watcher.stdout.readline().rstrip(b"\n"))
        assert started is not None
        try:
            yield watcher, started
        finally:
            for group in (started.group, watcher.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


def until(holds: Callable[[], bool]) -> None:
    while not holds():  # the test's own limit ends a wait for what never comes
        time.sleep(0.01)


def test_a_command_with_much_output_unread_goes_to_the_background_at_once(tmp_path: Path) -> None:
    """What is left is read from its file; so is that of a writer that never stops."""
    line = f"head -c {64 << 20} /dev/zero; touch {tmp_path}/written; exec sleep 1000"
    with watched(tmp_path, line) as (watcher, _):
        until((tmp_path / "written").exists)
        watcher.send_signal(LET_GO)
        assert watcher.stdout is not None
        passed = len(watcher.stdout.read())
        assert watcher.wait() == -LET_GO and passed <= 4 << 20


def test_what_a_command_leaves_writing_for_ever_does_not_hold_its_action(tmp_path: Path) -> None:
    """Here the test writes on, twice as fast as the output is read."""
    with watched(tmp_path, f"head -c {3 << 20} /dev/zero; exit 7") as (watcher, started):
        files = Path(started.folder)
        until(lambda: (files / "1.code").exists() and bool((files / "1.code").read_bytes()))
        assert watcher.stdout is not None
        passed = 0
        with open(files / "1.out", "ab", buffering=0) as writer:
            while data := watcher.stdout.read(1 << 16):
                passed += len(data)
                assert passed < 64 << 20
                writer.write(2 * data)
        assert watcher.wait() == 7 and passed >= 3 << 20


@pytest.mark.parametrize(("line", "code"), [
    ("exit 255", 255), ("kill -9 $$", 137), ("kill -INT $$", 130), ("kill -USR2 $$", 140)])
def test_the_exit_code_is_that_of_the_command(tmp_path: Path, line: str, code: int) -> None:
    assert launched(tmp_path, line)[0] == code


def test_a_command_inherits_the_clients_variables_and_no_others(tmp_path: Path) -> None:
    env = {"d": "1", "f": "2", "c": "3", "line": "4", "wait": "5", "LC_ALL": "C.UTF-8"}
    _, out, _ = launched(tmp_path, "env", env=env)
    told = dict(line.split("=", 1) for line in out.decode().splitlines())
    assert {name: told[name] for name in env} == env
    assert not [name for name in told if "e2b" in name.lower() or "keeper" in name]


def test_what_a_command_leaves_running_does_not_hold_its_action(tmp_path: Path) -> None:
    """The action's end does not wait for it, and it has no pipe of the action."""
    code, out, _ = launched(tmp_path, "sleep 1000 & echo $!")
    pid = int(out)
    assert code == 0
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    os.kill(pid, 9)
    assert not [link for link in links if link.startswith("pipe:")]


def test_files_of_ended_commands_are_removed(tmp_path: Path) -> None:
    launched(tmp_path, "echo 1", slot=1)
    launched(tmp_path, "echo 2", slot=2, old=(1,))
    left = sorted(os.listdir(tmp_path / ".e2b"))
    assert left and all(name.startswith("2.") for name in left)


@pytest.mark.parametrize("line", ["", "x", "1 2", "a 2 /tmp", "cwd"])
def test_a_first_line_of_somebody_else_is_none(line: str) -> None:
    assert read_first_line(line.encode()) is None


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
