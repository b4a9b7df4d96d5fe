"""OpenEnv's container provider: the server of an environment runs in a session of the job.

    env = await CodingEnv.from_docker_image(
        "registry.hf.space/openenv-coding-env:latest", provider=SessionContainerProvider(mem="2G"))

OpenEnv's client asks its provider for a container, waits until the server in it is ready, and stops
the container when it is closed. Here the container is a session: memory is held until its end, and
the server leases cores only while it works, because it is a background process of the session. The
client reaches the server by an address on its own machine, which leads to the port of the session
(`Session.forward`); so the server listens on the sandbox's loopback, and no port of a node is used.

An image's CMD is not started by a session. So, as OpenEnv's provider for Daytona does, this one
finds `openenv.yaml` in the image, which names the application, and starts uvicorn with it. This
module was run with OpenEnv 0.3.0 and 0.10.0.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import shlex
import time
import urllib.request
from typing import Any

from tangram_hpc import Session
from tangram_hpc.errors import TangramError

from ..harness.session_options import session_options
from ..process_client import process_client, when_collected

SERVER_PORT = 8000  # on which the servers of OpenEnv's images listen
_LOG = '"${TMPDIR:-/tmp}/openenv-server.log"'
_LOG_MAX = 2000  # bytes of the server's log that an error shows
_POLL_S, _ANSWER_S = 0.1, 5.0
# The application of the environment in /app, as OpenEnv's images have it: the first line of
# openenv.yaml that begins with `app:`, without quotes.
_FOUND_COMMAND = r"""
file=/app/env/openenv.yaml
[ -f "$file" ] || file=$(find /app -maxdepth 4 -name openenv.yaml -print -quit 2>/dev/null)
[ -f "$file" ] || { echo "no openenv.yaml in /app; name the server's command as cmd" >&2; exit 2; }
app=$(sed -n "s/^app:[[:space:]]*[\"']\{0,1\}\([^\"'#[:space:]]*\).*/\1/p" "$file" | head -n 1)
[ -n "$app" ] || { echo "$file names no app; name the server's command as cmd" >&2; exit 2; }
cd "$(dirname "$file")" && exec python -m uvicorn "$app" --host 127.0.0.1 --port PORT
"""


class SessionContainerProvider:
    """Runs one environment server at a time in a session; see OpenEnv's `ContainerProvider`.

    Args:
        cmd: the command line that starts the server and stays in the foreground, for the shell;
            empty to start the application that the image's `openenv.yaml` names.
        server_port: the port on which the server listens in the sandbox.
        open_timeout_s: how long opening may take, in seconds, waiting for memory and the image
            included; None for no limit.
        options: arguments of `Client.session`, such as `mem`, `files` or `network`. Processes
            of the server lease cores (`background="run"`) unless `background` says otherwise.

    Raises:
        InvalidInput: a key is unknown, or `network` cannot be understood.

    Example:
        provider = SessionContainerProvider(cmd="uvicorn server.app:app --port 8000", mem="1G")
        env = GenericEnvClient.from_docker_image("envs/echo:1", provider=provider)
    """

    def __init__(self, cmd: str = "", *, server_port: int = SERVER_PORT,
                 open_timeout_s: float | None = None, **options: Any) -> None:
        self._options = {"background": "run", "network": "loopback",
                         **session_options(options, "beside cmd, server_port and open_timeout_s")}
        self._cmd, self._server_port, self._open_timeout_s = cmd, server_port, open_timeout_s
        self._container = _Container()
        when_collected(self, self._container.close)

    @property
    def session(self) -> Session | None:
        """The session in which the server runs; None before the start and after the stop."""
        return self._container.session

    @property
    def failure(self) -> str:
        """Why the session has ended by itself, such as the loss of its node; empty if it has not.
        The reward of such an episode says nothing about the policy."""
        return "" if self.session is None else self.session.why_ended

    def start_container(self, image: str = "", port: int | None = None,
                        env_vars: dict[str, str] | None = None, **options: Any) -> str:
        """Opens a session, starts the server in it, and returns the server's URL.

        Args:
            image: an image, as `Client.session` names it; empty for the node's own files.
            port: the port of the URL, on 127.0.0.1 of this machine; None for any free port.
            env_vars: environment variables of the server.
            options: `cmd`, and arguments of `Client.session` for this container.

        Raises:
            RuntimeError: the session cannot be opened, was not opened in time, or lacks one of
                its files.
        """
        self.stop_container()
        command = options.pop("cmd", self._cmd)
        asked = {**self._options,
                 **session_options(options, "beside image, port, env_vars and cmd")}
        if image:
            asked["image"] = image
        try:
            return self._container.start(
                {**asked, "env": {**asked.get("env", {}), **(env_vars or {})}},
                _line(command, self._server_port), self._server_port, port or 0,
                self._open_timeout_s)
        except (TangramError, concurrent.futures.TimeoutError) as error:
            self.stop_container()
            why = str(error) or "the session was not opened in time"  # a time-out has no text
            raise RuntimeError(f"tangram: {why}") from error

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Waits until the server answers.

        Args:
            base_url: the URL that `start_container` returned.
            timeout_s: the longest time to wait, in seconds.

        Raises:
            TimeoutError: the server does not answer in time; the error shows the end of its log.
            RuntimeError: the session has ended.
        """
        until = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException), \
                    opener.open(f"{base_url}/health", timeout=_ANSWER_S) as answer:
                if answer.status == 200:
                    return
            if self.session is None or self.failure:
                raise RuntimeError(f"tangram: the session of {base_url} has ended"
                                   f"{self.failure and ': ' + self.failure}")
            if time.monotonic() >= until:
                raise TimeoutError(f"the server at {base_url} did not answer within {timeout_s:g} "
                                   f"s; its log ends with: {self.server_log()}")
            time.sleep(_POLL_S)

    def server_log(self) -> str:
        """Returns the end of what the server has printed; empty if there is no session."""
        if self.session is None:
            return ""
        try:
            told = self.session.exec(["sh", "-c", f"tail -c {_LOG_MAX} {_LOG}"], timeout=10)
            text: str = told.result().text
            return text.strip()
        except TangramError as error:
            return f"(no log: {error})"

    def stop_container(self) -> None:
        """Ends the server and its session; returns at once. A second call does nothing."""
        self._container.close()

    def close(self) -> None:
        """Does what `stop_container` does: nothing is held beyond the session."""
        self.stop_container()

    def __enter__(self) -> SessionContainerProvider:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Container:
    """The session of a running server, and the local address that leads to it.

    Attributes:
        session: the session; None while there is none.
        forward: the address; None while there is none.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.forward: Any = None

    def start(self, options: dict[str, Any], command: str, server_port: int, local_port: int,
              open_timeout_s: float | None) -> str:
        """Opens the session, starts the server, and returns its URL."""
        session = self.session = process_client().session(**options)
        session.opened.result(open_timeout_s)
        for each in session.first:
            each.result()
        # the output goes to a file, because the command ends and the server goes on
        session.exec(["sh", "-c", f"( {command}\n) >{_LOG} 2>&1 </dev/null &"]).result()
        self.forward = session.forward(server_port, local_port=local_port)
        url: str = self.forward.url
        return url

    def close(self) -> None:
        """Closes the address and the session; returns at once."""
        forward, self.forward = self.forward, None
        session, self.session = self.session, None
        if forward is not None:
            forward.close()
        if session is not None:
            with contextlib.suppress(TangramError):  # if the broker is gone, so is the session
                session.close()


def _line(command: str, port: int) -> str:
    """Returns the command line of the server; without a command that of the found application."""
    return command or f"sh -c {shlex.quote(_FOUND_COMMAND.replace('PORT', str(port)))}"
