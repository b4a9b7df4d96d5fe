"""The disk is measured before files are written from outside, at a bounded cost for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.domain.states import ActionState
from tangram_hpc.sandbox.process import sandbox_meter
from tangram_hpc.sandbox.process.sandbox_meter import SandboxMeter

MS = 10**6


class Disk:
    """A meter whose walk over the files takes `walk_ns` of CPU time and finds `mib`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, walk_ns: int) -> None:
        self.walks, self.mib, self.now, self._cpu, self._walk_ns = 0, 0, 1, 0, walk_ns
        monkeypatch.setattr(sandbox_meter, "used_mib", self._walk)
        monkeypatch.setattr(sandbox_meter, "unlinked_mib", lambda pids, folders: 0)
        monkeypatch.setattr(sandbox_meter.time, "thread_time_ns", lambda: self._cpu)
        monkeypatch.setattr(sandbox_meter.time, "monotonic_ns", lambda: self.now)
        self.meter = SandboxMeter((str(tmp_path),), NoProcesses())  # type: ignore[arg-type]

    def _walk(self, folder: Any, others: Any) -> int:
        self.walks += 1
        self._cpu += self._walk_ns
        return self.mib

    def write(self, size: int, limit_mib: int = 100) -> tuple[ActionState, str] | None:
        return self.meter.before_write(limit_mib, size, self.now)


class NoProcesses:
    def pids(self) -> list[int]:
        return []


def test_many_written_files_do_not_walk_over_all_files_each_time(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = Disk(monkeypatch, tmp_path, 10 * MS)
    for _ in range(1000):
        assert disk.write(10) is None
        disk.now += MS
    assert disk.walks == 5  # a twentieth of the time
    disk.now += 200 * MS
    disk.mib = 101
    broken = disk.write(10)
    assert broken is not None and broken[1] == "disk: 101 MiB written, 100 MiB allowed"
    assert disk.write(10) is not None, "a full disk is measured before each write"
    disk.mib = 99
    assert disk.write(10) is None


def test_what_was_written_since_the_last_walk_counts(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = Disk(monkeypatch, tmp_path, 1000 * MS)
    for _ in range(25):
        assert disk.write(4 << 20) is None
    assert disk.walks == 1
    disk.mib = 104
    assert disk.write(4 << 20) is None  # these are at most 100 MiB
    assert disk.meter.over(100) and disk.write(1) is not None and disk.walks == 2
    disk.mib = 0  # one file was written again and again
    assert disk.write(1) is None and not disk.meter.over(100)
