"""The MCP server: its tools against a real broker, and the server itself with MCP's own client."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
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

from tangram_hpc import LocalCluster
from tangram_hpc.errors import MissingExtra, TangramError
from tangram_hpc.hooks.mcp_server import SessionTools, main, make_server

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
