"""Results: a broker's Result and its payload become the value or the exception of a Future.

Nothing is unpickled unless the caller set `trusted=True` for this very action.
"""

from __future__ import annotations

import errno
import logging
import pickle
from collections.abc import Callable
from typing import Any

import msgspec

from ..domain.action import Action, Kind
from ..domain.ids import show
from ..domain.outcome import Outcome
from ..domain.states import ActionState
from ..errors import (
    ActionFailed,
    ActionOutOfMemory,
    ActionTimeout,
    FileDenied,
    FileFailed,
    FileInTheWay,
    FileIsFolder,
    FileIsNoFolder,
    FileMissing,
    InfeasibleRequest,
    ProtocolError,
    RemoteError,
    SessionLost,
    ShellEnded,
    TangramError,
    UntrustedResult,
    described,
)
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.value import decode_value
from .endpoints.grant_request import GrantRequest
from .file_calls import PartialRead
from .functions import FunctionCache, UploadedFunction
from .future import ExecResult, Future
from .session_record import SessionRecord
from .stored_payloads import StoredPayloads

_log = logging.getLogger(__name__)
_RESULTS = (ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT,
            ActionState.OUT_OF_MEMORY)
_FILE_ERRORS: dict[str, type[FileFailed]] = {
    "ENOENT": FileMissing, "EISDIR": FileIsFolder, "ENOTDIR": FileIsNoFolder,
    "EEXIST": FileInTheWay, "EACCES": FileDenied, "EPERM": FileDenied, "EROFS": FileDenied}
# states in which an action ends by itself, not by a limit or a cancellation
_OWN_ENDS = (ActionState.COMPLETED, ActionState.FAILED)


class Pending(msgspec.Struct, gc=False):
    """An action whose result has not arrived, with all that is needed to submit it again after a
    reconnect, and to end its future.

    Attributes:
        action: what was submitted.
        payload: its payload as it was sent; a large one names its entry in the store.
        future: the user's future.
        trusted: whether the result may be unpickled.
        submitted_ns: when it was submitted, by the monotonic clock.
        on_output: the caller's function for output; None for none, or after it raised.
        cancelled: whether this client has asked for its cancellation.
        grant_request: the grant request that it belongs to; None for other actions.
        session: the session that it was submitted to; None for none.
        stored: the entry of the job's store that it needs until its end; empty for none.
        uploaded: the function that it needs in the store until its end; None for none.
        reader: for a part of a file that is read in parts; None otherwise.
        earlier: the futures of the parts of a file that are written before this last one.
        on_credit: called with the bytes of input that may be sent in all, when more may be; None
            for actions without input.
        sent_ns: for an action that was held back, when it was sent; 0 for one that was sent when
            it was submitted.
        counted: whether `SubmissionCredit` counts it.
        direct: whether it serves direct calls, each of which is counted when it ends.
    """

    action: Action
    payload: bytes
    future: Future
    trusted: bool
    submitted_ns: int
    on_output: Callable[[int, bytes], None] | None = None
    cancelled: bool = False
    grant_request: GrantRequest | None = None
    session: SessionRecord | None = None
    stored: str = ""
    uploaded: UploadedFunction | None = None
    reader: PartialRead | None = None
    earlier: tuple[Future, ...] = ()
    on_credit: Callable[[int], None] | None = None
    sent_ns: int = 0
    counted: bool = False
    direct: bool = False

    def with_time_held_back(self, result: ms.ActionResult) -> ms.ActionResult:
        """Adds the time that an action waited here for credit, until `sent_ns`, to the time that it
        waited for units at the broker."""
        held_ns = self.sent_ns - self.submitted_ns
        return msgspec.structs.replace(result, queue_ns=result.queue_ns + held_ns)

    def release(self, functions: FunctionCache, store: StoredPayloads) -> None:
        """Called when the action has ended: releases its entries in the job's store."""
        if self.uploaded is not None:
            functions.ended(self.uploaded)
        if self.stored:
            store.release(self.stored)


