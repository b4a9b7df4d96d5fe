"""The side of a server that forks: it takes requests from a socket, and each fork becomes a command
in the place of a start of Python.

This module imports little, since every process that is forked carries it: the memory of the
sandboxes is measured, and they are forks of a fork (`forked_start.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

REQUEST_MAX = 1 << 17  # bytes of a request: the words and the environment
FDS_MAX = 32
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_arguments: tuple[int, int] | None = None


def serve(number: int, run: Callable[..., None]) -> None:
    """Forks for each request until the other end of the socket is closed.

    Args:
        number: the descriptor of the socket.
        run: called in the fork with the descriptors and the parts of the request; never returns.
    """
    global _arguments
    _arguments = _arguments or _arguments_memory()
    gc.collect()
    gc.freeze()  # no collection in a child touches, and so copies, what was imported here
    with socket.socket(fileno=number) as requests:
        while True:
            packet, fds, _, _ = socket.recv_fds(requests, REQUEST_MAX, FDS_MAX)
            if not packet:
                return
            child = _clone()
            if child == 0:
                run(fds, *json.loads(packet))
            for each in fds:
                os.close(each)
            requests.send(str(child).encode())


def _clone() -> int:
    """Forks, so that the child's parent is the parent of this process. This process has one
    thread. Python has no call for it, so the steps are those of `os.fork`."""
    calls, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(calls.syscall(CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def become(fds: list[int], kept: list[int], words: list[str], argv: list[str],
           environ: dict[str, str], folder: str, session: bool) -> None:
    """Gives this fork what a start would have given it: descriptors, words, directory, variables.
    """
    if session:
        os.setsid()
    _place(fds, [0, 1, 2, *kept])
    _show(words)
    for stream, at in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.reconfigure(line_buffering=at == 2 or os.isatty(at))  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir, sys.argv = None, argv  # TMPDIR may be another one now


def run(command: Callable[[], int]) -> None:
    """Runs the command of this fork, and ends as the interpreter does; never returns."""
    status = 1
    try:
        status = command()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - the outermost call of this process
        traceback.print_exc()
    finally:
        _end(status)


def _place(fds: list[int], places: list[int]) -> None:
    """Gives the received descriptors their numbers, and closes all others."""
    above = max([*fds, *places]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd, place in zip(moved, places, strict=True):
        os.dup2(fd, place)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in places:
            with contextlib.suppress(OSError):  # the one that listed them is closed already
                os.close(fd)


def _arguments_memory() -> tuple[int, int]:
    """Where the kernel finds this process's command line: fields 48 and 49 of proc(5)'s stat."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])


def _show(words: list[str]) -> None:
    """Lets /proc show these words as the command line, if they fit; zeros follow them."""
    assert _arguments is not None
    begin, end = _arguments
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if begin and len(text) <= end - begin:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _end(status: int) -> None:
    """Ends as the interpreter does: threads, exit functions, streams."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        import atexit
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - nobody is left to catch it
        status = status or 120  # as the interpreter's
        traceback.print_exc()
    finally:
        os._exit(status)


# ---- the fork server of an executor --------------------------------------------------------------


def serve_fork_servers(number: int) -> None:
    """Becomes a fork server of an executor (`sandbox/process/fork_server.py`) for each request. So
    this process has imported what a fork server has, this module, and no more."""
    from tangram_hpc.sandbox.process import fork_server

    def fork(fds: list[int], words: list[str], argv: list[str], environ: dict[str, str],
             folder: str, session: bool, kept: list[int]) -> None:
        def command() -> Any:
            become(fds, kept, words, argv, environ, folder, session)
            sys.path[0] = folder  # as after `python -m`
            fork_server.main()
            return 0
        run(command)

    serve(number, fork)
