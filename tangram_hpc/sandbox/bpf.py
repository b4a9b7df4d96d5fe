"""Decisions about one system call, and their assembly into a kernel filter (classic BPF,
seccomp(2)). Pure.

A filter only jumps forward, so it is a decision graph without cycles. Each `FilterStep` answers,
loads a value, or compares the loaded value and goes on in one of two ways. The assembler emits
equal steps once, however many calls lead to them: all calls that end in EPERM share one return, and
all calls whose mode is their second argument share one look at it. It works from the last
instruction to the first, so the place of every target is known when a jump to it is emitted. Which
calls are refused is not known here.
"""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Collection, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

_LOAD, _RETURN, _AND, _JUMP = 0x20, 0x06, 0x54, 0x05
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_VALUE_AT = 4  # in struct sock_filter, which has 8 bytes
_ARGS_AT = 16  # in struct seccomp_data; the upper half of an argument lies 4 bytes further
_LONGEST = 254  # a conditional jump skips 255 at most, and the other way may put one more between
_OFTEN = 11  # the weight of a frequent number, in ranges
NUMBER_AT, ARCH_AT = 0, 4


class FilterStep(NamedTuple):
    """A part of a filter, with everything that follows it.

    Attributes:
        op: the instruction's code.
        value: what it returns, what it compares with, which bits it keeps, or where it loads. A
            negative value is a hole, -1 the first, to be filled after the assembly.
        yes: the next step; after a comparison, if it holds. None after a return.
        no: the next step if a comparison does not hold.
    """

    op: int
    value: int
    yes: FilterStep | None = None
    no: FilterStep | None = None


def answer(value: int) -> FilterStep:
    """Ends the filter with the action `value`."""
    return FilterStep(_RETURN, value)


def load(at: int, then: FilterStep) -> FilterStep:
    """Loads the 32 bits at offset `at` of struct seccomp_data."""
    return FilterStep(_LOAD, at, then)


def low(argument: int, then: FilterStep) -> FilterStep:
    """Loads the lower half of an argument, which is all that the kernel reads of an `int`."""
    return load(_ARGS_AT + 8 * argument, then)


def high(argument: int, then: FilterStep) -> FilterStep:
    """Loads the upper half of an argument."""
    return load(_ARGS_AT + 8 * argument + 4, then)


def masked(mask: int, then: FilterStep) -> FilterStep:
    """Keeps these bits of the loaded value."""
    return FilterStep(_AND, mask, then)


def equal(value: int, yes: FilterStep, no: FilterStep) -> FilterStep:
    """Branches on whether the loaded value is `value`."""
    return FilterStep(_EQUAL, value, yes, no)


def any_bit(bits: int, yes: FilterStep, no: FilterStep) -> FilterStep:
    """Branches on whether the loaded value has one of these bits."""
    return FilterStep(_ANY_BIT, bits, yes, no)


def one_of(values: Sequence[int], yes: FilterStep, no: FilterStep) -> FilterStep:
    """Branches on whether the loaded value is one of these."""
    for value in reversed(values):
        no = equal(value, yes, no)
    return no


def binary_search(ranges: Sequence[tuple[int, FilterStep]],
                  often: Collection[int] = ()) -> FilterStep:
    """A binary search for the range that contains the loaded number. Frequent numbers are found
    after fewer comparisons, and all others after hardly more.

    Args:
        ranges: the first number of each range and its step, in order; the first range also holds
            everything below.
        often: the first numbers of ranges that are frequent.
    """
    sums = [0, *accumulate(_OFTEN if first in often else 1 for first, _ in ranges)]

    def among(start: int, end: int) -> FilterStep:
        if end - start == 1:
            return ranges[start][1]
        middle = bisect(sums, (sums[start] + sums[end]) // 2, start + 2, end) - 1
        return FilterStep(_AT_LEAST, ranges[middle][0], among(middle, end), among(start, middle))

    return among(0, len(ranges))


def assemble(first: FilterStep) -> tuple[bytes, list[int]]:
    """The instructions, 8 bytes each, that decide from `first` on.

    Returns:
        The program, with 0 where a step's value is a hole, and the positions of the holes in it, in
            the order of their numbers.
    """
    program = _Assembler().run(first)
    holes = sorted((-line[3], _VALUE_AT + 8 * at) for at, line in enumerate(program)
                   if line[3] < 0)
    values = chain.from_iterable((op, yes, no, max(0, value)) for op, yes, no, value in program)
    return struct.pack("HBBI" * len(program), *values), [at for _, at in holes]


class _Assembler:
    """One assembly. A place is an instruction's distance from the end of the program."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, int, int]] = []  # op, value, place if yes, place if no
        self._places: dict[tuple[int, int, int, int], int] = {}

    def run(self, first: FilterStep) -> list[tuple[int, int, int, int]]:
        """The fields of struct sock_filter (code, skip if yes, skip if no, value), in order."""
        self._put(first)
        found = []
        for place, (op, value, yes, no) in enumerate(self._lines):
            if op == _JUMP:
                found.append((op, 0, 0, place - 1 - yes))
            elif op in (_RETURN, _LOAD, _AND):
                found.append((op, 0, 0, value))
            else:
                found.append((op, place - 1 - yes, place - 1 - no, value))
        return found[::-1]

    def _put(self, step: FilterStep) -> int:
        """The place of a step. It is emitted unless an equal one was."""
        op, value, then, otherwise = step
        yes = -1 if then is None else self._put(then)
        no = -1 if otherwise is None else self._put(otherwise)
        key = (op, value, yes, no)
        if key not in self._places:
            if no >= 0:
                yes, no = self._near(yes), self._near(no)
            elif yes >= 0 and yes != len(self._lines) - 1:
                self._repeat(yes)
            self._lines.append((op, value, yes, no))
            self._places[key] = len(self._lines) - 1
        return self._places[key]

    def _near(self, place: int) -> int:
        """Returns `place`; if a comparison cannot reach so far, emits a jump there and returns the
        place of that jump."""
        if len(self._lines) - place <= _LONGEST:
            return place
        self._lines.append((_JUMP, 0, place, -1))
        return len(self._lines) - 1

    def _repeat(self, place: int) -> None:
        """Emits the step at `place` again if it is a comparison with near targets, else a jump to
        it. A second comparison is no longer than a jump to the first, and runs one instruction
        less.
        """
        op, value, yes, no = self._lines[place]
        if no >= 0 and len(self._lines) - min(yes, no) <= _LONGEST:
            self._lines.append((op, value, yes, no))
        else:
            self._lines.append((_JUMP, 0, place, -1))
