"""Works on the files of an image as root of a user namespace with several users.

Only such a process can give files to the users of an image. A namespace can be made only by a
process that has one thread and is not confined, but a pull confines itself and has two threads. So
the namespace is made before, and a child process enters it for each piece of work. The child
returns its result as JSON and not pickled, because it has read an image that is not trusted.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..sandbox import user_namespace
from ..sandbox.user_namespace import NoRange, UserMap
from .image_errors import ImageRefused, ImageUnavailable

_REFUSED, _UNAVAILABLE = "refused", "unavailable"
_PIECE = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


@lru_cache(maxsize=1)
def users() -> UserMap | None:
    """Returns the users whose files images may have on this node; None where all files of an image
    belong to this process's user. Blocks for some 50 ms once."""
    try:
        found = user_namespace.several()
    except NoRange:
        return None
    # `namespace` forks, which a worker with its threads must not do; a worker that is root does not
    # call this function
    there = namespace(found) >= 0 if os.geteuid() == 0 else user_namespace.works(found)
    return found if there else None


@lru_cache(maxsize=1)
def namespace(of: UserMap) -> int:
    """Returns a descriptor of a user namespace with these users; -1 where none can be made. Call it
    before this process starts threads or confines itself."""
    ready, tells = os.pipe2(os.O_CLOEXEC)
    anchor = os.fork()
    if anchor == 0:
        try:
            user_namespace.enter(of)
            os.write(tells, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tells)
    try:
        if not os.read(ready, 1):
            return -1
        return os.open(f"/proc/{anchor}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.kill(anchor, signal.SIGKILL)
        os.waitpid(anchor, 0)


def as_root(work: Callable[[], Any]) -> Any:
    """Calls `work` in a child process that is root of the namespace of `users`; where `users` is
    None, calls it in this process. What `work` returns must be representable in JSON.

    Raises:
        ImageRefused: `work` has raised it.
        ImageUnavailable: `work` has raised it or an OSError, or the child process died.
    """
    of = users()
    if of is None:
        return work()
    fd = namespace(of)
    if fd < 0:
        raise ImageUnavailable("image: no user namespace can be made to unpack it")
    into, out = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(into)
        try:
            answer = _answer(fd, work)
            with open(out, "wb") as file:
                file.write(json.dumps(answer).encode(errors="backslashreplace"))
        finally:
            os._exit(0)
    os.close(out)
    try:
        with open(into, "rb") as file:
            text = file.read()
    except BaseException:  # as of ^C: the child would fill the folder that is removed next
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    if not text:
        raise ImageUnavailable("image: the process that unpacks it died")
    kind, value = json.loads(text)
    if kind == _REFUSED:
        raise ImageRefused(value)
    if kind == _UNAVAILABLE:
        raise ImageUnavailable(value)
    return value


def _answer(fd: int, work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        if _libc.setns(fd, user_namespace.NEW_USER) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"user namespace: {os.strerror(code)}")
        user_namespace.become_root()
        return "", work()
    except ImageRefused as error:
        return _REFUSED, str(error)
    except ImageUnavailable as error:
        return _UNAVAILABLE, str(error)
    except OSError as error:
        return _UNAVAILABLE, f"image: {error}"
