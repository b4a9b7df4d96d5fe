"""All errors that a user can get. Each message is one line that names the field and the remedy.

`exit_status` is the exit code of a command that ends with the error: 2 if the input was wrong, 1 if
something failed. An action that cannot run now is PENDING, which is no error; one that can never
run is an `InfeasibleRequest`. A violated invariant of this package raises an AssertionError, not
one of these errors.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

# What the system answers where a disk is full or a quota is used up: what takes room cannot be
# done, but files can be removed.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class TangramError(Exception):
    """The base class of every error that this package raises on purpose.

    Attributes:
        exit_status: the exit code of a command that ends with this error.
    """

    exit_status = 1


class InvalidInput(TangramError):
    """An argument, a settings file or an option is wrong; the message names it and the remedy."""

    exit_status = 2


class MissingExtra(InvalidInput):
    """An optional dependency is not installed; the message says how to install it."""


class AccessError(InvalidInput):
    """The access file is missing, readable by others, left by an ended job, or has a wrong key."""


class WrongWorld(InvalidInput):
    """The MPI world is not the launched one: it has another number of ranks or of gateways."""


class InfeasibleRequest(InvalidInput):
    """The request can never be granted with the resources that the job holds."""


class BrokerUnreachable(TangramError):
    """The broker does not answer, or went away and did not come back within its grace.

    Attributes:
        refused: whether the broker's host answered that no process listens there any more. If
            False, the network may only be down for a while.
    """

    refused = False


class ScratchLost(TangramError):
    """The folder in which a worker keeps its sandboxes was removed while the worker runs."""

    exit_status = 70  # as after a broken invariant, so that the worker is started again


class ProtocolError(TangramError):
    """A peer sent something that is not in the protocol, or is in another version of it."""


class ClientClosed(BrokerUnreachable):
    """The client cannot be used: either it was closed, or it was opened before this process was
    forked and belongs to the parent process.
    """


class WouldDeadlock(TangramError, RuntimeError):
    """The call could never return where it was made: a callback would wait for the client whose
    thread calls it, or a signal handler has interrupted another call of the same client.
    """


class ActionFailed(TangramError):
    """An action ended in another state than COMPLETED.

    Attributes:
        result: all that is known of the end, such as an ExecResult; None for nothing.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class SessionLost(ActionFailed):
    """The session has ended: its node failed or was drained, it was idle for too long, its
    time-to-live is over, or its client closed it. Actions that waited or ran in the session raise
    this error, and so do its opening and `Client.attach`."""


class ShellEnded(ActionFailed):
    """A command found no shell: the shell has ended (`exit`, a signal, `close`), was lost with the
    init of its sandbox, or could not be opened. The message says which. The command that ended the
    shell has a result of its own and does not raise this."""


class SetupFailed(TangramError):
    """An environment could not be prepared; the message quotes the step that failed and the end of
    its output. All callers that waited for the environment get the same message; the next caller
    tries again.
    """


class ActionTimeout(ActionFailed, TimeoutError):
    """An action ran longer than its `timeout` and was ended.

    It is a `TimeoutError` too. `Future.result(timeout=...)` raises a plain `TimeoutError` when the
    caller's own wait was too short; then `Future.done()` is False.

    Attributes:
        name: the action's name.
        limit_s: its `timeout`, in seconds; 0 where none was set.
        used_s: the run time that it took, in seconds.
    """

    name, limit_s, used_s = "", 0.0, 0.0


class ActionOutOfMemory(ActionFailed, MemoryError):
    """An action took more memory than it may have and was ended. It is a `MemoryError` too.

    Attributes:
        name: the action's name.
        limit_mib: the memory that the action asked for, in MiB. 0 if it asked for none: then the
            memory of its session or its node was the limit.
        used_mib: the largest resident set of one of its processes that was seen, in MiB. A sudden
            growth is not always seen.
    """

    name, limit_mib, used_mib = "", 0, 0.0


