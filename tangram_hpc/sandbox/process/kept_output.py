"""Keeps a bounded part of a command's output stream: its beginning, its end, or both. Pure.

A command may write without end, so what is kept is bounded while it runs, and what is dropped is
counted. Output often comes in very small pieces, so pieces are joined to blocks: a block costs its
bytes and little more.
"""

from __future__ import annotations

from collections import deque

_BLOCK = 1 << 16  # bytes; one block more than the bound may be held for a moment


class KeptOutput:
    """What is kept of one stream.

    Args:
        most: the most bytes that are kept.
        keep: "head" for the first bytes, "tail" for the last ones, "both" for the first and the
            last half; of an odd number the first half has one more.

    Attributes:
        cut: the bytes that were dropped.
    """

    __slots__ = ("_head", "_head_most", "_last", "_last_size", "_tail_most", "cut")

    def __init__(self, most: int, keep: str = "head") -> None:
        self._tail_most = {"head": 0, "tail": most, "both": most // 2}[keep]
        self._head_most = most - self._tail_most
        self._head = bytearray()
        self._last: deque[bytearray] = deque()
        self._last_size = 0
        self.cut = 0

    def add(self, data: bytes) -> bytes:
        """Takes the next piece; returns the part of it that belongs to the head."""
        room = self._head_most - len(self._head)
        head, rest = data[:room], data[room:]
        self._head += head
        if rest and self._tail_most:
            self._add_last(rest)
        else:
            self.cut += len(rest)
        return head

    def pass_on(self, data: bytes) -> bytes:
        """Counts the next piece of a stream that is sent while it comes, and keeps nothing; returns
        the part of it that may still be sent.
        """
        head = data[:self._head_most]
        self._head_most -= len(head)
        self.cut += len(data) - len(head)
        return head

    @property
    def passes_no_more(self) -> bool:
        """Whether nothing more of a stream that is sent while it comes may be sent."""
        return not self._head_most

    def _add_last(self, data: bytes) -> None:
        if self._last and len(self._last[-1]) < _BLOCK:
            self._last[-1] += data
        else:
            self._last.append(bytearray(data))
        self._last_size += len(data)
        while self._last_size - len(self._last[0]) >= self._tail_most:
            dropped = len(self._last.popleft())
            self._last_size -= dropped
            self.cut += dropped

    def finish(self) -> bytes:
        """Returns what is kept, after the last piece; `cut` is then final."""
        over = self._last_size - self._tail_most
        if self._last and over > 0:
            del self._last[0][:over]
            self._last_size -= over
            self.cut += over
        return bytes(self._head) if not self._last else b"".join((self._head, *self._last))
