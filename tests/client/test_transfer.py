"""Uploads and downloads of trees: what a hostile sandbox lists is never written outside."""

from __future__ import annotations

import concurrent.futures
import os
import stat
from pathlib import Path

import pytest

from tangram_hpc.client.transfer import FILES_MAX, checked_entries, download, upload
from tangram_hpc.errors import FileFailed, InvalidInput
from tangram_hpc.protocol.payload import FileEntry
from tangram_hpc.protocol.process_frames import FILE_MAX

BIG = 1 << 30


class Folder:
    """A sandbox's files in a real folder, answered as a session answers; `lies` replace what it
    would list."""

    def __init__(self, root: Path) -> None:
        self.root, self.lies, self.open_now, self.most = root, None, 0, 0
        root.mkdir(parents=True, exist_ok=True)

    def _done(self, value: object) -> concurrent.futures.Future:
        folder = self

        class Answer(concurrent.futures.Future):
            def result(self, timeout=None):
                folder.open_now -= 1
                return super().result(timeout)

        self.open_now += 1
        self.most = max(self.most, self.open_now)
        future = Answer()
        future.set_result(value)
        return future

    def read(self, path: str, offset: int = 0, length: int | None = None):
        if length is None and (self.root / path).stat().st_size > FILE_MAX:
            raise FileFailed(f"{path}: it is more than one read returns")
        return self._done((self.root / path).read_bytes()[offset:][:length])

    def write(self, path: str, data, mode: int = 0o644):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
        return self._done(None)

    def mkdir(self, path: str):
        (self.root / path).mkdir(parents=True, exist_ok=True)
        return self._done(None)

    def listing(self, path: str = ""):
        if self.lies is not None:
            return self._done(tuple(self.lies))
        top = self.root / path
        if top.is_file():
            return self._done((entry(top, ""),))
        return self._done(tuple(entry(p, str(p.relative_to(top))) for p in sorted(top.rglob("*"))))


def entry(path: Path, name: str) -> FileEntry:
    mode = path.lstat().st_mode
    kind = ("link" if stat.S_ISLNK(mode) else "dir" if stat.S_ISDIR(mode)
            else "file" if stat.S_ISREG(mode) else "other")
    return FileEntry(name, kind, path.lstat().st_size, stat.S_IMODE(mode))


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None
            for p in root.rglob("*")}


@pytest.fixture
def sandbox(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "sandbox")


def test_a_tree_is_uploaded_and_downloaded_unchanged(sandbox: Folder, tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "a" / "deep").mkdir(parents=True)
    (local / "empty").mkdir()
    (local / "a" / "deep" / "x.bin").write_bytes(bytes(range(256)) * 300)
    (local / "run.sh").write_text("#!/bin/sh\n")
    (local / "run.sh").chmod(0o755)
    (local / "ü name\n").write_text("odd")
    (local / "link").symlink_to("run.sh")  # within the tree: its content goes
    for n in range(100):
        (local / "a" / f"{n}").write_text(str(n))
    assert upload(sandbox, local, "in") == 104
    assert sandbox.most <= 40, "the whole tree was on its way at once"
    assert tree(sandbox.root / "in") == tree(local)
    sandbox.most = 0
    assert download(sandbox, "in", tmp_path / "back", BIG, False) == 104
    assert tree(tmp_path / "back") == tree(local) and sandbox.most <= 40
    assert os.access(tmp_path / "back" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "back" / "a" / "1", os.X_OK)
    assert download(sandbox, "in/a/", tmp_path / "part", BIG, False) == 101


def test_a_single_file_takes_the_given_name(sandbox: Folder, tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("1")
    for path in ("", "sub/", "sub/other"):
        assert upload(sandbox, one, path) == 1
    assert tree(sandbox.root) == {"one.txt": b"1", "sub": None, "sub/one.txt": b"1",
                                  "sub/other": b"1"}
    assert download(sandbox, "sub/other", tmp_path / "new.txt", BIG, False) == 1
    (tmp_path / "folder").mkdir()
    assert download(sandbox, "sub/other", tmp_path / "folder", BIG, False) == 1
    assert (tmp_path / "new.txt").read_text() == (tmp_path / "folder" / "other").read_text() == "1"


@pytest.mark.parametrize("entries", [
    [("../x", "file")], [("a/../../x", "file")], [("/etc/x", "file")], [("..", "dir")],
    [("a//x", "file")], [("./x", "file")], [("x/", "dir")], [("x\0y", "file")],
    [("x" * 5000, "file")], [("a", "file"), ("a", "file")], [("a", "dir"), ("a", "file")],
    [("a", "file"), ("a/b", "file")], [("a", "link")], [("a", "link"), ("a/b", "file")],
    [("a", "other")], [("a", "socket?")], [("", "file"), ("b", "file")],
])
def test_a_hostile_listing_is_refused_in_one_line(sandbox: Folder, tmp_path: Path, entries) -> None:
    (sandbox.root / "a").write_text("evil")
    sandbox.lies = [FileEntry("innocent", "file"), *(FileEntry(*e) for e in entries)]
    target = tmp_path / "deep" / "target"
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InvalidInput, match=r"^download: ") as error:
        download(sandbox, "", target, BIG, False)
    assert "\n" not in str(error.value)
    assert set(tmp_path.rglob("*")) == before, "it wrote before it had checked all"


