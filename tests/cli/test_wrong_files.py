"""Verbs say which file is wrong, at once, where a file is empty, damaged or none at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tangram_hpc import AccessError
from tangram_hpc.cli import main
from tangram_hpc.storage.access import read_access


def test_an_empty_name_of_a_settings_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set gives it; the user means a file."""
    for words in (["--config", "", "config"], ["config", "--config="]):
        assert main(words) == 2, words
        assert "--config: the name of the file is empty" in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_an_access_file_that_is_none_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "access.json", 0o600)
    for path in (tmp_path / "access.json", Path("/dev/tty")):
        with pytest.raises(AccessError, match="it is not a regular file"):
            read_access(path)
