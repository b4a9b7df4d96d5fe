"""Payloads in the job's store are removed when they are no longer needed, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.folder_size import bytes_in

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.broker.idempotency import IdempotencyKeys
from tangram_hpc.broker.store_garbage import StoreGarbage
from tangram_hpc.client import connection, functions, request
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol.message import ActionResult
from tangram_hpc.scheduler.state.ledger import Ledger
from tangram_hpc.storage.spool import FileSpool
from tangram_hpc.storage.store import FolderStore

MIB = 1 << 20


def _turned() -> Callable[[bytes], bytes]:
    def turned(data: bytes) -> bytes:  # travels by value: runners do not find this module
        return data[::-1]

    return turned


turned = _turned()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home"), grace_s=2) as c:
        yield c


def held(c: LocalCluster) -> int:
    """Bytes in the store."""
    return bytes_in(c.folder / "store")


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def test_large_calls_and_results_leave_nothing(cluster: LocalCluster) -> None:
    assert cluster.submit(turned, b"ab").result(60) == b"ba"  # the function stays: it is small
    before = held(cluster)
    for _ in range(10):
        data = os.urandom(MIB)
        futures = [cluster.submit(turned, data) for _ in range(4)]  # one entry for all four
        assert all(future.result(60) == data[::-1] for future in futures)
    until(lambda: held(cluster) <= before, "the store to be empty again")


def test_a_store_entry_is_kept_until_its_last_action_ends(
        cluster: LocalCluster, tmp_path: Path) -> None:
    go, data = str(tmp_path / "go"), os.urandom(MIB)

    def size_later(data: bytes, wait: bool) -> int:
        while wait and not os.path.exists(go):
            time.sleep(0.01)
        return len(data)

    before = held(cluster)
    first = cluster.submit(size_later, data, True)
    second = cluster.submit(size_later, data, True)
    behind = [cluster.submit(turned, data) for _ in range(3)]  # they fetch it when the others ended
    Path(go).touch()
    assert first.result(60) == second.result(60) == MIB
    assert all(future.result(60) == data[::-1] for future in behind)
    until(lambda: held(cluster) <= before + 100_000, "the store to be empty again")


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_writers_of_one_store_entry_have_separate_temporary_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, and two containers in which both processes have the same pid."""
    store, both, rename = FolderStore(tmp_path), threading.Barrier(2), os.replace
    monkeypatch.setattr(os, "getpid", lambda: 1)

    def together(temporary: Path, path: Path) -> None:
        both.wait(60)
        rename(temporary, path)

    monkeypatch.setattr(os, "replace", together)
    with ThreadPoolExecutor(2) as pool:
        names = {one.result(60) for one in [pool.submit(store.put, b"x" * 100, "1.0")
                                            for _ in range(2)]}
    assert len(names) == 1 and store.get(names.pop()) == b"x" * 100
    assert temporary_files(tmp_path) == []


def test_a_killed_writers_temporary_file_is_swept_by_age_or_with_its_owner(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    code = ("import sys, threading; from tangram_hpc.storage.store import FolderStore\n"
            "print(flush=True)\n"
            "for n in range(99999): FolderStore(sys.argv[1]).put(bytes([n % 256]) * (8 << 20), "
            "f'7.{n}')")
    for way in ("age", "owner"):
        while not temporary_files(tmp_path):
            writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)],
                                      stdout=subprocess.PIPE)
            assert writer.stdout is not None and writer.stdout.readline()
            time.sleep(0.05)
            writer.kill()
            writer.wait()
            writer.stdout.close()
            for path in tmp_path.glob("[!.]*"):
                path.unlink()
        whole = store.put(b"whole", "8.0")
        store.sweep_temporary()  # it is young: its writer could still be there
        assert temporary_files(tmp_path)
        if way == "age":
            os.utime(temporary_files(tmp_path)[0], (1, 1))
            store.sweep_temporary()
        else:
            store.sweep(["7."])
        assert temporary_files(tmp_path) == [] and store.get(whole) == b"whole"


