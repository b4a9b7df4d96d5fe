"""A Python interpreter that keeps its variables between calls, and the calls. A program of its own.

The server hands this text to `python3 -c` in a sandbox, so it uses the standard library alone, from
Python 3.8 on. `run` makes one call: it prints a line of JSON for each event, and starts the kernel
if it does not live. Its end, for whatever reason, interrupts the code that it asked for.

A context is one kernel, with a folder: the file `alive` is locked while the kernel lives, the pipe
`calls` takes the names of calls, `CALL.json` holds what a call asks for, and `CALL` is the pipe of
its events. Pipes and files are all it needs: not every sandbox permits sockets.
"""

from __future__ import annotations

import ast
import base64
import builtins
import codecs
import fcntl
import json
import linecache
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

DEFAULT = "default"  # the context of calls that name none; it is made when it is needed
REFUSED, UNKNOWN = 3, 4  # exit statuses: for a directory, and for a context, that is not there
NAME = 32  # the length of a call's name, which a pipe takes whole
STARTS_MAX = 3  # kernels that a call starts, if each ends before it takes the call
END = b'{"type": "end_of_execution"}\n'
GRACE_S = 2.0  # code that is interrupted and goes on for longer ends with its kernel
LOOK_S = 0.2  # between two looks whether a kernel lives that has not taken a call
DRAIN_S = 2.0  # the longest wait for output that programs have left in the pipes
AWAIT = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
COROUTINE = 0x80  # inspect.CO_COROUTINE
SHELL_LINE = re.compile(r"^([ \t]*)(!|%(?=pip\b))(.*)$", re.MULTILINE)
FORMATS = {"html": "_repr_html_", "markdown": "_repr_markdown_", "svg": "_repr_svg_",
           "png": "_repr_png_", "jpeg": "_repr_jpeg_", "pdf": "_repr_pdf_",
           "latex": "_repr_latex_", "json": "_repr_json_", "javascript": "_repr_javascript_"}
NO_METHOD = "_ipython_canary_method_should_not_exist_"  # who has it has all, such as a mock


