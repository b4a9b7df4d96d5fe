"""`tangram journal`: what a check finds, what a repair keeps, and that a real broker goes on then.

One run with named work is killed. Each test damages a copy of its folder in another way, repairs it
with the verb, and continues the run: a name whose result is kept must not run again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from helpers.cluster_parts import kill_for_good

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.atomic_file import replace_file
from tangram_hpc.cli import main
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput
from tangram_hpc.storage import journal_repair
from tangram_hpc.storage.journal import FileJournal, read_journal
from tangram_hpc.storage.journal_check import check_job
from tangram_hpc.storage.journal_segments import read_journals
from tangram_hpc.storage.record_salvage import salvage

NAMES = [f"w{n}" for n in range(12)]


def run(cluster: LocalCluster, effects: Path) -> dict[str, str]:
    """Submits all names; each writes a line when it really runs."""
    done = {n: cluster.submit(f"echo {n} >> {effects}; echo {n}", trusted=True, once=n,
                              name="line") for n in NAMES}
    return {name: future.result(60).text for name, future in done.items()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the folder of a run that was killed after all names had ended."""
    home = tmp_path_factory.mktemp("killed")
    first = LocalCluster(cpus=2, mem_mib=512, home=home, job="mine").start()
    try:
        run(first, home / "effects")
        kill_for_good(first)
    finally:
        first.close()
    return home


@pytest.fixture
def home(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that home for one test."""
    shutil.copytree(killed, tmp_path / "home")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def verb(capsys: pytest.CaptureFixture[str], word: str) -> tuple[int, dict]:
    status = main(["journal", word, "-j", "mine", "--json"])
    return status, json.loads(capsys.readouterr().out)


def continued(home: Path, effects: Path) -> list[str]:
    """Continues the run; returns which names ran again. Each has its result."""
    effects.touch()
    with LocalCluster(cpus=2, mem_mib=512, home=home, job="mine") as again:
        assert run(again, effects) == {name: f"{name}\n" for name in NAMES}
    return effects.read_text().split()


def spoil(path: Path, at: int, size: int) -> None:
    """Writes other bytes over a part of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + size] = random.Random(at).randbytes(size)
    path.write_bytes(data)


def offsets(path: Path) -> list[int]:
    """Where the records of a journal or a segment begin, and its end."""
    data = path.read_bytes()
    return [at for at, _ in salvage(data, 8).records] + [len(data)]


def test_a_whole_job_needs_no_repair(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "jobs" / "mine"
    journal = folder / "journal"
    journal.write_bytes(journal.read_bytes()[:-3])  # a torn end is whole too
    before = {path: path.read_bytes() for path in (journal, folder / "once" / "0")}
    status, report = verb(capsys, "check")
    assert (status, report["problems"], report["kept"]) == (0, [], len(NAMES))
    assert [f["torn"] > 0 for f in report["files"]] == [True, False]
    status, done = verb(capsys, "repair")
    assert (status, done["lines"], done["moved"]) == (0, [], {})
    assert {path: path.read_bytes() for path in before} == before
    assert main(["journal", "check"]) == 0  # the job that was written to last
    assert "torn at its end" in capsys.readouterr().out


@pytest.mark.parametrize("byte", [9, 13, 17, 24])
@pytest.mark.parametrize("name", ["journal", "once/0"])
def test_a_flipped_bit_is_set_right_and_nothing_is_lost(
        home: Path, capsys: pytest.CaptureFixture[str], name: str, byte: int) -> None:
    """In the length, in both checksums and in the body of the first record."""
    folder = home / "jobs" / "mine"
    events = list(read_journals(folder))
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:byte] + bytes((whole[byte] ^ 4,)) + whole[byte + 1 :])
    assert main(["journal", "check", "-j", "mine"]) == 1
    told = capsys.readouterr().out
    assert f"PROBLEM  {name}: damaged at byte 8" in told
    assert "REMEDY   put back copies of the files; or run `tangram journal repair -j mine`" in told
    status, done = verb(capsys, "repair")
    assert (status, done["corrected"], done["lost_events"], done["lost"]) == (0, 1, 0, [])
    assert path.read_bytes() == whole
    assert (folder / done["moved"][name]).stat().st_size == len(whole)
    assert verb(capsys, "check")[0] == 0
    assert list(read_journals(folder)) == events