def test_too_many_files_or_bytes_are_refused(sandbox: Folder, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="more than"):
        checked_entries(FileEntry(str(n), "file") for n in range(FILES_MAX + 1))
    (sandbox.root / "a").write_bytes(b"x" * 1000)
    with pytest.raises(InvalidInput, match="1000 bytes, more than max_bytes"):
        download(sandbox, "", tmp_path / "t", 999, False)
    sandbox.lies = [FileEntry("a", "file", size=1)]  # and it lies about its size
    with pytest.raises(InvalidInput, match="grew over max_bytes"):
        download(sandbox, "", tmp_path / "t", 999, False)
    assert not (tmp_path / "t" / "a").exists()


def test_a_file_larger_than_one_read_is_downloaded(sandbox: Folder, tmp_path: Path) -> None:
    large = sandbox.root / "large"
    large.touch()
    os.truncate(large, FILE_MAX + 3)
    assert download(sandbox, "large", tmp_path / "out", BIG, False) == 1
    assert (tmp_path / "out").stat().st_size == FILE_MAX + 3
    sandbox.lies = [entry(large, "large")]
    os.truncate(large, FILE_MAX + 9)
    with pytest.raises(InvalidInput, match="'large' grew while it was copied"):
        download(sandbox, "", tmp_path / "folder", BIG, False)
    assert list((tmp_path / "folder").iterdir()) == []


def test_links_and_pipes_are_skipped_on_request(sandbox: Folder, tmp_path: Path) -> None:
    (sandbox.root / "a").write_text("1")
    (sandbox.root / "l").symlink_to("/etc/passwd")
    os.mkfifo(sandbox.root / "pipe")
    with pytest.raises(InvalidInput, match="'l' is a link"):
        download(sandbox, "", tmp_path / "t", BIG, False)
    assert download(sandbox, "", tmp_path / "t", BIG, True) == 1
    assert tree(tmp_path / "t") == {"a": b"1"}


def test_links_in_the_target_are_never_followed(sandbox: Folder, tmp_path: Path) -> None:
    """Neither one that was there nor one that came with an earlier download's name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("mine")
    target = tmp_path / "t"
    target.mkdir()
    (target / "d").symlink_to(outside)
    (target / "f").symlink_to(outside / "f")
    os.link(outside / "f", target / "hard")
    (sandbox.root / "f").write_text("evil")
    (sandbox.root / "hard").write_text("evil")
    assert download(sandbox, "", target, BIG, False) == 2
    assert (target / "f").read_text() == "evil" and not (target / "f").is_symlink()
    (sandbox.root / "d").mkdir()
    (sandbox.root / "d" / "f").write_text("evil")
    with pytest.raises(InvalidInput, match="'d' in the target is no folder"):
        download(sandbox, "", target, BIG, False)
    assert tree(outside) == {"f": b"mine"}
    assert not [p for p in target.iterdir() if p.name.startswith(".tangram-")]


def test_files_that_cannot_be_uploaded_are_refused_in_one_line(
        sandbox: Folder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    local = tmp_path / "local"
    local.mkdir()
    (local / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match=r"^upload: .*out is a link that leads out"):
        upload(sandbox, local, "")
    (local / "out").unlink()
    (local / "dir").symlink_to(tmp_path)
    with pytest.raises(InvalidInput, match=r"^upload: .*dir is a link to a folder"):
        upload(sandbox, local, "")
    (local / "dir").unlink()
    os.mkfifo(local / "pipe")
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        upload(sandbox, local, "")
    with pytest.raises(InvalidInput, match=r"cannot read .*nowhere"):
        upload(sandbox, tmp_path / "nowhere", "")


def test_an_interrupted_download_leaves_no_part_of_a_file(
        sandbox: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox.root / "big").write_bytes(b"x" * 1000)

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download(sandbox, "", tmp_path / "down", BIG, False)
    assert os.listdir(tmp_path / "down") == []
