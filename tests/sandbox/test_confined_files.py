"""What a sandbox's init does with files for somebody outside, while programs change them."""

from __future__ import annotations

from pathlib import Path

from tangram_hpc.sandbox.files import confine


def test_a_file_that_is_removed_during_a_listing_hides_no_other_file(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d/in"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    entries = confine.listing(str(tmp_path), "")
    assert next(entries).name == "a"
    (tmp_path / "b").unlink()
    assert [entry.name for entry in entries] == ["c", "d", "d/in"]
