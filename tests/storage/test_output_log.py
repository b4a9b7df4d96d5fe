"""The log of a node's outputs: what is read is what was written, within the quota and the time."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tangram_hpc.storage import output_log
from tangram_hpc.storage.output_log import (
    DROPPED,
    ERR,
    OUT,
    KeptPiece,
    NodeOutputLog,
    OutputReader,
    last_output,
)


def logged(job: Path, *pieces: tuple[int, int, int, bytes], max_bytes: int = 1 << 20,
           node: str = "n1", keep_s: float = 0.0) -> list[str]:
    """Writes pieces as one worker does; returns its warnings."""
    warned: list[str] = []
    log = NodeOutputLog(job, node, max_bytes, keep_s, warned.append)
    for piece in pieces:
        log.add(*piece)
    log.close()
    return warned


def reading(job: Path, action: int) -> OutputReader:
    """A reader of a log that must not be damaged."""
    return OutputReader(job, action, pytest.fail)


def segment(job: Path, number: int = 1, node: str = "n1") -> Path:
    """The only segment of this number."""
    path, = (job / "outputs" / node).glob(f"{number}-*.out")
    return path


def test_an_action_finds_its_own_output_in_order(tmp_path: Path) -> None:
    assert logged(tmp_path, (7, 1, OUT, b"a"), (8, 2, OUT, b"other"), (7, 1, ERR, b"b")) == []
    logged(tmp_path, (7, 5, OUT, b"again"), node="n2/x")
    reader = reading(tmp_path, 7)
    assert list(reader.new()) == [KeptPiece(1, OUT, b"a"), KeptPiece(1, ERR, b"b"),
                                  KeptPiece(5, OUT, b"again")]
    assert list(reader.new()) == []
    logged(tmp_path, (7, 1, OUT, b"late"))
    assert list(reader.new()) == [KeptPiece(1, OUT, b"late")]


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        logged(tmp_path, (1, 1, OUT, b"x"))
    finally:
        os.umask(before)
    found = sorted(tmp_path.rglob("*"))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in found]
    assert modes == [0o700, 0o700, 0o600]


def test_the_oldest_goes_first_and_the_quota_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    monkeypatch.setattr(output_log, "_GATHER_S", 0.0)
    quota = 16_000
    for number in range(40):  # each worker begins a segment
        logged(tmp_path, (number, 1, OUT, b"x" * 1900), max_bytes=quota)
    sizes = [path.stat().st_size for path in (tmp_path / "outputs/n1").iterdir()]
    assert quota - 2000 < sum(sizes) <= quota
    assert list(reading(tmp_path, 0).new()) == []
    assert len(list(reading(tmp_path, 39).new())) == 1
    # much at once, by one worker
    logged(tmp_path, *[(n, 1, OUT, b"y" * 500) for n in range(100)], max_bytes=quota, node="n2")
    sizes = [path.stat().st_size for path in (tmp_path / "outputs/n2").iterdir()]
    assert quota - 4000 < sum(sizes) <= quota and max(sizes) <= quota // 8
    logged(tmp_path, (7, 1, OUT, b"z" * 200_000), max_bytes=1 << 20, node="n3")
    assert b"".join(p.data for p in reading(tmp_path, 7).new()) == b"z" * 200_000


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"old"))
    os.utime(segment(tmp_path), (0, 0))
    logged(tmp_path, (2, 1, OUT, b"new"), keep_s=3600)
    assert [*(tmp_path / "outputs/n1").iterdir()] == [segment(tmp_path, 2)]


def test_a_torn_end_is_skipped_and_damage_is_told(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"whole"), (1, 1, OUT, b"torn"))
    path = segment(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    told: list[str] = []
    reader = OutputReader(tmp_path, 1, told.append)
    assert [piece.data for piece in reader.new()] == [b"whole"]
    # another client of a network file system: the size is there, and the content is not yet
    path.write_bytes(data[:len(data) // 2] + bytes(len(data) // 2) + data[:5])
    assert [piece.data for piece in reader.new()] == []
    path.write_bytes(data)
    assert [piece.data for piece in reader.new()] == [b"torn"] and told == []


def test_a_segment_that_is_emptied_is_read_on(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"first, and long"))
    path, told = segment(tmp_path), list[str]()
    reader = OutputReader(tmp_path, 1, told.append)
    assert [piece.data for piece in reader.new()] == [b"first, and long"]
    os.truncate(path, 0)  # by somebody who needed the room
    (other := tmp_path / "other").mkdir()
    logged(other, (1, 1, OUT, b"next"))
    path.write_bytes(segment(other).read_bytes())
    for wanted in ([b"next"], []):
        assert [piece.data for piece in reader.new()] == wanted
        assert len(told) == 1 and "the segment was cut" in told[0]


def test_the_other_segments_are_shown_if_one_is_damaged(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"first"), (1, 1, OUT, b"whole"), (1, 1, OUT, b"lost"))
    path = segment(tmp_path)
    data = path.read_bytes()
    logged(tmp_path, (1, 1, OUT, b"other node"), node="n2")
    told: list[str] = []
    reader = OutputReader(tmp_path, 1, told.append)
    path.write_bytes(data.replace(b"whole", b"whale"))
    assert [piece.data for piece in reader.new()] == [b"first", b"other node"] and not told
    path.with_name(path.name.replace("1-", "2-", 1)).write_bytes(data)  # the writer has gone on
    assert [piece.data for piece in reader.new()] == [b"first", b"whole", b"lost"]
    assert len(told) == 1 and f"{path}: damaged at byte {(len(data) + 1) // 3};" in told[0]
    assert list(reader.new()) == [] and len(told) == 1


def test_workers_with_one_name_do_not_break_each_others_log(tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:
    monkeypatch.setattr(output_log, "_GATHER_S", 0.0)
    warned: list[str] = []
    logs = [NodeOutputLog(tmp_path, name, 1 << 16, 0.0, warned.append) for name in ("a/b", "a_b")]
    for number in range(600):
        for log in logs:
            log.add(number, 1, OUT, b"x" * 1900)
    for log in logs:
        log.close()
    logs = [NodeOutputLog(tmp_path, name, 1 << 16, 0.0, warned.append) for name in ("a/b", "a_b")]
    for log in logs:
        log.add(600, 1, OUT, b"last")
    for log in logs:
        log.close()
    assert warned == []
    assert len(list(reading(tmp_path, 600).new())) == 2
    sizes = [path.stat().st_size for path in (tmp_path / "outputs/a_b").iterdir()]
    assert sum(sizes) <= (1 << 16) + (1 << 13)  # each may have begun a segment at once


def test_a_worker_whose_segment_was_removed_begins_another(tmp_path: Path) -> None:
    log = NodeOutputLog(tmp_path, "n1", 1 << 20, 0.0, pytest.fail)
    wrote = threading.Event()
    inner, log._write = log._write, lambda data: (inner(data), wrote.set())  # type: ignore
    log.add(1, 1, OUT, b"old")
    assert wrote.wait(30)
    segment(tmp_path).unlink()
    log.add(1, 1, OUT, b"new")
    log.close()
    assert [piece.data for piece in reading(tmp_path, 1).new()] == [b"new"]


def test_output_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("in the way")
    warned = logged(tmp_path, (1, 1, OUT, b"x"))
    assert len(warned) == 1 and "tangram logs" in warned[0]


def test_each_attempt_is_told_what_was_dropped_of_it(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "WAITING_MAX", 1000)
    goes, writes = threading.Event(), threading.Event()

    def slow(_: float) -> None:
        writes.set()
        assert goes.wait(60)

    monkeypatch.setattr(output_log.time, "sleep", slow)
    log = NodeOutputLog(tmp_path, "n1", 1 << 20, 0.0, pytest.fail)
    log.add(1, 1, OUT, b"x" * 400)
    assert writes.wait(60)  # the writer waits, and takes nothing before `goes`
    for action, size in ((1, 400), (1, 401), (2, 402), (1, 403), (3, 0)):
        log.add(action, 1, OUT, b"x" * size)
    monkeypatch.setattr(output_log, "WAITING_MAX", 0)
    log.add(4, 1, OUT, b"last words")
    goes.set()
    log.close()
    found = {action: [(p.stream, p.data if p.stream == DROPPED else len(p.data))
                      for p in reading(tmp_path, action).new()] for action in (1, 2, 3, 4)}
    assert found == {1: [(OUT, 400), (OUT, 400), (DROPPED, b"804")], 2: [(DROPPED, b"402")],
                     3: [], 4: [(DROPPED, b"10")]}


def test_the_last_output_is_that_of_the_last_attempt_and_says_what_was_dropped(tmp_path: Path
                                                                               ) -> None:
    logged(tmp_path, (7, 1, OUT, b"first try"), (7, 1, DROPPED, b"99"), (8, 2, OUT, b"other"),
           (9, 3, DROPPED, b"5"))
    logged(tmp_path, (7, 4, OUT, b"begin"), (7, 4, DROPPED, b"804"), (7, 4, ERR, b"end"),
           node="n2/x")
    again = b"begin\n[804 bytes before here were not kept]\nend"
    assert last_output(tmp_path, {7, 9, 10}, 100) == {
        7: again, 9: b"[5 bytes before here were not kept]\n"}
    assert last_output(tmp_path, {7}, 4) == {7: b"\nend"}
    assert last_output(tmp_path, {7, 8}, 100, {"n2/x"}) == {7: again}
    assert last_output(tmp_path, {7}, 100, {"n1"}) == {
        7: b"first try\n[99 bytes before here were not kept]\n"}
