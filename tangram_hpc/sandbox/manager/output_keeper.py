"""Hands what commands write to the node's log of outputs, with secrets masked.

Output reaches the worker in two ways. A running command's comes in chunks, which an execution
process sends when its `Setup` says that outputs are kept. The rest comes with the command's result:
commands of the fast path are over before anything is sent. So for each stream the keeper counts
what came in chunks, and takes from the result what follows it.

A secret that a session was given by name must not lie in a file because a command has printed it.
Its value is replaced by its variable's name, also where two chunks share it: the end of a chunk
that may be the beginning of a value waits for the next chunk. Values under 4 bytes are not masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ...ports import OutputLog
from ...protocol.payload import ExecReturn, decode

_STREAMS = (1, 2)
_SHORTEST = 4  # bytes of a value that is masked: a shorter one would hit ordinary words


class SecretMask:
    """Replaces secrets in one stream of bytes.

    However the stream is cut into chunks, the output is that of one chunk: at each place the
    longest value that begins there is replaced, from left to right.

    Args:
        secrets: the values by the names of their variables. Values under 4 bytes are not masked.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        found = {value.encode(): f"[secret {name}]".encode() for name, value in secrets.items()
                 if len(value.encode()) >= _SHORTEST}
        self._values = sorted(found, key=lambda value: (-len(value), value))
        self._names = found
        # a longer value first: a shorter one may be its beginning
        self._any = re.compile(b"|".join(map(re.escape, self._values)))
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes; returns what can be written by now."""
        if not self._values:
            return data
        data = self._rest + data
        # A value that begins before `edge` is either complete or does not stand there, since the
        # longest beginning of a value at the end of the data begins at `edge`.
        edge = len(data) - max(_begun(data, value) for value in self._values)
        written, at = self._masked(data, edge)
        self._rest = data[at:]
        return written

    def end(self) -> bytes:
        """Returns what still waits, after the last bytes."""
        rest, self._rest = self._rest, b""
        return self._masked(rest, len(rest))[0] if rest else b""

    def cut(self) -> int:
        """Drops what still waits, as the stream lacks its last bytes: it may be most of a value.
        Returns how many bytes these were.
        """
        size, self._rest = len(self._rest), b""
        return size

    def _masked(self, data: bytes, edge: int) -> tuple[bytes, int]:
        """The data as it is written, up to `edge`, or to the end of a value that begins before it;
        and the offset up to which that is.
        """
        parts: list[bytes] = []
        at = 0
        for match in self._any.finditer(data):
            if match.start() >= edge:
                break
            parts += data[at:match.start()], self._names[match[0]]
            at = match.end()
        if at < edge:
            parts.append(data[at:edge])
        return b"".join(parts), max(at, edge)


def _begun(data: bytes, value: bytes) -> int:
    """How many bytes at the end of the data are the beginning of the value, but not all of it.

    It looks only where the value's first bytes stand, so it is O(size of the value) unless these
    are frequent in the data.
    """
    tail = data[max(0, len(data) - len(value) + 1):]
    first = value[:_SHORTEST]
    at = tail.find(first)
    while at >= 0:
        if value.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(first, at + 1)
    return next((size for size in range(min(_SHORTEST - 1, len(tail)), 0, -1)
                 if tail.endswith(value[:size])), 0)


class _Stream:
    """What was seen of one stream of an attempt: the bytes so far, and its mask."""

    __slots__ = ("mask", "seen")

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self.seen, self.mask = 0, SecretMask(secrets)


class OutputKeeper:
    """Keeps the outputs of the attempts of one node.

    Args:
        log: where they are written.
    """

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self._streams: dict[int, tuple[_Stream, _Stream]] = {}  # by lease, of running commands

    def chunk(self, action: int, lease: int, stream: int, data: bytes,
              secrets: Mapping[str, str]) -> None:
        """Takes a chunk of a running command; another stream than the two is ignored."""
        if stream in _STREAMS:
            if lease not in self._streams:
                self._streams[lease] = _Stream(secrets), _Stream(secrets)
            self._add(action, lease, stream, data, self._streams[lease][stream - 1])

    def ended(self, action: int, lease: int, payload: bytes | None,
              secrets: Mapping[str, str]) -> None:
        """Takes the rest of an attempt's output from its result; None if there is no result."""
        streams = self._streams.pop(lease, None)
        found = _returned(payload)
        if found is None and streams is None:
            return
        streams = streams or (_Stream(secrets), _Stream(secrets))
        for number, one in zip(_STREAMS, streams, strict=True):
            kept, cut = found[number - 1] if found is not None else (b"", 0)
            self._add(action, lease, number, kept[one.seen:], one)
            if rest := _cut_off(one.mask, cut) if cut else one.mask.end():
                self._log.add(action, lease, number, rest)

    def close(self) -> None:
        """Closes the log, after the last attempt has ended."""
        self._log.close()

    def _add(self, action: int, lease: int, stream: int, data: bytes, one: _Stream) -> None:
        one.seen += len(data)
        if written := one.mask.feed(data):
            self._log.add(action, lease, stream, written)


def _cut_off(mask: SecretMask, cut: int) -> bytes:
    """The end of a stream that lacks its last bytes."""
    held = mask.cut()
    secret = f"[{held} bytes may be the beginning of a secret]" if held else ""
    return f"{secret}\n[{cut} bytes of this stream were not kept: `output_max`]\n".encode()


def _returned(payload: bytes | None) -> tuple[tuple[bytes, int], tuple[bytes, int]] | None:
    """The output that a result holds, with the number of bytes that it lacks, by stream."""
    try:
        result = decode(payload) if payload is not None else None
    except msgspec.DecodeError:
        return None
    if not isinstance(result, ExecReturn):
        return None
    return (result.stdout, result.cut[0]), (result.stderr, result.cut[1])
