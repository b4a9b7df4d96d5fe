"""`tangram` commands without the start of Python: a process that has imported the package forks for
each of them.

A start of `python -m tangram_hpc` imports for 0.2 to 0.6 s of CPU, and most tests of a verb ask
what it prints and with which status it ends. Here each command is a process of its own too, with
the environment, the directory and the three streams that it is given. What it does not show is how
a start goes: tests that judge imports, Python's options or signals at a start use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
REQUEST_MAX = 1 << 17  # bytes of a request: the words and the environment
IMPORTED = ("asyncio", "concurrent.futures", "cryptography.x509", "tangram_hpc.app.local",
            "tangram_hpc.client", "tangram_hpc.cli.views.acct_verb", "tangram_hpc.config.settings",
            "tangram_hpc.accounting.record", "tangram_hpc.app.broker_process.serve_broker")
_lock = threading.Lock()


def tangram(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None,
            check: bool = False, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs one command of `tangram` to its end, as `subprocess.run` does, with an empty stdin."""
    args = [str(word) for word in words]
    request = json.dumps([args, dict(os.environ if env is None else env), str(cwd or Path.cwd())])
    with contextlib.ExitStack() as files:
        streams: list[IO[Any]] = [files.enter_context(open(os.devnull))]
        streams += [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        with _lock:
            server = _server()
            socket.send_fds(server, [request.encode()], [file.fileno() for file in streams])
            child = int(server.recv(64))
            server.settimeout(timeout)
            try:
                status = int(server.recv(64))
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                server.settimeout(None)
                server.recv(64)
                raise subprocess.TimeoutExpired(args, timeout) from None
            server.settimeout(None)
        out, err = (_text(file) for file in streams[1:])
    done = subprocess.CompletedProcess(["tangram", *args], status, out, err)
    if check:
        done.check_returncode()
    return done


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


@functools.cache
def _server() -> socket.socket:
    """The socket to this process's server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); " \
        f"from helpers import forked_verb; forked_verb.serve({theirs.fileno()})"
    child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(child.wait)
    atexit.register(ours.close)  # the last that is registered is called first
    return ours


def serve(number: int) -> None:
    """Forks for each request until the other end of the socket is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=number) as requests:
        while True:
            packet, streams, _, _ = socket.recv_fds(requests, REQUEST_MAX, 3)
            if not packet:
                return
            child = os.fork()
            if child == 0:
                requests.close()
                _run(*json.loads(packet), streams)
            for each in streams:
                os.close(each)
            requests.send(str(child).encode())
            _, status = os.waitpid(child, 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(words: list[str], environ: dict[str, str], folder: str, streams: list[int]) -> None:
    """Becomes the command; never returns."""
    status = 1
    try:
        for at, each in enumerate(streams):
            os.dup2(each, at)
            os.close(each)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = ["tangram", *words]
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(at, mode) for at, mode in enumerate("rww"))
        from tangram_hpc.cli import main
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the outermost loop of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
