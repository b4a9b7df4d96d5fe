"""Time limits: a number is seconds, and what has a : or - is read as srun reads it. Numbers of
tasks and nodes are read too, since scripts for srun name them.
"""

from __future__ import annotations

import argparse

import pytest

from tangram_hpc.cli import main
from tangram_hpc.cli.helpers.times import time_limit


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


@pytest.mark.parametrize("words", [["-n", "2"], ["--ntasks=0"], ["-N", "a"], ["--nodes", "1-2"]])
def test_more_than_one_task_is_refused_with_the_remedy(words: list[str],
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words, "--", "true"])
    assert ended.value.code == 2
    assert "an action is one task on one node; name 1" in capsys.readouterr().err
