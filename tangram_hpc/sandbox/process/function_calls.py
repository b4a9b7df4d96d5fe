"""Calls a user's function in this process, and makes a payload of what it returns or raises.

Only this module and the client unpickle what another process has sent. It runs in runners: what
functions print goes to one file, whose end is told with an exception.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle

from ...protocol.payload import DirectReturn, ErrorReturn, Payload, ValueReturn
from ...protocol.process_frames import PAYLOAD_MAX, TAIL
from ...protocol.value import encode_value

_output = -1  # the file that holds what functions print; a function may close descriptors 1 and 2


class Untrusted(Exception):
    """The result can travel only as a pickle, which the caller has not allowed."""


def unpickled_function(pickled: bytes) -> Callable[..., Any]:
    """Returns the function that a client has pickled."""
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def call_function(function: Callable[..., Any], arguments: bytes, pickled: bool) -> Payload:
    """Calls a function, and waits for its coroutine if it returns one.

    Args:
        function: the function.
        arguments: the pickle of (args, kwargs).
        pickled: whether the result may travel as a pickle.

    Returns:
        What the function returned.

    Raises:
        Untrusted: only a pickle can carry the result, and it may not be one.
        OverflowError: the result is too large.
        BaseException: whatever the function raises.
    """
    process = os.getpid()
    try:
        args, kwargs = pickle.loads(arguments)
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
    except BaseException as error:
        if os.getpid() != process:
            _end_forked_child(error)
        raise
    if os.getpid() != process:
        _end_forked_child(None)
    if isinstance(result, DirectReturn):
        return result
    value = _pack(result, pickled)
    if len(value.data) > PAYLOAD_MAX:
        raise OverflowError(f"a result of {len(value.data)} bytes is too large; return a path")
    return value


def _end_forked_child(error: BaseException | None) -> NoReturn:
    """Ends a child that the function has forked and that has left the function, with the exit
    status that a Python program would have. Only the parent may answer: the child has inherited
    the worker's socket, and its answer would be taken for the function's.
    """
    code: object = None if error is None else 1
    try:
        if isinstance(error, SystemExit):
            code = error.code
        elif error is not None:
            traceback.print_exception(type(error), error, _from_users_code(error))
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        _flush_streams()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else code is not None)


def failure_of(error: BaseException) -> tuple[ErrorReturn, str]:
    """Returns what the client is told of an exception, with the end of the function's output; and
    one line for the accounting.
    """
    kind = "UntrustedResult" if isinstance(error, Untrusted) else type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__
        text = "(its text cannot be made)"
    trace = "" if isinstance(error, Untrusted) else _trace(error)
    if tail := _output_tail():
        trace += f"\n--- the end of its output ---\n{tail}"
    kind, text, trace = map(_tellable, (kind, text, trace))
    reason = f"{kind}: {text}".splitlines()[0][:200]
    return ErrorReturn(kind, text[: 1 << 16], trace[-(1 << 16) :]), reason


def print_into(path: str) -> None:
    """From now on, what this process prints goes to the file `path`, which is made."""
    global _output
    _output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for fd in (1, 2):
        os.dup2(_output, fd)


def forget_output() -> None:
    """Empties the file that holds what functions print."""
    _flush_streams()
    if os.lseek(_output, 0, os.SEEK_END):
        os.ftruncate(_output, 0)


def _output_tail() -> str:
    _flush_streams()
    size = os.fstat(_output).st_size
    return os.pread(_output, TAIL, max(0, size - TAIL)).decode(errors="replace")


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # each call of a function comes here, and `contextlib.suppress` takes as long again
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _tellable(text: str) -> str:
    """Makes text valid for a message. A file name, for example, need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _pack(result: Any, pickled: bool) -> ValueReturn:
    try:
        return ValueReturn(encode_value(result))
    except TypeError as error:
        if not pickled:
            raise Untrusted(
                f"the result holds a {error}, which only a pickle can carry; return plain values "
                "or arrays, or submit with trusted=True"
            ) from None
    return ValueReturn(cloudpickle.dumps(result), True)


def _from_users_code(error: BaseException) -> types.TracebackType | None:
    """The traceback from the user's code on: what calls a function is no part of it."""
    frames, last = error.__traceback__, error.__traceback__
    while last is not None:
        if last.tb_frame.f_code.co_filename == __file__:
            frames = last.tb_next
        last = last.tb_next
    return frames


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _from_users_code(error)))
