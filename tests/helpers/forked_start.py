"""Starts of `python -m tangram_hpc` without the start of Python: a process that has imported the
package forks for each of them.

A broker's or a worker's imports take 0.4 s of CPU, and the tests start hundreds of them. `install`
puts a subclass in the place of `subprocess.Popen`. For the command `tangram`, and for a `Script`,
it asks a server to fork. Every other command starts as ever. The new process is a child of the
process that asked, as the server passes CLONE_PARENT; so `wait`, `kill` and `returncode` are
Popen's own. It has the arguments, the environment, the directory, the streams and the descriptors
that it was given.

What a fork cannot show: how a start goes, which modules it imports, and what /proc says of the
environment. An import cycle that fails only if a certain verb is entered first stays hidden, as the
server has imported most modules before. So does what the interpreter's finalization does besides
exit functions and streams, such as a finalizer that fails. Files with such tests are in
`REAL_STARTS` of tests/conftest.py. A process that would inherit other limits, users, namespaces or
variables of Python than the server has is started for real.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tangram_hpc.sandbox import environment

from . import forking, kept_probe
from .surroundings import surroundings

TESTS = Path(__file__).resolve().parents[1]
IMPORTED = ("asyncio", "concurrent.futures", "cryptography.x509", "tangram_hpc.app.local",
            "tangram_hpc.app.broker_process.serve_broker", "tangram_hpc.app.worker",
            "tangram_hpc.accounting.record", "tangram_hpc.cli.broker", "tangram_hpc.cli.worker",
            "tangram_hpc.cli.views.acct_verb", "tangram_hpc.client", "tangram_hpc.config.settings",
            "tangram_hpc.http_api.app", "tangram_hpc.http_api.e2b.sandboxes",
            "tangram_hpc.http_api.server", "tangram_hpc.worker.driver")
FDS_MAX = forking.FDS_MAX
_CLONE = forking.CLONE
_WORDS_MAX = 1000  # bytes of a command line that /proc can show
_MAIN = str(TESTS.parent / "tangram_hpc" / "__main__.py")
_TANGRAM = str(Path(sys.executable).with_name("tangram"))
_FORK_SERVER = [sys.executable, "-m", "tangram_hpc.sandbox.process.fork_server"]
# Variables that Python, the C library or the loader reads at a start only.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "COVERAGE_")
_START = subprocess.Popen


class Script(str):
    """The path of a Python program that may be run by a fork: `[sys.executable, Script(path)]`. The
    commands `tangram` that the program starts are forks too."""


class Server:
    """The client's side of one process that forks.

    Attributes:
        owner: the process whose children its forks are. A fork of that process has no use for it.
        requests: the socket to it.
        surroundings: what this process could hand on to children when the server was started.
        variables: the variables of `_READ_AT_START` that the server was started with.
        lock: held for one request and its answer.
    """

    def __init__(self, requests: socket.socket, environ: Mapping[Any, Any] = os.environ) -> None:
        self.owner = os.getpid()
        self.requests = requests
        self.surroundings = surroundings()
        self.variables = _at_start(environ)
        self.lock = threading.Lock()

    def is_like(self, environ: Mapping[Any, Any]) -> bool:
        """Whether a fork is what a start with this environment by this process would be."""
        return (self.owner == os.getpid() and self.variables == _at_start(environ)
                and self.surroundings == surroundings())

    def fork(self, request: Sequence[Any], fds: Sequence[int]) -> int:
        """Returns the process id of a new child of this process."""
        with self.lock:
            socket.send_fds(self.requests, [json.dumps(request).encode()], fds)
            return int(self.requests.recv(64))


class ForkingPopen(_START):  # type: ignore[type-arg,misc,valid-type]
    """`subprocess.Popen` that asks the server for what it can fork."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool,
                       pass_fds: Sequence[int], cwd: Any, env: Any, *rest: Any) -> None:
        # rest: two of Windows, shell, six ends of pipes, restore_signals, three ids, umask,
        # start_new_session and, from Python 3.11 on, process_group
        shell, (stdin, _, _, stdout, _, stderr) = rest[2], rest[3:9]
        *ids, umask, session = rest[10:15]
        server, start = None, _wanted(args)
        if start and close_fds and umask < 0 and ids == [None] * 3 and (
                not (executable or preexec_fn or shell) and rest[15:] in ((), (-1,))
                and len(pass_fds) <= FDS_MAX - 3):
            environ = os.environ if env is None else env
            server = (_fork_server_for(environ) if start[1][:3] == _FORK_SERVER
                      else _server_for(environ))
        if server is None or start is None:
            return super()._execute_child(  # type: ignore[misc,no-any-return]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        environ = {os.fsdecode(key): os.fsdecode(value)
                   for key, value in (os.environ if env is None else env).items()}
        folder = os.path.join(os.getcwd(), os.fsdecode(cwd or ""))
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        streams = [at if fd == -1 else fd for at, fd in enumerate((stdin, stdout, stderr))]
        request = start[1:] if start[1][:3] == _FORK_SERVER else start
        self.pid = server.fork([*request, environ, folder, bool(session), list(pass_fds)],
                               [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])  # type: ignore[attr-defined]


