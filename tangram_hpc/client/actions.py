"""Submission of a user's work: a command or a Python function becomes an action.

`Client.submit` and `Session.submit` both end here. Every argument is checked before anything is
sent; the error names the wrong one. Calls of services, rollout pools and endpoints have modules of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..domain.action import Kind, Profile
from ..errors import InvalidInput
from ..protocol.payload import DetachableCall, Payload
from .connection import Connection
from .future import Future
from .request import Cpus, Options, Work, command_user, environment, exec_call, tool_of
from .session_record import SessionRecord


def submit(connection: Connection, work: Work, args: tuple[Any, ...],
           session: SessionRecord | None, /, cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0,
           timeout: float | None = None, name: str = "", retries: int | None = None,
           resizable: bool = True, component: str = "", profile: Profile | None = None,
           kwargs: Mapping[str, Any] | None = None, trusted: bool = False, endpoint: str = "",
           cwd: str = "", env: Mapping[str, str] | None = None, stdin: bytes | str = b"",
           files: Mapping[str, bytes | str] | None = None,
           on_output: Callable[[int, bytes], None] | None = None, clean_env: bool = True,
           once: str = "", trajectory: str | int | None = None, output_max: int = 0,
           keep: str = "head", user: str | int = "", real_user: bool = False,
           reads_input: bool | None = None) -> Future:
    """Submits one action; see `Client.submit`. `reads_input` is that of `Session.exec_detachable`,
    and None for what cannot go to the background."""
    if connection.failure is not None:  # checked before a function is written to the store
        raise connection.failure
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInput(f"kwargs: {kwargs!r:.60} is not a mapping of names to values")
    if on_output is not None and not callable(on_output):
        raise InvalidInput(f"on_output: {on_output!r:.60} is not a function of (stream, bytes)")
    if trajectory is not None:
        whose = tool_of(trajectory)
    else:
        whose = session.trajectory if session is not None else ""
    options = Options(cpus, mem, gpus, timeout, name, retries, resizable, component, profile,
                      trusted, endpoint, once, whose)
    if callable(work):
        function, uploaded = connection.functions.call(work, args, dict(kwargs or {}), trusted)
        return connection.submit(Kind.FUNCTION, options, session,
                                 getattr(work, "__name__", "function"), function, trusted,
                                 on_output, uploaded)
    if args or kwargs:
        raise InvalidInput("args: only a function takes arguments; put them into argv")
    user = command_user(user, None if session is None else session.spec)
    if session is not None:
        if trusted and not session.spec.trusted:
            raise InvalidInput("trusted: it applies to a session as a whole; open the session with "
                               "trusted=True")
        env = {**session.env, **environment(env)}
    command, what = exec_call(work, cwd=cwd, env=env, stdin=stdin, files=files,
                              stream=on_output is not None, clean_env=clean_env,
                              output_max=output_max, keep=keep, user=user,
                              real_user=real_user)
    payload: Payload = command
    if reads_input is not None:
        if on_output is None or stdin:
            raise InvalidInput("on_output, stdin: a detachable command needs the first and takes "
                               "no second; give its input with reads_input")
        payload = DetachableCall(command, reads_input)
    return connection.submit(Kind.EXEC, options, session, what, payload, trusted, on_output)
