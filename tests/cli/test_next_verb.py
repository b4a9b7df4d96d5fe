"""Hints for people: at a terminal only, so that no program ever reads one."""

from __future__ import annotations

import sys

import pytest

from tangram_hpc.cli.helpers.next_verb import hint


@pytest.mark.parametrize("terminals", [{"stdout", "stderr"}, {"stdout"}, {"stderr"}, set()])
def test_a_hint_is_for_terminals_only(terminals: set[str], monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda name=name: name in terminals,
                            raising=False)
    hint("look here")
    told = capsys.readouterr()
    assert told.out == "" and told.err == (
        "tangram: hint: look here\n" if len(terminals) == 2 else "")
