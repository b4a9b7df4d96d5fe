"""An MCP server whose tools work in one session of the job's broker, for evaluation agents.

An agent starts it and speaks to it over stdin and stdout:

    python -m tangram_hpc.hooks.mcp_server --image ubuntu:22.04 --mem 2G

Each agent starts a server of its own, so each agent has a session of its own, which ends with the
server. The server opens no port, so only the agent that started it can reach it. The package `mcp`
is imported only when the server runs. The server was run with mcp 2.3.0.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any

import tangram_hpc
from tangram_hpc.errors import (
    FileFailed,
    InvalidInput,
    MissingExtra,
    TangramError,
    how_to_install,
)

from .harness.session_options import seconds_of, session_options
from .process_client import process_client
from .tool_answers import TEXT_MAX, answer_text, file_error_text, shortened

_TIMEOUT_S = 120.0


class SessionTools:
    """The tools of one session, which is opened at the first call of a tool. If the session is
    lost, each later call says so, because an agent must not go on in an empty sandbox without
    knowing.

    Args:
        timeout_s: the longest run time of a command, in seconds; a call may ask for less.
        options: arguments of `Client.session`.

    Raises:
        InvalidInput: an option is unknown, or the time limit is no number > 0; the message names
            it.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S, **options: Any) -> None:
        self._timeout_s, self._options = seconds_of(timeout_s, "timeout_s"), {
            "background": "run", **session_options(options, "options")}
        self._session: tangram_hpc.Session | None = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> tangram_hpc.Session:
        async with self._opening:
            if self._session is None:
                client = await asyncio.to_thread(process_client)
                session = client.session(**self._options)
                try:
                    await session.opened
                except BaseException:
                    session.close()
                    raise
                self._session = session
            return self._session

    async def run_command(self, command: str, timeout_s: float = 0) -> str:
        """Runs a shell command in the sandbox. Files stay from one command to the next; the working
        directory and exported variables do not.

        Args:
            command: The command line.
            timeout_s: The time limit in seconds; 0 for the longest that is allowed.
        """
        limit = min(seconds_of(timeout_s, "timeout_s") if timeout_s else inf, self._timeout_s)
        result = await (await self._opened()).exec(command, timeout=limit, keep="both")
        return answer_text(result, limit)

    async def read_file(self, path: str) -> str:
        """Reads a text file of the sandbox.

        Args:
            path: The file.
        """
        data: bytes = await (await self._opened()).read(path)
        return shortened(data.decode(errors="replace"), TEXT_MAX)

    async def write_file(self, path: str, content: str) -> str:
        """Writes a text file of the sandbox; missing folders are made.

        Args:
            path: The file.
            content: Its whole content.
        """
        try:
            data = content.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"content: character {error.start} is half of a surrogate pair, "
                               "which no UTF-8 text can hold; nothing was written") from None
        await (await self._opened()).write(path, data)
        return f"wrote {len(data)} bytes to {path}"

    async def list_folder(self, path: str = ".") -> str:
        """Lists a folder of the sandbox: a line for each entry, folders with a slash, files with
        their size. Of a file the path and the size are told.

        Args:
            path: The folder.
        """
        entries = await (await self._opened()).listing(path, depth=1)
        lines = [f"{each.name}/" if each.kind == "dir" else f"{each.name or path} {each.size}"
                 for each in sorted(entries, key=lambda each: str(each.name))]
        return shortened("\n".join(lines) or "(empty)", TEXT_MAX)


def make_server(tools: SessionTools) -> Any:
    """Makes the MCP server with these tools.

    Raises:
        MissingExtra: the package `mcp` is not installed.
    """
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise MissingExtra(f"the MCP server needs the package mcp, version 2.3 or later: "
                           f"{how_to_install('mcp')}") from None
    server = MCPServer("tangram")
    for tool in (tools.run_command, tools.read_file, tools.write_file, tools.list_folder):
        server.tool(structured_output=False)(_telling(tool, ToolError))
    return server


def _telling(tool: Callable[..., Coroutine[Any, Any, str]], error_class: type[Exception]
             ) -> Callable[..., Coroutine[Any, Any, str]]:
    """Returns the tool with its errors as exceptions of `error_class`: the server passes on the
    text of these exceptions only."""

    @functools.wraps(tool)
    async def telling(*args: Any, **kwargs: Any) -> str:
        try:
            return await tool(*args, **kwargs)
        except FileFailed as error:
            raise error_class(file_error_text(error)) from None
        except TangramError as error:
            raise error_class(str(error)) from None

    return telling


def main(words: Sequence[str] | None = None) -> None:
    """Runs the server until its input ends.

    Args:
        words: the command line options; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tangram_hpc.hooks.mcp_server",
        description="An MCP server over stdin and stdout, whose tools work in one session.")
    parser.add_argument("--image", default="", help="the session's image; none: the node's files")
    parser.add_argument("--mem", default="0", help="memory of the session, such as 2G")
    parser.add_argument("--backend", default="", help="the isolation backend; none: the best")
    parser.add_argument("--component", default="", help="the het component or partition")
    parser.add_argument("--network", action="store_true", help="give it the node's network")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="SECONDS",
                        help="the longest run time of a command")
    given = vars(parser.parse_args(words))
    timeout_s = given.pop("timeout")
    try:
        process_client()  # so that a wrong job is an error now, and not at the first call of a tool
        make_server(SessionTools(timeout_s, **given)).run("stdio")
    except TangramError as error:
        parser.exit(error.exit_status, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
