"""A damaged journal or spool is reported, and only a torn end is dropped silently.

A flipped bit anywhere must not lose a committed event or a kept result silently. A file that was
cut off, as a crash leaves it, must still give everything that was written completely.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from helpers.cluster_parts import kill_broker, processes_of
from helpers.forked_verb import tangram

from tangram_hpc import LocalCluster
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.journal import FileJournal, read_journal
from tangram_hpc.storage.spool import FileSpool

BATCHES = [[ev.LeaseReleased(at, 10 * at + n) for n in range(at % 3 + 1)] for at in range(1, 17)]
EVENTS = [event for batch in BATCHES for event in batch]
RESULT = ms.ActionResult(1, Outcome(ActionState.COMPLETED), "n", (0,), 1, 0, 0, 0)
KEPT = {f"step0/{n}": b"kept %d" % n for n in range(6)}


def write_journal(path: Path) -> bytes:
    """Commits of one to three events."""
    journal = FileJournal(path, "none", lambda call: call())
    for batch in BATCHES:
        journal.append(batch)
        journal.commit(lambda: None)
    journal.close()
    return path.read_bytes()


def write_spool(folder: Path) -> bytes:
    """Writes kept results, each with a commit of its own; returns the bytes of the one segment."""
    spool = FileSpool(folder, 1 << 20)
    for name, payload in KEPT.items():
        spool.keep_result(name, RESULT, payload, "exec")
        spool.commit()
    data = (folder / "0").read_bytes()
    spool.close(remove=False)
    return data


def read_spool(folder: Path, data: bytes) -> dict[str, bytes | None]:
    """What a broker's next start finds in a spool whose one segment is `data`."""
    folder.mkdir(exist_ok=True)  # a spool that ends with nothing in it removes its folder
    (folder / "0").write_bytes(data)
    return found_in(folder)


def found_in(folder: Path) -> dict[str, bytes | None]:
    """What a broker's next start finds in a spool with one segment."""
    (folder / "1").unlink(missing_ok=True)  # of the start before
    spool = FileSpool(folder, 1 << 20)
    found = {name: result[1] for name in spool.names()
             if (result := spool.result(name)) is not None}
    spool.close(remove=False)
    return found


def test_a_kill_before_the_commit_loses_no_call_whose_segment_is_not_needed_any_more(
        tmp_path: Path) -> None:
    """The call's result is not written yet, and another key is dropped in the same cycle."""
    spool = FileSpool(tmp_path, 1 << 20)
    spool.keep_call("runs", b"its call", 1)
    spool.commit()
    again = FileSpool(tmp_path, 1 << 20)  # of the next broker, with a segment of its own
    again.keep_result("other", RESULT, b"", "exec")
    again.commit()
    again.keep_result("runs", RESULT, b"its result", "exec")
    again.drop(["other"])
    third = FileSpool(tmp_path, 1 << 20)  # the one before was killed
    assert third.call("runs", 1) == b"its call" and third.names() == ["runs", "other"]
    again.commit()
    assert not (tmp_path / "0").exists()


def test_a_call_counts_only_for_its_own_action(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path, 1 << 20)
    spool.keep_call("runs", b"its call", 1)
    spool.commit()
    again = FileSpool(tmp_path, 1 << 20)
    assert (again.call("runs", 1), again.call("runs", 2)) == (b"its call", None)


def flips(path: Path) -> Iterator[int]:
    """Flips each bit of a file in turn, and yields its number while it is flipped."""
    data = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    for bit in range(8 * len(data)):
        at = bit // 8
        os.pwrite(fd, bytes([data[at] ^ 1 << bit % 8]), at)
        yield bit
        os.pwrite(fd, data[at : at + 1], at)
    os.close(fd)


def test_any_flipped_bit_of_a_journal_is_an_error(tmp_path: Path) -> None:
    """Every single bit, lengths and the last record included: all events are read, or an error is
    raised."""
    path = tmp_path / "journal"
    silent = []
    write_journal(path)
    for bit in flips(path):
        try:
            if list(read_journal(path)) != EVENTS:
                silent.append(bit)
        except InvalidInput as error:
            assert str(path) in str(error)
    assert silent == [], f"{len(silent)} flips lost events without a word, such as {silent[:5]}"


def test_any_flipped_bit_of_a_torn_journal_is_an_error(tmp_path: Path) -> None:
    """A torn end does not hide damage before it."""
    path = tmp_path / "journal"
    torn = write_journal(path)[:-5]
    path.write_bytes(torn)
    whole = list(read_journal(path))
    assert whole == [event for batch in BATCHES[:-1] for event in batch]
    last = torn.rindex(msgspec.msgpack.encode(BATCHES[-1])[:8])
    silent = []
    for bit in flips(path):
        try:
            if list(read_journal(path)) != whole and bit // 8 < last:
                silent.append(bit)
        except InvalidInput:
            pass
    assert silent == []


def test_a_journal_cut_off_anywhere_gives_every_whole_commit(tmp_path: Path) -> None:
    """What a crash leaves is no damage: the commits before the cut are read without an error."""
    path = tmp_path / "journal"
    whole = write_journal(path)
    wholes = [[e for batch in BATCHES[:n] for e in batch] for n in range(len(BATCHES) + 1)]
    seen = []
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        seen.append(wholes.index(list(read_journal(path))))
    assert seen == sorted(seen) and set(seen) == set(range(len(BATCHES) + 1))
    assert seen[-1] == len(BATCHES) and seen[-2] == len(BATCHES) - 1


