"""Users, files on disk and processes of the same protocol meet what they met before; and the check
of that can fail.

`golden/` holds the collectors and the files, `docs/GOLDEN.md` says how to use them.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden import check, compare, digest, journals, messages, public, runs, where, wire
from golden.__main__ import main as golden_main
from golden.renames import FILE, Renames, read_renames
from golden.shell import clean

from tangram_hpc.config.settings import Config

NOTHING = Renames()


@pytest.fixture(autouse=True)
def _no_settings() -> Iterator[None]:
    with clean():
        yield


# ---- the check ----------------------------------------------------------------------------------


def test_frozen_is_equal() -> None:
    """The part that takes seconds; `make golden` and the test below do all."""
    assert check.frozen(read_renames(), cheap=True) == []


def test_listed_changes_only_as_the_map_says() -> None:
    assert check.listed(read_renames()) == []


@pytest.mark.long
def test_all_of_frozen_is_equal() -> None:
    assert check.frozen(read_renames()) == []


def test_every_placer_and_every_kind_of_fact_is_in_it() -> None:
    """What is offered tomorrow needs a golden run too."""
    golden = check.read("frozen", "runs")
    assert all(any(f" {placer}: records" in key for key in golden) for placer in runs.placers())
    assert all(name.partition(":")[0] in {p.partition(":")[0] for p in runs.placers()}
               for name in where.find("placers"))
    version = check.read("frozen", "constants")["journal version"]
    kinds = {event.__struct_config__.tag for path in journals.FOLDER.glob(f"*-{version}")
             for event in where.find("read_journal")(path)}
    assert {kind.__struct_config__.tag for kind in where.find("AnyEvent").__args__} == kinds


def test_journals_of_every_version_that_is_read_are_kept() -> None:
    constants = check.read("frozen", "constants")
    versions = {constants["journal version"], *constants["older journal that is read"]}
    kept = {path.read_bytes()[6] for path in journals.FOLDER.iterdir()}
    assert kept == versions


# ---- frozen: it can fail ------------------------------------------------------------------------


def test_a_changed_tag_is_told() -> None:
    golden = check.read("frozen", "wire")
    spoiled = {("message.Message 99" if key == "message.Message 11" else key): value
               for key, value in golden.items()}
    lines = compare.frozen("frozen/wire", spoiled, wire.layouts(read_renames(), golden))
    assert "frozen/wire: message.Message 99: is gone" in lines
    assert any(line.startswith("frozen/wire: message.Message 11: is new") for line in lines)


def test_another_order_of_fields_is_told() -> None:
    golden = check.read("frozen", "wire")
    spoiled = copy.deepcopy(golden)
    spoiled["message.Message 13"]["fields"].reverse()
    assert compare.frozen("frozen/wire", golden, spoiled) == [
        "frozen/wire: message.Message 13: fields[0]: was \"spec: SessionSpec\", is \"n: int = 0\""]


def test_another_class_of_the_same_layout_is_the_same() -> None:
    """A message that was renamed, in a module that was moved, is found by its tag."""
    golden, found = check.read("frozen", "wire"), wire.layouts(NOTHING, {})
    label = next(key for key in found if key.endswith(" 13")).rpartition(" ")[0]
    elsewhere = {key.replace("message.Message", "protocol.Root"): value
                 for key, value in golden.items()}
    again = wire.layouts(read_renames(), elsewhere)
    assert label == "message.Message"
    assert compare.frozen("frozen/wire", elsewhere, again) == []


def test_a_dropped_json_key_is_told() -> None:
    golden = check.read("frozen", "json-keys")
    spoiled = copy.deepcopy(golden)
    del spoiled["sim"]["step_s"]
    assert compare.frozen("frozen/json-keys", golden, spoiled) == [
        "frozen/json-keys: sim: step_s: is gone (was \"number\")"]


def test_another_exit_status_is_told() -> None:
    golden = check.read("frozen", "exit-statuses")
    spoiled = copy.deepcopy(golden)
    spoiled["config --config bad.toml"]["status"] = 1
    assert compare.frozen("frozen/exit-statuses", golden, spoiled) == [
        "frozen/exit-statuses: config --config bad.toml: status: was 2, is 1"]


def test_a_placer_that_differs_in_one_decision_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real run, in which a single grant of `fcfs:4` takes other cores."""
    base = type(where.find("make_placer")("fcfs:4"))
    place, spoiled = base.place, []

    def other(self: Any, snapshot: Any) -> Any:
        made = place(self, snapshot)
        grants = [g for g in made.grants if g.units == 4]
        if grants and not spoiled:
            spoiled.append(grants[0])
            at = made.grants.index(grants[0])
            made.grants[at] = grants[0]._replace(units=1)
        return made
    monkeypatch.setattr(base, "place", other)
    golden = check.read("frozen", "runs")
    told = [(key, digest.first_difference(golden[key], lines))
            for key, lines in one_run("mixed-24 oracle fcfs:4").items()]
    assert spoiled
    records = dict(told)["mixed-24 oracle fcfs:4: records"]
    assert records.startswith("line ") and '"trajectory"' in records


