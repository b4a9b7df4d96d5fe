"""Prepared environments: set-up steps that run once in a job, and whose files many sessions share.

An environment is identified by the fingerprint of everything it is made of. The broker tells one
client to build it, and lets the others wait; within a process one thread asks, and the others wait
for that thread. The builder opens a session, writes the files, runs the steps, and takes a
snapshot. If that fails, all who wait get the error, and the next caller builds again.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...errors import BrokerUnreachable, InvalidInput, SetupFailed, TangramError
from ...interrupts import CallersLock
from ...protocol import message as ms
from ..connection import Connection
from ..forked import watch_forks
from ..request import raw_files
from ..session import Session

_ASK_S = 20.0  # after this time the question is repeated, because its answer may have been lost
_SHOWN = 2000  # how many characters of a failed step's output its error quotes

SetupSteps = Sequence[Sequence[str] | str]


class PreparedEnvironments:
    """The environments that this client asks for.

    Args:
        connection: the client's connection.
        open_session: `Client.session`.
    """

    def __init__(self, connection: Connection, open_session: Callable[..., Session]) -> None:
        self._connection, self._open_session = connection, open_session
        self._lock = CallersLock()
        self._asked: dict[str, concurrent.futures.Future[str]] = {}
        watch_forks(self)

    def disown(self) -> None:
        """Forgets, in the child of a fork, the requests of the parent's threads."""
        self._lock, self._asked = CallersLock(), {}

    def prepared(self, setup: SetupSteps, files: Mapping[str, bytes | str] | None, timeout: float,
                 options: Mapping[str, Any]) -> str:
        """Returns the name of the environment's snapshot; see `Client.prepared`."""
        steps, raw = _steps(setup), raw_files(files)
        fingerprint = _fingerprint(steps, raw, options)
        with self._lock:
            asked = self._asked.get(fingerprint)
            mine = asked is None
            if asked is None:
                asked = self._asked[fingerprint] = concurrent.futures.Future()
        if not mine:
            return asked.result()
        try:
            name = self._ask(fingerprint, steps, raw, timeout, options)
        except BaseException as error:
            # threads that wait for this one must not be told that they were interrupted themselves
            asked.set_exception(error if isinstance(error, TangramError) else SetupFailed(
                f"setup: the thread that prepared it was ended ({type(error).__name__})"))
            raise
        else:
            asked.set_result(name)
            return name
        finally:
            with self._lock:
                self._asked.pop(fingerprint, None)

    def _ask(self, fingerprint: str, steps: SetupSteps, files: Mapping[str, bytes], timeout: float,
             options: Mapping[str, Any]) -> str:
        """Asks the broker for the environment, and builds it if the broker says so."""
        try:
            answer = self._tell("prepare", fingerprint, "")  # it may wait for another build
            if "build" in answer:
                return self._build(fingerprint, steps, files, timeout, options)
        except BaseException as error:
            self._give_up(fingerprint, error)
            raise
        if "error" in answer:
            raise SetupFailed(str(answer["error"]))
        return str(answer["snapshot"])

    def _give_up(self, fingerprint: str, error: BaseException) -> None:
        """Tells the broker that this client neither builds the environment nor waits for it any
        more. Does not wait for the answer."""
        why = str(error) if isinstance(error, TangramError) else (
            f"setup: the client that prepared it was ended ({type(error).__name__})")
        with suppress(TangramError):  # the connection is over; the waiting threads learn that
            self._connection.begin(lambda request: ms.ManageSnapshot(
                request, "failed", fingerprint, why[:_SHOWN + 400]))

    def _tell(self, op: str, fingerprint: str, text: str) -> Any:
        """Tells the broker something, and waits until it has answered or the connection is over:
        other clients may wait for what this one says."""
        while True:
            try:
                return self._connection.request(
                    lambda request: ms.ManageSnapshot(request, op, fingerprint, text), _ASK_S)
            except BrokerUnreachable:
                if self._connection.failure is not None:
                    raise

    def _build(self, fingerprint: str, steps: SetupSteps, files: Mapping[str, bytes],
               timeout: float, options: Mapping[str, Any]) -> str:
        with self._open_session(files=files, **options) as session:
            for number, step in enumerate(steps, 1):
                _run(session, number, step, timeout)
            name = str(session.snapshot().result())
        self._tell("ready", fingerprint, name)
        return name


def _run(session: Session, number: int, step: Sequence[str] | str, timeout: float) -> None:
    result = session.exec(step, timeout=timeout).result()
    if not result.ok:
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-_SHOWN:]
        why = result.reason or f"exit code {result.exit_code}"
        raise SetupFailed(f"setup: step {number}, {step!r:.200}: {result.state.value}, {why}"
                          + (f"; its output ends: {said!r}" if said else ""))


def _steps(setup: SetupSteps) -> SetupSteps:
    if isinstance(setup, str | bytes) or not isinstance(setup, Sequence):
        raise InvalidInput(f"setup: {setup!r:.60} is not a list of commands; write [command]")
    for step in setup:
        if not step or not isinstance(step, str | Sequence) or isinstance(step, bytes) or not all(
                isinstance(word, str) for word in step):
            raise InvalidInput(f"setup: {step!r:.60} is neither a line for the shell nor a list of "
                               "an argv's words")
    return setup


def _listed(value: Any) -> list[Any]:
    """Returns what JSON does not know as a list; a set in one order for all processes."""
    return sorted(value) if isinstance(value, set | frozenset) else list(value)


def _fingerprint(steps: SetupSteps, files: Mapping[str, bytes], options: Mapping[str, Any]) -> str:
    """Returns a digest of everything the environment is made of. Raises InvalidInput."""
    try:
        said = json.dumps([
            [step if isinstance(step, str) else list(step) for step in steps],
            {path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())},
            dict(options)], sort_keys=True, default=_listed)
    except (TypeError, ValueError):
        raise InvalidInput("options: an environment is made of texts, numbers, lists and mappings "
                           "of them; leave the others out") from None
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()