def give_output(pending: Pending, stream: int, data: bytes) -> None:
    """Hands a piece of output to the caller's `on_output`. If that raises, the exception is logged,
    `on_output` is not called again, and the client goes on."""
    assert pending.on_output is not None
    try:
        pending.on_output(stream, data)
    except Exception:  # noqa: BLE001 - the caller's own code, on our thread
        pending.on_output = None
        _log.exception("%s: its on_output raised this and is called no more", _name(pending))


def conclude(pending: Pending, result: ms.ActionResult, payload: memoryview | None,
             store: StoredPayloads, act_ns: int) -> None:
    """Ends the future as the result says; `act_ns` is the ACT in ns. The future ends as cancelled
    only if this client has cancelled the action (decision 0036), because a task that awaits a
    `CancelledError` is cancelled itself."""
    future, outcome = pending.future, result.outcome
    future.told = result, act_ns
    if outcome.state is ActionState.CANCELLED and pending.cancelled:
        future.end_cancelled()
        return
    try:
        value = _value(pending, result, payload, store)
        if pending.reader is not None:
            value = pending.reader.take(value, future)
            if value is None:
                return  # the next part ends the future
    except TangramError as error:
        future.set_exception(_without_frames(error))
    except msgspec.DecodeError as error:
        future.set_exception(ProtocolError(f"{_name(pending)}: its result is not in the protocol "
                                           f"({error})"))
    else:
        future.set_result(value)


