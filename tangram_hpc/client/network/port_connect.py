"""Opens a stream to a port of a session, and waits for a server that is still starting."""

from __future__ import annotations

import time

from ...errors import InvalidInput, PortFailed
from ...protocol.port_flow import PORT_MAX, wrong_port
from ..connection import Connection
from ..request import seconds_of
from ..session_record import SessionRecord
from .open_streams import LINK_LOST
from .port_stream import PortStream

# Worth another attempt: the server or the sandbox may still be starting, or other streams may end.
_AGAIN = ("ECONNREFUSED", "EAGAIN", "EMFILE")
_PAUSE_S, _PAUSE_MAX_S = 0.02, 0.5  # between two attempts


def checked_port(port: int) -> int:
    """Returns the number of a port.

    Raises:
        InvalidInput: it is not the number of a port.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise InvalidInput(f"port: {port!r:.40} is not a whole number from 1 to {PORT_MAX}")
    if why := wrong_port(port):
        raise InvalidInput(why)
    return port


def connect_port(connection: Connection, record: SessionRecord, port: int,
                 timeout: float | None, wait_s: float) -> PortStream:
    """Connects to a port of a session; see `Session.connect`."""
    checked_port(port)
    if timeout is not None:
        timeout = seconds_of(timeout, "timeout")
    wait_s = seconds_of(wait_s, "wait_s")
    record.opened.result(timeout)
    until, pause = time.monotonic() + wait_s, _PAUSE_S
    while True:
        stream = connection.open_stream(record, port)
        try:
            stream.wait_open(timeout)
            return stream
        except PortFailed as error:
            if error.code == LINK_LOST:  # the next one is asked for when there is a channel again
                continue
            if error.code not in _AGAIN or time.monotonic() + pause > until:
                raise
        except BaseException:
            stream.close()
            raise
        time.sleep(pause)
        pause = min(_PAUSE_MAX_S, pause * 2)