def one_run(name: str) -> dict[str, list[str]]:
    folder = Path.cwd()
    case = next(c for c in runs.cases(folder) if c.name == name)
    return runs.lines_of(case, folder)


def test_a_damaged_old_journal_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One fact less in a journal: its replay gives something else."""
    path = journals.FOLDER / "story-elastic-5"
    (tmp_path / path.name).write_bytes(path.read_bytes()[:-400])
    monkeypatch.setattr(journals, "FOLDER", tmp_path)
    golden = check.read("frozen", "journals")
    lines = compare.frozen("frozen/journals", golden, dict(journals.replays()), part=True)
    assert any(line.startswith("frozen/journals: story-elastic-5: facts: lines: was ")
               for line in lines)


# ---- listed: it can fail ------------------------------------------------------------------------


def test_an_added_setting_is_told() -> None:
    now = {**check.read("listed", "settings"), "tangram.toml colour": "str, = 'red'"}
    golden = check.read("listed", "settings")
    assert compare.listed("listed/settings", "settings", golden, now, NOTHING) == [
        "listed/settings: tangram.toml colour: is new; renames.toml has no entry that leads to it "
        "(a rename in [settings], or a line of `settings` in [added])"]
    added = Renames(added={"settings": frozenset({"tangram.toml colour"})})
    assert compare.listed("listed/settings", "settings", golden, now, added) == []


def test_another_default_is_told() -> None:
    golden = check.read("listed", "settings")
    now = {**golden, "tangram.toml grace_s": "float, ge 0, le 86400, = 31.0"}
    lines = compare.listed("listed/settings", "settings", golden, now, NOTHING)
    assert len(lines) == 1 and "was \"float, ge 0, le 86400, = 30.0\", is " in lines[0]


def test_a_rename_needs_its_entry_and_its_alias() -> None:
    golden = check.read("listed", "settings")
    now = dict(golden)
    now["tangram.toml patience_s"] = now.pop("tangram.toml grace_s")
    lines = compare.listed("listed/settings", "settings", golden, now, NOTHING)
    assert lines[0] == ("listed/settings: tangram.toml grace_s: is gone; name its new spelling in "
                        "renames.toml [settings]")
    told = Renames({"settings": {"tangram.toml grace_s": "tangram.toml patience_s"}})
    assert compare.listed("listed/settings", "settings", golden, now, told) == []


@pytest.mark.parametrize(("section", "old", "new"), [
    ("modules", "tangram_hpc.erors", "tangram_hpc.errors"),
    ("names", "tangram_hpc.Klient", "tangram_hpc.Client"),
    ("names", "tangram_hpc.Client.sumbit", "tangram_hpc.Client.submit"),
    ("names", "tangram_hpc.Client.submit(cores)", "tangram_hpc.Client.submit(cpus)"),
    ("settings", "tangram.toml patience_s", "tangram.toml grace_s"),
    ("settings", "[elastic] nodes_max", "[elastic] max_nodes"),
    ("options", "tangram sim --placer", "tangram sim --policy"),
    ("options", "tangram simulate", "tangram sim"),
    ("options", "template hetjob jobname", "template hetjob job_name"),
    ("env", "TANGRAM_FOLDER", "TANGRAM_HOME"),
])
def test_an_old_spelling_that_does_not_work_is_told(section: str, old: str, new: str) -> None:
    lines = public.aliases(Renames({section: {old: new}}))
    assert lines == [f"renames.toml: [{section}] {old!r}: the old spelling does not work any more; "
                     f"keep an alias of {new!r} for one release"]


@pytest.mark.parametrize(("section", "both"), [
    ("modules", "tangram_hpc.errors"), ("names", "tangram_hpc.Client.submit(cpus)"),
    ("settings", "tangram.toml read_paths"), ("settings", "tangram.toml placer"),
    ("settings", "[elastic] max_nodes"), ("options", "tangram sim --policy"),
    ("options", "tangram acct -j"), ("options", "tangram sim"), ("env", "TANGRAM_HOME"),
    ("options", "template hetjob job_name")])
def test_a_spelling_that_works_is_an_alias(section: str, both: str) -> None:
    assert public.aliases(Renames({section: {both: both}})) == []


def test_a_renamed_class_takes_its_members_with_it() -> None:
    golden = check.read("listed", "names")
    now = {key.replace("tangram_hpc.Session", "tangram_hpc.Sandbox", 1)
           if key.startswith(("tangram_hpc.Session.", "tangram_hpc.Session(")) or
           key == "tangram_hpc.Session" else key: value for key, value in golden.items()}
    told = Renames({"names": {"tangram_hpc.Session": "tangram_hpc.Sandbox"}})
    assert compare.listed("listed/names", "names", golden, now, told) == []
    assert len(compare.listed("listed/names", "names", golden, now, NOTHING)) > 20


def test_an_entry_that_renames_nothing_is_told() -> None:
    told = Renames({"options": {"tangram sim --nothing": "tangram sim --something"}})
    golden = check.read("listed", "options")
    assert compare.listed("listed/options", "options", golden, golden, told) == [
        "renames.toml: [options] 'tangram sim --nothing': the listing has no such entry; remove it"]


def test_texts_are_those_of_the_source() -> None:
    tree = ast.parse('def f(x, y):\n    """Not a text of it."""\n'
                     '    raise ValueError(f"field {x!r} is " f"wrong by {y:.1f}")')
    assert list(messages.texts(tree)) == ["field {!r} is wrong by {:.1f}"]


def test_another_text_is_told() -> None:
    golden = check.read("listed", "messages")
    old, new = "ACT mean", "mean of ACT"
    now = {new if key == old else key: value for key, value in golden.items()}
    lines = compare.listed("listed/messages", "messages", golden, now, NOTHING)
    assert [line.partition(";")[0] for line in lines] == [
        "listed/messages: ACT mean: is gone", "listed/messages: mean of ACT: is new"]
    told = Renames({"messages": {old: new}})
    assert compare.listed("listed/messages", "messages", golden, now, told) == []


def test_the_map_knows_its_sections(tmp_path: Path) -> None:
    read_renames(FILE)
    wrong = tmp_path / "renames.toml"
    wrong.write_text("[option]\n")
    with pytest.raises(ValueError, match="section 'option' is not one of modules, names"):
        read_renames(wrong)


def test_settings_are_those_of_the_model() -> None:
    """The listing misses none of the main file's keys."""
    listed = {key.partition(" ")[2] for key in public.settings(NOTHING)
              if key.startswith("tangram.toml ")}
    assert listed == set(Config.model_fields)


def test_the_frozen_class_is_not_written_by_the_way(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "update", lambda kind: pytest.fail(f"{kind} was written"))
    for words, told in (("update --class frozen", "say --rewrite-frozen"),
                        ("update", "name the class")):
        monkeypatch.setattr(sys, "argv", ["golden", *words.split()])
        with pytest.raises(SystemExit) as end:
            golden_main()
        assert end.value.code == 2 and told in capsys.readouterr().err


def test_golden_files_are_text_that_git_can_compare() -> None:
    for path in check.DATA.glob("*/*.json"):
        told = json.loads(path.read_text())
        assert list(told) == sorted(told), path
        assert path.read_text().count("\n") == len(told) + 2, path
