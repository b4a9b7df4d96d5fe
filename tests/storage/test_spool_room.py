"""A key that is kept for long does not keep the room of all that was forgotten since."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import ActionResult
from tangram_hpc.storage.spool import FileSpool

LIMIT = 1 << 18
RESULT = ActionResult(1, Outcome(ActionState.COMPLETED), "n1", (), 1, 0, 0, 1)


def do(spool: FileSpool, name: str, size: int) -> bool:
    """Keeps the call of a key, and then its result."""
    taken = spool.keep_call(name, name.encode() * size, 1)
    spool.commit()
    if taken:
        spool.keep_result(name, RESULT, name.encode()[::-1] * size, "exec")
        spool.commit()
    return taken


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def check(spool: FileSpool, sizes: dict[str, int], also: str = "") -> None:
    """Checks what is kept. The key `also` is being added or dropped in this moment."""
    assert {*spool.names()} - {also} == {*sizes} - {also}
    for name, size in sizes.items():
        kept = spool.result(name)
        assert kept is not None and kept[1] == name.encode()[::-1] * size, name


def test_one_kept_key_does_not_fill_the_spool(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path, LIMIT)
    assert do(spool, "kept", 100)
    for n in range(2000):  # 24 times what the spool may take
        assert do(spool, f"step {n}", 300), f"the spool is full after {n} keys"
        spool.drop([f"step {n}"])
        assert size_of(tmp_path) <= LIMIT
    spool.close(remove=False)
    check(FileSpool(tmp_path, LIMIT), {"kept": 100})


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_when_records_are_written_again_and_the_broker_is_killed(
        seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, kept = random.Random(seed), dict[str, int]()
    spool, moves, now = FileSpool(tmp_path / "once", LIMIT), 0, ""
    remove_unused = spool._remove_unused

    def killed() -> None:
        """Files as they are when the broker is killed before it removes a segment."""
        nonlocal moves
        moves += 1
        if not spool._pending and moves % 7 == seed:
            copy = tmp_path / f"copy{moves}"
            shutil.copytree(tmp_path / "once", copy)
            again = FileSpool(copy, LIMIT)
            check(again, kept, now)
            again.close(remove=True)
        remove_unused()

    monkeypatch.setattr(spool, "_remove_unused", killed)
    for n in range(1500):
        now, size = f"k{n}", rng.randrange(200)
        if do(spool, now, size):
            kept[now] = size
        if rng.random() < 0.9 and len(kept) > 100:
            old = rng.choice(list(kept))
            del kept[old]
            spool.drop([old])
            spool.commit()
    assert moves > 20
    check(spool, kept)
    assert spool._live_bytes <= size_of(tmp_path / "once") <= LIMIT + LIMIT // 8
    spool.close(remove=False)
    again = FileSpool(tmp_path / "once", LIMIT)
    check(again, kept)
    assert again._live_bytes == spool._live_bytes