class Events:
    """Where the events of the call that runs go; nowhere while none runs."""

    def __init__(self) -> None:
        self._lock, self._fd = threading.Lock(), -1

    def begin(self, fd: int) -> None:
        """Sends what follows to a call's pipe."""
        self._fd = fd

    def end(self) -> None:
        """Sends what follows nowhere."""
        with self._lock:
            fd, self._fd = self._fd, -1
        os.close(fd)

    def leave(self) -> None:
        """Does the same in a process that the code has forked."""
        self._lock = threading.Lock()
        if self._fd >= 0:
            self.end()

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends one event."""
        line = (json.dumps({"type": kind, **fields}) + "\n").encode()
        with self._lock:
            while line and self._fd >= 0:
                try:
                    line = line[os.write(self._fd, line):]
                except OSError:  # the caller has gone
                    return


class CapturedStream:
    """Turns what is written to one of the descriptors 1 and 2 into events, whoever writes it."""

    def __init__(self, fd: int, name: str, events: Events) -> None:
        self._fd, self._name, self._events = fd, name, events
        self._mark = b"\0%s\0" % os.urandom(16).hex().encode()
        self._drained = threading.Event()
        self._read, self._end = os.pipe()
        self.file: TextIO | None = None
        threading.Thread(target=self._pass_on, daemon=True).start()

    def begin(self) -> TextIO:
        """Returns the file for `sys`, as new if earlier code has closed it."""
        os.dup2(self._end, self._fd)  # programs that the code starts inherit this one
        if self.file is None or self.file.closed:
            self.file = open(  # noqa: SIM115 - it lives as long as the kernel
                self._fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        return self.file

    def drain(self) -> None:
        """Returns when all that was written before is told."""
        self._drained.clear()
        with suppress(OSError, ValueError):  # the code has closed it
            assert self.file is not None
            self.file.flush()
        os.write(self._end, self._mark)
        self._drained.wait(DRAIN_S)

    def _pass_on(self) -> None:
        text, held = codecs.getincrementaldecoder("utf-8")("replace"), b""
        while True:
            held += os.read(self._read, 1 << 16)
            while True:
                before, mark, after = held.partition(self._mark)
                if not mark:
                    break
                self._tell(text.decode(before, True))
                text.reset()
                held = after
                self._drained.set()
            keep = max(n for n in range(len(self._mark)) if held.endswith(self._mark[:n]))
            self._tell(text.decode(held[:len(held) - keep]))
            held = held[len(held) - keep:]

    def _tell(self, text: str) -> None:
        if text:
            self._events.tell(self._name, text=text, timestamp=time.time_ns())


class Kernel:
    """Runs code, one call after the other, in one namespace."""

    def __init__(self) -> None:
        self._events, self._count, self._running = Events(), 0, False
        self._pid = os.getpid()
        self._loop: Any = None  # of asyncio, which is imported when code awaits
        self._done, self._wake = os.pipe()
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._outputs = [CapturedStream(1, "stdout", self._events),
                         CapturedStream(2, "stderr", self._events)]
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, display=self._display)
        sys.modules["__main__"], self._names, sys.argv = main, main.__dict__, [""]
        os.register_at_fork(after_in_child=self._events.leave)
        signal.signal(signal.SIGINT, self._interrupted)

    def serve(self, calls: int, folder: str) -> None:
        """Carries out calls for ever.

        Args:
            calls: the descriptor of the pipe of their names.
            folder: the context's folder.
        """
        while True:
            path = os.path.join(folder, os.read(calls, NAME).decode())
            self._open_streams()  # before another file gets the number of one that is closed
            try:
                with open(path + ".json") as file:
                    asked = json.load(file)
                out = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails if its reader has gone
            except (OSError, ValueError):
                continue
            finally:
                forget(path)
            os.set_blocking(out, True)
            self._call(out, asked)

    def _open_streams(self) -> None:
        os.dup2(self._null, 0)
        sys.stdout, sys.stderr = (output.begin() for output in self._outputs)
        if sys.stdin is None or sys.stdin.closed:  # `exit` closes it
            sys.stdin = open(os.devnull)  # noqa: SIM115 - it lives as long as the kernel

    def _call(self, out: int, asked: dict[str, Any]) -> None:
        watch = threading.Thread(target=self._watch, args=(out,), daemon=True)
        self._events.begin(out)
        watch.start()
        self._run(asked["code"], asked["envs"])
        os.write(self._wake, b"x")
        watch.join()
        os.read(self._done, 1)
        self._events.end()

    def _watch(self, out: int) -> None:
        """Interrupts the code when its caller has gone, and ends a kernel whose code goes on."""
        caller, done = select.poll(), select.poll()
        caller.register(out, 0)
        for each in (caller, done):
            each.register(self._done, select.POLLIN)
        caller.poll()
        if not done.poll(0):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not done.poll(GRACE_S * 1000):
                os._exit(1)

    def _interrupted(self, number: int, frame: object) -> None:
        if self._running:
            raise KeyboardInterrupt

    def _run(self, code: str, envs: dict[str, str]) -> None:
        self._count += 1
        self._events.tell("number_of_executions", execution_count=self._count)
        before: dict[str, str | None] = {}
        error = None
        try:
            before = {name: os.environ.get(name) for name in envs}
            os.environ.update(envs)
            self._running = True
            try:
                self._cell(code, f"<cell {self._count}>")
            finally:
                self._running = False
        except BaseException as raised:  # noqa: BLE001 - the code may raise anything
            error = raised
        if os.getpid() != self._pid:
            end_forked(error)
        self._drain()
        if error is not None:
            self._events.tell("error", name=type(error).__name__, value=message(error),
                              traceback=told(error))
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._events.tell("end_of_execution")

    def _drain(self) -> None:
        for output in self._outputs:
            output.drain()

    def _cell(self, code: str, name: str) -> None:
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        tree = parsed(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        # by the last argument this program's own __future__ does not hold for the code
        self._do(compile(tree, name, "exec", AWAIT, True))
        if isinstance(last, ast.Expr):
            value = self._do(compile(ast.Expression(last.value), name, "eval", AWAIT, True))
            if value is not None:
                self._names["_"] = value
                self._show(value, True)

    def _do(self, code: types.CodeType) -> Any:
        value = eval(code, self._names)
        if code.co_flags & COROUTINE:
            import asyncio

            self._loop = self._loop or asyncio.new_event_loop()
            task = self._loop.create_task(value)
            try:
                value = self._loop.run_until_complete(task)
            except BaseException:
                if not task.done():  # else it would go on when a later call awaits
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        self._loop.run_until_complete(task)
                raise
        return value

    def _display(self, *values: Any) -> None:
        """Shows values, as the function of this name in a notebook."""
        for value in values:
            self._show(value, False)

    def _show(self, value: Any, is_main: bool) -> None:
        shown = {"text": repr(value)}
        plain = isinstance(value, type) or hasattr(value, NO_METHOD)
        for name, method in FORMATS.items():
            if not plain and callable(getattr(value, method, None)):
                found = getattr(value, method)()
                found = found[0] if isinstance(found, tuple) else found
                if isinstance(found, bytes):
                    found = base64.b64encode(found).decode()
                if found is not None:
                    shown[name] = found
        self._drain()  # what was printed before comes first
        self._events.tell("result", is_main_result=is_main, **shown)


def parsed(code: str, name: str) -> ast.Module:
    """Returns the tree of code. If it is no Python as it stands, lines of the shell in it are made
    into calls first."""
    try:
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | AWAIT)
    except SyntaxError:
        if not SHELL_LINE.search(code):
            raise
        tree = compile(SHELL_LINE.sub(as_call, code), name, "exec", ast.PyCF_ONLY_AST | AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


def as_call(line: re.Match[str]) -> str:
    """Returns Python for a line of the shell in code (`!ls`, `%pip install NAME`)."""
    command = f"{sys.executable} -m {line[3]}" if line[2] == "%" else line[3]
    return f"{line[1]}__import__('subprocess').run({command!r}, shell=True) and None"


def end_forked(error: BaseException | None) -> None:
    """Ends a process that the code has forked and that has come to the code's end."""
    status: object = None
    if isinstance(error, SystemExit):
        status = error.code
    elif error is not None:
        status = told(error)
    with suppress(OSError, ValueError):  # the code has closed them
        if not isinstance(status, (int, type(None))):
            print(str(status).rstrip("\n"), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def message(error: BaseException) -> str:
    """Returns an error's message. It may come from a method of the user's class, which may fail."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code may raise anything
        return "<the message of this error cannot be made>"


def told(error: BaseException) -> str:
    """Returns an error's traceback, without this program's own lines."""
    here = error.__traceback__
    while here is not None and not here.tb_frame.f_code.co_filename.startswith("<cell "):
        here = here.tb_next
    return "".join(traceback.format_exception(type(error), error, here))


# ---- calls --------------------------------------------------------------------------------------


def forget(path: str) -> None:
    """Removes what a call has left."""
    for name in (path, path + ".json"):
        with suppress(OSError):
            os.unlink(name)


def locked(folder: str) -> int | None:
    """Returns the locked descriptor of `alive`, for the kernel that is to be started, and empties
    the file; None if one lives."""
    fd = os.open(os.path.join(folder, "alive"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    return fd


def call(folder: str, name: str) -> int:
    """Names a call to the kernel of a context; starts the kernel if it does not live.

    Returns:
        The pipe. While somebody has it open, the next kernel finds what this one has not taken.
    """
    alive = locked(folder)
    # which succeeds also while the kernel is being started
    calls = os.open(os.path.join(folder, "calls"), os.O_RDWR)
    os.write(calls, name.encode())
    if alive is not None and os.fork() == 0:
        try:
            become_kernel(alive, calls, folder)
        finally:
            os._exit(1)
    if alive is not None:
        os.close(alive)
    return calls


def become_kernel(alive: int, calls: int, folder: str) -> None:
    """Makes this process the kernel of a context, which ends with its sandbox."""
    os.setsid()
    os.write(alive, b"%d" % os.getpid())
    low, high = sorted((alive, calls))
    for first, end in ((3, low), (low + 1, high), (high + 1, high + 64)):
        os.closerange(first, end)  # such as the end of its first call's pipe
    with open(os.path.join(folder, "cwd")) as file:
        try:
            os.chdir(file.read())
        except OSError:  # earlier code has removed it
            os.chdir("/")
    sys.path[0] = ""
    held = [alive, calls]

    def leave() -> None:  # else a process that the code leaves behind would pass for the kernel
        while held:  # its own processes find none, and keep files that have these numbers by then
            os.close(held.pop())

    os.register_at_fork(after_in_child=leave)
    Kernel().serve(calls, folder)


def run(folder: str, *parts: str) -> None:
    """Makes one call, and prints its events.

    Args:
        folder: the context's folder.
        parts: JSON in pieces, with the code and its environment variables.
    """
    name = os.urandom(NAME // 2).hex()
    path = os.path.join(folder, name)
    os.mkfifo(path, 0o600)
    events = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(path + ".json", "w") as file:
        file.write("".join(parts))
    write(b'{"type": "started"}\n')
    taken = is_taken(folder, name, events)
    os.set_blocking(events, taken)
    last = b""
    while taken and not last.endswith(END):
        data = os.read(events, 1 << 16)
        if not data:
            break
        write(data)
        last = (last + data)[-64:]
    forget(path)
    if not last.endswith(END):
        error = {"type": "error", "name": "KernelDied", "traceback": "",
                 "value": "the Python process of this context has ended, and its variables are "
                          "lost; it may have used up the sandbox's memory"}
        cut = last and not last.endswith(b"\n")
        write((b"\n" if cut else b"") + json.dumps(error).encode() + b"\n")


def is_taken(folder: str, name: str, events: int) -> bool:
    """Names a call to the kernel, and waits until the kernel has taken it. Returns False if the
    kernel and `STARTS_MAX` - 1 more have ended before, or if the context has been dropped.
    """
    calls = call(folder, name)
    taken = select.poll()
    taken.register(events, select.POLLIN)
    starts = 1
    try:
        while not taken.poll(LOOK_S * 1000):
            alive = locked(folder)
            if alive is not None:  # the kernel has ended without this call
                os.close(alive)
                if starts == STARTS_MAX:
                    return False
                os.close(call(folder, name))
                starts += 1
    except FileNotFoundError:  # the context has been dropped
        return False
    finally:
        os.close(calls)
    return True


def write(data: bytes) -> None:
    """Prints bytes."""
    while data:
        data = data[os.write(1, data):]


def make(folder: str, cwd: str) -> dict[str, str]:
    """Makes a context whose kernel begins in a directory; returns what tells about it."""
    os.chdir(os.path.expanduser(cwd))
    base = os.path.dirname(folder)
    os.makedirs(base, 0o700, exist_ok=True)
    new = tempfile.mkdtemp(prefix=".run-code-", dir=os.path.dirname(base))
    with open(os.path.join(new, "cwd"), "w") as file:
        file.write(os.getcwd())
    os.mkfifo(os.path.join(new, "calls"), 0o600)
    try:
        os.rename(new, folder)
    except OSError:  # another call has made it meanwhile
        clear(new)
    return describe(folder)


def describe(folder: str) -> dict[str, str]:
    """Returns what tells about a context."""
    with open(os.path.join(folder, "cwd")) as file:
        return {"id": os.path.basename(folder), "language": "python", "cwd": file.read()}


def ended(folder: str) -> int:
    """Ends the kernel of a context, if it lives; returns the locked descriptor of `alive`, without
    which no other is started."""
    alive = locked(folder)
    while alive is None:
        with open(os.path.join(folder, "alive")) as file:
            pid = file.read()
        if pid:  # else it is being started
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.005)
        alive = locked(folder)
    return alive


def stop(folder: str) -> None:
    """Ends the kernel of a context, if it lives."""
    os.close(ended(folder))


def drop(folder: str) -> None:
    """Ends a context."""
    alive = ended(folder)
    clear(folder)
    os.close(alive)


def clear(folder: str) -> None:
    """Removes a context's folder."""
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def main(verb: str, *words: str) -> int:
    """Does one verb; returns the exit status."""
    base = os.path.join(tempfile.gettempdir(), ".run-code")
    if verb == "list":
        known = sorted(os.listdir(base)) if os.path.isdir(base) else []
        print(json.dumps([describe(os.path.join(base, name)) for name in known]))
        return 0
    name, rest = words[0], words[1:]
    folder = os.path.join(base, name)
    if verb == "make":
        try:
            print(json.dumps(make(folder, *rest)))
        except OSError as error:
            print(f"cwd: {rest[0]} ({error.strerror})", file=sys.stderr)
            return REFUSED
        return 0
    if not os.path.isdir(folder):
        if name != DEFAULT or verb != "run":
            return UNKNOWN
        make(folder, os.getcwd())
    verbs: dict[str, Callable[..., None]] = {"run": run, "restart": stop, "drop": drop}
    verbs[verb](folder, *rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
