"""An action that holds units for direct calls, and the connection to its process."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ProtocolError
from ...ports import DirectConnection
from ...protocol.direct_frames import (
    DirectCall,
    DirectReply,
    read_reply,
    receive_message,
    send_message,
)
from ..future import Future
from .direct_functions import KnownFunction


class CallTooLong(Exception):
    """A call has not ended within its time limit."""


class DirectLease:
    """One action and its connection.

    Attributes:
        future: the action's future.
        connection: the connection.
        answered: how many calls have a reply.
    """

    def __init__(self, future: Future, connection: DirectConnection) -> None:
        self.future, self.connection, self.answered = future, connection, 0
        self._there: dict[int, None] = {}  # numbers of the functions that the process has

    def has_ended(self) -> bool:
        """Whether the process has closed the connection: between calls it sends nothing else."""
        return self.connection.readable(0)

    def ask(self, known: KnownFunction, by_number: Mapping[int, KnownFunction], arguments: bytes,
            trusted: bool, timeout_s: float | None) -> DirectReply | None:
        """Sends a call and waits for its reply; None if the connection ends without one.

        Args:
            known: the function.
            by_number: all functions that may be called again.
            arguments: the pickle of its arguments.
            trusted: whether the result may travel as a pickle.
            timeout_s: how long the call may run, in seconds; None for no limit.

        Raises:
            CallTooLong: it has not ended within `timeout_s` seconds.
            ProtocolError: what came back is no reply to this call.
        """
        pickled = b"" if known.number in self._there else known.pickled
        dropped = tuple(n for n in self._there if n not in by_number) if pickled else ()
        number = self.answered + 1
        try:
            send_message(self.connection, DirectCall(number, known.number, pickled, arguments,
                                                     trusted, dropped))
            if timeout_s is not None and not self.connection.readable(timeout_s):
                raise CallTooLong
            message = receive_message(self.connection)
        except OSError:
            return None
        if message is None:
            return None
        reply = read_reply(message)
        if reply.number != number:
            raise ProtocolError(f"a reply to direct call {reply.number} came instead of {number}")
        self.answered = number
        self._there[known.number] = None
        for each in dropped:
            del self._there[each]
        return reply