def install() -> None:
    """Lets this process start the command `tangram`, and the fork servers of its own executors, by
    forks from now on."""
    global _fork_servers
    if _CLONE is not None:
        if _fork_servers is None and threading.current_thread() is threading.main_thread():
            # A fork server gets a signal when the thread ends that started the process it is a fork
            # of. So this is the main thread, and not the one that an executor lives in.
            _fork_servers = _started_for_fork_servers()
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        kept_probe.install(_folder())


def uninstall() -> None:
    """Lets this process start everything for real again."""
    subprocess.Popen = _START  # type: ignore[misc]
    kept_probe.uninstall()


def _folder() -> str:
    """The folder of the kept reports of a runtime; it ends with the process that made it."""
    global _reports
    if not _reports:
        folder = tempfile.TemporaryDirectory(prefix="tangram-probed-")
        atexit.register(folder.cleanup)
        _reports = folder.name
    return _reports


def _at_start(environ: Mapping[Any, Any]) -> dict[str, str]:
    words = {os.fsdecode(key): os.fsdecode(value) for key, value in environ.items()}
    return {key: value for key, value in words.items() if key.startswith(_READ_AT_START)}


def _wanted(args: Any) -> tuple[bool, list[str], list[str]] | None:
    """Returns whether the program is a script, its command line, and its `sys.argv`; None if no
    fork can do it."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [word if isinstance(word, Script) else os.fsdecode(word) for word in args]
    if words[:1] == [sys.executable] and isinstance(words[1] if words[1:] else None, Script):
        return True, words, [os.path.abspath(words[1]), *words[2:]]
    for start, program in (([sys.executable, "-m", "tangram_hpc"], _MAIN), ([_TANGRAM], _TANGRAM),
                           (_FORK_SERVER, _FORK_SERVER[2])):
        if words[:len(start)] == start:
            return False, words, [program, *words[len(start):]]
    return None


# ---- the server, as the process that uses it sees it ---------------------------------------------

_server: Server | None = None
_fork_servers: Server | None = None
_reports = ""
_starting = threading.Lock()


def _server_for(environ: Mapping[Any, Any]) -> Server | None:
    """Returns the server, or None if a process with this environment must start for real."""
    global _server
    with _starting:
        if _server is None:
            _server = _started()
    return _server if _server.is_like(environ) else None


def _fork_server_for(environ: Mapping[Any, Any]) -> Server | None:
    """The same for a fork server. There is none in a fork, which is a worker: its fork server must
    be its child, and a fork of this server would be a child of the worker's parent."""
    return _fork_servers if _fork_servers and _fork_servers.is_like(environ) else None


def _started() -> Server:
    return Server(_server_process("from helpers import forked_start as server",
                                  f"serve({{}}, {_folder()!r})", None))


def _started_for_fork_servers() -> Server:
    environ = environment.for_child_processes(os.environ)
    return Server(_server_process("from helpers import forking as server",
                                  "serve_fork_servers({})", environ), environ)


def _server_process(imported: str, call: str, environ: dict[str, str] | None) -> socket.socket:
    """Starts a server; returns the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); {imported}; del sys.path[0]; " \
        f"server.{call.format(theirs.fileno())}  #{' ' * _WORDS_MAX}"
    child = _START([sys.executable, "-c", program], stdin=subprocess.DEVNULL, cwd="/",
                   stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environ)
    theirs.close()
    atexit.register(child.wait)
    atexit.register(ours.close)  # the last that is registered is called first
    return ours


def _fork_server() -> None:
    """Gives this process, which is a fork itself, a server of its own."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for at in range(3):  # who reads this process's output waits for its end, not the server's
            os.dup2(null, at)
        serve(theirs.detach(), _reports)
        os._exit(0)
    theirs.close()
    _server = Server(ours)
    install()


# ---- the server itself ---------------------------------------------------------------------------


def serve(number: int, reports: str) -> None:
    """Imports the package, and becomes a command for each request."""
    global _reports
    _reports = reports
    for name in IMPORTED:
        importlib.import_module(name)
    kept_probe.install(reports)
    forking.serve(number, _run)


def _run(fds: list[int], is_script: bool, words: list[str], argv: list[str],
         environ: dict[str, str], folder: str, session: bool, kept: list[int]) -> None:
    """Becomes the command; never returns."""
    def command() -> int:
        forking.become(fds, kept, words, argv, environ, folder, session)
        return _script(argv[0]) if is_script else _tangram()
    forking.run(command)


def _tangram() -> int:
    from tangram_hpc.cli import main
    if sys.argv[1:2] == ["demo"]:  # it starts clusters
        _fork_server()
    return main()


def _script(path: str) -> int:
    _fork_server()
    sys.path[0] = os.path.dirname(path)  # as after `python SCRIPT`; else it is the directory
    runpy.run_path(path, run_name="__main__")
    return 0
