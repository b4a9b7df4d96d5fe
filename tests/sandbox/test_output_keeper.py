"""What goes into the log of outputs: each byte once, and no secret."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.protocol.payload import ExecReturn, encode
from tangram_hpc.sandbox.manager.output_keeper import OutputKeeper, SecretMask


class Log:
    """Joins what it gets by stream."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, int, int], bytes] = {}

    def add(self, action: int, lease: int, stream: int, data: bytes) -> None:
        key = action, lease, stream
        self.streams[key] = self.streams.get(key, b"") + data

    def close(self) -> None:
        pass


def test_what_came_in_chunks_is_not_taken_again_from_the_result() -> None:
    log = Log()
    keeper = OutputKeeper(log)
    keeper.chunk(7, 1, 1, b"one ", {})
    keeper.chunk(7, 1, 3, b"no stream", {})
    keeper.ended(7, 1, encode(ExecReturn(b"one two", b"err", (0, 5))), {})
    keeper.ended(8, 2, encode(ExecReturn(b"quick")), {})  # over before anything was sent
    keeper.ended(9, 3, None, {})
    keeper.ended(9, 4, b"\xc1 not in the protocol", {})
    assert log.streams == {(7, 1, 1): b"one two", (8, 2, 1): b"quick", (7, 1, 2): (
        b"err\n[5 bytes of this stream were not kept: `output_max`]\n")}


def test_a_command_that_was_killed_leaves_what_it_wrote() -> None:
    log = Log()
    keeper = OutputKeeper(log)
    keeper.chunk(7, 1, 2, b"last words, s3cr", {"KEY": "s3cret"})
    keeper.ended(7, 1, None, {"KEY": "s3cret"})
    assert log.streams == {(7, 1, 2): b"last words, s3cr"}


def fed(secrets: dict[str, str], *chunks: bytes) -> bytes:
    """What is written of a stream that comes in these chunks."""
    mask = SecretMask(secrets)
    return b"".join([*map(mask.feed, chunks), mask.end()])


def test_a_value_inside_a_longer_one_does_not_uncover_it() -> None:
    secrets = {"USER": "myorg", "DSN": "myorg:tok_abcdef"}
    assert fed(secrets, b"x myorg", b":tok_abcdef") == b"x [secret DSN]"
    assert fed(secrets, b"x myorg", b":tok") == b"x [secret USER]:tok"
    assert fed({"A": "tok_abc", "B": "abcdef"}, b"tok_abc", b"def") == b"[secret A]def"
    # what is put in for a value is not searched again
    assert fed({"KEY": "s3cret", "WORD": "secret"}, b"s3cret") == b"[secret KEY]"


def test_an_output_that_is_cut_inside_a_value_ends_before_it() -> None:
    log = Log()
    secrets = {"KEY": "tok_abcdef"}
    OutputKeeper(log).ended(7, 1, encode(ExecReturn(b"x tok_abcde", b"", (9, 0))), secrets)
    assert log.streams == {(7, 1, 1): b"x [9 bytes may be the beginning of a secret]\n"
                                      b"[9 bytes of this stream were not kept: `output_max`]\n"}


def test_the_end_of_a_chunk_is_found_at_once_for_a_long_value() -> None:
    value = "".join(map(chr, range(0x21, 0x7f))) * 44  # as a key in PEM: 4 KiB
    mask, began_s = SecretMask({"KEY": value}), time.process_time()
    for _ in range(400):
        mask.feed(b"no secret, " * 400)
    assert time.process_time() - began_s < 0.4  # it was 0.9 s with a search of all lengths


@given(parts=st.lists(st.sampled_from([b"s3cret", b"s3cretive", b"s3c", b"ret", b"x", b"s", b"abab",
                                       b"ababc", b"\n"]), max_size=12),
       cuts=st.lists(st.integers(0, 80), max_size=8))
def test_no_secret_is_written_wherever_chunks_end(parts: list[bytes], cuts: list[int]) -> None:
    secrets = {"KEY": "s3cret", "LONG": "s3cretive", "REPEATS": "ababc", "TINY": "x",
               "ACROSS": "retx"}
    data, mask, written = b"".join(parts), SecretMask(secrets), b""
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for begin, end in pairwise(edges):
        written += mask.feed(data[begin:end])
    written += mask.end()
    assert written == fed(secrets, data)
    assert not any(value in written for value in (b"s3cret", b"s3cretive", b"ababc", b"retx"))
    back = written
    for name, value in secrets.items():
        back = back.replace(f"[secret {name}]".encode(), value.encode())
    assert back == data
