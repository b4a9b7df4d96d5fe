"""The sessions of other clients that this client is attached to, and its requests to attach.

The broker counts a client as attached or not. One client may attach to the same session several
times, from several threads; all of them share one record, which counts them, and the broker is told
when the last one has detached. A request to attach that is not answered yet may be for any
session. So no detachment is sent before all such requests are answered: the two messages could
pass each other.

Requests and attachments are repeated after a reconnect, because neither does harm twice. No
detachment is lost with a connection either (`protocol/unconfirmed.py`). Every function here is
called with the connection's lock held, and none sends a message: each returns the messages that
are to be sent.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from ..errors import InvalidInput, SessionLost, TangramError
from ..interrupts import CallersLock, PlainFuture
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.reading import reader
from .forked import end_copy
from .session_record import SessionRecord

_read_context = reader(pl.SessionContext)
AttachAnswer = concurrent.futures.Future[SessionRecord]
Records = dict[int, SessionRecord]  # by session id


class Attachments:
    """The requests to attach of one client, and the end of its attachments."""

    def __init__(self, lock: CallersLock) -> None:
        self._lock = lock  # the connection's, which the futures of its sessions need
        # requests that are under way, by number
        self._asked: dict[int, tuple[ms.AttachSession, AttachAnswer]] = {}
        self._unwanted: dict[int, None] = {}  # attached sessions whose callers had given up

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, message: ms.AttachSession) -> AttachAnswer:
        """Notes a request; its future ends with the record of the session."""
        answer: AttachAnswer = PlainFuture(self._lock)
        self._asked[message.request] = message, answer
        return answer

    def answered(self, told: ms.Attached, context: memoryview | None, records: Records
                 ) -> list[ms.Message]:
        """Adds an attachment to the client's records."""
        number = told.spec.id
        asked = self._asked.pop(told.request, None)
        if asked is None:  # nobody waits for it any more, or it was repeated after a reconnect
            self._unwanted[number] = None
            return self.settle(records)
        message, answer = asked
        record = records.get(number)
        if record is None:
            more = pl.SessionContext() if context is None else _read_context(context)
            record = records[number] = SessionRecord(self._lock, told.spec, dict(more.env),
                                                     more.trajectory, owned=False, may_close=False)
        if not record.token or (told.may_close and not record.may_close):
            record.token, record.may_close = message.token, told.may_close
        record.hold = record.hold or message.hold
        record.attachments += 1
        answer.set_result(record)
        return self.settle(records)

    def refused(self, told: ms.Rejected, records: Records) -> list[ms.Message] | None:
        """Ends a request that the broker refused; None if the refusal is of something else."""
        asked = self._asked.pop(told.id, None)
        if asked is None:
            return None
        asked[1].set_exception(SessionLost(told.text) if told.lost else InvalidInput(told.text))
        return self.settle(records)

    def give_up(self, request: int, records: Records) -> list[ms.Message]:
        """Forgets a request whose caller waits no more."""
        self._asked.pop(request, None)
        return self.settle(records)

    def settle(self, records: Records) -> list[ms.Message]:
        """Leaves the sessions that nobody in this process is attached to any more."""
        if self._asked:
            return []
        left = [n for n, record in records.items() if not record.owned and record.attachments < 1]
        for number in left:
            records.pop(number).on_down("this client detached from it")
        left += [number for number in self._unwanted if number not in records
                 and number not in left]
        self._unwanted.clear()
        return [ms.DetachSession(number) for number in left]

    def again(self, records: Records, new_id: Callable[[], int]) -> list[ms.Message]:
        """The messages that repeat all attachments after a reconnect."""
        return [ms.AttachSession(new_id(), record.spec.name, record.token, record.hold, number)
                for number, record in records.items() if not record.owned]

    def asked_again(self) -> list[ms.Message]:
        """The messages that repeat all requests after a reconnect. They follow the detachments: a
        request may be for a session that this client has just left."""
        return [message for message, _ in self._asked.values()]

    def fail(self, error: TangramError) -> None:
        """Ends all requests, because the connection has ended."""
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            answer.set_exception(error)

    def disown(self, error: TangramError) -> None:
        """Ends the copies of all requests in the child of a fork."""
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            end_copy(answer, error)