class FileFailed(ActionFailed, OSError):
    """A file operation of a session failed. It is an `OSError` too.

    The kinds that callers most often tell apart have a subclass that is Python's own exception as
    well: `except FileNotFoundError` catches a `FileMissing`. As in every `OSError`, `errno` is the
    number that this node's system gives the error.

    Attributes:
        code: the symbolic name of the error, as `errno` spells it: "ENOENT", "EISDIR", "EACCES",
            "ENOTDIR", "EEXIST", "ENOTEMPTY", "EBUSY", "ELOOP", "EFBIG", "ENOSPC", "EAGAIN" (the
            file changed while it was read or written), "EILSEQ" (a name is not UTF-8), "EINVAL".
    """

    code = ""

    @property
    def errno(self) -> int | None:  # type: ignore[override]
        """The number of `code` here. It is not stored, because a pickle would not carry it."""
        return getattr(errno, self.code, None)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class FileMissing(FileFailed, FileNotFoundError):
    """A file, or a folder on the way to it, is not there (ENOENT)."""


class FileIsFolder(FileFailed, IsADirectoryError):
    """A folder stands where a file was expected (EISDIR)."""


class FileIsNoFolder(FileFailed, NotADirectoryError):
    """Something else stands where a folder was expected (ENOTDIR)."""


class FileInTheWay(FileFailed, FileExistsError):
    """Something stands where a folder was to be made or a file moved to (EEXIST)."""


class FileDenied(FileFailed, PermissionError):
    """The sandbox may not do this with the file (EACCES, EPERM, EROFS)."""


class StoreFailed(TangramError, OSError):
    """The job's store cannot be read or written: its disk is full, or fails. It is an `OSError`
    too, and `errno` says what is wrong.
    """

    def __str__(self) -> str:
        return str(self.args[-1])


class PortFailed(TangramError, ConnectionError):
    """A stream to a port of a session could not be opened, or broke. It is a `ConnectionError` too.

    Attributes:
        code: the symbolic name of the error, as `errno` spells it: "ECONNREFUSED" (nothing listens
            on the port), "ECONNRESET" (the server, its sandbox or its node is gone),
            "EAFNOSUPPORT" (the sandbox has no network of its own), "EMFILE" (the session has too
            many streams), "EAGAIN" (the sandbox is not ready).
    """

    code = ""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RemoteError(ActionFailed):
    """A Python function raised in its runner, or a service refused a call. The message holds the
    type and the text of the error, and its traceback if it has one."""


class Throttled(TangramError):
    """An endpoint answered "too many requests" (429) and has not carried the call out. An attempt
    raises it; `check_response` does so for HTTP.

    Args:
        retry_after: for how many seconds the endpoint must not be called; 0 or None if it did not
            say. A text that is no number is the message.
        text: the message.

    Attributes:
        retry_after: as above.
    """

    retry_after = 0.0

    def __init__(self, retry_after: float | str | None = 0.0,
                 text: str = "too many requests") -> None:
        if isinstance(retry_after, str) and not _is_number(retry_after):
            text, retry_after = retry_after, 0.0  # as other exceptions, and so as copies, are made
        super().__init__(text)
        self.retry_after = _seconds(retry_after)


class Transient(TangramError):
    """An attempt failed in a way that may pass: a 5xx, a lost connection. An attempt raises it;
    `check_response` does so for HTTP.

    Args:
        text: the message.
        reached: whether the endpoint may have carried the call out in spite of the failure.
        retry_after: as for `Throttled`.

    Attributes:
        reached, retry_after: as above.
    """

    reached, retry_after = True, 0.0

    def __init__(self, text: str = "", *, reached: bool = True,
                 retry_after: float | str | None = 0.0) -> None:
        super().__init__(text or "the endpoint failed")
        self.reached, self.retry_after = reached, _seconds(retry_after)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _seconds(retry_after: Any) -> float:
    if retry_after is not None and not _is_number(retry_after):
        raise InvalidInput(f"retry_after: {retry_after!r:.60} is no number of seconds; leave it "
                           "out, or call tangram_hpc.check_response, which reads the header")
    return float(retry_after or 0.0)


class UntrustedResult(ActionFailed):
    """A result can only travel as a pickle, and the caller did not set `trusted=True`."""


def how_to_install(extra: str) -> str:
    """The shell command that installs an extra.

    It names the checkout if this process runs from one. A package that was installed from a wheel
    or an index has its extras in its own metadata, and pip asks no index for the package itself.

    Args:
        extra: one or more extras, such as "torch" or "torch,mpi".
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install '{checkout}[{extra}]'"
    return f"pip install 'tangram-hpc[{extra}]'"


def described(error: BaseException) -> str:
    """Returns the class and the text of an exception of somebody else's code; the class alone if
    its text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error's text is code too
        return type(error).__name__
