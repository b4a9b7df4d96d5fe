"""The worker's part of port streams: it knows which init has which stream, and passes messages on.

Only sessions have ports: a sandbox of a pool serves one command, and no client can name it. When an
init dies or is ended, its streams end too, although its session may go on with another init.
"""

from __future__ import annotations

from ...ports import Reports
from ...protocol.message import (
    OpenStream,
    StreamCredit,
    StreamData,
    StreamEnded,
    StreamMessage,
)
from ...protocol.process_frames import ConnectPort, PortBytes, PortCredit, PortEnded, ProcessFrame
from .execution_processes import ExecutionProcess
from .sessions import Sessions


class PortTraffic:
    """The port streams of all sessions on one worker."""

    def __init__(self, sessions: Sessions, reports: Reports) -> None:
        self._sessions, self._reports = sessions, reports
        self._inits: dict[int, ExecutionProcess] = {}  # by stream

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """Passes a message of a client on to the init that has its stream."""
        if isinstance(message, OpenStream):
            return self._open(message)
        process = self._inits.get(message.stream)
        if process is None:
            return
        order: ProcessFrame
        if isinstance(message, StreamData):
            order = PortBytes(message.stream, data, message.last)
        elif isinstance(message, StreamCredit):
            order = PortCredit(message.stream, message.count)
        else:
            order = PortEnded(message.stream)
            del self._inits[message.stream]
        process.send(order)

    def _open(self, message: OpenStream) -> None:
        session = self._sessions.get(message.session)
        process = session.process if session is not None else None
        if session is None or session.closing or process is None or not session.up:
            return self._reports.stream(StreamEnded(
                message.stream, "session: its sandbox is not ready", "EAGAIN"))
        self._inits[message.stream] = process
        process.send(ConnectPort(message.stream, message.port))

    def report(self, process: ExecutionProcess, message: PortBytes | PortCredit | PortEnded
               ) -> None:
        """Passes an init's message about one of its streams on to the broker."""
        if self._inits.get(message.stream) is not process:
            return
        if isinstance(message, PortBytes):
            self._reports.stream(StreamData(message.stream, message.last), message.data)
        elif isinstance(message, PortCredit):
            self._reports.stream(StreamCredit(message.stream, max(0, message.count)))
        else:
            del self._inits[message.stream]
            self._reports.stream(StreamEnded(message.stream, message.reason, message.code))

    def lost(self, process: ExecutionProcess, reason: str) -> None:
        """Ends all streams of an init that is gone."""
        for stream in [one for one, init in self._inits.items() if init is process]:
            del self._inits[stream]
            self._reports.stream(StreamEnded(stream, f"connect: {reason}", "ECONNRESET"))
