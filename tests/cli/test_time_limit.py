"""Time limits: a number is seconds, and what has a : or - is read as srun reads it."""

from __future__ import annotations

import argparse

import pytest

from tangram_hpc.cli.helpers.time_limit import time_limit


@pytest.mark.parametrize(("text", "seconds"), [
    ("90", 90), ("0.5", 0.5), (".5", 0.5), ("1:30", 90), ("2:00:05", 7205), ("1-12", 129600),
    ("0-1:30", 5400), ("1-0:0:7", 86407), ("90:00", 5400), ("0:00", 0)])
def test_a_time_limit_is_what_srun_takes_it_for(text: str, seconds: float) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "1e3", "nan", "1:", ":1", "1:2:3:4", "1-", "-1:00",
                                  "1-2-3", "1.5:00", "a", "1 30", "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time limit"):
        time_limit(text)
