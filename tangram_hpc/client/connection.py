"""The connection of one client to its broker: what is open there, and the thread that serves it.

`Connection` is the lowest part of a client. The classes that users see (`Client`, `Session`,
`Endpoint`) and the parts in between submit actions, open sessions and send queries through it. It
knows none of them.

One background thread owns the channel: it alone receives, ends futures and reconnects. Any thread
may submit. It does so under the lock, and wakes the thread once for all that is queued.

Actions and sessions are kept until their end is known. After a lost channel the thread dials again
and repeats all of them under the same ids, so nothing is lost and nothing runs twice. Questions
without an answer are asked again as well. Messages that have no answer, such as the release of a
session, are counted by both sides, and those that the broker lacks are sent again
(`protocol/unconfirmed.py`). Only port streams end with their channel.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from ..domain.action import Kind
from ..domain.ids import mint
from ..domain.session import SessionSpec
from ..errors import (
    AccessError,
    BrokerUnreachable,
    ClientClosed,
    InvalidInput,
    ProtocolError,
    SessionLost,
    TangramError,
)
from ..interrupts import CallersLock, PlainFuture, if_free
from ..ports import Channel, ChannelLost, Dial, Store
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.frame import Buffer, Outbox
from ..protocol.input_flow import SIGNAL
from ..protocol.liveness import PING_S, Patience
from ..protocol.process_frames import PAYLOAD_MAX
from ..protocol.service_frames import FRAME_MAX as CALLS_MAX
from ..protocol.unconfirmed import COUNTED, UnconfirmedMessages
from .attachments import Attachments
from .client_metrics import ActionWindows
from .file_calls import PartialRead
from .forked import end_copy, not_ours, watch_forks
from .functions import FunctionCache, UploadedFunction
from .future import Future, check_python_runs
from .network.open_streams import LINK_LOST, OpenStreams, end_streams
from .network.port_stream import PortStream
from .request import Options, context_of, make_action, packed, seconds_of
from .results import Pending, conclude, give_output, log_refusal, refuse
from .session_handle import SessionHandle
from .session_record import SessionRecord
from .stored_payloads import StoredPayloads
from .submission_credit import SubmissionCredit

_TRY_S = 20.0  # a round of dials takes less; if one took longer, this process was stopped meanwhile
_CUT = "the connection with the broker was lost; connect again"
_HELLO_S = 10.0  # how long the broker may take to answer a Hello
# Results are acknowledged together, after so many of them or so many bytes. If no action is open,
# the last ones are acknowledged once no message has come for _ACK_LATE_S. So a client that makes
# one call after the other does not send an acknowledgement for each call.
_ACK_AFTER, _ACK_BYTES, _ACK_LATE_S = 128, 1 << 20, 0.01


class _Question(NamedTuple):
    message: ms.Message
    answer: concurrent.futures.Future[Any]


class Connection:
    """One client's connection to its broker.

    Attributes:
        job: the job's name.
        welcome: the broker's last `Welcome` to this client; None before the first one.
        store: this client's entries in the job's store.
        functions: the functions that this client has uploaded to the store.
        windows: sums over the actions that ended since the client's metrics were last read.
        failure: why nothing can be submitted any more; None while the connection works.
        owner: the id of the process that opened the connection.
        again: a Python call by which another process gets a client of its own, for messages.
    """

    def __init__(self, dials: Sequence[Dial], job: str, make_store: Callable[[str], Store],
                 name: str, rank: int, size: int, connect_s: float, again: str,
                 back_within_s: float = 0.0, tenant: str = "") -> None:
        """Connects; the arguments are those of `Client`.

        Raises:
            BrokerUnreachable: the broker did not answer within `connect_s` seconds.
            TangramError: no way to the broker could be opened.
        """
        self.job, self.owner, self.again = job, os.getpid(), again
        self.welcome: ms.Welcome | None = None
        self.failure: TangramError | None = None
        self._dials, self._back_within_s = list(dials), back_within_s
        self._uid, self._name, self._rank, self._size = uuid.uuid4().hex, name, rank, size
        self._tenant = tenant
        self._lock = CallersLock()  # held to change anything below, except to remove entries
        self._outbox = Outbox()  # messages that were not sent yet
        self._woken = False  # whether the thread was woken for the messages in the outbox
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}  # actions whose result is not here
        self._sessions: dict[int, SessionRecord] = {}  # sessions whose end is not known
        self._opening: set[int] = set()  # sessions among these that wait for admission
        self._questions: dict[int, _Question] = {}  # without an answer
        self._unconfirmed = UnconfirmedMessages()
        # (session or 0, message) that a thread could not put into the outbox, as the lock was held
        self._deferred: deque[tuple[int, ms.Message]] = deque()
        self._to_cancel: deque[int] = deque()  # actions that it could not cancel
        self._credit = SubmissionCredit()  # which actions among `_pending` are not sent yet
        self._attachments = Attachments(self._lock)
        self._streams = OpenStreams()
        self.windows = ActionWindows()
        self._lock.needed = (self.windows.lock,)
        self._acks, self._ack_bytes = list[int](), 0  # results that were not acknowledged
        self._closing = False
        self._channel: Channel | None = None
        self._ready = threading.Event()  # the first Welcome is here, or will never be
        watch_forks(self)
        self._thread = threading.Thread(target=self._run, name="tangram-client", daemon=True)
        self._thread.start()
        welcome = self._await_welcome(connect_s + back_within_s)
        self.store = StoredPayloads(make_store(welcome.store), welcome.client)
        self.functions = FunctionCache(self.store)

    def _await_welcome(self, connect_s: float) -> ms.Welcome:
        if not self._ready.wait(connect_s):
            self.failure = self.failure or BrokerUnreachable(
                f"job {self.job}: no answer from the broker within {connect_s:.0f} s")
            self._closing = True
        if self.failure is not None:
            raise self.failure
        assert self.welcome is not None
        return self.welcome

    @property
    def via(self) -> str:
        """The kind of channel in use, `socket` or `mpi`; empty while there is none."""
        return self._channel.via if self._channel is not None else ""

    # ---- for the parts of a client -----------------------------------------------------------

    def submit(self, kind: Kind, options: Options, session: SessionRecord | None, what: str,
               call: pl.Payload, trusted: bool = False,
               on_output: Callable[[int, bytes], None] | None = None,
               uploaded: UploadedFunction | None = None, key: str = "cpu",
               reader: PartialRead | None = None, earlier: tuple[Future, ...] = (),
               future: Future | None = None,
               on_credit: Callable[[int], None] | None = None) -> Future:
        """Submits one action and returns at once.

        Args:
            kind: the kind of the action.
            options: how it shall be served.
            session: the session that it belongs to; None for none.
            what: its name, if `options` has none.
            call: its payload; one over 64 KiB goes through the store.
            trusted: whether its result may be unpickled.
            on_output: called with the pieces of its output.
            uploaded: the function that it calls, whose count already includes this action; None for
                other actions.
            key: its key resource.
            reader: puts the parts of a file together, of which this is one.
            earlier: the futures of the parts of a file that are written before it.
            future: the future that it ends; None for a new one.
            on_credit: called with the bytes of input that may be sent in all, when more may be
                (`protocol/input_flow.py`).

        Returns:
            The action's Future.

        Raises:
            TangramError: an argument is wrong, or the connection has ended.
        """
        in_session, stored = session.spec.id if session is not None else 0, ""
        try:
            if self.failure is not None:  # in the child of a fork the store is the parent's
                raise self.failure
            action = make_action(self.new_id(), kind, options, in_session, what, key)
            if uploaded is not None and action.once:
                call = msgspec.structs.replace(
                    call, digest=self.store.keep(uploaded.name, action.once))
            payload, stored = self._payload_of(call, kind, action.once)
            with self._lock:
                self._check_open()
                if future is None:
                    future = Future(action.id, self.cancel,
                                    self.interrupt if kind is Kind.EXEC else None, self._lock)
                future.action = action.id
                pending = Pending(action, payload, future, trusted, time.monotonic_ns(), on_output,
                                  session=session, stored=stored, uploaded=uploaded, reader=reader,
                                  earlier=earlier, on_credit=on_credit, direct=options.direct)
                if self._credit.admit(pending):
                    self._put(ms.Submit(action), payload)
                self._pending[action.id] = pending  # last: after ^C, no entry of what was not sent
        except TangramError:
            self.store.release(stored)
            self.functions.not_submitted(uploaded)
            raise
        return future

    def _payload_of(self, call: pl.Payload, kind: Kind, once: str) -> tuple[bytes, str]:
        """Returns a call's payload, and its name in the store; empty if it is not stored."""
        payload = packed(call, "work, env, cwd, files",
                         CALLS_MAX if kind is Kind.CALL else PAYLOAD_MAX)
        if len(payload) <= ms.INLINE_MAX:
            return payload, ""
        stored = self.store.put(payload, once)
        return pl.encode(pl.Stored(stored, len(payload))), stored

    def submit_grant(self, pending: Pending) -> None:
        """Submits an action that asks for a grant of an endpoint, which has no payload."""
        with self._lock:
            self._check_open()
            self._put(ms.Submit(pending.action), pending.payload)
            self._pending[pending.action.id] = pending  # last, as in `submit`

    def cancel(self, action: int) -> None:
        """Asks the broker to cancel an action, and the parts of a file that are written before it;
        nothing happens if its result is here. An action that is held back ends at once. It never
        waits for the lock, so a finalizer may call it, as `send_of_session`."""
        self._to_cancel.append(action)
        withdrawn = if_free(self._lock, self._cancel_deferred)
        if withdrawn is not None:
            self._end_withdrawn(withdrawn)
        elif self._channel is not None:
            self._channel.wake()  # this object's thread cancels it

    def _cancel_deferred(self) -> list[Pending]:
        """Cancels what `cancel` was called for; returns what was held back, which the caller ends
        by `_end_withdrawn` when it has released the lock; lock held."""
        withdrawn = []
        while self._to_cancel:
            action = self._to_cancel.popleft()
            pending = self._pending.get(action)
            if pending is None:
                continue
            if self._credit.withdraw(action):
                withdrawn.append(self._pending.pop(action))
                continue
            for one in (*(self._pending.get(part.action) for part in pending.earlier), pending):
                if one is not None:
                    one.cancelled = True
                    self._put(ms.Cancel((one.action.id,)))
        return withdrawn

    def _end_withdrawn(self, withdrawn: list[Pending]) -> None:
        for pending in withdrawn:
            self.store.release(pending.stored)
            self.functions.not_submitted(pending.uploaded)  # `ended` is for what was sent
            pending.future.end_cancelled()

    def interrupt(self, action: int, number: int) -> None:
        """Sends a signal to an action; nothing happens if its result is here."""
        self.send_input(action, SIGNAL, number)

    def send_input(self, action: int, kind: int, number: int = 0, other: int = 0,
                   data: bytes | None = None) -> None:
        """Sends input to an action (`protocol/input_flow.py`), unless its result is here."""
        with self._lock:
            if (pending := self._pending.get(action)) is not None:
                self._put_held_back(pending)
                self._put(ms.Input(action, kind, number, other, int(data is not None)), data)

    def open_session(self, spec: SessionSpec, env: dict[str, str], trajectory: str,
                     token: str = "") -> SessionRecord:
        """Requests a session under an id of its own; `spec.id` is ignored. Returns at once.

        Args:
            token: the close token of a shared session; empty for one that is not shared.
        """
        context = context_of(spec, env, trajectory)
        with self._lock:
            self._check_open()
            spec = msgspec.structs.replace(spec, id=self.new_id())
            record = self._sessions[spec.id] = SessionRecord(self._lock, spec, env, trajectory,
                                                                   token)
            self._opening.add(spec.id)
            self._put(ms.RequestSession(spec, n=1 if context else 0), context)
        return record

    def attach(self, handle: SessionHandle, hold: bool, timeout_s: float) -> SessionRecord:
        """Attaches to a shared session; see `Client.attach`."""
        timeout_s = seconds_of(timeout_s, "timeout_s")
        self._lock.check_wait()
        with self._lock:
            self._check_open()
            message = ms.AttachSession(self.new_id(), handle.name, handle.token, hold)
            packed(message, "name, hold")
            answer = self._attachments.ask(message)
            self._put(message)
        try:
            return answer.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            with self._lock:
                self._put_all(self._attachments.give_up(message.request, self._sessions))
            raise BrokerUnreachable(f"job {self.job}: no answer within {timeout_s:g} s") from None

    def detach(self, record: SessionRecord) -> None:
        """Ends one attachment of this process; the session is left with the last one."""
        with self._lock:
            record.attachments -= 1
            self._put_all(self._attachments.settle(self._sessions))

    def send_of_session(self, session: int, message: ms.Message) -> None:
        """Sends a message about a session, unless the session has ended. It never waits for the
        lock, so a finalizer may call it, which may interrupt a thread that holds the lock."""
        self._defer(session, message)

    def _defer(self, session: int, message: ms.Message) -> None:
        self._deferred.append((session, message))
        if if_free(self._lock, self._put_deferred) is None and self._channel is not None:
            self._channel.wake()  # the holder may be past the place where it looks at them

    def open_stream(self, session: SessionRecord, port: int) -> PortStream:
        """Asks for a stream to a port of a session; returns at once."""
        with self._lock:
            self._check_open()
            number = self.new_id()
            stream = PortStream(self, number, session.spec.id, port, self._lock)
            if session.why_ended:
                raise SessionLost(session.why_ended)
            self._streams.add(number, stream)
            self._put(ms.OpenStream(number, session.spec.id, port))
        return stream

    def send_of_stream(self, stream: int, message: ms.Message, data: bytes | None = None) -> None:
        """See `port_stream.StreamSender`."""
        with self._lock:
            if stream in self._streams:
                self._put(message, data)

    def end_stream(self, stream: int) -> None:
        """See `port_stream.StreamSender`."""
        with self._lock:
            if self._streams.remove(stream):
                self._put(ms.StreamEnded(stream))

    def send(self, message: ms.Message, must_be_open: bool = False) -> None:
        """Sends a message that has no answer. Without `must_be_open` it never waits for the lock,
        as `send_of_session`: the end of an attempt is told by a coroutine, which may be collected.

        Args:
            message: of a kind that is counted (`protocol/unconfirmed.py`), or one that the caller
                keeps in its state; another one would be lost with the channel.
            must_be_open: whether to raise the error that ended the connection.

        Raises:
            TangramError: `must_be_open` was set and the connection has ended.
        """
        if not must_be_open:
            return self._defer(0, message)
        with self._lock:
            self._check_open()
            self._put(message)

    def ask(self, what: str, argument: str = "", timeout_s: float = 10.0) -> Any:
        """The broker's answer to a query; see `Client.ask`."""
        return self.request(lambda request: ms.Query(request, what, argument), timeout_s)

    def request(self, question: Callable[[int], ms.Message], timeout_s: float = 10.0) -> Any:
        """Sends a question and waits for its answer. After a reconnect it is asked again, so it
        must be one that does no harm twice.

        Args:
            question: makes the message from the number of the request.
            timeout_s: how long to wait for the answer, in seconds.

        Raises:
            InvalidInput: the broker refuses the question.
            BrokerUnreachable: no answer came in time, or the connection has ended.
        """
        timeout_s = seconds_of(timeout_s, "timeout_s")
        number, answer = self.begin(question)
        try:
            return answer.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise BrokerUnreachable(f"job {self.job}: no answer within {timeout_s:.0f} s"
                                    ) from None
        finally:
            with self._lock:
                self._questions.pop(number, None)

    def begin(self, question: Callable[[int], ms.Message]
              ) -> tuple[int, concurrent.futures.Future[Any]]:
        """Sends a question, and asks it again after each reconnect until its answer is here.

        Returns:
            The number of the request, and the future of its answer.

        Raises:
            TangramError: the question is too long, or the connection has ended.
        """
        answer: concurrent.futures.Future[Any] = PlainFuture(self._lock)
        with self._lock:
            self._check_open()
            number = self.new_id()
            message = question(number)
            packed(message, "the question")
            self._questions[number] = _Question(message, answer)
            self._put(message)
        return number, answer

    def new_id(self) -> int:
        """An id that no other action, session or question of this job has."""
        assert self.welcome is not None
        return mint(self.welcome.client, next(self._numbers))

    def close(self) -> None:
        """Says goodbye and waits for the thread; the broker cancels what is still open. A second
        call does nothing, nor does one while Python finalizes, as the thread stands still then."""
        if sys.is_finalizing():
            return
        with self._lock:
            if self._closing:
                return
            self._put_acks()
            self._put(ms.Bye())
            self._closing = True
        if not self._lock.served_here:  # a callback cannot wait for its thread
            self._thread.join(10)

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a client cannot be sent to another process; call "
                           f"{self.again} there for a client of its own")

    def disown(self) -> None:
        """Makes this copy useless in the child of a fork; see `forked`."""
        error = not_ours("client", self.owner, self.again)
        self._lock, self._closing, self.failure = CallersLock(), True, error
        if self._channel is not None:
            self._channel.abandon()
        self._channel, self._outbox, self._credit = None, Outbox(), SubmissionCredit()
        pending, self._pending = self._pending, {}
        sessions, self._sessions = self._sessions, {}
        questions, self._questions = self._questions, {}
        self._deferred.clear()
        self._to_cancel.clear()
        for one in pending.values():
            end_copy(one.future, error)
            if one.grant_request is not None:
                one.grant_request.disown(error)
        for session in sessions.values():
            session.disown(error)
        for question in questions.values():
            end_copy(question.answer, error)
        self._attachments.disown(error)
        for stream in self._streams.take_all():
            stream.disown()

    def _check_open(self) -> None:
        """Raises the error that ended this connection, if it has ended; lock held."""
        if sys.is_finalizing():
            check_python_runs()
        if self.failure is not None:
            raise self.failure
        if self._closing:
            raise self._closed()

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"job {self.job}: this client was closed; call tangram_hpc.connect() "
                            "for another one")

    def _put(self, message: ms.Message, payload: Buffer | None = None) -> None:
        """Queues a message and wakes the thread once for all that is queued; lock held."""
        if self._deferred:
            self._put_deferred()
        self._queue(message, payload)

    def _queue(self, message: ms.Message, payload: Buffer | None) -> None:
        if self._closing:
            return  # the Bye is the last of the messages that mean something
        self._outbox.put(message, payload)
        if type(message) in COUNTED and self._unconfirmed.add(message, payload):
            self._outbox.put(ms.Ping(self._unconfirmed.sent))
        if not self._woken and self._channel is not None:
            self._channel.wake()  # first: ^C in between would leave the next message unnoticed
            self._woken = True

    def _put_held_back(self, pending: Pending) -> None:
        """Queues an action now, if it is held back; lock held."""
        if self._credit.release(pending.action.id):
            pending.sent_ns = time.monotonic_ns()
            self._put(ms.Submit(pending.action), pending.payload)

    def _put_all(self, messages: list[ms.Message]) -> None:
        for message in messages:
            self._put(message)

    def _put_deferred(self) -> bool:
        """Queues what `send` and `send_of_session` have left, in order; lock held. Returns True."""
        while self._deferred:
            session, message = self._deferred.popleft()
            if not session or session in self._sessions:
                self._queue(message, None)
        return True

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._lock.served_by = threading.get_ident()
        try:
            self._serve(self._open(first=True))
        except TangramError as error:
            self._fail(error)
        except BaseException as error:  # no future may wait for a thread that is gone
            self._fail(BrokerUnreachable(f"job {self.job}: the client's own thread failed "
                                         f"({error!r:.200}); connect again"))
            raise
        finally:
            if self._channel is not None:
                self._channel.close()
            self._ready.set()
            self._lock.served_by = 0  # a later thread may get the id of this one

    def _serve(self, channel: Channel) -> None:
        last_ping = time.monotonic()
        while True:
            try:
                if self._send_outbox(channel):
                    return self._fail(self._closed())
                last = len(self._acks) if not self._pending else 0  # the last results, if any
                for message, payload in channel.wait(_ACK_LATE_S if last else PING_S,
                                                     self._awaits()):
                    self._receive(message, payload)
                if (len(self._acks) >= _ACK_AFTER or self._ack_bytes >= _ACK_BYTES
                        or (last and last == len(self._acks) and not self._pending)):
                    with self._lock:
                        self._put_acks()
                now = time.monotonic()
                if now - last_ping >= PING_S:
                    last_ping = now
                    with self._lock:
                        self._outbox.put(ms.Ping(self._unconfirmed.sent))
            except ChannelLost as error:
                if self._closing:
                    return self._fail(self._closed())
                channel.close()
                with self._lock:
                    broken = self._streams.take_all()
                end_streams(broken, _CUT, LINK_LOST)
                channel = self._open(first=False, because=str(error))

    def _awaits(self) -> bool:
        """Whether an answer is due, so that a polling channel may spend CPU on waiting for it."""
        return bool(self._pending or self._questions or self._opening or self._attachments
                    or self._streams)

    def _send_outbox(self, channel: Channel) -> bool:
        """Sends what is queued; returns whether the goodbye was sent, which is the last message."""
        with self._lock:
            self._put_deferred()
            withdrawn = self._cancel_deferred()
            if not self._closing:
                for pending in self._credit.take_due():
                    pending.sent_ns = time.monotonic_ns()
                    self._outbox.put(ms.Submit(pending.action), pending.payload)
            self._woken, closing = False, self._closing
            frame = self._outbox.take()
        self._end_withdrawn(withdrawn)
        if frame:
            channel.send(frame)
        return closing

    def _put_acks(self) -> None:
        """Acknowledges the results that are here; lock held."""
        acks, self._acks, self._ack_bytes = self._acks, [], 0
        if acks:
            self._outbox.put(ms.Ack(tuple(acks)))

    def _open(self, first: bool, because: str = "") -> Channel:
        """A channel whose broker has welcomed us; tries all ways until the grace is over. A first
        channel is given up at once if the broker does not accept this client.

        Raises:
            TangramError: none could be opened; the last reason.
        """
        grace_s = self.welcome.grace_s if self.welcome is not None else self._back_within_s
        grace_s = max([grace_s, *(s.spec.grace_ns / 1e9 for s in list(self._sessions.values())
                                  if s.owned)])
        patience, pause = Patience(time.monotonic(), grace_s, _TRY_S), 0.05
        while True:
            problem: TangramError = BrokerUnreachable(f"job {self.job}: {because or 'no way'}")
            for dial in self._dials:
                try:
                    channel = dial()
                except TangramError as error:
                    problem = error
                    continue
                try:
                    self._greet(channel, first)
                    return channel
                except _Forgotten:
                    channel.close()
                    raise
                except (ChannelLost, TangramError) as error:
                    channel.close()
                    problem = error if isinstance(error, TangramError) else problem
            refused = first and isinstance(problem, AccessError | InvalidInput)
            if patience.over(time.monotonic()) or self._closing or refused:
                if not first and isinstance(problem, AccessError):  # the access file says so
                    problem = BrokerUnreachable(f"job {self.job}: {problem}")
                raise problem from None
            time.sleep(pause)
            pause = min(1.0, pause * 2)

    def _greet(self, channel: Channel, first: bool) -> None:
        hello, name = Outbox(), self._name or f"{os.uname().nodename}:{os.getpid()}"
        hello.put(ms.ClientHello(ms.PROTOCOL_VERSION, self.job, self._uid, name, self._rank,
                                 self._size, channel.via, self._tenant))
        channel.send(hello.take())
        deadline = time.monotonic() + _HELLO_S
        later = []
        welcome: ms.Welcome | None = None
        while welcome is None:
            if time.monotonic() > deadline:
                raise ChannelLost("no welcome within 10 s")
            for message, payload in channel.wait(0.1, True):
                if isinstance(message, ms.PeerRefused):
                    raise InvalidInput(f"job {self.job}: the broker refused us: {message.text}")
                if isinstance(message, ms.Welcome):
                    welcome = message
                else:
                    later.append((message, payload))
        if self.welcome is not None and 0 < welcome.epoch < self.welcome.epoch:
            raise ChannelLost("the broker has been superseded by one that this client has seen")
        with self._lock:
            self._adopt(channel, welcome, first)
        for message, payload in later:
            self._receive(message, payload)
        self._ready.set()

    def _adopt(self, channel: Channel, welcome: ms.Welcome, first: bool) -> None:
        """Makes this channel ours; lock held."""
        if not first and self.welcome is not None and welcome.client != self.welcome.client:
            raise _Forgotten(f"job {self.job}: the broker no longer knows this client; its "
                             "sessions are gone")
        self._channel, self.welcome = channel, welcome
        self._credit.allow(welcome.credit)
        if not first:
            self._repeat(welcome.received)

    def _repeat(self, received: int) -> None:
        """Queues everything that the broker may not have: open sessions and actions, messages that
        it has not counted, and questions; lock held."""
        self._put_deferred()
        self._outbox.take()  # it is filled again from what is kept
        for session in self._sessions.values():
            if session.owned:
                context = context_of(session.spec, session.env, session.trajectory)
                n = 1 if context else 0
                self._outbox.put(ms.RequestSession(session.spec, True, n), context)
        for message in self._attachments.again(self._sessions, self.new_id):
            self._outbox.put(message)
        for pending in self._pending.values():
            if self._credit.holds(pending.action.id):
                continue
            self._outbox.put(ms.Submit(pending.action), pending.payload)
            if pending.cancelled:
                self._outbox.put(ms.Cancel((pending.action.id,)))
            if pending.grant_request is not None and pending.grant_request.said is not None:
                self._outbox.put(pending.grant_request.said)
        for message, payload in self._unconfirmed.missing(received):
            self._outbox.put(message, payload)
        for message in (*self._attachments.asked_again(), *self._streams.again(),
                        *(question.message for question in self._questions.values())):
            self._outbox.put(message)
        if self._closing:
            self._outbox.put(ms.Bye())

    def _receive(self, message: ms.Message, payload: memoryview | None) -> None:
        match message:
            case ms.ActionResult(action=action):
                self._acks.append(action)
                if payload is not None:
                    self._ack_bytes += len(payload)
                if (pending := self._take(action)) is not None:
                    act_ns = time.monotonic_ns() - pending.submitted_ns
                    if pending.sent_ns:
                        message = pending.with_time_held_back(message)
                    self.windows.add(pending.action, message, act_ns, pending.direct)
                    conclude(pending, message, payload, self.store, act_ns)
                    pending.release(self.functions, self.store)
            case ms.Output(id=action, stream=stream):
                open_one = self._pending.get(action)
                if open_one is not None and open_one.on_output is not None and payload is not None:
                    give_output(open_one, stream, bytes(payload))
            case ms.InputCredit(id=action, total=total):
                open_one = self._pending.get(action)
                if open_one is not None and open_one.on_credit is not None:
                    open_one.on_credit(total)
            case ms.StreamData() | ms.StreamCredit() | ms.StreamEnded():
                self._streams.receive(message, payload)
            case ms.Granted(action=action):
                open_one = self._pending.get(action)
                if open_one is not None and open_one.grant_request is not None:
                    open_one.grant_request.granted(message)
            case ms.SessionUp(session=session_id):
                self._opening.discard(session_id)
                if (session := self._sessions.get(session_id)) is not None:
                    session.on_up(message)
            case ms.SessionDown(session=session_id, reason=reason, infeasible=infeasible):
                with self._lock:
                    self._opening.discard(session_id)
                    session = self._sessions.pop(session_id, None)
                if session is not None:
                    session.on_down(reason, infeasible)
            case ms.Attached():
                with self._lock:
                    self._put_all(self._attachments.answered(message, payload, self._sessions))
            case ms.Rejected():
                self._rejected(message)
            case ms.QueryReply(request=request):
                question = self._take_question(request)
                if question is not None and payload is not None:
                    _answer(question, bytes(payload))
            case ms.Pong(stamp=received, credit=credit):
                with self._lock:
                    self._unconfirmed.confirm(received)
                    self._credit.allow(credit)
            case ms.Shutdown(reason=reason):
                raise BrokerUnreachable(f"job {self.job}: the broker ended: {reason}")

    def _take(self, action: int) -> Pending | None:
        # no lock: another thread removes only what is held back, which has no result
        pending = self._pending.pop(action, None)
        if pending is not None:
            self._credit.ended(pending)
        return pending

    def _take_question(self, request: int) -> _Question | None:
        with self._lock:
            return self._questions.pop(request, None)

    def _rejected(self, message: ms.Rejected) -> None:
        if (pending := self._take(message.id)) is not None:
            refuse(pending, message)
            return pending.release(self.functions, self.store)
        question = self._take_question(message.id)
        if question is not None:
            return question.answer.set_exception(InvalidInput(message.text))
        with self._lock:
            if (left := self._attachments.refused(message, self._sessions)) is not None:
                return self._put_all(left)
            self._opening.discard(message.id)
            session = self._sessions.pop(message.id, None)
        if session is not None:
            session.on_down(message.text, infeasible=not message.lost)
        elif not message.id:
            log_refusal(self.job, message)

    def _fail(self, error: TangramError) -> None:
        """Ends all open actions, sessions and queries with this error. An action that its caller
        has cancelled ends as cancelled instead."""
        with self._lock:
            self.failure = error
            open_now, self._pending = list(self._pending.values()), {}
            self._credit = SubmissionCredit()
            sessions, self._sessions = list(self._sessions.values()), {}
            questions, self._questions = list(self._questions.values()), {}
            self._attachments.fail(error)
            streams = self._streams.take_all()
        end_streams(streams, str(error))
        for pending in open_now:
            if pending.cancelled:
                pending.future.end_cancelled()
            else:
                pending.future.set_exception(error)
        for session in sessions:
            session.on_down(str(error), error=error)
        for question in questions:
            question.answer.set_exception(error)


def _answer(question: _Question, payload: bytes) -> None:
    try:
        told = json.loads(payload)
    except (ValueError, RecursionError) as error:
        question.answer.set_exception(ProtocolError(f"the broker's answer is not JSON ({error})"))
    else:
        question.answer.set_result(told)


class _Forgotten(BrokerUnreachable):
    """Raised when the broker answers, but its grace for this client is over."""
