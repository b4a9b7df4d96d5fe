"""Hands what commands write to the node's log of outputs, with secrets masked.

Output reaches the worker in two ways. A running command's comes in chunks, which an execution
process sends when its `Setup` says that outputs are kept. The rest comes with the command's result:
commands of the fast path are over before anything is sent. So for each stream the keeper counts
what came in chunks, and takes from the result what follows it.

A secret that a session was given by name must not lie in a file because a command has printed it.
Its value is replaced by its variable's name, also where two chunks share it: the end of a chunk
that may be the beginning of a value waits for the next chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...ports import OutputLog
from ...protocol.payload import ExecReturn, decode

_STREAMS = (1, 2)
_SHORTEST = 4  # bytes of a value that is masked: a shorter one would hit ordinary words


class SecretMask:
    """Replaces secrets in one stream of bytes.

    Args:
        secrets: the values by the names of their variables.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        found = {value.encode(): name for name, value in secrets.items()
                 if len(value.encode()) >= _SHORTEST}
        # a longer value first: it may contain a shorter one
        self._values = sorted(found.items(), key=lambda pair: (-len(pair[0]), pair[0]))
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes; returns what can be written by now."""
        if not self._values:
            return data
        data = self._rest + data
        for value, name in self._values:
            data = data.replace(value, f"[secret {name}]".encode())
        held = max(_begun(data, value) for value, _ in self._values)
        self._rest = data[len(data) - held:]
        return data[:len(data) - held]

    def end(self) -> bytes:
        """Returns what still waits, after the last bytes."""
        rest, self._rest = self._rest, b""
        return rest


def _begun(data: bytes, value: bytes) -> int:
    """How many bytes at the end of the data are the beginning of the value. O(its length squared).
    """
    return next((size for size in range(min(len(value) - 1, len(data)), 0, -1)
                 if data.endswith(value[:size])), 0)


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
            note = f"\n[{cut} bytes of this stream were not kept: `output_max`]\n" if cut else ""
            if rest := one.mask.end() + note.encode():
                self._log.add(action, lease, number, rest)

    def close(self) -> None:
        """Closes the log, after the last attempt has ended."""
        self._log.close()

    def _add(self, action: int, lease: int, stream: int, data: bytes, one: _Stream) -> None:
        one.seen += len(data)
        if written := one.mask.feed(data):
            self._log.add(action, lease, stream, written)


def _returned(payload: bytes | None) -> tuple[tuple[bytes, int], tuple[bytes, int]] | None:
    """The output that a result holds, with the number of bytes that it lacks, by stream."""
    try:
        result = decode(payload) if payload is not None else None
    except msgspec.DecodeError:
        return None
    if not isinstance(result, ExecReturn):
        return None
    return (result.stdout, result.cut[0]), (result.stderr, result.cut[1])
