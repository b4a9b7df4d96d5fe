"""`Session`: a trajectory's stateful sandbox, as its user holds it.

What is submitted to a session runs in order, one action at a time, and files stay between its
actions. Leaving the `with` block closes the session and cancels what still runs in it; where the
client is attached to another client's session, leaving it only detaches. `upload` and
`download` are many actions each and block; every other method that acts returns a Future at once.

The session's state is its record, which the connection keeps until the session's end is known.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..domain.action import Kind
from ..domain.ids import show
from ..domain.session import SessionSpec
from ..domain.session_token import TOKEN_MAX, attach_token, hash_of
from ..errors import InvalidInput
from ..protocol import message as ms
from ..protocol import payload as pl
from .actions import submit
from .connection import Connection
from .file_calls import PartialRead, span, write_calls
from .future import Future
from .network.forward import PortForward
from .network.port_connect import connect_port
from .network.port_stream import PortStream
from .request import (
    Options,
    Work,
    check_flag,
    environment,
    raw_bytes,
    raw_files,
    session_spec,
    tool_of,
)
from .session_handle import SessionHandle
from .session_record import SessionFuture, SessionRecord
from .terminals.pty import Pty, open_pty
from .terminals.shell import Shell
from .transfer import download, upload

_TOKEN_MIN = 32  # characters of a token that the caller chose


class Session:
    """A stateful sandbox on one node; made by `Client.session`, `Session.fork` and `Client.attach`.

    A session holds memory from its admission to its end, and CPUs only while an action runs in it.
    `with session:` (or `async with`) waits for its admission and closes it at the end.

    Example:
        with client.session(mem="1G", files={"t.py": "print(1 + 1)"}) as session:
            assert session.exec(["python3", "t.py"]).result().text == "2\\n"

    Attributes:
        first: the Futures of the files that the session was opened with, in their order.
    """

    def __init__(self, connection: Connection, record: SessionRecord,
                 attached: bool = False) -> None:
        self.first: list[Future] = []
        self._connection, self._record = connection, record
        self._attached, self._left = attached, False

    @property
    def id(self) -> str:
        """The session's id, as commands and accounting show it."""
        return show(self._record.spec.id)

    @property
    def spec(self) -> SessionSpec:
        """What was requested: memory in MiB, backend, image, idle time in ns, and so on."""
        return self._record.spec

    @property
    def name(self) -> str:
        """The session's name. If the session is shared, it is unique in the job while it is open.
        """
        return self._record.spec.name

    @property
    def env(self) -> dict[str, str]:
        """The environment variables of all commands of this session."""
        return self._record.env

    @property
    def trajectory(self) -> str:
        """The trajectory whose tools run in this session; empty for none."""
        return self._record.trajectory

    @property
    def node(self) -> str:
        """The node that the session is on. Empty before its admission; after a move, the new
        node."""
        return self._record.node

    @property
    def image_digest(self) -> str:
        """The digest of the image that the session runs in. Empty before its admission, and for a
        session without an image or with a plain folder."""
        return self._record.image_digest

    @property
    def output_bound(self) -> int:
        """The largest `output_max` that a command may have here, in bytes; a larger one is refused.
        """
        assert self._connection.welcome is not None  # the client has connected
        return self._connection.welcome.output_bound

    @property
    def wait_s(self) -> float:
        """How long the session waited for its admission, in seconds; 0.0 before it."""
        return self._record.wait_s

    @property
    def why_ended(self) -> str:
        """One line that says why the session ended; empty while it has not."""
        return self._record.why_ended

    @property
    def opened(self) -> SessionFuture[None]:
        """A future that ends when the session is admitted; it can be awaited. It raises
        InfeasibleRequest if the session can never be admitted, and SessionLost if it ended before.
        """
        return self._record.opened

    @property
    def closed(self) -> SessionFuture[str]:
        """A future of the reason for the session's end; it ends when the memory is free again, and
        can be awaited."""
        return self._record.closed

    def submit(self, work: Work, *args: Any, **options: Any) -> Future:
        """Submits one action that runs inside this session; returns at once.

        Args:
            work: what runs, as for `Client.submit`.
            args: the arguments of a function.
            options: every other argument of `Client.submit`. Without `retries`, the action is not
                started again when its node fails, because the session's state is gone then.

        Returns:
            A Future, as for `Client.submit`. It raises SessionLost when the session has ended.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return submit(self._connection, work, args, self._record, **options)

    def exec(self, command: Sequence[str] | str, **options: Any) -> Future:
        """Runs a command in this session; returns at once.

        Args:
            command: an argv list, or a line for the shell.
            options: `cwd`, `env`, `stdin`, `timeout`, `cpus`, `user` and every other argument of
                `Client.submit`. A relative `cwd` is below the session's directory.

        Returns:
            A Future of an ExecResult. A command that fails is a result, not an exception.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            result = session.exec("make -j4 test", cpus=(1, 4), timeout=300).result().check()
        """
        return self.submit(command, **options)

    def exec_detachable(self, command: Sequence[str] | str, *, reads_input: bool = False,
                        **options: Any) -> Future:
        """Runs a command that can go to the background of this session; returns at once.

        The command writes to the files PATH.out and PATH.err, and what it writes is passed on while
        its action runs. Its first line of stdout is not its own: `PID PATH`, its process id in the
        session, which is also its process group, and the beginning of its files' paths.
        `Future.interrupt(signal.SIGUSR2)` does not reach the command, but ends its action by this
        signal. The command then goes on as a background process, as `background` of the session
        says, and its exit code is written to PATH.code when it has ended. Whoever reads these files
        removes them. Cancelling the action, and its timeout, kill the command at once.

        Args:
            command: an argv list, or a line for the shell.
            reads_input: whether the command reads the FIFO PATH.in; otherwise it reads nothing.
                Removing PATH.in with `remove` ends the input.
            options: `on_output` (required), `cwd`, `env`, `timeout`, `cpus`, `user` and every other
                argument of `Client.submit`, except `stdin`.

        Returns:
            A Future of an ExecResult.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return submit(self._connection, command, (), self._record, **options,
                      reads_input=reads_input)

    def shell(self, **options: Any) -> Shell:
        """Opens a shell that remembers its directory, variables, functions, aliases, options and
        background jobs from one command to the next; returns at once. A session may have several.

        Args:
            options: `cwd`, `env`, `program`, `pty`, `rows`, `cols`, `echo`, `restart` and `user`,
                as described for `Shell`.

        Returns:
            The shell. As a context manager it waits until it is open, and closes it at the end.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with session.shell() as shell:
                shell.run("cd /tmp; export A=1").result()
                assert shell.run("echo $PWD $A").result().text == "/tmp 1\\n"
        """
        return Shell(self._connection, self._record, **options)

    def pty(self, command: Sequence[str] | str, **options: Any) -> Pty:
        """Runs a command on a terminal of its own; returns at once.

        Args:
            command: an argv list, or a line for the shell.
            options: `rows` and `cols` (24 and 80), `echo` (False), and of the options of `exec`
                `cwd`, `env`, `clean_env`, `cpus`, `mem`, `gpus`, `timeout`, `name` and `user`.

        Returns:
            The terminal, to write to and to read from.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with session.pty(["python3", "-i"]) as pty:
                pty.write("print(6 * 7)\\n")
        """
        return open_pty(self._connection, self._record, command, **options)

    def connect(self, port: int, timeout: float | None = None, wait_s: float = 0.0) -> PortStream:
        """Connects to a TCP port of the session, as a command of the session would on its
        loopback; blocks until it is connected. Any client that may use the session can connect.

        Args:
            port: the port that a server in the session listens on.
            timeout: how long to wait for the session's admission and for each answer, in seconds;
                None for no limit.
            wait_s: for how long to try again, in seconds, while nothing listens on the port, for
                example because the server is still starting, or while the session has too many
                streams.

        Returns:
            A stream with the methods of a connected socket.

        Raises:
            PortFailed: no connection could be made, for example because nothing listens on the
                port; its `code` says why.
            TimeoutError: no answer came in time.
            InvalidInput: an argument is wrong; the message names it.
            SessionLost: the session has ended.

        Example:
            session.exec("python3 -m http.server 8000 >/dev/null 2>&1 &").result()
            with session.connect(8000, wait_s=10) as stream:
                stream.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                assert stream.recv(4) == b"HTTP"
        """
        return connect_port(self._connection, self._record, port, timeout, wait_s)

    def forward(self, port: int, *, local_port: int = 0, unix: bool | str = False,
                wait_s: float = 0.0) -> PortForward:
        """Opens a local address that leads to a TCP port of the session; returns at once. Only this
        process's user can connect to it, on a machine that others use as well.

        Args:
            port: the port that a server in the session listens on.
            local_port: the port on 127.0.0.1; 0 for any free port.
            unix: True for a Unix socket in a private folder instead of a port, or the path of the
                Unix socket.
            wait_s: as for `connect`, for each connection.

        Returns:
            The address, as `url`, `host` and `port`, or `path`. Used as a context manager, it is
            closed at the end.

        Raises:
            InvalidInput: an argument is wrong, or nothing can listen there; the message names it.

        Example:
            with session.forward(8000) as local:
                page = urllib.request.urlopen(local.url).read()
        """
        return PortForward(self._connection, self._record, port, local_port, unix, wait_s)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> Future:
        """Writes a file; missing parent folders are made. Returns at once.

        Paths of all file methods are those of the sandbox: an absolute one begins at its root, a
        relative one at the session's directory. Links are followed within that root.

        Args:
            path: the file.
            data: the content; a str is written as UTF-8. It travels in parts of 8 MiB, so a command
                that still runs may see a part of it.
            mode: the file's permission bits.

        Returns:
            A Future that ends when the file is written. It raises FileFailed when that failed: its
            subclasses and its `code` say why.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        content = data if isinstance(data, bytearray | memoryview) else raw_bytes(data, "data")
        calls, parts = write_calls(_below(path), content, mode), list[Future]()
        last = next(calls)
        for call in calls:
            parts.append(self._file(last, "write"))
            last = call
        return self._connection.submit(Kind.FILE, Options(), self._record, "write", last,
                                       earlier=tuple(parts))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Future:
        """Reads a file; returns at once.

        Args:
            path: the file, as for `write`.
            offset: the first byte.
            length: the most bytes; None for all that follow, at most 256 MiB.

        Returns:
            A Future of bytes. It raises FileFailed when the file could not be read: FileMissing,
            FileIsFolder, FileDenied and so on, or with `code` "EAGAIN" if a file of several parts
            of 8 MiB has changed while it was read.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        first, most = span(offset, length)

        def ask(call: pl.FileCall, reader: PartialRead, future: Future | None) -> Future:
            return self._connection.submit(Kind.FILE, Options(), self._record, "read", call,
                                           reader=reader, future=future)

        return PartialRead(_below(path), first, most, ask).ask_next(None)

    def listing(self, path: str = "", depth: int = 0) -> Future:
        """Lists a folder and everything below it, or one file; returns at once.

        Args:
            path: the folder or file, as for `write`; empty for the session's directory.
            depth: how many levels; 1 for the folder's own entries, 0 for all.

        Returns:
            A Future of a tuple of entries, see `stat`; their names begin below the folder. The
            sandbox chose the names: check one before you use it as a path of your own. A name
            that is not UTF-8 has the kind "other" and a backslash escape for such a byte. It raises
            FileFailed when the folder could not be listed.
        """
        return self._file(pl.FileCall(_below(path), op="list", depth=span(depth, None)[0]), "list")

    def stat(self, path: str) -> Future:
        """Says what a path names; a link at its end is not followed. Returns at once.

        Args:
            path: the file, folder or link, as for `write`.

        Returns:
            A Future of an entry with `name`, `kind` ("file", "dir", "link" or "other"), `size` in
            bytes, `mode`, `mtime_ns`, `target` (of a link), `uid` and `gid`. It raises FileMissing
            when nothing is there, and another FileFailed when that cannot be known.
        """
        return self._file(pl.FileCall(_below(path), op="stat"), "stat")

    def mkdir(self, path: str) -> Future:
        """Makes a folder and its missing parents; returns at once.

        Args:
            path: the folder, as for `write`; one that exists is accepted.

        Returns:
            A Future that ends when the folder is there. It raises FileFailed when that failed.
        """
        return self._file(pl.FileCall(_below(path), op="mkdir"), "mkdir")

    def remove(self, path: str) -> Future:
        """Removes a file, a link, or a folder with everything in it; returns at once.

        Args:
            path: what is removed, as for `write`. A link is removed, not what it leads to.

        Returns:
            A Future that ends when it is gone. It raises FileMissing when nothing was there, and
            another FileFailed when it cannot be removed.
        """
        return self._file(pl.FileCall(_below(path), op="remove"), "remove")

    def move(self, path: str, target: str) -> Future:
        """Gives a file, link or folder another path; returns at once. Missing folders on the way to
        the new path are made, and a file that is there is replaced.

        Args:
            path: what is moved, as for `write`.
            target: its new path.

        Returns:
            A Future that ends when it is moved. It raises FileFailed when that failed; with `code`
            "EXDEV" if a folder would have to be copied to another file system.
        """
        return self._file(pl.FileCall(_below(path), op="move", target=_below(target)), "move")

    def upload(self, local: str | os.PathLike[str], path: str = "") -> int:
        """Copies a local file, or everything in a local folder, into the session; blocks.

        Args:
            local: the file or folder on this machine.
            path: the target, as for `write`. If it is empty or ends in "/", a file keeps its own
                name.

        Returns:
            The number of files.

        Raises:
            InvalidInput: something cannot be read, or is neither a file nor a folder.
            FileFailed: the session could not write a file.
        """
        return upload(self, _local(local), _below(path))

    def download(self, path: str, local: str | os.PathLike[str], *, max_bytes: int = 1 << 30,
                 skip_others: bool = False) -> int:
        """Copies a file, or everything in a folder, out of the session; blocks. Nothing is written
        outside `local`, whatever names the sandbox lists.

        Args:
            path: the file or folder, as for `write`.
            local: for a folder: the target folder; for a file: its new name, or a folder.
            max_bytes: the most bytes that are copied; more are refused.
            skip_others: whether to leave out links and everything else that is neither a file nor
                a folder, instead of refusing them.

        Returns:
            The number of files.

        Raises:
            InvalidInput: the sandbox lists a name that must not be written, or too much.
            FileFailed: the session could not read a file.
        """
        return download(self, _below(path), _local(local), max_bytes, skip_others)

    def fork(self, *, env: Mapping[str, str] | None = None,
             files: Mapping[str, bytes | str] | None = None, trajectory: str | int = "",
             **overrides: Any) -> Session:
        """Opens a new session that begins with a copy of this session's files; returns at once.
        The files are copied after everything that was submitted to this session before has ended.

        Args:
            env: environment variables in addition to this session's.
            files: path -> content; written before anything else happens in the new session.
            trajectory: the trajectory whose tools run in the new session; empty for none.
            overrides: arguments of `Client.session` in which the new session differs from this one.

        Returns:
            The new session.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with session.fork(mem="2G") as branch:
                branch.exec("git apply attempt.patch && make test").result()
        """
        shared = overrides.pop("shared", False)
        base = msgspec.structs.replace(self.spec.for_fork(), name="") if shared else (
            self.spec.for_fork())
        try:
            spec = session_spec(base, **overrides)
        except TypeError as error:
            raise InvalidInput(f"fork: {error}") from None
        return open_session(self._connection, spec, {**self.env, **environment(env)}, files,
                            trajectory, shared)

    def snapshot(self) -> Future:
        """Takes a snapshot of this session's files: of what it changed in its image, of its
        directory and of its temporary directory. Returns at once. The snapshot is taken when all
        actions that were submitted to this session before have ended. Background processes are
        stopped meanwhile, and are not part of the snapshot. The session goes on afterwards.

        Returns:
            A Future of the snapshot's name, for `Client.session(snapshot=...)` of any client of the
            job. It raises ActionFailed when the files cannot be frozen, or do not fit.

        Example:
            name = session.snapshot().result()
            with client.session(snapshot=name, mem="2G") as attempt:
                attempt.exec("git apply attempt.patch && make test").result()
        """
        call = pl.SnapshotCall(f"snap-{secrets.token_hex(12)}")
        return self._connection.submit(Kind.FILE, Options(), self._record, "snapshot", call)

    def renew(self) -> None:
        """Restarts the idle time of a session that was opened with `idle_s`; returns at once."""
        session = self.spec.id
        self._connection.send_of_session(session, ms.RenewSession(session))

    def close(self) -> None:
        """Ends the session; returns at once. What still runs in it is cancelled; `closed` ends when
        the memory is free. A second call does nothing. While the connection to the broker is
        broken, the session ends when it is back. A finalizer (`__del__`, `weakref.finalize`) may
        call this method and `renew`, and no other one that sends something.

        Raises:
            InvalidInput: this client is attached with a handle that does not let it close.
        """
        if not self._record.may_close:
            raise InvalidInput("close: this handle does not let its holder close the session; "
                               "detach(), or take session.handle(may_close=True)")
        session = self.spec.id
        self._connection.send_of_session(session, ms.ReleaseSession(session))

    def handle(self, may_close: bool = False) -> SessionHandle:
        """Returns what another process of the job needs to attach to this session. If the session
        is not admitted yet, this waits until the broker has answered that it knows the session.

        Args:
            may_close: whether the holder of the handle may also close the session, and hold it open
                beyond the end of the client that opened it.

        Returns:
            A handle, which can be pickled; `handle().text` is the same as text. It holds a token:
            whoever has it can use the session.

        Raises:
            InvalidInput: the session was not opened with `shared=True`, this client is attached
                without the right that the handle shall give, or the session can never open.
            SessionLost: the session has ended.
            BrokerUnreachable: no answer came within 10 s.
        """
        token = self._record.token
        if not token:
            raise InvalidInput(f"handle: session {self.id} is not shared; open it with shared=True")
        if may_close and not self._record.may_close:
            raise InvalidInput("may_close: this client is attached without that right itself")
        if not self.opened.done():  # nobody may attach before the broker has heard of the session
            self._connection.ask("explain", self.id)
        if self.opened.done():
            self.opened.result()
        if self._record.may_close and not may_close:
            token = attach_token(token)
        return SessionHandle(self.name, token, self._connection.job)

    def detach(self) -> None:
        """Leaves a session of another client; returns at once. What this client had submitted to it
        is cancelled, unless another part of this process is still attached. A second call does
        nothing.

        Raises:
            InvalidInput: this client opened the session.
        """
        if not self._attached:
            raise InvalidInput("detach: this client opened the session; close() ends it, and with "
                               "outlives=True it goes on without its client")
        if not self._left:
            self._left = True
            self._connection.detach(self._record)

    def _end(self) -> None:
        if self._attached:
            self.detach()
        else:
            self.close()

    def _file(self, call: pl.FileCall, what: str) -> Future:
        return self._connection.submit(Kind.FILE, Options(), self._record, what, call)

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a session cannot be sent to another process; call "
                           f"{self._connection.again}.attach(handle) there, with what "
                           "session.handle() returns; it must be opened with shared=True")

    def __enter__(self) -> Session:
        try:
            self.opened.result()
            for each in self.first:
                each.result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    async def __aenter__(self) -> Session:
        try:
            await self.opened
            for each in self.first:
                await each
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._end()


