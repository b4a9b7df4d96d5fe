"""Words that others chose cannot change a terminal, hide a line or look like another row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.forked_verb import tangram

from tangram_hpc import LocalCluster
from tangram_hpc.cli.helpers.printable import printable, printable_answer

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\r\nFAKE ROW|x\u202egnp.exe\x9b31m"


@pytest.mark.parametrize(("text", "shown"), [
    ("plain, ümläut 漢字", "plain, ümläut 漢字"), ("a\x1b[31mb", r"a\x1b[31mb"), ("a\nb", r"a\nb"),
    ("\x9b1m", r"\x9b1m"), ("\u202egpj", r"\u202egpj"), ("\u200b", r"\u200b"),
    ("\udc9b", r"\udc9b"), ("\U000e0041", r"\U000e0041")])
@pytest.mark.attack("code", "terminal")
def test_characters_that_do_not_print_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()  # a lone surrogate could not be printed at all


def test_line_breaks_stay_where_lines_are_asked_for() -> None:
    assert printable("a\nb\x1b", lines=True) == "a\nb\\x1b"


def test_all_texts_of_an_answer_are_made_printable() -> None:
    answer = {"n\x07": ["\x1b", {"deep": "\r"}], "count": 3, "none": None}
    assert printable_answer(answer) == {r"n\x07": [r"\x1b", {"deep": r"\r"}], "count": 3,
                                        "none": None}


@pytest.mark.attack("code", "terminal")
@pytest.mark.attack("repository", "terminal")
@pytest.mark.attack("rank", "terminal")
@pytest.mark.attack("session", "terminal")
def test_a_hostile_name_changes_no_table(tmp_path: Path) -> None:
    environ = {**os.environ, "TANGRAM_HOME": str(tmp_path)}

    def verb(*words: str) -> str:
        return tangram(*words, env=environ, check=True).stdout

    with LocalCluster(cpus=1, home=tmp_path, job="hostile") as cluster:
        running = cluster.submit(["sleep", "60"])
        waiting = cluster.submit(["true"], name=HOSTILE)
        cluster.submit(["true"], name="after it")
        told = [verb("info", "-j", "hostile"), verb("explain", "-j", "hostile", waiting.id)]
        running.cancel()
        waiting.result(60)
        told += [verb("acct", "-j", "hostile", "-o", "JobID,JobName%200,State"),
                 verb("acct", "-j", "hostile", "-n", "-P", "-o", "JobID,JobName,State")]
        rows = json.loads(verb("acct", "-j", "hostile", "--json"))["actions"]
    assert HOSTILE in [row["name"] for row in rows]  # JSON has its own escapes
    for text in told:
        assert printable(text, lines=True) == text
        assert not any(line.startswith("FAKE") for line in text.splitlines())
    assert "x1b" in told[0] and "x1b" in told[2]
    assert [line.count("|") for line in told[3].splitlines()] == [2, 2, 2]
