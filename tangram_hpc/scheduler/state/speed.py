"""Pure. Computes an action's speed on a number of units, and logarithms, in whole numbers.

Without floats the results are the same on every machine, so a replay decides as the broker did.
Speeds are in 1/2**20 of the speed on one unit, serial fractions in 1/1000, logarithms in 1/1024.
"""

from __future__ import annotations

from functools import lru_cache

ONE = 20  # speeds are in 1/2**ONE
LG = 10  # logarithms are in 1/2**LG


@lru_cache(maxsize=1 << 16)
def speed(serial: int, units: int) -> int:
    """The speed on `units`, by Amdahl's law; 0 on no unit."""
    return ((units * 1000) << ONE) // (serial * units + 1000 - serial) if units else 0


@lru_cache(maxsize=1 << 12)
def speed_gains(serial: int, top: int) -> tuple[int, ...]:
    """The gain in speed of each further unit, up to `top`. It is never 0, so that idle units are
    lent.
    """
    return tuple(max(1, speed(serial, k + 1) - speed(serial, k)) for k in range(top))


def run_ns(work_ns: int, serial: int, units: int) -> int:
    """The run time on `units`, which must be at least 1."""
    return (work_ns << ONE) // speed(serial, units)


def lg(x: int) -> int:
    """The binary logarithm of x, by repeated squaring; 0 for x < 1."""
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
    """The histogram bucket of an amount of work.

    There are eight buckets an octave, and the lowest is 32, for up to 8 ns. The upper edge of a
    bucket is at most 9/8 of the edge of the one before.
    """
    work = min(max(8, work_ns), (1 << 64) - 1)
    return (work.bit_length() << 3) | (work >> (work.bit_length() - 4)) & 7


def most_of(bucket: int) -> int:
    """The largest amount of work in a bucket of `octaves`."""
    return ((9 + (bucket & 7)) << max(0, (bucket >> 3) - 4)) - 1