def open_session(connection: Connection, spec: SessionSpec, env: Mapping[str, str] | None,
                 files: Mapping[str, bytes | str] | None, trajectory: str | int,
                 shared: bool = False, token: str = "") -> Session:
    """Requests a session and submits the writing of its first files; returns at once.

    Args:
        connection: the connection of the client that owns the session.
        spec: what the session needs; its id is ignored.
        env, files, trajectory, shared, token: as for `Client.session`.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    check_flag(shared, "shared")
    raw, env = raw_files(files), environment(env)
    _check_token(token, shared)
    if shared:
        token = token or secrets.token_hex(24)
        spec = msgspec.structs.replace(
            spec, name=spec.name or f"session-{secrets.token_hex(4)}",
            attach_hash=hash_of(attach_token(token)), close_hash=hash_of(token))
    session = Session(connection, connection.open_session(spec, env, tool_of(trajectory), token))
    try:
        session.first = [session.write(path, data) for path, data in raw.items()]
    except BaseException:  # a refused name, a full store, ^C: nobody has the session to close it
        session.close()
        raise
    return session


def _check_token(token: str, shared: bool) -> None:
    """Raises InvalidInput, which does not show the token, if no session can have it."""
    if token == "":
        return
    if not shared:
        raise InvalidInput("token: only a shared session has one; open it with shared=True too")
    if not (isinstance(token, str) and token.isascii() and token.isprintable()
            and _TOKEN_MIN <= len(token) <= TOKEN_MAX):
        raise InvalidInput(f"token: it is not a text of {_TOKEN_MIN} to {TOKEN_MAX} printable "
                           "ASCII characters; leave it out, or take secrets.token_hex(24)")


def _local(path: Any) -> str:
    """A path of this machine. Raises InvalidInput."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if isinstance(text, str) and "\0" not in text:
            return text
    raise InvalidInput(f"local: {path!r:.60} is no path")


def _below(path: Any) -> str:
    """A path of the session. Raises InvalidInput."""
    if not isinstance(path, str):
        raise InvalidInput(f"path: {path!r:.60} is not a text")
    return path
