"""What a repair may use of a file with more damage than one bit, and what it must not take."""

from __future__ import annotations

import random
import zlib

import pytest

from tangram_hpc.storage.one_bit import flip, flipped_bit
from tangram_hpc.storage.record_file import HEAD, framed
from tangram_hpc.storage.record_salvage import BODY_MAX, salvage

BODIES = [b"body %d" % n * (n + 1) for n in range(8)]


def spoiled(data: bytes, at: int, size: int) -> bytes:
    return data[:at] + random.Random(at).randbytes(size) + data[at + size :]


def found(data: bytes) -> list[bytes]:
    return [bytes(body) for _, body in salvage(data, 0).records]


def test_a_spoiled_body_or_header_costs_one_record() -> None:
    data = b"".join(map(framed, BODIES))
    at = sum(len(framed(body)) for body in BODIES[:3])
    left = BODIES[:3] + BODIES[4:]
    for begin, size in ((at + HEAD, 9), (at, HEAD)):
        result = salvage(spoiled(data, begin, size), 0)
        assert [bytes(body) for _, body in result.records] == left
        assert result.holes == [(at, len(framed(BODIES[3])))] and result.damaged_at == at


def test_records_inside_a_payload_are_never_taken() -> None:
    """A payload that is itself a file of records, of which the header is spoiled."""
    inner = b"".join(framed(b"false %d" % n) for n in range(5))
    for payload in (inner, inner + b"more", inner[:-3]):
        for behind in ([], BODIES[:2]):
            data = b"".join(map(framed, [b"first", payload, *behind]))
            at = len(framed(b"first"))
            assert found(spoiled(data, at, HEAD)) == [b"first", *behind]


def test_behind_two_spoiled_headers_only_what_leads_to_the_end_counts() -> None:
    data = b"".join(map(framed, BODIES))
    starts = [sum(len(framed(body)) for body in BODIES[:n]) for n in range(len(BODIES))]
    data = spoiled(spoiled(data, starts[2], HEAD), starts[5], HEAD)
    assert found(data) == BODIES[:2] + BODIES[6:]


def test_a_torn_record_is_torn_although_a_bit_of_its_header_is_wrong() -> None:
    at = len(framed(b"first"))
    data = framed(b"first") + framed(b"torn in the middle")[:HEAD + 5]
    for bit in range(8 * HEAD):
        result = salvage(flip(data, 8 * at + bit), 0)
        assert [bytes(body) for _, body in result.records] == [b"first"]
        assert (result.torn, result.holes, result.damaged_at) == (HEAD + 5, [], at)


def test_only_one_bit_is_ever_set_right() -> None:
    """Two flipped bits in a body, and one in a body that is too large to be certain."""
    data = b"".join(map(framed, BODIES))
    bit = 8 * (data.index(BODIES[5]) + 2)
    assert found(flip(data, bit)) == BODIES
    assert found(flip(flip(data, bit), bit + 11)) == BODIES[:5] + BODIES[6:]
    large = framed(bytes(BODY_MAX)), framed(bytes(BODY_MAX + 1))
    assert [found(flip(one, 8 * HEAD + 5)) for one in large] == [[bytes(BODY_MAX)], []]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 300])
def test_the_flipped_bit_is_found_wherever_it_is(size: int) -> None:
    data = random.Random(size).randbytes(size)
    crc = zlib.crc32(data)
    assert flipped_bit(data, crc) is None
    assert [flipped_bit(flip(data, bit), crc) for bit in range(8 * size)] == list(range(8 * size))
