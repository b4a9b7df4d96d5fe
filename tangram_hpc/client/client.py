"""`Client`: submits actions, holds what is open, hands results to futures.

Law: one background thread owns the channel and ends futures; any thread may submit. What is open is
kept until its result is here, so that a lost way costs nothing: the client comes back by another
and says everything again under the same ids, and nothing runs twice.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..domain.action import Kind, Profile
from ..domain.ids import mint
from ..errors import BrokerUnreachable, InvalidInput, TangramError
from ..ports import Channel, ChannelLost, Dial, Store
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.frame import Buffer, Outbox
from ..protocol.liveness import Patience
from .endpoints.pace import Pace
from .endpoints.quotas import Quotas
from .forked import end_copy, not_ours, watch
from .functions import FunctionBook, Shipped
from .future import Future
from .opening import Opening
from .request import (
    Cpus,
    Options,
    Work,
    environment,
    exec_call,
    make_action,
    packed,
)
from .results import Pending, Streams, conclude, log_refusal, refuse
from .rollouts import RolloutCalls
from .session import Session, chosen_trajectory
from .shelf import Shelf

_PING_S = 2.0
_TRY_S = 20.0  # no try of all ways takes longer: what does was time in which we did not run
_ACK_AFTER, _ACK_BYTES = 128, 1 << 20  # results, or bytes of them, until we acknowledge them


class Client(RolloutCalls, Quotas, Opening):
    """A way to a broker; see `tangram_hpc.connect`. Use it as a context manager, or `close()`.

    Args:
        dials: ways to the broker, best first; each returns a fresh Channel or raises a
            TangramError. After a loss they are tried again until the broker's grace is over.
        again: how another process gets a client of its own, as Python; in errors.
        make_store: the job's store from its name in the Welcome.
    """

    def __init__(self, dials: Sequence[Dial], job: str, make_store: Callable[[str], Store],
                 name: str = "", rank: int = -1, size: int = 0, connect_s: float = 30.0,
                 again: str = "tangram_hpc.connect()") -> None:
        self.job, self.name, self.rank, self.size = job, name, rank, size
        self.welcome: ms.Welcome | None = None
        self._dials, self._make_store = list(dials), make_store
        self._uid, self._owner, self._again = uuid.uuid4().hex, os.getpid(), again
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._woken = False
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._sessions: dict[int, Session] = {}
        self._opening: set[int] = set()  # sessions whose admission is awaited
        self._answers: dict[int, concurrent.futures.Future[Any]] = {}
        RolloutCalls.__init__(self)
        self._acks, self._ack_bytes = list[int](), 0
        self._paces: dict[str, Pace] = {}
        self._closing = False
        self._failure: TangramError | None = None
        self._channel: Channel | None = None
        self._ready = threading.Event()
        watch(self)
        self._thread = threading.Thread(target=self._run, name="tangram-client", daemon=True)
        self._thread.start()
        self._await_welcome(connect_s)
        self._book = FunctionBook(self._store)

    def _await_welcome(self, connect_s: float) -> None:
        if not self._ready.wait(connect_s):
            self._failure = self._failure or BrokerUnreachable(
                f"job {self.job}: no answer from the broker within {connect_s:.0f} s")
            self._closing = True
        if self._failure is not None:
            raise self._failure
        assert self.welcome is not None
        self._store = Shelf(self._make_store(self.welcome.store), self.welcome.client)

    # ---- actions -----------------------------------------------------------------------------

    def submit(self, work: Work, *args: Any, cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0,
               session: Session | None = None, timeout: float | None = None, name: str = "",
               retries: int | None = None, resizable: bool = True, component: str = "",
               profile: Profile | None = None, kwargs: Mapping[str, Any] | None = None,
               trusted: bool = False, endpoint: str = "", cwd: str = "",
               env: Mapping[str, str] | None = None, stdin: bytes | str = b"",
               files: Mapping[str, bytes | str] | None = None,
               on_output: Callable[[int, bytes], None] | None = None,
               clean_env: bool = True, once: str = "",
               trajectory: str | int | None = None) -> Future:
        """Submits one action; returns at once.

        Args:
            work: an argv list, a shell string, or a Python function (called with `args` and
                `kwargs` in a runner process; shipped once, as it is at its first use).
            cpus: units: `4`, `(1, 8)` for any number in between, `[1, 2, 4]` for these.
            mem: memory held while it runs, beyond its session's: MiB, or "2G".
            timeout: seconds of run time; waiting never counts.
            retries: how often to start again when nodes fail (2; in a session 0, its state is
                gone with its node; with an endpoint 0, it may have been called).
            trusted: a command without a session is your own and may see your files; a function's
                result may come back as a pickle and is unpickled here. A function that runs a
                model's code can forge one: say so only if it does not.
            endpoint: a declared endpoint that it calls: it holds one of its slots while it runs and
                takes a token when it starts, and no core of its own (it waits most of the time).
            cwd, env, stdin, files: for commands. `files` are written before the start.
            on_output: called with (1 or 2, bytes) while a command runs, by the client's thread;
                what it raises is logged, and it is called no more.
            once: your name for this work, which is then done once in a job, also when the job is
                requeued: submitted again it gives the kept result, until `forget`.
            trajectory: whose tool it is, see `rollout`; its session's without.

        Returns:
            A Future of an ExecResult (a command; a failing one is a result, not an exception) or
            of the function's value. It raises RemoteError when the function raised, ActionFailed
            when the action could not be served, InfeasibleRequest when it never can be.

        Raises:
            InvalidInput: an argument is wrong; names it.
        """
        if self._failure is not None:  # before a function goes to the store
            raise self._failure
        _usable(session, kwargs, on_output)
        options = Options(cpus, mem, gpus, timeout, name, retries, resizable, component, profile,
                          trusted, endpoint, once, chosen_trajectory(trajectory, session))
        call: pl.Payload
        shipped = None
        if callable(work):
            call, shipped = self._book.call(work, args, dict(kwargs or {}), trusted)
            kind, what = Kind.FUNCTION, getattr(work, "__name__", "function")
        else:
            if args or kwargs:
                raise InvalidInput("args: only a function takes arguments; put them into argv")
            if session is not None:
                if trusted and not session.spec.trusted:
                    raise InvalidInput("trusted: the session says it for all its commands; open it "
                                       "with trusted=True")
                env = {**session.env, **environment(env)}
            call, what = exec_call(work, cwd=cwd, env=env, stdin=stdin, files=files,
                                   stream=on_output is not None, clean_env=clean_env)
            kind = Kind.EXEC
        return self._send_action(kind, options, session, what, call, trusted, on_output, shipped)

    def map(self, work: Work, *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """`submit(work, *items, **options)` for each tuple of items; yields results in order.

        All are submitted at once. With a command, `work` is called on the items to make it:
        pass a function for Python work, `submit` in a loop for commands.
        """
        if options.get("once"):
            raise InvalidInput("once: each action has a name of its own; use `submit` in a loop")
        futures = [self.submit(work, *items, **options) for items in zip(*iterables, strict=False)]

        def results() -> Iterator[Any]:
            try:
                for future in futures:
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        return results()

    def shutdown_broker(self, reason: str = "") -> None:
        """Asks the broker to end in order; what still runs is killed."""
        with self._lock:
            self._check_open()
            self._put(ms.Shutdown(reason))

    def close(self) -> None:
        """Says goodbye; the broker cancels what is still open, and its futures raise
        `ClientClosed`."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._put(ms.Bye())  # the broker cancels what is open
        self._thread.join(10)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a client cannot be sent to another process; call "
                           f"{self._again} there for a client of its own")

    def _disown(self) -> None:
        """In the child of a fork (see `forked`): this is a copy of another process's client."""
        error = not_ours("client", self._owner, self._again)
        self._lock, self._closing, self._failure = threading.Lock(), True, error
        if self._channel is not None:
            self._channel.abandon()
        self._channel, self._outbox = None, Outbox()
        pending, self._pending = self._pending, {}
        sessions, self._sessions = self._sessions, {}
        answers, self._answers = self._answers, {}
        for one in pending.values():
            end_copy(one.future, error)
            if one.turn is not None:
                one.turn.disown(error)
        for session in sessions.values():
            end_copy(session.opened, error)
            end_copy(session.closed, error)
        for answer in answers.values():
            end_copy(answer, error)

    @property
    def via(self) -> str:
        """The way in use: `socket` or `mpi`."""
        return self._channel.via if self._channel is not None else ""

    # ---- for Session and Future --------------------------------------------------------------

    def _send_action(self, kind: Kind, options: Options, session: Session | None, what: str,
                     call: pl.Payload, trusted: bool = False,
                     on_output: Callable[[int, bytes], None] | None = None,
                     shipped: Shipped | None = None, key: str = "cpu") -> Future:
        in_session, held = session.spec.id if session is not None else 0, ""
        try:
            if self._failure is not None:  # in the child of a fork the store is the parent's
                raise self._failure
            action = make_action(self._mint(), kind, options, in_session, what, key)
            if shipped is not None and action.once:
                call = msgspec.structs.replace(
                    call, digest=self._store.keep(shipped.name, action.once))
            payload = packed(call, "work, env, cwd, files")
            if len(payload) > ms.INLINE_MAX:
                held = self._store.put(payload, action.once)
                payload = pl.encode(pl.Stored(held, len(payload)))
            with self._lock:
                self._check_open()
                future = Future(action.id, self._cancel)
                self._pending[action.id] = Pending(action, payload, future, trusted,
                                                   time.monotonic_ns(), on_output, session=session,
                                                   held=held, shipped=shipped)
                self._put(ms.Submit(action), payload)
        except TangramError:
            self._store.release(held)
            self._book.not_submitted(shipped)
            raise
        return future

    def _cancel(self, action: int) -> None:
        with self._lock:
            pending = self._pending.get(action)
            if pending is not None:
                pending.cancelled = True
                self._put(ms.Cancel((action,)))

    def _mint(self) -> int:
        assert self.welcome is not None
        return mint(self.welcome.client, next(self._numbers))

    def _put(self, message: ms.Message, payload: Buffer | None = None) -> None:
        """Queues a message and wakes the thread once for all that is queued; lock held."""
        self._outbox.put(message, payload)
        if not self._woken and self._channel is not None:
            self._woken = True
            self._channel.wake()

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve(self._open(first=True))
        except TangramError as error:
            self._fail(error)
        finally:
            if self._channel is not None:
                self._channel.close()
            self._ready.set()

    def _serve(self, channel: Channel) -> None:
        last_ping = time.monotonic()
        while True:
            try:
                self._send_outbox(channel)
                if self._closing:
                    return self._fail(self._closed())
                for message, payload in channel.wait(_PING_S, self._awaits()):
                    self._receive(message, payload)
                if self._acks and (len(self._acks) >= _ACK_AFTER or not self._pending
                                   or self._ack_bytes >= _ACK_BYTES):
                    self._send_acks()
                now = time.monotonic()
                if now - last_ping >= _PING_S:
                    last_ping = now
                    with self._lock:
                        self._outbox.put(ms.Ping(0))
            except ChannelLost as error:
                if self._closing:
                    return self._fail(self._closed())
                channel.close()
                channel = self._open(first=False, because=str(error))

    def _awaits(self) -> bool:
        """Whether an answer is due, which a polling channel may spend CPU on."""
        return bool(self._pending or self._answers or self._opening)

    def _send_outbox(self, channel: Channel) -> None:
        with self._lock:
            self._woken = False
            frame = self._outbox.take()
        if frame:
            channel.send(frame)

    def _send_acks(self) -> None:
        with self._lock:
            acks, self._acks, self._ack_bytes = self._acks, [], 0
            self._outbox.put(ms.Ack(tuple(acks)))

    def _open(self, first: bool, because: str = "") -> Channel:
        """A channel whose broker has welcomed us; tries all ways until the grace is over.

        Raises:
            TangramError: none could be opened; the last reason.
        """
        grace_s = self.welcome.grace_s if self.welcome is not None else 0.0
        grace_s = max([grace_s, *(s.spec.grace_ns / 1e9 for s in list(self._sessions.values()))])
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
            if patience.over(time.monotonic()) or self._closing:
                raise problem from None
            time.sleep(pause)
            pause = min(1.0, pause * 2)

    def _greet(self, channel: Channel, first: bool) -> None:
        hello, name = Outbox(), self.name or f"{os.uname().nodename}:{os.getpid()}"
        hello.put(ms.Hello(ms.PROTOCOL_VERSION, self.job, self._uid, name, self.rank, self.size,
                           channel.via))
        channel.send(hello.take())
        deadline = time.monotonic() + 10.0
        later = []
        welcome: ms.Welcome | None = None
        while welcome is None:
            if time.monotonic() > deadline:
                raise ChannelLost("no welcome within 10 s")
            for message, payload in channel.wait(0.1, True):
                if isinstance(message, ms.Refused):
                    raise InvalidInput(f"job {self.job}: the broker refused us: {message.text}")
                if isinstance(message, ms.Welcome):
                    welcome = message
                else:
                    later.append((message, payload))
        with self._lock:
            self._adopt(channel, welcome, first)
        for message, payload in later:
            self._receive(message, payload)
        self._ready.set()

    def _adopt(self, channel: Channel, welcome: ms.Welcome, first: bool) -> None:
        """Makes this channel ours and says again all that is open; lock held."""
        if not first and self.welcome is not None and welcome.client != self.welcome.client:
            raise _Forgotten(f"job {self.job}: the broker no longer knows this client; its "
                             "sessions are gone")
        self._channel, self.welcome = channel, welcome
        if first:
            return
        self._outbox.take()  # rebuilt from what is open
        for session in self._sessions.values():
            self._outbox.put(ms.RequestSession(session.spec, again=True))
        for pending in self._pending.values():
            self._outbox.put(ms.Submit(pending.action), pending.payload)
            if pending.cancelled:
                self._outbox.put(ms.Cancel((pending.action.id,)))
            if pending.turn is not None and pending.turn.said is not None:
                self._outbox.put(pending.turn.said)

    def _receive(self, message: ms.Message, payload: memoryview | None) -> None:
        match message:
            case ms.Result(action=action):
                self._acks.append(action)
                if payload is not None:
                    self._ack_bytes += len(payload)
                if (pending := self._take(action)) is not None:
                    conclude(pending, message, payload, self._store)
                    pending.release(self._book, self._store)
            case ms.Output(id=action, stream=stream):
                open_one = self._pending.get(action)
                if open_one is not None and open_one.on_output is not None and payload is not None:
                    Streams.give(open_one, stream, bytes(payload))
            case ms.Granted(action=action):
                open_one = self._pending.get(action)
                if open_one is not None and open_one.turn is not None:
                    open_one.turn.granted(message)
            case ms.SessionUp(session=session_id):
                self._opening.discard(session_id)
                if (session := self._sessions.get(session_id)) is not None:
                    session._up(message)
            case ms.SessionDown(session=session_id, reason=reason, never=never):
                with self._lock:
                    self._opening.discard(session_id)
                    session = self._sessions.pop(session_id, None)
                if session is not None:
                    session._down(reason, never)
            case ms.Rejected():
                self._rejected(message)
            case ms.Answer(request=request):
                answer = self._answers.pop(request, None)
                if answer is not None and payload is not None:
                    answer.set_result(json.loads(bytes(payload)))
            case ms.Shutdown(reason=reason):
                raise BrokerUnreachable(f"job {self.job}: the broker ended: {reason}")

    def _take(self, action: int) -> Pending | None:
        return self._pending.pop(action, None)  # only this thread takes; no lock for each result

    def _rejected(self, message: ms.Rejected) -> None:
        if (pending := self._take(message.id)) is not None:
            refuse(pending, message)
            return pending.release(self._book, self._store)
        answer = self._answers.pop(message.id, None)
        if answer is not None:
            return answer.set_exception(InvalidInput(message.text))
        with self._lock:
            self._opening.discard(message.id)
            session = self._sessions.pop(message.id, None)
        if session is not None:
            session._down(message.text, never=not message.lost)
        elif not message.id:
            log_refusal(self.job, message)

    def _fail(self, error: TangramError) -> None:
        """Ends everything that is open with this error; what its caller cancelled, as cancelled."""
        with self._lock:
            self._failure = error
            open_now, self._pending = list(self._pending.values()), {}
            sessions, self._sessions = list(self._sessions.values()), {}
            answers, self._answers = list(self._answers.values()), {}
        for pending in open_now:
            if pending.cancelled:
                pending.future.end_cancelled()
            else:
                pending.future.set_exception(error)
        for session in sessions:
            session._down(str(error), error=error)
        for answer in answers:
            answer.set_exception(error)


class _Forgotten(BrokerUnreachable):
    """The broker answers, but its grace for this client is over."""


def _usable(session: Any, kwargs: Any, on_output: Any) -> None:
    """What is used here, and not sent as it is, can be. Raises InvalidInput."""
    if session is not None and not isinstance(session, Session):
        raise InvalidInput(f"session: {session!r:.60} is not what `Client.session` returned")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInput(f"kwargs: {kwargs!r:.60} is not a mapping of names to values")
    if on_output is not None and not callable(on_output):
        raise InvalidInput(f"on_output: {on_output!r:.60} is not a function of (stream, bytes)")
