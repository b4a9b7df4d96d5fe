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
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tangram_hpc.start_module import module_command

from . import kept_probe
from .surroundings import surroundings

TESTS = Path(__file__).resolve().parents[1]
IMPORTED = ("asyncio", "concurrent.futures", "cryptography.x509", "tangram_hpc.app.local",
            "tangram_hpc.app.broker_process.serve_broker", "tangram_hpc.app.worker",
            "tangram_hpc.accounting.record", "tangram_hpc.cli.broker", "tangram_hpc.cli.worker",
            "tangram_hpc.cli.views.acct_verb", "tangram_hpc.client", "tangram_hpc.config.settings",
            "tangram_hpc.http_api.app", "tangram_hpc.http_api.e2b.sandboxes",
            "tangram_hpc.http_api.server", "tangram_hpc.worker.driver")
REQUEST_MAX = 1 << 17  # bytes of a request: the words and the environment
FDS_MAX = 32
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_WORDS_MAX = 1000  # bytes of a command line that /proc can show
_MAIN = str(TESTS.parent / "tangram_hpc" / "__main__.py")
_TANGRAM = str(Path(sys.executable).with_name("tangram"))
# Variables that Python, the C library or the loader reads at a start only.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "COVERAGE_")
_START = subprocess.Popen


class Script(str):
    """The path of a Python program that may be run by a fork: `[sys.executable, Script(path)]`. The
    commands `tangram` that the program starts are forks too."""