def test_a_journal_end_of_zeros_counts_as_torn(tmp_path: Path) -> None:
    """Some file systems grow a file before they write its last blocks."""
    path = tmp_path / "journal"
    whole = write_journal(path)
    for cut in range(len(whole) - 60, len(whole)):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        found = list(read_journal(path))
        path.write_bytes(whole[:cut] + bytes(5000))
        assert list(read_journal(path)) == found
        path.write_bytes(whole[:cut])
        assert list(read_journal(path)) == found


def test_any_flipped_bit_of_a_spool_is_an_error(tmp_path: Path) -> None:
    """Every single bit: all kept results are unchanged, or an error is raised."""
    folder, silent = tmp_path / "once", []
    write_spool(folder)
    for bit in flips(folder / "0"):
        try:
            if found_in(folder) != KEPT:
                silent.append(bit)
        except InvalidInput as error:
            assert str(folder) in str(error)
    assert silent == [], f"{len(silent)} flips lost results without a word, such as {silent[:5]}"


def test_a_spool_cut_off_anywhere_gives_every_whole_result(tmp_path: Path) -> None:
    """The results before the cut are read without an error."""
    folder = tmp_path / "once"
    whole, names, seen = write_spool(folder), list(KEPT), []
    for cut in range(len(whole) + 1):
        found = read_spool(folder, whole[:cut])
        assert found == {name: KEPT[name] for name in names[: len(found)]}
        seen.append(len(found))
    assert seen == sorted(seen) and set(seen) == set(range(len(KEPT) + 1))


def test_a_spool_result_damaged_after_the_start_is_refused(tmp_path: Path) -> None:
    """The file is read again when a name is asked for, and the checksum is verified again."""
    write_spool(tmp_path)
    spool = FileSpool(tmp_path, 1 << 20)
    data = (tmp_path / "0").read_bytes()
    (tmp_path / "0").write_bytes(data.replace(b"kept 3", b"kept 7"))
    with pytest.raises(InvalidInput, match=r"damaged at byte .*step0/3"):
        spool.result("step0/3")
    kept = spool.result("step0/4")
    assert kept is not None and kept[1] == b"kept 4"


def no_checksum(body: bytes) -> bytes:
    """A record without a checksum, as in journals of version 5 and spools of that time."""
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def test_journals_and_spools_of_the_previous_format_are_still_read(tmp_path: Path) -> None:
    """A journal of version 5 and a spool without magic, torn ends included."""
    journal = b"TGJRNL\x05\0" + b"".join(no_checksum(msgspec.msgpack.encode(b)) for b in BATCHES)
    for cut, batches in ((0, BATCHES), (3, BATCHES[:-1])):
        (tmp_path / "journal").write_bytes(journal[: len(journal) - cut])
        assert list(read_journal(tmp_path / "journal")) == [e for b in batches for e in b]
    spool = b"".join(no_checksum(msgspec.msgpack.encode((2, name, RESULT, payload)))
                     for name, payload in KEPT.items())
    assert read_spool(tmp_path / "once", spool) == KEPT
    assert len(read_spool(tmp_path / "once", spool[:-3])) == len(KEPT) - 1


def test_any_flipped_bit_of_the_previous_format_is_an_error(tmp_path: Path) -> None:
    """Lengths have no checksum of their own there, so that a damaged one looks like a torn end."""
    path, folder, silent = tmp_path / "journal", tmp_path / "once", []
    path.write_bytes(b"TGJRNL\x05\0" + b"".join(no_checksum(msgspec.msgpack.encode(b))
                                                for b in BATCHES))
    for bit in flips(path):
        try:
            if list(read_journal(path)) != EVENTS:
                silent.append(("journal", bit))
        except InvalidInput:
            pass
    folder.mkdir()
    (folder / "0").write_bytes(b"".join(
        no_checksum(msgspec.msgpack.encode((2, name, RESULT, payload)))
        for name, payload in KEPT.items()))
    for bit in flips(folder / "0"):
        try:
            if found_in(folder) != KEPT:
                silent.append(("spool", bit))
        except InvalidInput:
            pass
    assert silent == []


def broker(home: Path) -> subprocess.CompletedProcess[str]:
    return tangram("broker", "--job", "hurt", env={**os.environ, "TANGRAM_HOME": str(home)})


@pytest.mark.parametrize("what", ["journal", "once/0"])
def test_a_broker_refuses_a_damaged_file_in_one_line_with_a_working_remedy(
        tmp_path: Path, what: str) -> None:
    """One bit of a length is flipped. The command that the message names is then run as printed,
    and the broker starts."""
    first = LocalCluster(cpus=1, mem_mib=512, home=tmp_path, job="hurt").start()
    try:
        for n in range(3):
            assert first.submit(f"echo {n}", trusted=True, once=f"w{n}").result(60).ok
        kill_broker(first)
        for child in processes_of(first):
            child.kill()
            child.wait(30)
    finally:
        first.close()
    path = first.folder / what
    data = bytearray(path.read_bytes())
    data[10] ^= 1  # in the length of the first record
    path.write_bytes(data)
    told = broker(tmp_path)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
    assert f"{path}: damaged at byte 8" in told.stderr
    remedy = re.search("`(m.*)` \\((results|`once` names)", told.stderr)
    assert remedy is not None, told.stderr
    subprocess.run(remedy[1], shell=True, check=True)
    with LocalCluster(cpus=1, mem_mib=512, home=tmp_path, job="hurt") as again:
        done = again.submit("echo again", trusted=True, once="w1").result(60)
        assert done.text == ("1\n" if what == "journal" else "again\n")
