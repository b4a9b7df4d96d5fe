"""Pure. How fast an action goes on so many units, and logarithms, in whole numbers.

Law: the same on every machine: no float, no clock. Speeds are in 1/2**20 of the speed on one unit,
serial fractions in 1/1000, logarithms in 1/1024.
"""

from __future__ import annotations

from functools import lru_cache

ONE = 20  # speeds are in 1/2**ONE
LG = 10  # logarithms are in 1/2**LG


@lru_cache(maxsize=1 << 16)
def speed(serial: int, units: int) -> int:
    """The speed on `units`, by Amdahl's law."""
    return ((units * 1000) << ONE) // (serial * units + 1000 - serial) if units else 0


@lru_cache(maxsize=1 << 12)
def speed_gains(serial: int, top: int) -> tuple[int, ...]:
    """What each further unit adds to the speed; never 0, so that idle units are lent."""
    return tuple(max(1, speed(serial, k + 1) - speed(serial, k)) for k in range(top))


def run_ns(work_ns: int, serial: int, units: int) -> int:
    """Run time on `units` >= 1."""
    return (work_ns << ONE) // speed(serial, units)


def lg(x: int) -> int:
    """log2(x), by squaring; 0 for x < 1."""
    if x < 1:
        return 0
    n = x.bit_length() - 1
    m = (x << 32) >> n
    r = n << LG
    for i in range(LG - 1, -1, -1):
        m = (m * m) >> 32
        if m >> 33:
            m >>= 1
            r |= 1 << i
    return r


def octaves(work_ns: int) -> int:
    """The bucket of a work, eight an octave, from 24 on; a bucket's edge is at most 9/8 of the one
    before."""
    work = min(max(8, work_ns), (1 << 64) - 1)
    return (work.bit_length() << 3) | (work >> (work.bit_length() - 4)) & 7


def most_of(bucket: int) -> int:
    """The largest work in a bucket of `octaves`."""
    return ((9 + (bucket & 7)) << max(0, (bucket >> 3) - 4)) - 1