def test_a_gap_in_the_journal_costs_events_and_no_result(
        home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Work that is queued, runs, or was never seen in the events that are left does not run
    again."""
    folder = home / "jobs" / "mine"
    events = len(list(read_journals(folder)))
    middle = offsets(folder / "journal")[len(offsets(folder / "journal")) // 2]
    spoil(folder / "journal", middle + 2, 30)
    status, report = verb(capsys, "check")
    assert status == 1 and any("bytes cannot be read" in line for line in report["problems"])
    status, done = verb(capsys, "repair")
    left = len(list(read_journals(folder)))
    assert status == 0 and 0 < done["lost_events"] < events and done["lost"] == []
    assert (folder / "damaged" / "journal").exists()
    assert left - len(done["ended"]) + done["lost_events"] < events  # less by those in the hole
    assert verb(capsys, "check")[0] == 0
    assert continued(home, tmp_path / "effects") == []


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_journal_cut_between_records_is_noticed_by_kept_results(
        home: Path, capsys: pytest.CaptureFixture[str], share: float) -> None:
    """No checksum shows such a cut, so a broker starts; the check compares with the spool."""
    path = home / "jobs" / "mine" / "journal"
    at = offsets(path)
    path.write_bytes(path.read_bytes()[: at[round(share * len(at))]])
    status, report = verb(capsys, "check")
    submitted = {e.action.once for e in read_journals(path.parent)
                 if isinstance(e, ev.ActionSubmitted)}
    assert set(report["unseen"]) == set(NAMES) - submitted
    assert status == int(bool(report["unseen"]))
    assert sorted(verb(capsys, "repair")[1]["unseen"]) == sorted(report["unseen"])
    assert verb(capsys, "check")[0] == 0


def test_lost_results_are_named_and_only_these_run_again(
        home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Part of the spool is overwritten, where it keeps results."""
    folder = home / "jobs" / "mine"
    spoil(folder / "once" / "0", offsets(folder / "once" / "0")[-6] + 5, 150)
    status, report = verb(capsys, "check")
    assert status == 1 and 0 < len(report["lost"]) < len(NAMES)
    status, done = verb(capsys, "repair")
    assert status == 0 and done["lost"] == report["lost"]
    assert any(f"results of {len(done['lost'])} names are lost" in line for line in done["lines"])
    assert verb(capsys, "check")[0] == 0
    assert sorted(continued(home, tmp_path / "effects")) == sorted(done["lost"])


def test_a_spool_that_is_cut_or_gone_is_noticed(
        home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "jobs" / "mine"
    segment = folder / "once" / "0"
    whole, at = segment.read_bytes(), offsets(segment)
    for cut in (at[-3], at[len(at) // 2], 8):
        segment.write_bytes(whole[:cut])
        assert verb(capsys, "check")[1]["lost"], cut
    shutil.rmtree(folder / "once")
    status, report = verb(capsys, "check")
    assert (status, sorted(report["lost"])) == (1, sorted(NAMES))
    assert sorted(verb(capsys, "repair")[1]["lost"]) == sorted(NAMES)
    assert verb(capsys, "check")[0] == 0


def test_both_damaged_and_a_later_journal(
        home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second start wrote a journal of its own, which cannot be used behind a gap in the first."""
    folder = home / "jobs" / "mine"
    again = LocalCluster(cpus=2, mem_mib=512, home=home, job="mine").start()
    try:
        assert again.submit("echo w0", trusted=True, once="w0", name="line").result(60).ok
        assert main(["journal", "repair", "-j", "mine"]) == 1
        assert "a broker serves it" in capsys.readouterr().err
        assert verb(capsys, "check")[0] == 0
        kill_for_good(again)
    finally:
        again.close()
    assert (folder / "journal-1").exists()
    spoil(folder / "journal", offsets(folder / "journal")[6] + 3, 40)
    spoil(folder / "once" / "0", offsets(folder / "once" / "0")[4] + 3, 60)
    assert verb(capsys, "check")[0] == 1
    status, done = verb(capsys, "repair")
    assert status == 0 and set(done["moved"]) == {"journal", "journal-1", "once/0"}
    assert sorted(p.name for p in (folder / "damaged").iterdir()) == [
        "journal", "journal-1", "once-0", "repairs.jsonl"]
    assert verb(capsys, "check")[0] == 0
    kept = set(NAMES) - set(continued(home, tmp_path / "effects"))
    assert len(kept) >= len(NAMES) - 3
    assert check_job(folder).problems == []


def test_a_missing_journal_is_noticed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starts write `journal`, `journal-1` and so on, so a gap in the numbers is a lost file."""
    folder = home / "jobs" / "mine"
    shutil.copy(folder / "journal", folder / "journal-2")
    status, report = verb(capsys, "check")
    assert (status, report["problems"]) == (1, ["journal-2: a journal before this one is missing"])
    with pytest.raises(InvalidInput, match="journal-1: it is missing, and later events build on"):
        list(read_journals(folder))
    events = len(list(read_journal(folder / "journal")))
    assert verb(capsys, "repair")[1]["lost_events"] == events
    assert verb(capsys, "check")[0] == 0
    (folder / "journal").rename(folder / "journal-1")
    assert verb(capsys, "check")[0] == 1
    status, done = verb(capsys, "repair")
    assert status == 0 and sorted(done["unseen"]) == sorted(NAMES)
    assert verb(capsys, "check")[1]["kept"] == len(NAMES)
    assert verb(capsys, "check")[0] == 0


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_repair_that_is_cut_off_can_be_made_again(
        home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """It fails at its first, second or third new file."""
    folder = home / "jobs" / "mine"
    shutil.copy(folder / "journal", folder / "journal-1")
    spoil(folder / "journal", offsets(folder / "journal")[6] + 3, 40)
    spoil(folder / "once" / "0", offsets(folder / "once" / "0")[-6] + 5, 90)
    calls = []

    def replace(path: Path, content: bytes, sync: bool) -> None:
        calls.append(path)
        if len(calls) > writes:
            raise OSError(28, "No space left on device")
        replace_file(path, content, sync=sync)

    with monkeypatch.context() as patched:
        patched.setattr(journal_repair, "replace_file", replace)
        status = main(["journal", "repair", "-j", "mine"])
        assert (status, "No space left" in capsys.readouterr().err) == (
            (2, True) if len(calls) > writes else (0, False))
    status, report = verb(capsys, "check")
    assert status == int(len(calls) > writes), report
    assert verb(capsys, "repair")[0] == 0
    assert verb(capsys, "check")[0] == 0
    again = continued(home, tmp_path / "effects")
    assert len(again) <= 3


def test_actions_that_wait_in_the_events_left_are_ended(
        home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The journal is left with submissions only: the record of the repair says why they ended."""
    folder = home / "jobs" / "mine"
    events = list(read_journals(folder))
    first = next(n for n, e in enumerate(events) if isinstance(e, ev.LeaseGranted))
    (folder / "journal").unlink()
    journal = FileJournal(folder / "journal", "none", lambda call: call())
    for part in (events[:first], events[first:]):
        journal.append(part)
        journal.commit(lambda: None)
    journal.close()
    spoil(folder / "journal", offsets(folder / "journal")[2] + 2, 40)
    status, done = verb(capsys, "repair")
    assert status == 0 and done["ended"]
    records = fold(read_journals(folder)).records.values()
    ended = {r.action.once: r.outcome.reason for r in records if r.outcome is not None}
    assert set(ended) == set(done["ended"])
    assert all("its result is kept" in reason for reason in ended.values())
    assert continued(home, tmp_path / "effects") == []


def test_a_broker_on_another_host_is_known_by_its_signs_of_life(
        home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may not show the locks of other hosts. The access file says that the broker,
    which was killed, has not ended."""
    folder = home / "jobs" / "mine"
    (epoch,) = folder.glob("epoch-*")
    holder = json.loads(epoch.read_text()) | {"host": "elsewhere"}
    epoch.write_text(json.dumps(holder))
    monkeypatch.setattr(journal_repair, "SILENT_S", 1.2)
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.1):
            os.utime(epoch)

    broker = threading.Thread(target=live)
    broker.start()
    try:
        assert main(["journal", "repair", "-j", "mine"]) == 1
    finally:
        ended.set()
        broker.join()
    assert "a broker serves it (host elsewhere" in capsys.readouterr().err
    assert verb(capsys, "repair")[0] == 0


def test_wrong_input_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("check", "repair"):
        assert main(["journal", word, "-j", "missing"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "it has no journal and no spool" in told
    journal = home / "jobs" / "mine" / "journal"
    data = bytearray(journal.read_bytes())
    data[6] += 1
    journal.write_bytes(data)  # of a later version
    assert main(["journal", "repair", "-j", "mine"]) == 2
    assert "nothing was changed" in capsys.readouterr().err
    data[6] = 0x88  # no version that will ever be next: a flipped bit
    journal.write_bytes(data)
    assert verb(capsys, "check")[0] == 1
    assert verb(capsys, "repair")[1]["lost_events"] == 0
    assert verb(capsys, "check")[0] == 0
