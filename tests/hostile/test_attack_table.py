"""Every attack names a cell of the table, and every cell is attacked or says why it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.__main__ import BEGIN, END, PAGE
from hostile.attack_table import (
    ASSETS,
    ATTACKERS,
    NO_WAY,
    Counting,
    cells_of,
    page,
    results,
    written,
)


def test_each_cell_is_attacked_or_says_why_not() -> None:
    every = {(attacker, asset) for attacker in ATTACKERS for asset in ASSETS}
    assert set(NO_WAY) <= every
    assert every - set(written()) == set(NO_WAY)


def test_a_mark_without_a_cell_is_refused() -> None:
    for wrong in (("martian", "files"), ("code",), ("code", "honour")):
        with pytest.raises(ValueError, match="name one of code, user"):
            cells_of([wrong])


def test_the_page_says_how_many_tests_attack_each_cell() -> None:
    """`make hostile HOSTILE=--write` writes it."""
    assert f"{BEGIN}{page()}\n{END}" in PAGE.read_text()


CASES = """
import pytest

@pytest.mark.attack("code", "files", "keys")
@pytest.mark.attack("rank", "keys")
@pytest.mark.parametrize("case", [1, 2, 3])
def test_it(case):
    if case == 3:
        pytest.skip("no such thing here")
    assert case == 1

def test_other():
    pass
"""


def test_cases_are_counted_in_each_cell_that_they_name(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    counting = Counting()
    pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)],
                plugins=[counting])
    counts = counting.counts
    for cell in (("code", "files"), ("code", "keys"), ("rank", "keys")):
        assert (counts.held[cell], counts.broken[cell], counts.skipped[cell]) == (1, 1, 1)
    assert len(counts.empty()) == len(ATTACKERS) * len(ASSETS) - 3
    assert counts.reasons == {"no such thing here": 1}
    assert "| keys and secrets | 1 of 2 | not tried |" in results(counts)