def _without_frames(error: TangramError) -> TangramError:
    """Drops the tracebacks of an exception that a future is to keep, and of those that led to it.

    Their frames are those of this thread, which tell a caller nothing. They refer to the `Pending`,
    which refers to the future, and the garbage collector cannot end this cycle, because it does not
    see what a `Pending` refers to (`gc=False`).
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _name(pending: Pending) -> str:
    return f"action {pending.future.id} ({pending.action.name})"


def _value(pending: Pending, result: ms.ActionResult, payload: memoryview | None,
           store: StoredPayloads) -> Any:
    outcome = result.outcome
    told = pl.decode(payload) if payload is not None else None
    for part in pending.earlier:
        if part.done() and not part.cancelled() and (error := part.exception()) is not None:
            raise error
    if isinstance(told, pl.Stored):
        told = _fetched(told, pending, store)
    command = pending.action.kind is Kind.EXEC
    if not command and outcome.state not in _OWN_ENDS:
        # a payload that the runner sent while it was being ended does not count
        raise _failure(pending, outcome, told)
    if isinstance(told, pl.ErrorReturn):
        raise _told_failure(pending, outcome, told)
    if told is not None and isinstance(told, pl.ExecReturn) is not command and not pending.reader:
        raise ProtocolError(f"{_name(pending)}: its result is not of its kind")
    if command and outcome.state in _RESULTS:
        told = told if isinstance(told, pl.ExecReturn) else pl.ExecReturn()
        return ExecResult(outcome.state, outcome.exit_status, outcome.signal, told.stdout,
                          told.stderr, told.cut, outcome.reason, outcome.cpu_ns / 1e9,
                          outcome.maxrss_kib, result.grants, outcome.isolation,
                          outcome.enforcement, outcome.lower_bounds)
    if outcome.state is not ActionState.COMPLETED:
        raise _failure(pending, outcome, told)
    if pending.reader is not None:
        if not isinstance(told, pl.FileReturn):  # a sandbox may answer what it likes
            raise ProtocolError(f"{_name(pending)}: its result is not the content of a file")
        return told
    if isinstance(told, pl.ValueReturn):
        return returned_value(told, _name(pending), pending.trusted)
    if isinstance(told, pl.DirectReturn):
        return told
    if isinstance(told, pl.FileList):
        if told.one and len(told.entries) != 1:
            raise ProtocolError(f"{_name(pending)}: its result is not one entry")
        return told.entries[0] if told.one else told.entries
    if isinstance(told, pl.SnapshotReturn):
        return told.name
    return None


def _told_failure(pending: Pending, outcome: Outcome, told: pl.ErrorReturn) -> TangramError:
    """Makes the exception of an action whose node says what went wrong."""
    kind = pending.action.kind
    if kind is Kind.FILE:
        return _file_failure(pending, outcome, told)
    if kind is Kind.EXEC and told.kind == pl.SHELL_ENDED:
        return ShellEnded(f"{_name(pending)}: {told.text}")
    return raised_error(told, _name(pending))


def raised_error(told: pl.ErrorReturn, name: str) -> ActionFailed:
    """Makes the exception for what a function or a service has raised in the call `name`."""
    trace = f"\n{told.trace}" if told.trace else ""
    if told.kind == "UntrustedResult":
        return UntrustedResult(f"{name}: {told.text}{trace}", told)
    return RemoteError(f"{name}: {told.kind}: {told.text}{trace}", told)


def _file_failure(pending: Pending, outcome: Outcome, told: pl.ErrorReturn) -> FileFailed:
    """Makes the exception of a file operation, whose kind is the name of an errno."""
    text = f"{_name(pending)}: {outcome.state.value}: {told.text}"
    error = _FILE_ERRORS.get(told.kind, FileFailed)(text, told)
    # the sandbox chose the name: only errno's own ones are believed
    error.code = told.kind if told.kind in errno.errorcode.values() else "EIO"
    return error


def _failure(pending: Pending, outcome: Outcome, told: Any) -> ActionFailed:
    """Makes the exception of an action that did not complete and has no result of its own."""
    action, state = pending.action, outcome.state
    text = f"{_name(pending)}: {state.value}: {outcome.reason or 'nothing more is known'}"
    if state is ActionState.TIMEOUT:
        late = ActionTimeout(f"{text} (it ran for {outcome.exec_ns / 1e9:.3g} s)", told)
        late.name, late.limit_s = action.name, action.timeout_ns / 1e9
        late.used_s = outcome.exec_ns / 1e9
        return late
    if state is ActionState.OUT_OF_MEMORY:
        asked = f" (it asked for {action.mem_mib} MiB)" if action.mem_mib else ""
        full = ActionOutOfMemory(text + asked, told)
        full.name, full.limit_mib = action.name, action.mem_mib
        full.used_mib = outcome.maxrss_kib / 1024
        return full
    if action.session and state in (ActionState.CANCELLED, ActionState.NODE_FAIL):
        of = f"session {show(action.session)}"
        return SessionLost(text if of in text else f"{text} ({of} is lost with it)", told)
    return ActionFailed(text, told)


def _fetched(told: pl.Stored, pending: Pending, store: StoredPayloads) -> pl.AnyPayload:
    """Reads a result that came through the store, and lets the store drop it."""
    data = store.get(told.digest)
    store.drop_result(told.digest, pending.action.id, pending.action.once)
    return pl.decode(data)


def returned_value(told: pl.ValueReturn, name: str, trusted: bool) -> Any:
    """Returns the value of a function.

    Args:
        told: what its process sent.
        name: the call, for errors.
        trusted: whether the value may be unpickled.

    Raises:
        UntrustedResult: it came as a pickle and may not be unpickled.
        ActionFailed: it cannot be unpickled here.
    """
    if not told.pickled:
        return decode_value(told.data)
    if not trusted:
        raise UntrustedResult(f"{name}: its result came as a pickle and `trusted=True` was not said"
                              )
    try:
        return pickle.loads(told.data)
    except BaseException as error:  # noqa: BLE001 - a pickle runs what it likes, on our thread
        raise ActionFailed(f"{name}: its result cannot be unpickled here: {described(error)}", told
                           ) from None


def refuse(pending: Pending, rejected: ms.Rejected) -> None:
    """Ends the future of an action that the broker refused. Where the reason is a lost session, the
    session's record may still know why the session ended, which the broker forgets."""
    if rejected.lost:
        session = pending.session
        why = session.why_ended if session is not None and session.why_ended else rejected.text
        error: TangramError = SessionLost(f"{_name(pending)}: {why}")
    else:
        error = InfeasibleRequest(rejected.text)
    pending.future.set_exception(error)


def log_refusal(job: str, rejected: ms.Rejected) -> None:
    """Logs the refusal of a message for which nobody waits."""
    _log.error("job %s: the broker refused a message of this client and goes on: %s", job,
               rejected.text)