class Server:
    """The client's side of one process that forks.

    Attributes:
        pid: its process.
        owner: the process whose children its forks are. A fork of that process has no use for it.
        requests: the socket to it.
        surroundings: what this process could hand on to children when the server was started.
        variables: the variables of `_READ_AT_START` that the server was started with.
        lock: held for one request and its answer.
    """

    def __init__(self, requests: socket.socket, pid: int) -> None:
        self.pid, self.owner = pid, os.getpid()
        self.requests = requests
        self.surroundings = surroundings()
        self.variables = _at_start(os.environ)
        self.lock = threading.Lock()

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
        server = None
        if (start := _wanted(args)) and close_fds and umask < 0 and ids == [None] * 3 and (
                not (executable or preexec_fn or shell) and rest[15:] in ((), (-1,))
                and len(pass_fds) <= FDS_MAX - 3):
            server = _server_for(os.environ if env is None else env)
        if server is None or start is None:
            return super()._execute_child(  # type: ignore[misc,no-any-return]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        environ = _texts(os.environ if env is None else env)
        folder = os.path.join(os.getcwd(), os.fsdecode(cwd or ""))
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        streams = [at if fd == -1 else fd for at, fd in enumerate((stdin, stdout, stderr))]
        self.pid = server.fork([*start, environ, folder, bool(session), list(pass_fds)],
                               [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])  # type: ignore[attr-defined]


def install() -> None:
    """Lets this process start the command `tangram` by forks from now on."""
    if _CLONE is not None:
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        kept_probe.install(_folder())


def uninstall() -> None:
    """Lets this process start everything for real again."""
    subprocess.Popen = _START  # type: ignore[misc]
    kept_probe.uninstall()


def server_processes() -> set[int]:
    """The pid of this process's fork server, which lives until this process ends; empty before its
    first use."""
    return set() if _server is None else {_server.pid}


def _folder() -> str:
    """The folder of the kept reports of a runtime; it ends with the process that made it."""
    global _reports
    if not _reports:
        folder = tempfile.TemporaryDirectory(prefix="tangram-probed-")
        atexit.register(folder.cleanup)
        _reports = folder.name
    return _reports


def _at_start(environ: Mapping[Any, Any]) -> dict[str, str]:
    return {key: value for key, value in _texts(environ).items() if key.startswith(_READ_AT_START)}


def _texts(environ: Mapping[Any, Any]) -> dict[str, str]:
    """The environment as texts. pytest changes its own between two tests, while a thread of a
    cluster may start a process, so a variable may be gone when its turn comes.
    """
    return {os.fsdecode(key): os.fsdecode(value) for key in list(environ)
            if (value := environ.get(key)) is not None}


def _wanted(args: Any) -> tuple[bool, list[str], list[str]] | None:
    """Returns whether the program is a script, its command line, and its `sys.argv`; None if no
    fork can do it."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [word if isinstance(word, Script) else os.fsdecode(word) for word in args]
    if words[:1] == [sys.executable] and isinstance(words[1] if words[1:] else None, Script):
        return True, words, [os.path.abspath(words[1]), *words[2:]]
    for start, program in (([sys.executable, "-m", "tangram_hpc"], _MAIN),
                           (module_command("tangram_hpc"), _MAIN), ([_TANGRAM], _TANGRAM)):
        if words[:len(start)] == start:
            return False, words, [program, *words[len(start):]]
    return None


# ---- the server, as the process that uses it sees it ---------------------------------------------

_server: Server | None = None
_reports = ""
_arguments: tuple[int, int] | None = None
_starting = threading.Lock()


def _server_for(environ: Mapping[Any, Any]) -> Server | None:
    """Returns the server, or None if a process with this environment must start for real."""
    global _server
    with _starting:
        if _server is None:
            _server = _started()
    same = (_server.owner == os.getpid() and _server.variables == _at_start(environ)
            and _server.surroundings == surroundings())
    return _server if same else None


def _started() -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r}); " \
        f"from helpers import forked_start; del sys.path[0]; " \
        f"forked_start.serve({theirs.fileno()}, {_folder()!r})  #{' ' * _WORDS_MAX}"
    child = _START([sys.executable, "-c", program], stdin=subprocess.DEVNULL, cwd="/",
                   stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(child.wait)
    atexit.register(ours.close)  # the last that is registered is called first
    return Server(ours, child.pid)


def _fork_server() -> None:
    """Gives this process, which is a fork itself, a server of its own."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for at in range(3):  # who reads this process's output waits for its end, not the server's
            os.dup2(null, at)
        serve(theirs.detach(), _reports)
        os._exit(0)
    theirs.close()
    _server = Server(ours, pid)
    install()


# ---- the server itself ---------------------------------------------------------------------------


def serve(number: int, reports: str) -> None:
    """Forks for each request until the other end of the socket is closed."""
    global _arguments, _reports
    _arguments, _reports = _arguments or _arguments_memory(), reports
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:  # an extra that is not installed
            if missing.name is None or missing.name.startswith("tangram_hpc"):
                raise
    kept_probe.install(reports)
    gc.collect()
    gc.freeze()  # no collection in a child touches, and so copies, what was imported here
    with socket.socket(fileno=number) as requests:
        while True:
            packet, fds, _, _ = socket.recv_fds(requests, REQUEST_MAX, FDS_MAX)
            if not packet:
                return
            child = _clone()
            if child == 0:
                _run(fds, *json.loads(packet))
            for each in fds:
                os.close(each)
            requests.send(str(child).encode())


def _clone() -> int:
    """Forks, so that the child's parent is the parent of this process. This process has one
    thread. Python has no call for it, so the steps are those of `os.fork`."""
    calls, python = ctypes.PyDLL(None, use_errno=True), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(calls.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _run(fds: list[int], is_script: bool, words: list[str], argv: list[str],
         environ: dict[str, str], folder: str, session: bool, kept: list[int]) -> None:
    """Becomes the command; never returns."""
    status = 1
    try:
        if session:
            os.setsid()
        _place(fds, [0, 1, 2, *kept])
        _show(words)
        # new ones: a stream remembers of its descriptor whether that can seek, as the server's can
        sys.stdout, sys.stderr = (
            os.fdopen(at, "w", 1 if at == 2 or os.isatty(at) else -1, stream.encoding,
                      stream.errors, closefd=False)
            for stream, at in ((sys.stdout, 1), (sys.stderr, 2)))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir, sys.argv = None, argv  # TMPDIR may be another one now
        status = _script(argv[0]) if is_script else _tangram()
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
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])


def _show(words: list[str]) -> None:
    """Lets /proc show these words as the command line, if they fit; zeros follow them."""
    assert _arguments is not None
    begin, end = _arguments
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if begin and len(text) <= end - begin:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


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


def _end(status: int) -> None:
    """Ends as the interpreter does: threads, exit functions, streams."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - nobody is left to catch it
        status = status or 120  # as the interpreter's
        traceback.print_exc()
    finally:
        os._exit(status)
