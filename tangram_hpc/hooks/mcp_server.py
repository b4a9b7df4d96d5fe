"""An MCP server whose tools work in one session of the job's broker, for evaluation agents.

An agent starts it and speaks to it over stdin and stdout:

    python -m tangram_hpc.hooks.mcp_server --image ubuntu:22.04 --mem 2G

Each agent starts a server of its own, so each agent has a session of its own, which ends with the
server. Agents whose packages start a server for each call name the session with `--share NAME`;
all servers of this name work in one session, which ends when no call was made for a while. The
server keeps nothing else from call to call, so it does not matter which server a call reaches.

The server opens no port, so only the agent that started it can reach it. The package `mcp` is
imported only when the server runs. The server was run with mcp 2.3.0.
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

from .harness.named_session import named_session, session_name
from .harness.session_options import seconds_of, session_options
from .process_client import process_client
from .tool_answers import TEXT_MAX, answer_text, file_error_text, shortened

_TIMEOUT_S = 120.0
_IDLE_S = 900.0  # how long a session with a name stays open without a call
_LONGEST_S = 86400  # ends a session with a name in which a background process never rests


class SessionTools:
    """The tools of one session, which is opened at the first call of a tool. An agent must not go
    on in an empty sandbox without knowing. So if a session without a name is lost, each later call
    says so. If one with a name is lost, the next call opens another one, and its answer says so.

    Args:
        timeout_s: the longest run time of a command, in seconds; a call may ask for less.
        share: a name, by which all servers of this user and job use one session; None for a session
            that is this server's alone.
        options: arguments of `Client.session`.

    Raises:
        InvalidInput: an option is unknown, the time limit is no number > 0, or `share` is no name;
            the message names it.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S, share: str | None = None,
                 **options: Any) -> None:
        self._timeout_s, self._options = seconds_of(timeout_s, "timeout_s"), {
            "background": "run", **session_options(options, "options")}
        if share is not None:
            share = session_name(share, "share")
            self._options = {"idle_s": _IDLE_S, "ttl_s": _LONGEST_S, **self._options,
                             "outlives": True}
        self._share = share
        self._session: tangram_hpc.Session | None = None
        self._opening = asyncio.Lock()
        self._news = ""

    def take_news(self) -> str:
        """Returns what the answer to the agent has to begin with, once: that its session is a new
        one. It is empty otherwise."""
        news, self._news = self._news, ""
        return news

    async def _opened(self) -> tangram_hpc.Session:
        async with self._opening:
            if self._session is not None and self._share and self._session.closed.done():
                self._session = None
            if self._session is None:
                client = await asyncio.to_thread(process_client)
                self._session = await (self._attached(client, self._share) if self._share else
                                       self._own(client))
            return self._session

    async def _own(self, client: tangram_hpc.Client) -> tangram_hpc.Session:
        session = client.session(**self._options)
        try:
            await session.opened
        except BaseException:
            session.close()
            raise
        return session

    async def _attached(self, client: tangram_hpc.Client, name: str) -> tangram_hpc.Session:
        session, ended = await named_session(client, f"mcp-{name}", self._options)
        if ended:
            self._news = (f"[{ended}; its files and processes are gone, and this call works in a "
                          "new, empty sandbox]\n")
        return session

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
        server.tool(structured_output=False)(_telling(tool, tools.take_news, ToolError))
    return server


def _telling(tool: Callable[..., Coroutine[Any, Any, str]], take_news: Callable[[], str],
             error_class: type[Exception]) -> Callable[..., Coroutine[Any, Any, str]]:
    """Returns the tool with the session's news before its answer, and with its errors as exceptions
    of `error_class`: the server passes on the text of these exceptions only."""

    @functools.wraps(tool)
    async def telling(*args: Any, **kwargs: Any) -> str:
        try:
            answer = await tool(*args, **kwargs)
            return f"{take_news()}{answer}"
        except FileFailed as error:
            raise error_class(f"{take_news()}{file_error_text(error)}") from None
        except TangramError as error:
            raise error_class(f"{take_news()}{error}") from None

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
    parser.add_argument("--share", metavar="NAME", help="work in one session with all servers of "
                        "this name, for agents that start a server for each call")
    parser.add_argument("--idle", type=float, metavar="SECONDS",
                        help=f"with --share: end the session when no call was made for so long "
                             f"(default: {_IDLE_S:g})")
    given = vars(parser.parse_args(words))
    timeout_s, idle_s = given.pop("timeout"), given.pop("idle")
    try:
        if idle_s is not None:
            if given["share"] is None:
                raise InvalidInput("--idle: a session without --share ends with its server")
            given["idle_s"] = seconds_of(idle_s, "--idle")
        process_client()  # so that a wrong job is an error now, and not at the first call of a tool
        make_server(SessionTools(timeout_s, **given)).run("stdio")
    except TangramError as error:
        parser.exit(error.exit_status, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
