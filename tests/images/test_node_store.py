"""The store of a node: whole or not there, locked by who uses it, and as large as it may be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.image_rig import MadeImage, entry, tar_of
from helpers.small_folder import in_a_small_folder

from tangram_hpc.images import owner_namespace
from tangram_hpc.images.image_errors import MAKE_ROOM, ImageUnavailable, of_os_error
from tangram_hpc.images.manifests import BlobRef, digest_of
from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PullSettings, pull
from tangram_hpc.images.shared_blobs import SharedBlobs
from tangram_hpc.images.unpack_layer import LayerNotes


def filled(tmp_path: Path, count: int = 3, size: int = 1 << 20) -> tuple[NodeStore, list[str]]:
    """A store with images of which each has a layer of its own; the first was used first."""
    base, digests, looks = tar_of(entry("base", bytes(size))), [], []
    for number in range(count):
        image = MadeImage([base, tar_of(entry(f"own{number}", bytes(size)))])
        layout = image.layout(tmp_path / f"layout{number}")
        digests.append(pull(str(layout), PullSettings(str(tmp_path / "store")), {},
                            on_layer=lambda *look: looks.append(look)).digest)
        used = tmp_path / "store/images" / image.digest[7:] / "used"
        os.utime(used, (number, number))
    assert looks == [(0, 2), (1, 2)] * count, "each layer of each image is told of"
    return NodeStore(tmp_path / "store"), digests


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store, digests = filled(tmp_path)
    assert store.size() == 4 << 20
    os.close(store.hold(digests[0]))  # it is used now, and so the youngest
    assert [image.digest for image in store.shrink(3 << 20)] == [digests[1]]
    assert store.size() == 3 << 20 and store.find(digests[0]) is not None
    assert [image.digest for image in store.shrink(0, keep=digests[2])] == [digests[0]]
    assert store.size() == 2 << 20  # the base is the last image's too
    assert store.names().keys() == {digests[2]}


def test_a_used_image_is_never_removed(tmp_path: Path) -> None:
    store, digests = filled(tmp_path, 2)
    held = store.hold(digests[0])
    assert store.in_use(digests[0]) and not store.in_use(digests[1])
    assert not store.remove(digests[0])
    assert [image.digest for image in store.shrink(0)] == [digests[1]]
    assert (Path(store.root_of(store.images()[0])) / "base").exists()
    os.close(held)
    assert store.remove(digests[0]) and store.images() == [] and store.hold(digests[0]) == -1
    assert store.prune_layers() == 2 << 20 and store.size() == 0


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    store, (digest,) = filled(tmp_path, 1)
    text = ("import sys, time; from tangram_hpc.images.node_store import NodeStore;"
            f"print(NodeStore({str(store.folder)!r}).hold({digest!r}), flush=True); time.sleep(60)")
    other = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert other.stdout is not None and int(other.stdout.readline()) >= 0
    assert not store.remove(digest)
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdout.close()
    assert store.remove(digest)


def test_an_image_that_comes_again_is_in_another_folder(tmp_path: Path) -> None:
    """A sandbox that was warmed with the first one must not be taken for one of the second."""
    store, (digest,) = filled(tmp_path, 1)
    first = store.root_of(store.images()[0])
    store.remove(digest)
    second = pull(str(tmp_path / "layout0"), PullSettings(str(store.folder)), {})
    assert second.digest == digest and second.folder != first


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    store = NodeStore(tmp_path / "store")
    dead = store.folder / "drafts/dead"
    (dead / "root/deep").mkdir(parents=True)
    os.chmod(dead / "root", 0)
    with store.draft() as living:
        for draft in (dead, living):
            os.utime(draft, (1, 1))
        assert store.sweep_drafts() == 1
        assert not dead.exists() and living.exists()
    assert not living.exists()


@pytest.mark.attack("user", "files", "results")
def test_a_store_that_others_may_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    os.chmod(folder, 0o777)
    with pytest.raises(ImageUnavailable, match="others may write into it; name a folder"):
        NodeStore(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ImageUnavailable, match="name a writable folder on a local disk"):
        NodeStore(tmp_path / "file/below")


@pytest.mark.parametrize("folder", ["locks", "drafts"])
def test_a_store_that_cannot_be_written_is_named(tmp_path: Path, folder: str) -> None:
    store, digests = filled(tmp_path, 2)
    shutil.rmtree(tmp_path / "store" / folder)
    (tmp_path / "store" / folder).touch()  # root could write into a folder of any mode
    with pytest.raises(ImageUnavailable, match=f"^image_store {tmp_path / 'store'}: Not a dir"):
        store.prune_layers() if folder == "locks" else store.remove(digests[0])


def test_room_can_be_made_on_a_disk_without_any(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from tests.helpers.image_rig import MadeImage, entry, tar_of
        from tangram_hpc.images.node_store import NodeStore
        from tangram_hpc.images.pull import PullSettings, pull
        folder, other = Path(sys.argv[1]), tar_of(entry("b", "b"))
        for layers in ([tar_of(entry("a", "a"))], [tar_of(entry("a", "a")), other]):
            archive = MadeImage(layers).docker_archive(folder / "image.tar")
            pull(str(archive), PullSettings(str(folder / "store")), {})
        store = NodeStore(folder / "store")
        try:
            for number in range(100):
                (folder / str(number)).mkdir()
        except OSError as error:
            print(error.strerror)
        print(store.remove(store.images()[-1].digest), store.prune_layers(), os.listdir(
            store.folder / "drafts"), len(store.shrink(0)), store.size())
        """
    assert in_a_small_folder(tmp_path, "1m,nr_inodes=70", code) == (
        "No space left on device\nTrue 1 [] 1 0\n")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESHUTDOWN,
                                  errno.EAGAIN])
