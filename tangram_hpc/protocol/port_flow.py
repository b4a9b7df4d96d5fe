"""Streams of bytes between a client and a port of a session's sandbox: bounds and credit. Pure.

A stream goes from the client through broker and worker to the init of the sandbox, which connects
to the port. Bytes need credit in both directions, so a side that does not read holds back the other
side, and at most `WINDOW` bytes are on their way in one direction. The init grants the client
`WINDOW` bytes when it has connected; this first credit tells the client that the stream is open.
With its request for the stream, the client grants the init `WINDOW` bytes. The broker also counts
the credit of both sides, and ends a stream on which a side sends more.

Streams are not journaled, since no decision depends on them, and no byte is sent twice: a stream
ends with the connection of its client and with the init of its sandbox.
"""

from __future__ import annotations

WINDOW = 256 * 1024  # bytes on their way in one direction of one stream
PIECE_MAX = 64 * 1024  # bytes of one message
CREDIT_STEP = WINDOW // 4  # credit is granted in steps of at least this, to save messages
STREAMS_MAX = 64  # streams that one session has open at once
PORT_MAX = 65535


def wrong_port(port: int) -> str:
    """Returns what is wrong with the number of a port; empty if nothing is."""
    return "" if 0 < port <= PORT_MAX else f"port: {port} is not from 1 to {PORT_MAX}"
