"""What is kept of a stream, however it comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.sandbox.process.kept_output import KeptOutput

PIECES = st.lists(st.one_of(st.binary(min_size=1, max_size=40),
                            st.sampled_from([b"x" * 70_000, b"yz" * 40_000])), max_size=20)


@given(PIECES, st.integers(1, 200_000), st.sampled_from(["head", "tail", "both"]))
def test_head_tail_or_both_is_kept_and_the_rest_counted(
        pieces: list[bytes], most: int, keep: str) -> None:
    kept, whole = KeptOutput(most, keep), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    tail = {"head": 0, "tail": most, "both": most // 2}[keep]
    wanted = whole if len(whole) <= most else whole[:most - tail] + whole[len(whole) - tail:]
    assert kept.finish() == wanted
    assert kept.cut == len(whole) - len(wanted)


@given(PIECES, st.integers(1, 100_000))
def test_a_streamed_output_ends_at_the_limit(pieces: list[bytes], most: int) -> None:
    kept, whole = KeptOutput(most), b"".join(pieces)
    assert b"".join(kept.pass_on(piece) for piece in pieces) == whole[:most]
    assert (kept.cut, kept.finish()) == (max(0, len(whole) - most), b"")


def test_single_bytes_without_end_take_no_more_memory_than_the_limit() -> None:
    kept = KeptOutput(1000, "tail")
    for _ in range(300_000):
        kept.add(b"x")
    assert sum(map(len, kept._last)) < 1000 + 2 * 65536 and len(kept._last) <= 3
    assert len(kept.finish()) == 1000 and kept.cut == 299_000