def test_a_node_that_fails_is_no_fault_of_the_image(code: int) -> None:
    error = of_os_error("entry 'a'", OSError(code, os.strerror(code)))
    assert isinstance(error, ImageUnavailable)
    assert str(error) == f"image: entry 'a': {os.strerror(code)}" + (
        f"; {MAKE_ROOM}" if code in (errno.ENOSPC, errno.EDQUOT) else "")


def test_a_pull_that_is_ended_ends_the_child_that_unpacks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It filled the draft that was being removed."""
    def ended(*_: object) -> None:
        raise SystemExit(143)

    def work() -> None:
        parent = os.getppid()
        (tmp_path / "child").write_text(str(os.getpid()))
        while Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)  # until it waits for this child
        os.kill(parent, signal.SIGUSR1)
        time.sleep(60)

    monkeypatch.setattr(owner_namespace, "users", lambda: "some")
    monkeypatch.setattr(owner_namespace, "namespace", lambda of: 0)
    monkeypatch.setattr(owner_namespace, "_answer", lambda fd, work: ("", work()))
    before = signal.signal(signal.SIGUSR1, ended)
    try:
        with pytest.raises(SystemExit):
            owner_namespace.as_root(work)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not Path("/proc", (tmp_path / "child").read_text()).exists()


def test_layers_of_a_pull_under_way_are_not_pruned(tmp_path: Path) -> None:
    store, digests = filled(tmp_path, 1)
    with store.pulling("some image"):
        store.remove(digests[0])
        assert store.prune_layers() == 0
    assert store.prune_layers() == 2 << 20


def test_jobs_with_an_earlier_release_read_the_notes_of_a_layer(tmp_path: Path) -> None:
    """They refuse a field that they do not know, and may share the store."""
    store, diff_id = NodeStore(tmp_path), digest_of(b"layer")
    notes = LayerNotes(removed=["x"], implied=["var", "var/tmp"], size=3)
    store.add_layer(diff_id, lambda folder: notes)
    (file,) = tmp_path.glob("layers*/*/notes.json")
    assert json.loads(file.read_text()).keys() == {"removed", "emptied", "late_links", "size",
                                                   "entries", "left_out"}
    found = store.layer(diff_id)
    assert found is not None and found.notes == notes
    (file.parent / "implied.json").unlink()  # as an earlier release leaves a layer
    found = store.layer(diff_id)
    assert found is not None and found.notes == LayerNotes(removed=["x"], size=3)


# ---- blobs that nodes share ----


def blob_of(data: bytes) -> BlobRef:
    return BlobRef(digest_of(data), len(data))


def test_one_fetches_for_all(tmp_path: Path) -> None:
    share, data = SharedBlobs(tmp_path / "share", True), os.urandom(5000)
    fetched: list[int] = []

    def fetch(file: object) -> None:
        fetched.append(1)
        time.sleep(0.2)
        file.write(data)  # type: ignore[attr-defined]

    def want() -> None:
        with SharedBlobs(tmp_path / "share", True).get(blob_of(data), fetch) as file:
            assert file.read() == data

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [1]
    assert [path.name for path in (tmp_path / "share/blobs").iterdir()] == [digest_of(data)[7:]]
    assert share.find(blob_of(data)) is not None


def test_who_dies_while_fetching_is_replaced(tmp_path: Path) -> None:
    share, data = SharedBlobs(tmp_path / "share", True, stale_s=0.3), b"content"
    name = digest_of(data)[7:]
    (share.folder / "blobs" / f"{name}.claim").touch()
    (share.folder / "blobs" / f"{name}.part-of-the-dead").write_bytes(b"con")
    with share.get(blob_of(data), lambda file: file.write(data) and None) as file:
        assert file.read() == data
    assert os.listdir(share.folder / "blobs") == [name]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    share = SharedBlobs(tmp_path / "share", True)

    def fetch(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise ImageUnavailable("image: no answer")

    with pytest.raises(ImageUnavailable, match="no answer"):
        share.get(blob_of(b"whole"), fetch)
    assert os.listdir(share.folder / "blobs") == []


def test_the_first_pin_of_a_name_holds(tmp_path: Path) -> None:
    share = SharedBlobs(tmp_path / "share", True)
    one, two = digest_of(b"1"), digest_of(b"2")
    assert share.digest_of_name("app") == ""
    assert [share.pin("app", one), share.pin("app", two)] == [one, one]
    assert share.pin("app", two, again=True) == two == share.digest_of_name("app")
    for path in (share.folder / "names").iterdir():
        path.write_text('{"digest": "../../etc"}')
    assert share.digest_of_name("app") == ""


OLD = 30 * 86400


def by(stamp: str) -> list[str]:
    return ["-type", "f", f"-{stamp}", "+30", "-delete"]


@pytest.mark.parametrize("rule", [by("mtime"), by("atime"), ["-depth", "-type", "f", "-delete"],
                                  ["-depth", "-mindepth", "1", "-delete"]])
def test_an_image_of_which_a_cleaner_took_files_is_unpacked_anew(
        tmp_path: Path, rule: list[str]) -> None:
    """Files of an image have the times of its archive, and many are never read."""
    folder, settings = tmp_path / "store", PullSettings(str(tmp_path / "store"))
    image = MadeImage([tar_of(entry("base", "x", mtime=OLD)), tar_of(entry("own", "y"))])
    layout = str(image.layout(tmp_path / "layout"))
    first = pull(layout, settings, {})
    assert pull(layout, settings, {}) == first
    held = NodeStore(folder).hold(first.digest)
    subprocess.run(["find", folder, *rule], check=True)
    assert not (Path(first.folder) / "base").exists()
    store = NodeStore(folder)
    assert store.find(first.digest) is None and store.hold(first.digest) == -1
    again = pull(layout, settings, {})
    assert again.digest == first.digest
    assert (Path(again.folder) / "base").read_text() == "x"
    assert (Path(again.folder) / "own").read_text() == "y"
    os.close(held)
    for left in (folder / "drafts").iterdir():
        os.utime(left, (0, 0))
    store.sweep_drafts()
    assert not list((folder / "drafts").iterdir()) and store.images() == [again.image]
    assert store.remove(again.digest)
    store.prune_layers()
    assert not list((folder / "layers").iterdir())


def test_no_file_of_an_image_or_a_layer_is_older_than_its_witness_by_any_time(
        tmp_path: Path) -> None:
    layout = MadeImage([tar_of(entry("a/b", "x", mtime=1))]).layout(tmp_path / "layout")
    pull(str(layout), PullSettings(str(tmp_path / "store")), {})
    for witness in (tmp_path / "store").glob("*/*/witness"):
        first = witness.stat()
        others = [p.lstat() for p in witness.parent.rglob("*") if p.is_file() and p != witness]
        assert len(others) > 2
        for each in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            assert getattr(first, each) <= min(getattr(other, each) for other in others), each


def test_a_layer_of_which_a_cleaner_took_files_is_unpacked_anew_for_another_image(
        tmp_path: Path) -> None:
    base = tar_of(entry("base", "x", mtime=OLD))
    settings = PullSettings(str(tmp_path / "store"))
    first = pull(str(MadeImage([base]).layout(tmp_path / "one")), settings, {})
    subprocess.run(["find", tmp_path / "store/layers", *by("mtime")], check=True)
    other = MadeImage([base, tar_of(entry("own", "y"))]).layout(tmp_path / "two")
    assert (Path(pull(str(other), settings, {}).folder) / "base").read_text() == "x"
    assert (Path(first.folder) / "base").read_text() == "x"


def test_an_image_that_an_earlier_release_unpacked_is_used(tmp_path: Path) -> None:
    store, (digest,) = filled(tmp_path, 1)
    found = store.find(digest)
    assert found is not None
    folder = Path(store.root_of(found)).parent
    (folder / "witness").unlink()
    (folder / found.root).rename(folder / "root-0a1b2c3d")
    record = json.loads((folder / "image.json").read_text())
    (folder / "image.json").write_text(json.dumps(record | {"root": "root-0a1b2c3d"}))
    store.sweep_drafts()
    assert store.find(digest) is not None
    os.close(store.hold(digest))
