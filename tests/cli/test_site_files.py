"""`tangram site files`: every file of a site, with its mode, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tangram_hpc.cli import main

SLURM = Path(__file__).resolve().parents[2] / "slurm"


def test_the_copies_are_the_files_with_their_modes(tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "site"
    for _ in range(2):  # once more changes nothing
        assert main(["site", "files", str(target)]) == 0
    assert capsys.readouterr().out == f"{target / 'README.md'}\n" * 2
    copied = {p.relative_to(target) for p in target.rglob("*") if p.is_file()}
    assert {Path("spank/tangram.c"), Path("epilog.d/50-tangram"), Path("modulefiles/tangram.lua"),
            Path("packaging/build-deb"), Path("README.md")} <= copied
    assert not [path for path in copied if path.suffix in (".so", ".o")]
    assert not [path for path in copied if "devcluster" in path.parts]
    for path in copied:
        assert (target / path).read_bytes() == (SLURM / path).read_bytes()
        assert os.access(target / path, os.X_OK) == os.access(SLURM / path, os.X_OK), path
    assert main(["site", "files"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {Path(line).relative_to(SLURM) for line in listed} == copied


def test_a_file_that_differs_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                             ) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["site", "files", str(tmp_path)]) == 2
    assert "README.md exists and differs" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "mine"
    assert main(["site", "files", str(tmp_path / "README.md")]) == 2


def test_an_empty_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set gives it; the current directory was not meant."""
    monkeypatch.chdir(tmp_path)
    assert main(["site", "files", ""]) == 2
    assert "FOLDER: the name of the folder is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
