"""Results are kept in order until they are confirmed, in memory or in spill files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import Finished
from tangram_hpc.storage.spill_files import FolderSpillFiles
from tangram_hpc.worker.kept_results import KeptResults

DONE = Outcome(ActionState.COMPLETED)


def result(lease: int, payload: bytes | None, clean: bool = True) -> Finished:
    return Finished(lease, DONE, clean, int(payload is not None))


def payload_of(lease: int, size: int = 10) -> bytes:
    return bytes([lease]) * size


def test_results_without_a_confirmation_are_unsent_again_in_order_after_a_loss() -> None:
    kept = KeptResults()
    for lease in (5, 3, 4):
        kept.add(result(lease, None), None, True)
    assert not list(kept.take_unsent(1 << 20)), "the connection has carried them"
    kept.confirm((3, 99))
    assert list(kept.results) == [5, 4] and 3 not in kept.results
    kept.connection_lost()
    kept.add(result(2, b"x"), b"x", False)
    assert kept.unsent == 3
    kept.confirm((4,))
    assert list(kept.take_unsent(1 << 20)) == [(result(5, None), None), (result(2, b"x"), b"x")]
    assert kept.unsent == 0 and list(kept.results) == [5, 2], "sent is not confirmed"


def test_a_released_result_says_so_and_keeps_its_place_and_payload() -> None:
    kept = KeptResults()
    kept.add(result(1, b"one", False), b"one", True)
    kept.add(result(2, None), None, True)
    assert not kept.release(1), "the broker has the result, so it must hear of the release"
    assert not kept.release(7)
    kept.connection_lost()
    assert kept.release(1), "the result itself will tell"
    assert list(kept.take_unsent(1 << 20)) == [(result(1, b"one"), b"one"), (result(2, None), None)]


def test_unsent_results_are_taken_in_pieces_of_a_given_size() -> None:
    kept = KeptResults()
    for lease in range(6):
        kept.add(result(lease, b""), payload_of(lease, 1000), False)
    pieces = []
    while kept.unsent:
        pieces.append([one.lease for one, _ in kept.take_unsent(2000)])
    assert pieces == [[0, 1], [2, 3], [4, 5]]


def test_payloads_beyond_the_bound_are_read_back_from_spill_files(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    kept = KeptResults(FolderSpillFiles(folder), memory_max=25, file_bytes=25)
    for lease in range(9):  # two in memory, then files of three, three and one
        kept.add(result(lease, b"1"), payload_of(lease), True)
    assert sorted((file.name, file.stat().st_size) for file in folder.iterdir()) == [
        ("0", 30), ("1", 30), ("2", 10)]
    kept.confirm((3, 4, 5, 6, 7))
    assert sorted(file.name for file in folder.iterdir()) == ["0", "2"], "one is in use still"
    kept.connection_lost()
    assert [(one.lease, payload) for one, payload in kept.take_unsent(1 << 20)] == [
        (lease, payload_of(lease)) for lease in (0, 1, 2, 8)]
    kept.confirm((0, 2, 8))
    assert list(folder.iterdir()) == []
    kept.add(result(9, b"1"), payload_of(9), True)
    assert list(folder.iterdir()) == [], "memory has room for it again"


def test_a_payload_that_cannot_be_spilled_stays_in_memory(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = FolderSpillFiles(tmp_path / "results")
    monkeypatch.setattr(spill, "put", lambda file, data: -1)
    kept = KeptResults(spill, memory_max=5)
    kept.add(result(1, b"1"), payload_of(1), False)
    assert list(kept.take_unsent(1 << 20)) == [(result(1, b"1"), payload_of(1))]
    kept.confirm((1,))
    kept.add(result(2, b"1"), b"four", False)
    assert list(kept.take_unsent(1 << 20)) == [(result(2, b"1"), b"four")]
