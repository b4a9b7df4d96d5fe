"""Verbs say which file is wrong, at once, where a file is empty, damaged or none at all."""

from __future__ import annotations

import pytest

from tangram_hpc.cli import main


def test_an_empty_name_of_a_settings_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set gives it; the user means a file."""
    for words in (["--config", "", "config"], ["config", "--config="]):
        assert main(words) == 2, words
        assert "--config: the name of the file is empty" in capsys.readouterr().err
