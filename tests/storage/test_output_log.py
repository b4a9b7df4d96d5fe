"""The log of a node's outputs: what is read is what was written, within the quota and the time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tangram_hpc.storage import output_log
from tangram_hpc.storage.output_log import DROPPED, ERR, OUT, KeptPiece, NodeOutputLog, OutputReader
from tangram_hpc.storage.record_file import Damaged


def logged(job: Path, *pieces: tuple[int, int, int, bytes], max_bytes: int = 1 << 20,
           node: str = "n1", keep_s: float = 0.0) -> list[str]:
    """Writes pieces as one worker does; returns its warnings."""
    warned: list[str] = []
    log = NodeOutputLog(job, node, max_bytes, keep_s, warned.append)
    for piece in pieces:
        log.add(*piece)
    log.close()
    return warned


def test_an_action_finds_its_own_output_in_order(tmp_path: Path) -> None:
    assert logged(tmp_path, (7, 1, OUT, b"a"), (8, 2, OUT, b"other"), (7, 1, ERR, b"b")) == []
    logged(tmp_path, (7, 5, OUT, b"again"), node="n2/x")
    reader = OutputReader(tmp_path, 7)
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
    found = sorted((tmp_path / "outputs").rglob("*"))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in found]
    assert modes == [0o700, 0o600]


def test_the_oldest_goes_first_and_the_quota_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    monkeypatch.setattr(output_log, "_GATHER_S", 0.0)
    quota = 16_000
    for number in range(40):  # each worker begins a segment
        logged(tmp_path, (number, 1, OUT, b"x" * 1900), max_bytes=quota)
    sizes = [path.stat().st_size for path in (tmp_path / "outputs/n1").iterdir()]
    assert quota - 2000 < sum(sizes) <= quota
    assert list(OutputReader(tmp_path, 0).new()) == []
    assert len(list(OutputReader(tmp_path, 39).new())) == 1
    # much at once, by one worker
    logged(tmp_path, *[(n, 1, OUT, b"y" * 500) for n in range(100)], max_bytes=quota, node="n2")
    sizes = [path.stat().st_size for path in (tmp_path / "outputs/n2").iterdir()]
    assert quota - 4000 < sum(sizes) <= quota and max(sizes) <= quota // 8
    logged(tmp_path, (7, 1, OUT, b"z" * 200_000), max_bytes=1 << 20, node="n3")
    assert b"".join(p.data for p in OutputReader(tmp_path, 7).new()) == b"z" * 200_000


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"old"))
    os.utime(tmp_path / "outputs/n1/1.out", (0, 0))
    logged(tmp_path, (2, 1, OUT, b"new"), keep_s=3600)
    assert [path.name for path in (tmp_path / "outputs/n1").iterdir()] == ["2.out"]


def test_a_torn_end_is_skipped_and_damage_is_told(tmp_path: Path) -> None:
    logged(tmp_path, (1, 1, OUT, b"whole"), (1, 1, OUT, b"torn"))
    path = tmp_path / "outputs/n1/1.out"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    reader = OutputReader(tmp_path, 1)
    assert [piece.data for piece in reader.new()] == [b"whole"]
    path.write_bytes(data)  # it was only being written
    assert [piece.data for piece in reader.new()] == [b"torn"]
    path.write_bytes(data.replace(b"whole", b"whale"))
    with pytest.raises(Damaged, match=r"1\.out: damaged at byte 0"):
        list(OutputReader(tmp_path, 1).new())


def test_output_that_cannot_be_written_holds_nobody_up(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs").write_text("in the way")
    warned = logged(tmp_path, (1, 1, OUT, b"x"))
    assert len(warned) == 1 and "tangram logs" in warned[0]
    # while the writer does not keep up, what exceeds the bound is counted
    monkeypatch.setattr(output_log, "_GATHER_S", 0.3)
    monkeypatch.setattr(output_log, "WAITING_MAX", 1000)
    job = tmp_path / "job"
    log = NodeOutputLog(job, "n1", 1 << 20, 0.0, warned.append)
    for _ in range(4):
        log.add(1, 1, OUT, b"x" * 400)
    while not list(OutputReader(job, 1).new()):
        pass
    log.add(1, 1, OUT, b"after")
    log.close()
    assert [(p.stream, len(p.data)) for p in OutputReader(job, 1).new()] == [
        (OUT, 400), (OUT, 400), (DROPPED, 3), (OUT, 5)]