def test_a_store_put_is_repeated_when_its_temporary_file_was_swept(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename, late = FolderStore(tmp_path), os.replace, [True]

    def after_a_stop(temporary: Path, path: Path) -> None:
        if late and late.pop():
            store.sweep_temporary(0)
        rename(temporary, path)

    monkeypatch.setattr(os, "replace", after_a_stop)
    assert store.get(store.put(b"data", "1.0")) == b"data" and temporary_files(tmp_path) == []


def test_a_restarted_broker_removes_old_temporary_files(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path, job="mine") as first:
        folder = first.folder / "store"
    folder.mkdir(exist_ok=True)
    old = folder / f".{'0' * 64}.once-1.4711"  # as an older release named it
    old.write_bytes(b"x" * 100)
    os.utime(old, (1, 1))
    with LocalCluster(cpus=1, home=tmp_path, job="mine") as again:
        assert again.folder / "store" == folder
        until(lambda: not old.exists(), "an old temporary file to be removed")


def test_two_clients_with_equal_data_do_not_remove_each_others_store_entries(
        cluster: LocalCluster) -> None:
    data = os.urandom(MIB)
    with tangram_hpc.connect(cluster.access) as other:
        for _ in range(5):
            mine = [cluster.submit(turned, data) for _ in range(2)]
            theirs = [other.submit(turned, data) for _ in range(2)]
            assert all(f.result(60) == data[::-1] for f in (*mine, *theirs))


def test_a_named_result_is_kept_in_the_store_until_it_is_forgotten(cluster: LocalCluster) -> None:
    data = os.urandom(MIB)
    before = held(cluster)
    with tangram_hpc.connect(cluster.access) as first:
        assert first.submit(turned, data, once="kept").result(60) == data[::-1]
    for _ in range(2):  # its client is gone, and it was read before
        assert cluster.submit(turned, data, once="kept").result(60) == data[::-1]
    assert held(cluster) >= before + MIB
    assert cluster.forget("kept") == 1
    until(lambda: held(cluster) <= before + 100_000, "the forgotten result to go")


def test_a_name_that_is_forgotten_and_used_again_keeps_its_store_entries(
        cluster: LocalCluster) -> None:
    """The name is forgotten and submitted again at once; entries of the first action are removed
    after a delay."""
    data, swept = os.urandom(MIB), os.urandom(MIB)
    for name, content in (("again", data), ("not again", swept)):
        assert cluster.submit(turned, content, once=name).result(60) == content[::-1]
    before = held(cluster)
    assert cluster.forget("again", "not again") == 2
    assert cluster.submit(turned, data, once="again").result(60) == data[::-1]
    until(lambda: held(cluster) <= before - MIB, "the name that nobody used again to go")
    assert cluster.submit(turned, data, once="again").result(60) == data[::-1]
    assert cluster.forget("again") == 1


def test_store_entries_of_an_expired_client_are_removed(cluster: LocalCluster) -> None:
    def entries() -> set[str]:
        return {path.name for path in (cluster.folder / "store").glob("*")}

    before = entries()
    trainer = subprocess.Popen(
        [sys.executable, "-c",
         "import os, time, tangram_hpc\n"
         "c = tangram_hpc.connect()\n"
         "def hold(data): time.sleep(600)\n"
         "c.submit(hold, os.urandom(1 << 20))\n"
         "print('submitted', flush=True)\n"
         "time.sleep(600)\n"],
        env={**os.environ, "TANGRAM_ACCESS": str(cluster.access)}, stdout=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stdout.readline()
    left = entries() - before
    assert len(left) == 2  # its function and its argument
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until(lambda: not entries() & left, "what it left to go")


def test_entries_of_an_expired_client_stay_as_long_as_a_session_of_it_is_open() -> None:
    """A session that outlives its client may move, and its archive is an entry of that client."""
    swept, remembered = list[str](), {7}
    garbage = StoreGarbage(swept.extend, lambda: 0, 0, lambda name: False, remembered.__contains__)
    garbage.client_expired(7)
    garbage.client_expired(8)
    garbage.watch()
    assert swept == ["8."]
    remembered.clear()
    garbage.watch()
    garbage.watch()
    assert swept == ["8.", "7."]


def test_what_is_too_large_for_an_action_is_refused_before_anything_is_stored(
        cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, functions, request):
        monkeypatch.setattr(module, "PAYLOAD_MAX", MIB)
    monkeypatch.setattr(connection, "CALLS_MAX", MIB)
    large, before = bytes(2 * MIB), entries_of(cluster)
    with cluster.session() as session:
        for call in (lambda: cluster.submit(turned, large), lambda: cluster.submit(lambda: large),
                     lambda: cluster.submit(turned, large, once="large"),
                     lambda: cluster.submit(["cat"], stdin=large),
                     lambda: session.exec(["cat"], files={"f": large}),
                     lambda: cluster.call("model", "score", data=large)):
            with pytest.raises(InvalidInput, match=f"{MIB}"):
                call()
    assert entries_of(cluster) == before
    assert cluster.submit(turned, bytes(MIB // 2)).result(60) == bytes(MIB // 2)


def entries_of(c: LocalCluster) -> set[str]:
    return {path.name for path in (c.folder / "store").glob("*")}


def test_large_function_definitions_take_bounded_room_in_the_store(cluster: LocalCluster) -> None:
    def size_of(data: bytes) -> Callable[[], int]:
        return lambda: len(data)

    before = held(cluster)
    for _ in range(50):
        assert cluster.submit(size_of(os.urandom(MIB))).result(60) == MIB
    until(lambda: held(cluster) < before + 40 * MIB, "the oldest functions to go")


def test_forgetting_names_looks_at_no_others(tmp_path: Path) -> None:
    class CountingSpool(FileSpool):
        looks = 0

        def has_result(self, once: str) -> bool:
            self.looks += 1
            return super().has_result(once)

        def names(self) -> list[str]:
            self.looks += 1000
            return super().names()

    dropped: list[str] = []
    spool = CountingSpool(tmp_path, 1 << 20)
    keys = IdempotencyKeys(Ledger(), spool, dropped.extend)
    result = ActionResult(1, Outcome(ActionState.COMPLETED), "n", (), 1, 5, 6, 0)
    for n in range(100):
        spool.keep_result(f"step{n % 10}/{n}", result, None, "exec")
    assert keys.forget(("step1/1", "none", "step1/1", "step2/2"), "") == 2
    assert dropped == ["step1/1", "step2/2"] and spool.looks == 3
    assert keys.forget(("step2/12", "step1/11"), "step2/") == 10 and "step2/12" in dropped
    assert sorted(set(spool.names())) == sorted(
        f"step{n % 10}/{n}" for n in range(100) if n % 10 != 2 and n not in (1, 11))
