"""All errors a user can meet, each one line that names the field and the remedy.

Law: `exit_status` is what a command ends with (2 = the input was wrong, 1 = it failed).
"Not now" is a PENDING reason and never an error; "never" is `InfeasibleRequest`.
A broken law of our own is an AssertionError, not one of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TangramError(Exception):
    """Root of everything this package raises on purpose."""

    exit_status = 1


class InvalidInput(TangramError):
    """Something a person wrote or passed is wrong: a field, a file, a flag."""

    exit_status = 2


class MissingExtra(InvalidInput):
    """An optional dependency is not installed; the message names the extra."""


class AccessError(InvalidInput):
    """The access file is missing, too open, stale, or holds the wrong key."""


class WrongWorld(InvalidInput):
    """The MPI world does not have the size that was launched."""


class InfeasibleRequest(InvalidInput):
    """What was asked for can never be granted by what is held."""


class BrokerUnreachable(TangramError):
    """The broker went away and did not come back in time. `refused`: its host answers and nobody
    listens there any more; else the way may only be shut for a while."""

    refused = False


class ProtocolError(TangramError):
    """The peer sent something that is not in the protocol, or another version of it."""


class ClientClosed(BrokerUnreachable):
    """This client asks nothing of the broker any more: its own process closed it, or it is the copy
    of another process's client that a fork left here."""


class ActionFailed(TangramError):
    """An action ended in another state than COMPLETED; `result` tells all that is known."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class SessionLost(ActionFailed):
    """The session is gone: its node failed, it was idle for too long, its node was drained, or its
    client closed it. Raised by what waited or ran in it, and by the session's own opening."""


class ActionTimeout(ActionFailed, TimeoutError):
    """An action ran longer than its `timeout`, and was ended.

    A `TimeoutError` as well, so that `except TimeoutError` finds it. `Future.result(timeout=...)`
    raises a plain `TimeoutError` when only the caller's own wait was too short; `Future.done()`
    tells the two apart.

    Attributes:
        name: the action's name.
        limit_s: the run time that it was given, in seconds; 0 when nobody said.
        used_s: the run time that it took, in seconds.
    """

    name, limit_s, used_s = "", 0.0, 0.0


class ActionOutOfMemory(ActionFailed, MemoryError):
    """An action took more memory than it may have, and was ended.

    Attributes:
        name: the action's name.
        limit_mib: the memory that it asked for, in MiB; 0 when it named none, and its session's or
            its node's was the limit.
        used_mib: the largest resident set that was seen of one of its processes, in MiB; a sudden
            growth is not always seen.
    """

    name, limit_mib, used_mib = "", 0, 0.0


class RemoteError(ActionFailed):
    """A Python function raised inside its runner; the message holds type, text and place."""


class Throttled(TangramError):
    """An endpoint said "too many" (429): it has not carried the call out. Raised by one attempt;
    `retry_after`: seconds until it wants to be asked again."""

    retry_after = 0.0

    def __init__(self, retry_after: float = 0.0, text: str = "too many requests") -> None:
        super().__init__(text)
        self.retry_after = float(retry_after)


class Transient(TangramError):
    """An attempt failed in a way that may pass: 5xx, a lost connection. `reached`: the endpoint may
    have carried it out all the same; `retry_after` as of `Throttled`."""

    reached, retry_after = True, 0.0

    def __init__(self, text: str = "", *, reached: bool = True, retry_after: float = 0.0) -> None:
        super().__init__(text or "the endpoint failed")
        self.reached, self.retry_after = reached, float(retry_after)


class UntrustedResult(ActionFailed):
    """A result can only travel as a pickle and the caller did not say `trusted=True`."""


def how_to_install(extra: str) -> str:
    """The command that adds an extra, such as `torch` or `torch,mpi`.

    The package is on no registry: it is installed from a checkout, whose folder is named where this
    process runs from one.
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install '{checkout}[{extra}]'"
    return f"pip install 'CHECKOUT[{extra}]' with the folder of tangram_hpc's source for CHECKOUT"
