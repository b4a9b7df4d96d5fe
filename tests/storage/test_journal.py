"""The journal: committed events are read back, torn ends are ignored, and damage is an error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.event import JOURNAL_VERSION
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.storage.journal import FileJournal, read_journal
from tangram_hpc.storage.record_file import framed


def events(n: int, start: int = 0) -> list[ev.Event]:
    return [ev.ActionSubmitted(i, Action(i + 1, "x")) for i in range(start, start + n)]


def write(path: Path, batches: list[list[ev.Event]], mode: str = "none") -> None:
    journal = FileJournal(path, mode, lambda call: call())
    for batch in batches:
        journal.append(batch)
        journal.commit(lambda: None)
    journal.close()


@pytest.mark.parametrize("mode", ["none", "always"])
def test_a_journal_is_read_back_and_can_be_appended_to(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "journal"
    write(path, [events(3), [], events(2, 3)], mode)
    write(path, [events(1, 5)], mode)
    assert list(read_journal(path)) == events(6)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_journal_end_loses_only_uncommitted_events(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [events(3)])
    first = path.stat().st_size
    write(path, [events(3, 3)])
    whole = path.read_bytes()
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(read_journal(path)) in (events(3), events(6)[:3])


def test_a_damaged_foreign_or_missing_journal_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [events(3), events(3, 3)])
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="damaged at byte 8"):
        list(read_journal(path))
    path.write_bytes(b"something else")
    with pytest.raises(InvalidInput, match="not a journal"):
        list(read_journal(path))
    with pytest.raises(InvalidInput, match=r"No such file.*name another with -j"):
        list(read_journal(tmp_path / "none"))


def test_an_unknown_journal_event_is_an_error_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [events(1)])
    body = msgspec.msgpack.encode([["SomethingNew", 7]])
    path.write_bytes(path.read_bytes() + framed(body))
    with pytest.raises(InvalidInput, match="this release cannot read it"):
        list(read_journal(path))


def test_batch_mode_confirms_commits_in_order_after_the_sync(tmp_path: Path) -> None:
    woken: list = []
    arrived = threading.Semaphore(0)

    def wake(call) -> None:
        woken.append(call)
        arrived.release()

    journal = FileJournal(tmp_path / "journal", "batch", wake)
    done: list[int] = []
    journal.append(events(1))
    journal.commit(lambda: done.append(1))
    assert done == []  # not before the disk has it
    journal.append(events(1, 1))
    journal.commit(lambda: done.append(2))
    assert arrived.acquire(timeout=30)
    woken.pop()()
    assert done == [1]
    assert arrived.acquire(timeout=30)
    woken.pop()()
    assert done == [1, 2]
    journal.close()
    assert list(read_journal(tmp_path / "journal")) == events(2)


def test_events_of_an_older_version_get_the_defaults_of_new_fields() -> None:
    """The default of a later field is the only meaning that older events had."""
    def read(*fields: object) -> ev.Event:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ev.AnyEvent)

    asked = read("session-requested", 1, [5, "s", 10, "", False])
    assert asked == ev.SessionRequested(1, SessionSpec(5, "s", 10))
    assert (asked.spec.origin, asked.spec.grace_ns, asked.spec.idle_ns) == (0, -1, 0)
    assert read("session-closed", 2, 5, "gone") == ev.SessionClosed(2, 5, "gone", False)
    joined = read("node-joined", 3, 1, ["n", "h", [0, 1], 64])
    assert joined.spec.backends == joined.spec.untrusted == ()
    assert not read("action-submitted", 4, [7, "x", "exec", [1]]).action.trusted


def test_a_failed_sync_is_raised_in_the_event_loop(tmp_path: Path) -> None:
    """Otherwise a commit that waits for the sync would wait for ever."""
    woken: list = []
    arrived = threading.Semaphore(0)

    def wake(call) -> None:
        woken.append(call)
        arrived.release()

    def full() -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    journal = FileJournal(tmp_path / "journal", "batch", wake, full)
    done: list[int] = []
    journal.append(events(1))
    journal.commit(lambda: done.append(1))
    assert arrived.acquire(timeout=30)
    with pytest.raises(OSError, match="quota"):
        woken.pop()()
    assert done == []


@pytest.mark.parametrize(("path", "limit", "said", "remedy"), [
    ("/dev/full", -1, "No space left on device", "make room, and"),
    ("", 0, "File too large", "raise the limit of file sizes (`ulimit -f`)")],
    ids=["full", "limited"])  # fmt: skip
def test_a_full_disk_or_a_limit_of_file_sizes_ends_the_broker_with_one_line(
        path: str, limit: int, said: str, remedy: str, tmp_path: Path) -> None:
    """/dev/full accepts no byte, like a full disk. Slurm hands the limits of the submitting shell
    on to the job."""
    full = tmp_path / "journal"
    if path:
        full.symlink_to(path)
    text = ("import asyncio, resource, sys\n"
            "from pathlib import Path\n"
            "from tangram_hpc.storage.journal import FileJournal\n"
            "from tangram_hpc.app.loop import die_on_broken_law\n"
            "async def main():\n"
            "    loop = asyncio.get_running_loop()\n"
            "    die_on_broken_law(loop, 'broker')\n"
            f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))\n"
            "    loop.call_soon(FileJournal, Path(sys.argv[1]), 'none', loop.call_soon)\n"
            "    await asyncio.sleep(30)\n"
            "asyncio.run(main())\n")
    done = subprocess.run([sys.executable, "-c", text, str(full)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert said in done.stderr and remedy in done.stderr


@pytest.mark.parametrize(("version", "said", "unsaid"), [
    (JOURNAL_VERSION + 1, "A later release wrote it: use that one", "journal repair"),
    (JOURNAL_VERSION + 90, "journal repair", "later release")], ids=["later", "damaged"])
def test_a_journal_of_a_later_release_names_a_remedy_that_helps(
        tmp_path: Path, version: int, said: str, unsaid: str) -> None:
    """A repair refuses such a journal, as after a requeue with an older release."""
    path = tmp_path / "job" / "journal"
    path.parent.mkdir()
    write(path, [events(3)])
    data = bytearray(path.read_bytes())
    data[6] = version
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as told:
        list(read_journal(path))
    assert said in str(told.value) and unsaid not in str(told.value)
