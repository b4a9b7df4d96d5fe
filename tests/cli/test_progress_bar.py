"""Progress of long work: a bar on a terminal that is removed at its end, lines elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tangram_hpc.cli import main
from tangram_hpc.cli.helpers.progress_bar import ProgressBar

EXAMPLES = Path(__file__).resolve().parents[2] / "tangram_hpc" / "simulator" / "examples"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def played(stream: io.StringIO, seconds: float, notes: bool = False) -> str:
    """What is printed of work of 100 units that take so long, with a look at each 0.01 s."""
    now = 0.0
    with ProgressBar("work: units", 100, stream, lambda: now) as progress:
        steps = int(seconds * 100)
        for step in range(steps):
            now = step / 100
            progress.at(100 * step // steps, f"part {step}" if notes else "")
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_ten_seconds_and_none_of_short_work() -> None:
    assert played(io.StringIO(), 9.9) == ""
    assert played(io.StringIO(), 35).splitlines() == [
        "tangram: work: units 28/100, 10 s, about 26 s left",
        "tangram: work: units 57/100, 20 s, about 15 s left",
        "tangram: work: units 85/100, 30 s, about 5 s left"]


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    shown = played(Terminal(), 4).split("\r")
    assert 15 <= len(shown) <= 25, "five times a second"
    assert any("[" + "#" * 15 + " " * 15 + "] 50/100, 2 s, about 2 s left" in s for s in shown)
    assert shown[-2].strip() == "" and shown[-1] == "" and max(map(len, shown)) <= 78
    assert len(played(Terminal(), 1, notes=True).split("\r")) > 90, "a new note is shown at once"


def test_an_error_leaves_no_bar() -> None:
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), ProgressBar("work: units", 0, stream) as progress:
        progress.at(3)
        raise KeyboardInterrupt
    assert "work: units: 3" in stream.getvalue() and stream.getvalue().endswith(" \r")


@pytest.mark.parametrize("words", [
    ["sim", "mixed-24", "--policy", "fcfs:4"], ["sim", "mixed-24", "--policy", "fcfs:4",
                                                "--latency-us", "50"]])
def test_a_simulation_says_how_far_it_is(words: list[str], monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--cluster", str(EXAMPLES / "cluster-24.json")]
    assert main([*words, *cluster]) == 0
    plain = capsys.readouterr()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*words, *cluster]) == 0
    assert capsys.readouterr().out == plain.out and plain.err == ""
    assert "sim: trajectories [" in terminal.getvalue()


def test_a_search_for_a_size_says_which_one_it_tries(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["size", "mixed-24", "--cluster", str(EXAMPLES / "cluster-24.json"), "--policies",
                 "fcfs:4", "--target-act", "100"]) == 0
    assert "fcfs:4" in capsys.readouterr().out
    assert "size: simulations: 0, 0 s, fcfs:4 on " in terminal.getvalue()
