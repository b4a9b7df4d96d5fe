"""The port streams that are open on one connection of a client.

A stream belongs to one channel. When the channel is lost, all streams end that were requested on
it, because bytes that were on the way are not sent again. `Session.connect` opens new ones, under
new numbers: what the node still sends for an old number must not get into another stream. A stream
that is requested while there is no channel is requested on the next one. The connection takes
streams out of this table with its lock held, and ends them without the lock: a thread that sends on
a stream takes the stream's lock first and the connection's lock second.
"""

from __future__ import annotations

from ...protocol.message import OpenStream, StreamCredit, StreamData, StreamEnded
from .port_stream import PortStream

LINK_LOST = "ECONNABORTED"  # how a stream ends whose channel was lost before it was connected


class OpenStreams:
    """The streams of a client by number. The connection's lock guards additions and removals."""

    def __init__(self) -> None:
        self._streams: dict[int, PortStream] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def add(self, number: int, stream: PortStream) -> None:
        """Notes a stream that is being opened."""
        self._streams[number] = stream

    def remove(self, number: int) -> bool:
        """Forgets a stream; returns whether it was known."""
        return self._streams.pop(number, None) is not None

    def take_all(self) -> list[PortStream]:
        """Forgets all streams and returns them."""
        streams, self._streams = list(self._streams.values()), {}
        return streams

    def again(self) -> list[OpenStream]:
        """Returns the messages that request, on a new channel, the streams of this client."""
        return [OpenStream(number, stream.session, stream.port)
                for number, stream in self._streams.items()]

    def receive(self, message: StreamData | StreamCredit | StreamEnded,
                data: memoryview | None) -> None:
        """Hands a message of the broker to its stream; drops it if the stream was closed here."""
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        if isinstance(message, StreamData):
            stream.on_data(b"" if data is None else bytes(data), message.last)
        elif isinstance(message, StreamCredit):
            stream.on_credit(message.count)
        else:
            self._streams.pop(message.stream, None)
            stream.on_ended(message)


def end_streams(streams: list[PortStream], reason: str, unopened: str = "ECONNRESET") -> None:
    """Ends streams that have been taken from their connection; `unopened` is the code for those
    that were not connected yet."""
    for stream in streams:
        stream.on_ended(StreamEnded(0, reason, "ECONNRESET" if stream.opened else unopened))
