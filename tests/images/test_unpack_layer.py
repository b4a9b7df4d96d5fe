"""Layers of strangers: what is unpacked and how, and that nothing leaves the folder."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
from pathlib import Path

import pytest
from helpers.image_rig import Entry, digest, entry, folder, hard_link, link, tar_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tangram_hpc.errors import TangramError
from tangram_hpc.images.image_errors import ImageRefused, ImageUnavailable
from tangram_hpc.images.image_limits import HEADER_MAX, UnpackBudget
from tangram_hpc.images.unpack_layer import LayerNotes, unpack_layer


def unpack(tmp_path: Path, *entries: Entry, budget: UnpackBudget | None = None, form: int =
           tarfile.PAX_FORMAT) -> tuple[Path, LayerNotes]:
    tree = tmp_path / "tree"
    tree.mkdir()
    data = tar_of(*entries, form=form)
    notes, found = unpack_layer(io.BytesIO(data), str(tree), budget or UnpackBudget())
    assert found == digest(data)
    return tree, notes


def names(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_files_folders_and_links_are_there_with_modes_and_times(tmp_path: Path, form: int) -> None:
    tree, notes = unpack(
        tmp_path, folder("usr", mode=0o755), folder("usr/bin", mode=0o555),
        entry("usr/bin/tool", "#!/bin/sh\n", mode=0o755, mtime=1_600_000_000),
        entry("etc/shadow", "x", mode=0), link("lib", "usr/lib"), hard_link("tool", "usr/bin/tool"),
        folder("tmp", mode=0o1777), form=form)
    assert names(tree) == ["etc", "etc/shadow", "lib", "tmp", "tool", "usr", "usr/bin",
                           "usr/bin/tool"]
    assert os.readlink(tree / "lib") == "usr/lib"
    about = (tree / "usr/bin/tool").stat()
    assert about.st_mtime == 1_600_000_000 and stat.S_IMODE(about.st_mode) == 0o755
    assert about.st_ino == (tree / "tool").stat().st_ino
    assert stat.S_IMODE((tree / "tmp").stat().st_mode) == 0o1777
    # the owner can enter, read and copy everything, or no overlay could
    assert stat.S_IMODE((tree / "usr/bin").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "etc/shadow").stat().st_mode) == 0o600
    assert (notes.entries, notes.size, notes.left_out) == (7, 11, 0)


@pytest.mark.attack("repository", "files")
def test_everything_belongs_to_the_user_and_no_file_gives_rights(tmp_path: Path) -> None:
    about = {"uid": 12345, "gid": 54321, "pax_headers": {
        "SCHILY.xattr.security.capability": "\x01", "SCHILY.xattr.user.overlay.redirect": "/etc"}}
    tree, _ = unpack(tmp_path, entry("su", "x", mode=0o6755, **about),
                     folder("shared", mode=0o2775, **about))
    for path in tree.rglob("*"):
        about_it = path.stat()
        assert (about_it.st_uid, about_it.st_gid) == (os.geteuid(), os.getegid())
        assert not about_it.st_mode & 0o6000
        assert not [name for name in os.listxattr(path) if name.startswith(("user.", "security."))]


@pytest.mark.attack("repository", "files")
def test_devices_pipes_and_capabilities_are_left_out(tmp_path: Path) -> None:
    tree, notes = unpack(
        tmp_path, entry("dev/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("dev/sda", kind=tarfile.BLKTYPE, devmajor=8), entry("pipe", kind=tarfile.FIFOTYPE),
        entry("ok", "x"))
    assert names(tree) == ["ok"] and notes.left_out == 3


def test_whiteouts_are_noted_and_make_no_files(tmp_path: Path) -> None:
    tree, notes = unpack(tmp_path, folder("a"), entry("a/.wh.b"), entry("c/.wh..wh..opq"),
                         entry(".wh.d"), entry(".wh..wh.plnk"))
    assert names(tree) == ["a"]
    assert (notes.removed, notes.emptied) == (["a/b", "d"], ["c"])
    assert LayerNotes.from_json(notes.to_json()) == notes


def test_names_of_any_kind_and_length_are_kept(tmp_path: Path) -> None:
    long = "/".join(["d" * 200] * 10) + "/" + "n" * 255
    odd = "sp ace\n\ttab\udcff*?"
    tree, _ = unpack(tmp_path, entry(long, "x"), entry(odd, "y"))
    # no shell and no pattern is involved on the way
    assert (tree / odd).read_text() == "y"
    here = os.open(tree, os.O_RDONLY)
    for part in long.split("/")[:-1]:
        there = os.open(part, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    assert os.listdir(here) == ["n" * 255]
    os.close(here)


def test_sparse_files_stay_sparse_and_right(tmp_path: Path) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(40 << 20)
        file.write(b"middle")
        file.truncate(64 << 20)
    for form in ("gnu", "posix"):
        packed = tmp_path / f"{form}.tar"
        assert os.system(f"tar -C {tmp_path} --sparse --format={form} -cf {packed} sparse") == 0
        tree = tmp_path / form
        tree.mkdir()
        with packed.open("rb") as file:
            notes, _ = unpack_layer(file, str(tree), UnpackBudget())
        assert (tree / "sparse").read_bytes() == source.read_bytes()
        assert (tree / "sparse").stat().st_blocks * 512 < 4 << 20 and notes.size == 64 << 20


def test_what_comes_twice_is_what_comes_last(tmp_path: Path) -> None:
    tree, _ = unpack(tmp_path, entry("a", "1"), entry("a", "2"), folder("b"), entry("b/c", "x"),
                     entry("b", "file"), entry("d", "file"), folder("d"), link("e", "/etc"),
                     entry("e", "no link"), link("f", "nowhere"), folder("f"), entry("f/g", "x"))
    assert (tree / "a").read_text() == "2" and (tree / "b").read_text() == "file"
    assert (tree / "d").is_dir() and (tree / "e").read_text() == "no link"
    assert not (tree / "f").is_symlink() and (tree / "f/g").exists()


def test_files_go_where_a_link_leads_that_has_replaced_another_one(tmp_path: Path) -> None:
    tree, _ = unpack(tmp_path, link("lib", "old"), entry("lib/a"), link("lib", "new"),
                     entry("lib/b"), folder("lib"), entry("lib/c"))
    assert names(tree) == ["lib", "lib/c", "new", "new/b", "old", "old/a"]


def test_files_go_where_a_link_leads_that_was_replaced_through_itself(tmp_path: Path) -> None:
    tree, _ = unpack(tmp_path, link("d/l", "."), entry("d/l/a"), link("d/l/l", "new"),
                     entry("d/l/b"))
    assert names(tree) == ["d", "d/a", "d/l", "d/new", "d/new/b"]


@pytest.mark.attack("repository", "files")
def test_a_link_inside_is_followed_as_from_inside(tmp_path: Path) -> None:
    tree, _ = unpack(tmp_path, folder("usr/lib"), link("lib", "usr/lib"), entry("lib/a", "1"),
                     link("abs", "/usr"), entry("abs/lib/b", "2"), link("up", "usr/../usr/lib"),
                     entry("up/c", "3"), link("chain", "lib"), entry("chain/d", "4"),
                     link("usr/high", "../../../usr/lib"), entry("usr/high/e", "5"))
    assert sorted(os.listdir(tree / "usr/lib")) == ["a", "b", "c", "d", "e"]


@pytest.mark.attack("repository", "files")
def test_an_absolute_name_begins_at_the_root_of_the_image(tmp_path: Path) -> None:
    tree, notes = unpack(tmp_path, folder("/"), folder("/layers", mode=0o750),
                         entry("/layers/a", "1"), hard_link("/layers/b", "/layers/a"),
                         hard_link("passwd", "/etc/passwd"), entry("/lib/.wh.old"),
                         entry("/lib/.wh..wh..opq"), entry("//etc//hostname", "2"),
                         link("up", "../.."), entry("up/evil", "3"))
    assert names(tree) == ["etc", "etc/hostname", "evil", "layers", "layers/a", "layers/b", "up"]
    assert (tree / "layers").stat().st_mode & 0o7777 == 0o750
    assert (tree / "layers/a").samefile(tree / "layers/b")
    assert notes.late_links == [("passwd", "etc/passwd")]
    assert (notes.removed, notes.emptied) == (["lib/old"], ["lib"])
    assert os.listdir(tmp_path) == ["tree"]


EVIL: list[tuple[list[Entry], str]] = [
    ([entry("/../evil")], "leads out of the image"),
    ([entry("../evil")], "leads out of the image"),
    ([entry("a/../../evil")], "leads out of the image"),
    ([folder("..")], "leads out of the image"),
    ([link("a", "b"), link("b", "a"), entry("a/evil")], "circle of links"),
    ([entry("file", "x"), entry("file/below", "x")], "leads through a file"),
    ([hard_link("evil", "../../etc/passwd")], "leads out of the image"),
    ([folder("d"), hard_link("evil", "d")], "hard link to the directory"),
    ([entry("a"), hard_link("a", "a")], "which must be another file"),
    ([entry("a/.wh...")], "whiteout"), ([entry("a/.wh..")], "whiteout"), ([entry(".wh.")],
                                                                         "whiteout"),
    ([entry("../.wh.evil")], "leads out"), ([entry("a/../../.wh.x")], "leads out"),
    ([link("x", "")], "without a target"),
    ([entry("a/" * 5000 + "b")], "path of 5001 directories|not a path"),
    ([entry("d/" * 300 + "b")], "path of 301 directories; at most 200"),
    ([entry("n" * 300)], "File name too long"),
    ([entry("x" * 5000)], "not a path"),
]


@pytest.mark.parametrize("entries, why", EVIL, ids=[why for _, why in EVIL])
@pytest.mark.attack("repository", "files", "settings")
def test_an_entry_that_leads_out_is_refused(tmp_path: Path, entries: list[Entry], why: str
                                            ) -> None:
    (tmp_path / "beside").write_text("untouched")
    with pytest.raises(ImageRefused, match=why) as told:
        unpack(tmp_path, *entries)
    assert str(told.value).startswith("image: ") and "\n" not in str(told.value)
    assert len(str(told.value)) < 400
    assert sorted(os.listdir(tmp_path)) == ["beside", "tree"]
    assert (tmp_path / "beside").read_text() == "untouched"


@pytest.mark.attack("repository", "files")
def test_an_absolute_link_never_reaches_the_machine(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    target.mkdir()
    tree, _ = unpack(tmp_path, link("out", str(target)), entry("out/evil", "x"),
                     entry("out2"), link("out2", str(target / "new")), entry("out2", "file"))
    assert os.listdir(target) == []
    assert (tree / str(target).lstrip("/") / "evil").read_text() == "x"
    assert (tree / "out2").read_text() == "file"


def header(name: bytes = b"x", size: bytes = b"00000000000\0", kind: bytes = b"0") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124 : 124 + len(size)] = size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = b"ustar\00000"
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


NEGATIVE = b"\xff" * 8 + struct.pack(">i", -512)
HUGE = b"\x80" + bytes(3) + struct.pack(">q", 1 << 62)


@pytest.mark.parametrize("data, why", [
    (header(size=NEGATIVE) * 3, "negative size|not a valid tar"),
    (header(size=HUGE) + b"x" * 5000, "ends within 'x'"),
    (header(size=b"00000100000\0") + b"short", "ends within 'x'"),
    (header(kind=b"x", size=b"77777777777\0") + b"A" * (3 << 20), "bytes of headers"),
    (header(kind=b"L", size=b"77777777777\0") + b"A" * (3 << 20), "bytes of headers"),
    (header(kind=b"L", size=NEGATIVE) * 3, "not a valid tar|negative|headers"),
    ((header(kind=b"x", size=b"00000000014\0") + b"12 a=bcdefg\n".ljust(512, b"\0")) * 5000,
     "not a valid tar|bytes of headers"),
    (b"this is no tar" * 200, "not a valid tar"),
    (gzip.compress(tar_of(entry("a", "x" * 9000)), mtime=0)[:-20], "middle of its compressed data"),
    (b"\x1f\x8b" + b"x" * 600, "not valid gzip"),
    (header(kind=b"x", size=b"00000000036\0") + b"30 GNU.sparse.map=9,-5,3,junk\n".ljust(512, b"\0")
     + header(size=b"00000001000\0") + bytes(512), "not a valid tar|sparse"),
])
def test_a_damaged_archive_is_refused_in_one_line(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(ImageRefused, match=why) as told:
        unpack_layer(io.BytesIO(data), str(tmp_path), UnpackBudget())
    assert str(told.value).startswith("image: ") and "\n" not in str(told.value)


@pytest.mark.attack("repository", "disk")
def test_a_bomb_is_refused_while_it_is_small(tmp_path: Path) -> None:
    bomb = gzip.compress(tar_of(entry("zeros", bytes(64 << 20))))
    with pytest.raises(ImageRefused, match="image_max_mib"):
        unpack_layer(io.BytesIO(bomb), str(tmp_path), UnpackBudget(bytes_left=8 << 20))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 9 << 20


def test_bytes_after_the_last_entry_count_too(tmp_path: Path) -> None:
    bomb = gzip.compress(tar_of(entry("a")) + bytes(32 << 20))
    with pytest.raises(ImageRefused, match="image_max_mib"):
        unpack_layer(io.BytesIO(bomb), str(tmp_path), UnpackBudget(bytes_left=8 << 20))


@pytest.mark.attack("repository", "disk")
def test_a_hole_counts_as_bytes(tmp_path: Path) -> None:
    source = tmp_path / "hole"
    source.touch()
    os.truncate(source, 1 << 40)
    assert os.system(f"tar -C {tmp_path} --sparse -cf {tmp_path}/hole.tar hole") == 0
    (tmp_path / "tree").mkdir()
    with (tmp_path / "hole.tar").open("rb") as file, pytest.raises(ImageRefused, match="max_mib"):
        unpack_layer(file, str(tmp_path / "tree"), UnpackBudget())


@pytest.mark.attack("repository", "disk")
def test_a_million_entries_are_refused_at_the_bound(tmp_path: Path) -> None:
    with pytest.raises(ImageRefused, match="more files"):
        unpack(tmp_path, *[entry(f"f{n}") for n in range(300)],
               budget=UnpackBudget(entries_left=250))
    assert len(os.listdir(tmp_path / "tree")) == 250


@pytest.mark.attack("repository", "memory")
def test_headers_are_never_read_into_memory_whole(tmp_path: Path) -> None:
    """tarfile would read all that a header announces; the reader gives it at most `HEADER_MAX`."""
    class Endless(io.RawIOBase):
        given = 0

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            Endless.given += len(buffer)
            buffer[:] = b"A" * len(buffer)
            return len(buffer)

        def readable(self) -> bool:
            return True

    class Joined:
        rest = [header(kind=b"x", size=b"77777777777\0")]

        def read(self, size: int = -1) -> bytes:
            return self.rest.pop() if self.rest else Endless().read(size) or b""

    with pytest.raises(ImageRefused, match="bytes of headers"):
        unpack_layer(Joined(), str(tmp_path), UnpackBudget())  # type: ignore[arg-type]
    assert Endless.given <= HEADER_MAX


@pytest.mark.parametrize("kind", ["plain", "gzip", "members", "zstd"])
def test_a_layer_may_be_compressed(tmp_path: Path, kind: str) -> None:
    data = tar_of(entry("a", os.urandom(700_000)), entry("b", "x" * 700_000))
    if kind == "gzip":
        packed = gzip.compress(data)
    elif kind == "members":
        packed = b"".join(gzip.compress(data[at : at + 100_000])
                          for at in range(0, len(data), 100_000))
        packed += bytes(512)
    elif kind == "zstd":
        packed = pytest.importorskip("zstandard").compress(data)
    else:
        packed = data
    notes, found = unpack_layer(io.BytesIO(packed), str(tmp_path), UnpackBudget())
    assert found == digest(data) and notes.size == 1_400_000
    assert (tmp_path / "b").read_text() == "x" * 700_000


def test_zstd_without_its_library_says_what_to_install(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImageRefused, match=r"zstandard.*extra"):
        unpack_layer(io.BytesIO(b"\x28\xb5\x2f\xfd" + bytes(100)), str(tmp_path), UnpackBudget())


def test_a_full_disk_is_not_the_images_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ImageUnavailable, match="'a': No space left"):
        unpack(tmp_path, entry("a", "x"))


PART = st.sampled_from(["a", "b", "c", "..", ".", "", "/", "etc", ".wh.a", ".wh...", ".wh..wh..opq",
                        "ü", "\x7f", "x" * 260, "\udc80"])
PATHS = st.lists(PART, min_size=1, max_size=6).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE,
                         tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z"])
ENTRIES = st.lists(st.tuples(PATHS, KINDS, PATHS, st.integers(0, 0o7777), st.binary(max_size=600)),
                   max_size=12)


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES)
@example([("a", tarfile.SYMTYPE, "../..", 0, b""), ("a/b", tarfile.REGTYPE, "", 0, b"x")])
@example([("a", tarfile.SYMTYPE, "/etc", 0, b""), ("a", tarfile.DIRTYPE, "", 0, b"")])
@pytest.mark.attack("repository", "files")
def test_no_archive_writes_outside(tmp_path: Path, made: list[tuple[str, bytes, str, int, bytes]]
                                   ) -> None:
    """Whatever an archive holds, it is unpacked below its folder, or refused in one line."""
    area = tmp_path / os.urandom(8).hex()
    tree = area / "x/y/tree"
    tree.mkdir(parents=True)
    (area / "etc").mkdir()
    entries = [entry(name, data if kind in (tarfile.REGTYPE, tarfile.CONTTYPE, b"Z") else b"", kind,
                     linkname=target, mode=mode) for name, kind, target, mode, data in made]
    try:
        unpack_layer(io.BytesIO(tar_of(*entries, form=tarfile.GNU_FORMAT)), str(tree),
                     UnpackBudget())
    except TangramError as error:
        assert "\n" not in str(error)
    outside = [path for path in area.rglob("*") if tree not in (path, *path.parents)]
    assert sorted(outside) == sorted([area / "etc", area / "x", area / "x/y"])
    for path in tree.rglob("*"):
        about = path.lstat()
        assert stat.S_IFMT(about.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        assert not stat.S_ISREG(about.st_mode) or not about.st_mode & 0o6000


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_to_the_bytes_makes_another_error(tmp_path: Path, data: st.DataObject) -> None:
    """Flipped bytes anywhere are unpacked or refused; nothing else is raised and nothing hangs."""
    whole = bytearray(tar_of(folder("a"), entry("a/b", "content" * 50), link("l", "a"),
                             hard_link("h", "a/b"), entry("p" * 150, "x"), entry("s", "y")))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    # checksums are made right again, so that damage reaches what is behind them
    for start in range(0, len(whole), 512):
        block = whole[start : start + 512]
        if block[257:262] == b"ustar" and data.draw(st.booleans()):
            block[148:156] = b"        "
            whole[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    tree = tmp_path / os.urandom(8).hex()
    tree.mkdir()
    try:
        unpack_layer(io.BytesIO(bytes(whole)), str(tree), UnpackBudget(bytes_left=1 << 24))
    except TangramError as error:
        assert "\n" not in str(error)
