"""The MCP server: its tools against a real broker, and the server itself with MCP's own client."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    eventually,
    sessions_open,
)
from helpers.other_python import client_env, make_venv

from tangram_hpc import Client, LocalCluster, Session, connect
from tangram_hpc.errors import AccessError, InvalidInput, MissingExtra, TangramError
from tangram_hpc.hooks.harness.named_session import _secret_of_job
from tangram_hpc.hooks.mcp_server import SessionTools, _telling, main, make_server

__all__ = ["adapters_cluster"]


class TestMcpToolsWithoutTheirServer(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        return SessionTools(LIMIT_S, **options)

    def call(self, trajectory: Any, line: str) -> str:
        try:
            return str(asyncio.run(trajectory.run_command(line)))
        except TangramError as error:  # the server answers with the error's text
            return str(error)

    def end(self, trajectory: Any) -> None:
        if trajectory._session is not None:
            trajectory._session.close()

    def lose(self, trajectory: Any) -> None:
        trajectory._session.close()


class TestMcpToolsWithASharedSession(TestMcpToolsWithoutTheirServer):
    names = (f"trajectory-{number}" for number in count())

    def begin(self, **options: Any) -> Any:
        return SessionTools(LIMIT_S, share=next(self.names), **options)

    def call(self, trajectory: Any, line: str) -> str:
        answer = super().call(trajectory, line)
        return trajectory.take_news() + answer


def server_of(name: str, client: Client, **options: Any) -> Coroutine[Any, Any, Session]:
    """Opens the session of a name as a server of its own does, whose client this is."""
    return SessionTools(share=name, **options)._attached(client, name)


def test_servers_of_one_name_that_start_together_open_one_session(cluster: LocalCluster) -> None:
    async def story(clients: list[Client]) -> None:
        sessions = await asyncio.gather(*(server_of("together", each) for each in clients))
        assert len({session.id for session in sessions}) == 1 and sessions_open(cluster) == 1
        other = await server_of("another", clients[0])
        assert other.id != sessions[0].id
        for session in (other, sessions[0]):
            session.close()

    with ExitStack() as stack:
        asyncio.run(story([stack.enter_context(connect()) for _ in range(4)]))
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_files_and_processes_stay_when_the_server_that_opened_the_session_ends(
        cluster: LocalCluster) -> None:
    async def story() -> None:
        with connect() as client:
            session = await server_of("calls", client)
            await session.exec("echo kept > file; sleep 600 > /dev/null & echo $! > pid")
        with connect() as client:
            session = await server_of("calls", client)
            done = await session.exec("cat file; kill $(cat pid) && echo ran")
            assert done.text == "kept\nran\n"
            session.close()

    asyncio.run(story())


def test_a_server_with_other_options_is_refused_in_one_line(cluster: LocalCluster) -> None:
    tools = SessionTools(share="options", mem="64M")
    asyncio.run(tools.write_file("file", ""))
    for given in ({"mem": "32M"}, {"mem": "64M", "network": True}, {"mem": "64M", "idle_s": 60}):
        with pytest.raises(InvalidInput, match=(
                r"^name: 'mcp-options' is taken by session [^\n]*; those who share a session by "
                r"its name ask for the same options \(here [^\n]*mem=")):
            asyncio.run(SessionTools(share="options", **given).list_folder())
    assert asyncio.run(SessionTools(share="options", mem="64M").list_folder()) == "file 0"
    tools._session.close()  # type: ignore[union-attr]


def test_a_session_that_has_ended_is_replaced_and_the_agent_told_once(cluster: LocalCluster
                                                                      ) -> None:
    first, second = SessionTools(share="ended"), SessionTools(share="ended")
    asyncio.run(first.write_file("file", "lost"))
    first._session.close()  # type: ignore[union-attr]
    tool = _telling(second.read_file, second.take_news, RuntimeError)
    with pytest.raises(RuntimeError, match=r"^\[session \S+ .*; its files and processes are "
                                           r"gone, .* new, empty sandbox\]\nno such file: file$"):
        asyncio.run(tool("file"))
    with pytest.raises(RuntimeError, match=r"^no such file: file$"):
        asyncio.run(tool("file"))
    assert asyncio.run(first.list_folder()) == "(empty)"  # it attaches to the same new session
    assert first._session.id == second._session.id  # type: ignore[union-attr]
    assert sessions_open(cluster) == 1
    second._session.close()  # type: ignore[union-attr]


def test_the_secret_of_shared_sessions_is_for_its_user_alone(
        cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "access.json").write_bytes(cluster.access.read_bytes())
    monkeypatch.setenv("TANGRAM_ACCESS", str(tmp_path / "access.json"))
    secrets = {_secret_of_job() for _ in range(3)}
    (file,) = tmp_path.glob("*.key")
    assert secrets == {file.read_bytes()} and file.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["access.json", file.name]
    file.chmod(0o640)
    with pytest.raises(AccessError, match="mode 0600"):
        asyncio.run(SessionTools(share="read").list_folder())
    file.unlink()
    file.symlink_to(tmp_path / "access.json")
    with pytest.raises(AccessError, match=r"\.key: "):
        asyncio.run(SessionTools(share="link").list_folder())


def test_a_name_that_another_session_has_is_refused(cluster: LocalCluster) -> None:
    with cluster.client.session(shared=True, name="mcp-taken"):
        with pytest.raises(InvalidInput, match="name: 'mcp-taken' is taken by session"):
            asyncio.run(SessionTools(share="taken").list_folder())


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 65, "é", 3])
def test_a_wrong_name_to_share_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match=r"share: .* is not 1 to 64 letters"):
        SessionTools(share=name)


def test_an_idle_time_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--idle", "60"])
    assert "--idle: a session without --share ends with its server" in capsys.readouterr().err


def test_files_are_written_read_and_listed(cluster: LocalCluster) -> None:
    async def story() -> None:
        tools = SessionTools()
        assert await tools.write_file("deep/file", "é\n") == "wrote 3 bytes to deep/file"
        assert await tools.read_file("deep/file") == "é\n"
        assert await tools.list_folder() == "deep/"
        assert await tools.list_folder("deep") == "file 3"
        assert await tools.list_folder("deep/file") == "deep/file 3"
        with pytest.raises(FileNotFoundError):
            await tools.read_file("none")

    asyncio.run(story())


def test_a_file_error_is_told_without_the_actions_id(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tools: dict[str, Any] = {}

    class Server:
        def __init__(self, name: str) -> None: ...

        def tool(self, **options: Any) -> Any:
            return lambda tool: tools.setdefault(tool.__name__, tool)

    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", SimpleNamespace(MCPServer=Server))
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver.exceptions",
                        SimpleNamespace(ToolError=RuntimeError))
    make_server(SessionTools())
    with pytest.raises(RuntimeError, match=r"^no such file: none$"):
        asyncio.run(tools["read_file"]("none"))


def test_half_a_surrogate_pair_is_an_error_that_the_agent_can_read() -> None:
    with pytest.raises(TangramError, match="content: character 1 is half of a surrogate pair"):
        asyncio.run(SessionTools().write_file("file", "a\ud83d"))


def test_an_option_that_no_session_has_is_named() -> None:
    with pytest.raises(TangramError, match=r"options: memm: .*; known are .* mem,"):
        SessionTools(memm="1G")


def test_time_limits_that_are_no_seconds_are_named() -> None:
    for limit in (0, -1.0, float("nan"), "30"):
        with pytest.raises(TangramError, match=r"timeout_s: .* is not a number of seconds > 0"):
            SessionTools(limit)  # type: ignore[arg-type]
    with pytest.raises(TangramError, match=r"timeout_s: -1 is not a number of seconds > 0"):
        asyncio.run(SessionTools().run_command("true", -1))


@pytest.mark.skipif(importlib.util.find_spec("mcp") is not None, reason="mcp is installed here")
def test_without_the_package_the_server_says_what_to_install() -> None:
    with pytest.raises(MissingExtra, match="mcp"):
        make_server(SessionTools())


def test_without_a_broker_the_server_ends_with_one_line(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
        ) -> None:
    from tangram_hpc.hooks.process_client import use_client

    use_client(None)
    monkeypatch.setenv("TANGRAM_ACCESS", str(tmp_path / "none.json"))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and "none.json" in capsys.readouterr().err


PROGRAM = """
import asyncio, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    server = StdioServerParameters(command=sys.executable, env=dict(os.environ), args=[
        "-m", "tangram_hpc.hooks.mcp_server", "--timeout", "5", "--mem", "256M"])
    async with stdio_client(server) as pipes, ClientSession(*pipes) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        assert [tool.name for tool in tools] == [
            "run_command", "read_file", "write_file", "list_folder"], tools
        async def call(name, **arguments):
            told = await session.call_tool(name, arguments)
            return told.is_error, told.content[0].text
        assert await call("write_file", path="f", content="one") == (False, "wrote 3 bytes to f")
        assert await call("run_command", command="cat f; exit 3") == (False, "one\\n[exit code 3]")
        failed, text = await call("read_file", path="none")
        assert failed and text.endswith(" read_file: no such file: none"), (failed, text)
    server.args += ["--share", "calls", "--idle", "5"]
    async def of_its_own(name, **arguments):  # a call by a server that is started for it
        async with stdio_client(server) as pipes, ClientSession(*pipes) as session:
            await session.initialize()
            return (await session.call_tool(name, arguments)).content[0].text
    assert await of_its_own("write_file", path="f", content="kept") == "wrote 4 bytes to f"
    assert await of_its_own("read_file", path="f") == "kept"
asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_mcps_own_client_calls_the_tools(tmp_path: Path) -> None:
    programs = make_venv(tmp_path / "venv", sys.executable, ["mcp==2.3.0"])
    with LocalCluster(cpus=1, home=tmp_path / "home") as cluster:
        done = subprocess.run([str(programs / "python"), "-c", PROGRAM], text=True,
                              capture_output=True, timeout=300, check=False,
                              env=client_env(cluster.access))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert eventually(lambda: sessions_open(cluster) == 0)
