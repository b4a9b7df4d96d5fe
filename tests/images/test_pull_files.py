"""Images in files and folders, from their name to their root file system in the store."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from helpers.image_rig import (
    HERE,
    MadeImage,
    digest,
    entry,
    folder,
    hard_link,
    link,
    needs_squashfs,
    sif_of,
    skopeo_folder,
    squashfs_of,
    tar_of,
)

from tangram_hpc.images import sif
from tangram_hpc.images.image_errors import ImageRefused, ImageUnavailable
from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PulledImage, PullSettings, import_image, pull

OTHER = "linux/arm64" if HERE != "linux/arm64" else "linux/amd64"


def get(tmp_path: Path, name: str, **settings: int) -> PulledImage:
    return pull(name, PullSettings(str(tmp_path / "store"), **settings), {})  # type: ignore[arg-type]


@pytest.fixture
def image() -> MadeImage:
    """Three layers that change each other."""
    return MadeImage([
        tar_of(folder("a"), entry("a/kept", "1"), entry("a/changed", "1"), entry("a/gone", "1"),
               folder("emptied"), entry("emptied/old", "1"), link("was_link", "a"),
               folder("was_folder"), entry("was_folder/x", "1")),
        tar_of(entry("a/changed", "2"), entry("a/.wh.gone"), entry("emptied/.wh..wh..opq"),
               entry("emptied/new", "2"), folder("was_link"), entry("was_link/y", "2"),
               entry("was_folder", "2"), entry(".wh.never_was")),
        tar_of(hard_link("a/late", "a/kept"), entry("a/gone", "3", mode=0o4755)),
    ], env=["PATH=/opt/bin:/bin", "NAME=value", "broken"])


def tree(root: str) -> dict[str, str]:
    return {str(path.relative_to(root)): "/" if path.is_dir() else path.read_text()
            for path in sorted(Path(root).rglob("*"))}


MERGED = {"a": "/", "a/kept": "1", "a/changed": "2", "a/gone": "3", "a/late": "1", "emptied": "/",
          "emptied/new": "2", "was_link": "/", "was_link/y": "2", "was_folder": "2"}


def test_an_oci_layout_by_each_of_its_names(tmp_path: Path, image: MadeImage) -> None:
    layout = image.layout(tmp_path / "layout", "v1")
    archive = image.oci_archive(tmp_path / "a.tar", "v1")
    for name in (str(layout), f"oci:{layout}", f"oci:{layout}:v1", str(archive),
                 f"oci-archive:{archive}:v1"):
        found = get(tmp_path, name)
        assert found.digest == image.digest and tree(found.folder) == MERGED
        assert found.image is not None and found.image.env == ("PATH=/opt/bin:/bin", "NAME=value")
    assert os.stat(f"{found.folder}/a/gone").st_mode & 0o7777 == 0o755
    assert os.path.samefile(f"{found.folder}/a/late", f"{found.folder}/a/kept")
    store = NodeStore(tmp_path / "store")
    assert [one.digest for one in store.images()] == [image.digest]
    assert sorted(store.layer_sizes()) == sorted(image.diff_ids)
    assert list((tmp_path / "store/drafts").iterdir()) == []


def test_a_folder_that_skopeo_wrote_is_an_image(tmp_path: Path, image: MadeImage) -> None:
    found = get(tmp_path, str(skopeo_folder(tmp_path / "one", image)))
    assert found.digest == image.digest and tree(found.folder) == MERGED
    other = MadeImage([tar_of(entry("other"))], offered=OTHER)
    several = skopeo_folder(tmp_path / "several", other, image)
    assert get(tmp_path, str(several)).digest == image.digest
    (several / f"{image.digest.removeprefix('sha256:')}.manifest.json").write_bytes(other.manifest)
    with pytest.raises(ImageRefused, match="another digest"):
        get(tmp_path, str(several))


def test_a_root_file_system_may_have_files_of_an_images_folder(tmp_path: Path) -> None:
    for name, text in (("version", "1.2"), ("manifest.json", "{}")):
        (tmp_path / name).write_text(text)
    assert get(tmp_path, str(tmp_path)) == PulledImage(str(tmp_path))


def test_what_docker_save_writes(tmp_path: Path, image: MadeImage) -> None:
    archive = image.docker_archive(tmp_path / "saved.tar", "app:1", "example.org/app:2")
    for name in (str(archive), f"docker-archive:{archive}", f"docker-archive:{archive}:app:1",
                 f"docker-archive:{archive}:example.org/app:2"):
        found = get(tmp_path, name)
        assert found.digest == digest(image.config) and tree(found.folder) == MERGED
    with pytest.raises(ImageRefused, match="no image 'nope'; it has app:1, example"):
        get(tmp_path, f"docker-archive:{archive}:nope")


def test_layers_that_two_images_share_are_there_once(tmp_path: Path) -> None:
    base = tar_of(entry("large", "x" * 100_000))
    one = MadeImage([base, tar_of(entry("a"))]).layout(tmp_path / "one")
    two = MadeImage([base, tar_of(entry("b"))]).layout(tmp_path / "two")
    first, second = get(tmp_path, f"oci:{one}"), get(tmp_path, f"oci:{two}")
    assert os.path.samefile(f"{first.folder}/large", f"{second.folder}/large")
    assert len(NodeStore(tmp_path / "store").layer_sizes()) == 3


def test_files_of_a_layer_go_through_a_link_of_the_layer_below(tmp_path: Path) -> None:
    layout = MadeImage([
        tar_of(entry("usr/bin/sh", "1"), link("bin", "usr/bin"), link("lib", "/usr/lib"),
               link("sbin", "bin"), link("lib64", "usr/lib64"), link("own", "usr/bin"),
               entry("file", "1")),
        # neither `bin` nor `lib` has an entry of its own, as in layers of Bazel
        tar_of(entry("bin/tool", "2"), entry("bin/sub/x", "2"), entry("sbin/admin", "2"),
               entry("lib64/ld.so", "2"), folder("own"), entry("own/x", "2"),
               entry("file/x", "2")),
        tar_of(hard_link("bin/late", "sbin/tool"), entry("lib/so", "3")),
    ]).layout(tmp_path / "layout")
    root = Path(get(tmp_path, f"oci:{layout}").folder)
    assert tree(str(root / "usr")) == {
        "bin": "/", "bin/sh": "1", "bin/tool": "2", "bin/sub": "/", "bin/sub/x": "2",
        "bin/admin": "2", "bin/late": "2", "lib": "/", "lib/so": "3", "lib64": "/",
        "lib64/ld.so": "2"}
    assert [os.readlink(root / name) for name in ("bin", "lib", "sbin", "lib64")] == [
        "usr/bin", "/usr/lib", "bin", "usr/lib64"]
    assert tree(str(root / "own")) == {"x": "2"} and not (root / "own").is_symlink()
    assert tree(str(root / "file")) == {"x": "2"}


def test_whiteouts_of_a_layer_go_through_a_link_of_the_layer_below(tmp_path: Path) -> None:
    names = ("lib", "opt", "own", "linked")
    layout = MadeImage([
        tar_of(*(entry(f"usr/{name}/{file}", "1") for name in names for file in "xy"),
               *(link(name, f"/usr/{name}") for name in names), link("deep", "lib"),
               entry("usr/lib/sub/z", "1"), link("gone", "nowhere"), entry("far/x", "1"),
               entry("far/y", "1"), link("high/up", "../../../far"),
               link("round", "round"), entry("file", "1")),
        # neither `lib` nor `opt` has an entry of its own; the other two replace their links
        tar_of(entry("lib/.wh.x"), entry("lib/new", "2"), entry("deep/sub/.wh.z"),
               entry("opt/.wh..wh..opq"), entry("opt/new", "2"),
               folder("own"), entry("own/.wh..wh..opq"), entry("own/.wh.x"),
               link("linked", "file"), entry("linked/.wh.x"), entry("gone/.wh.x"),
               entry("high/up/.wh.x"), entry("high/up/new", "2"),
               entry("round/.wh.x"), entry("file/.wh.x")),
    ]).layout(tmp_path / "layout")
    root = Path(get(tmp_path, f"oci:{layout}").folder)
    assert tree(str(root / "usr")) == {
        "lib": "/", "lib/y": "1", "lib/new": "2", "lib/sub": "/", "opt": "/", "opt/new": "2",
        "own": "/", "own/x": "1", "own/y": "1", "linked": "/", "linked/x": "1", "linked/y": "1"}
    assert tree(str(root / "own")) == {} and not (root / "own").is_symlink()
    assert tree(str(root / "far")) == {"y": "1", "new": "2"}  # `..` of the root is the root
    assert os.readlink(root / "lib") == "/usr/lib" and (root / "file").read_text() == "1"


def test_files_of_a_layer_that_a_link_below_leads_to_no_folder_are_refused(tmp_path: Path
                                                                          ) -> None:
    for target, why in (("out", "a circle of links"), ("file", "leads through a file")):
        layout = MadeImage([tar_of(link("out", target), entry("file")), tar_of(entry("out/x"))]
                           ).layout(tmp_path / target.replace("/", "_"))
        with pytest.raises(ImageRefused, match=why):
            get(tmp_path, f"oci:{layout}")
    assert not (tmp_path / "x").exists()


def test_a_folder_without_an_entry_in_a_layer_keeps_the_mode_of_the_layer_below(
        tmp_path: Path) -> None:
    layout = MadeImage([
        tar_of(folder("tmp", mode=0o1777), folder("home/bob", mode=0o700),
               folder("var", mode=0o700), folder("run", mode=0o711), folder("gone", mode=0o700)),
        tar_of(entry("tmp/x"), entry("home/bob/x/y"), folder("var/tmp"), entry("run/a/b"),
               entry("gone/x"), entry(".wh.gone"), link("to_run", "run/a"), entry("to_run/c/d"),
               folder("to_run/c", mode=0o750)),
        tar_of(entry("var/x"), folder("var", mode=0o755), folder("run", mode=0o750)),
    ]).layout(tmp_path / "layout")
    found = get(tmp_path, f"oci:{layout}")
    modes = {name: stat.S_IMODE(os.stat(f"{found.folder}/{name}").st_mode) for name in (
        "tmp", "home/bob", "home/bob/x", "var", "run", "run/a", "run/a/c", "gone")}
    assert modes == {"tmp": 0o1777, "home/bob": 0o700, "home/bob/x": 0o755, "var": 0o755,
                     "run": 0o750, "run/a": 0o755, "run/a/c": 0o750, "gone": 0o755}


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "root/bin").mkdir(parents=True)
    assert get(tmp_path, str(tmp_path / "root")) == PulledImage(str(tmp_path / "root"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("what, why", [
    ("nothing", "No such file"), ("text", "not a valid tar"), ("pipe", "not a regular file"),
    ("tar", "neither of an OCI layout nor"), ("gzip", "compressed as a whole")])
def test_a_path_that_is_no_image_says_what_it_is(tmp_path: Path, what: str, why: str) -> None:
    path = tmp_path / what
    if what == "text":
        path.write_text("this is no image\n" * 100)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "tar":
        path.write_bytes(tar_of(entry("bin/sh", "x")))
    elif what == "gzip":
        import gzip

        path.write_bytes(gzip.compress(tar_of(entry("bin/sh", "x"))))
    with pytest.raises(ImageRefused, match=why):
        get(tmp_path, str(path))


def test_a_hard_link_keeps_the_file_that_its_layer_then_replaces(tmp_path: Path) -> None:
    image = MadeImage([
        tar_of(entry("old", "1"), entry("moved/x", "1"), entry("same", "1"), entry("was", "1")),
        tar_of(hard_link("kept", "old"), hard_link("again", "kept"), entry("old", "2"),
               hard_link("renamed", "moved/x"), entry(".wh.moved"),
               entry("was", "2"), hard_link("was", "same"),
               hard_link("replaced", "same"), entry("replaced", "2"))])
    found = get(tmp_path, str(image.layout(tmp_path / "layout")))
    assert tree(found.folder) == {"again": "1", "kept": "1", "old": "2", "renamed": "1",
                                  "replaced": "2", "same": "1", "was": "1"}
    root = Path(found.folder)
    assert (root / "again").samefile(root / "kept") and (root / "was").samefile(root / "same")
    assert sorted(os.listdir(root.parent)) == ["image.json", "used", root.name, "witness"]


def test_directories_have_the_times_of_their_entries(tmp_path: Path) -> None:
    image = MadeImage([
        tar_of(folder("a", mtime=1_000), entry("a/x"), folder("b", mtime=2_000), entry("b/gone"),
               folder("c", mtime=3_000), link("to_a", "a"), folder("d", mtime=4_000),
               entry("d", "a file now"), entry("late/y"), folder("late", mtime=5_000.5)),
        tar_of(entry("a/more"), folder("b", mtime=2_222), entry("b/.wh.gone"), link("c", "a"),
               folder("to_a/sub", mtime=6_000), entry("to_a/sub/z"), folder("gone", mtime=7_000)),
        tar_of(entry(".wh.gone"), hard_link("late/link", "a/x"))])
    root = Path(get(tmp_path, str(image.layout(tmp_path / "layout"))).folder)
    assert {path: (root / path).stat().st_mtime for path in ("a", "b", "a/sub", "late")} == {
        "a": 1_000, "b": 2_222, "a/sub": 6_000, "late": 5_000.5}
    assert (root / "d").read_text() == "a file now" and not (root / "gone").exists()


def test_the_platform_of_this_machine_is_taken(tmp_path: Path) -> None:
    mine, other = MadeImage([tar_of(entry("a"))]), MadeImage([tar_of(entry("b"))], offered=OTHER)
    layout = other.layout(mine.layout(tmp_path / "layout"))
    assert get(tmp_path, str(layout)).digest == mine.digest
    alone = other.layout(tmp_path / "alone")
    with pytest.raises(ImageRefused, match=f"it is for {OTHER}, and this node is {HERE}"):
        get(tmp_path, str(alone))


def test_several_images_need_a_name(tmp_path: Path) -> None:
    layout = MadeImage([tar_of(entry("a"))]).layout(tmp_path / "layout", "a")
    MadeImage([tar_of(entry("b"))]).layout(layout, "b")
    with pytest.raises(ImageRefused, match="has several images; name one of a, b as oci:"):
        get(tmp_path, str(layout))
    assert tree(get(tmp_path, f"oci:{layout}:b").folder) == {"b": ""}
    with pytest.raises(ImageRefused, match="no image 'c'; it has a, b"):
        get(tmp_path, f"oci:{layout}:c")


@pytest.mark.attack("network", "results")
def test_a_layer_that_is_not_what_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    image = MadeImage([tar_of(entry("a", "good"))])
    layout = image.layout(tmp_path / "layout")
    evil = MadeImage([tar_of(entry("a", "evil"))])
    (packed,) = [key for key in image.blobs if key != digest(image.config)]
    (other,) = [data for key, data in evil.blobs.items() if key != digest(evil.config)]
    (layout / "blobs" / packed.replace(":", "/")).write_bytes(other)
    with pytest.raises(ImageRefused, match=r"a layer has the digest sha256:.* the configuration"):
        get(tmp_path, str(layout))
    (layout / "blobs" / image.digest.replace(":", "/")).write_bytes(b"{}")
    with pytest.raises(ImageRefused, match="another digest"):
        get(tmp_path, str(layout))
    store = tmp_path / "store"
    assert not [*(store / "images").iterdir(), *(store / "layers").iterdir(),
                *(store / "drafts").iterdir()]


def _mutated(image: MadeImage, change: object) -> MadeImage:
    record = json.loads(image.manifest)
    change(record)  # type: ignore[operator]
    image.manifest = json.dumps(record).encode()
    return image


def nested(depth: int) -> bytes:
    return b'{"manifests":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("change, why", [
    (lambda r: r.pop("config"), "no field `config`"),
    (lambda r: r.update(layers="x"), "no list `layers`"),
    (lambda r: r.update(layers=r["layers"] * 600), "600 entries in `layers`; at most 512"),
    (lambda r: r["layers"][0].update(digest="md5:00"), "without a sha256 digest"),
    (lambda r: r["layers"][0].update(digest="sha256:../../etc/passwd"), "without a sha256 digest"),
    (lambda r: r["layers"][0].update(size=-1), "the size -1"),
    (lambda r: r["layers"][0].update(size=True), "the size True"),
    (lambda r: r["config"].update(size=1 << 30), "configuration has more than"),
    (lambda r: r.update(layers=[]), "names 1 layers and its manifest 0"),
    (lambda r: r.update(schemaVersion=1), "schema 1"),
    (lambda r: r.update(pad="x" * (5 << 20)), "more than 4194304 bytes"),
])
@pytest.mark.attack("repository", "broker")
def test_an_absurd_manifest_is_refused(tmp_path: Path, change: object, why: str) -> None:
    image = _mutated(MadeImage([tar_of(entry("a"))]), change)
    with pytest.raises(ImageRefused, match=why) as told:
        get(tmp_path, str(image.layout(tmp_path / "layout")))
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


@pytest.mark.parametrize("index", [b"", b"[]", b"{", nested(200_000), b'{"manifests": [1]}'])
def test_an_absurd_index_is_refused(tmp_path: Path, index: bytes) -> None:
    layout = MadeImage([tar_of(entry("a"))]).layout(tmp_path / "layout")
    (layout / "index.json").write_bytes(index)
    with pytest.raises(ImageRefused, match=r"^image: "):
        get(tmp_path, str(layout))


def test_a_chain_of_indexes_ends(tmp_path: Path) -> None:
    """An index cannot name itself, as it would have to hold its own digest; a chain can be long."""
    image = MadeImage([tar_of(entry("a"))])
    layout = image.layout(tmp_path / "layout")
    data = image.manifest
    for _ in range(6):
        data = json.dumps({"schemaVersion": 2, "manifests": [
            {"digest": digest(data), "size": len(data)}]}).encode()
        (layout / "blobs" / digest(data).replace(":", "/")).write_bytes(data)
    (layout / "index.json").write_bytes(data)
    with pytest.raises(ImageRefused, match="more than 3 indexes"):
        get(tmp_path, str(layout))


def test_an_image_that_fails_leaves_no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    below = tar_of(entry("a", "x" * 1000))
    kept = get(tmp_path, str(MadeImage([tar_of(entry("k"))]).docker_archive(tmp_path / "kept.tar")))
    refused = MadeImage([below, tar_of(entry("../b"))]).docker_archive(tmp_path / "refused.tar")
    with pytest.raises(ImageRefused):
        get(tmp_path, str(refused))
    store = NodeStore(tmp_path / "store")
    assert store.layer_sizes().keys() == set(kept.image.diff_ids)

    full = MadeImage([below, tar_of(entry("b", "full"))]).docker_archive(tmp_path / "full.tar")
    write = os.write
    with monkeypatch.context() as patch:
        def fails(fd: int, data: Any) -> int:
            if data == b"full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        patch.setattr(os, "write", fails)
        with pytest.raises(ImageUnavailable, match="No space left"):
            get(tmp_path, str(full))
    assert store.layer_sizes().keys() == set(kept.image.diff_ids)


def test_a_bound_on_what_an_image_unpacks_to(tmp_path: Path) -> None:
    image = MadeImage([tar_of(entry(f"f{n}", bytes(700_000))) for n in range(3)])
    layout = image.layout(tmp_path / "layout")
    with pytest.raises(ImageRefused, match="image_max_mib"):
        get(tmp_path, str(layout), max_mib=1)
    assert get(tmp_path, str(layout), max_mib=3).digest == image.digest


@pytest.mark.attack("repository", "files")
def test_an_archive_whose_names_lead_out_gives_no_other_file(tmp_path: Path) -> None:
    path, secret = tmp_path / "a.tar", tmp_path / "secret"
    secret.write_text("secret")
    path.write_bytes(tar_of(
        link("config.json", str(secret)), entry("manifest.json", json.dumps(
            [{"Config": "config.json", "Layers": ["../secret", str(secret)]}]))))
    with pytest.raises(ImageRefused, match=r"has no file 'config.json'"):
        get(tmp_path, str(path))


# ---- .sif ----


@needs_squashfs
def test_a_sif_file_is_unpacked_like_any_image(tmp_path: Path) -> None:
    source = squashfs_of([folder("bin"), entry("bin/tool", "x", mode=0o4755), link("l", "bin"),
                          entry("closed", "x", mode=0), folder("shut", mode=0o111)], tmp_path)
    path = tmp_path / "image.sif"
    path.write_bytes(sif_of(source))
    found = get(tmp_path, str(path))
    assert found.digest == digest(path.read_bytes())
    assert sorted(tree_names(found.folder)) == ["bin", "bin/tool", "closed", "l", "shut"]
    for each in Path(found.folder).rglob("*"):
        about = each.lstat()
        assert (about.st_uid, about.st_gid) == (os.geteuid(), os.getegid())
        assert not about.st_mode & 0o6000 or stat.S_ISDIR(about.st_mode)
    assert get(tmp_path, str(path)).folder == found.folder
    path.write_bytes(sif_of(source) + b"changed")
    assert get(tmp_path, str(path)).digest != found.digest


@needs_squashfs
def test_a_sif_file_says_env_and_workdir_of_the_image_it_was_built_from(tmp_path: Path) -> None:
    source, path = squashfs_of([entry("a", "x")], tmp_path), tmp_path / "image.sif"
    path.write_bytes(sif_of(source, config=json.dumps({
        "Env": ["PATH=/opt/bin", "A=b c", "odd"], "WorkingDir": "/testbed", "User": "bob",
        "Cmd": ["x"]}).encode()))
    image = get(tmp_path, str(path)).image
    assert image is not None
    # the files have lost their owners, so bob could not write his own
    assert (image.env, image.working_dir, image.user) == (("PATH=/opt/bin", "A=b c"), "/testbed",
                                                          "")
    for config in (b"[]", b"{" * 5000, b'{"Env": 1' + b" " * (4 << 20)):
        path.write_bytes(sif_of(source, config=config))
        with pytest.raises(ImageRefused, match="its configuration"):
            get(tmp_path, str(path))


@needs_squashfs
def test_a_bare_squashfs_is_unpacked_like_a_sif_file(tmp_path: Path) -> None:
    path = tmp_path / "image.sqsh"
    path.write_bytes(squashfs_of([folder("bin"), entry("bin/tool", "x", mode=0o4755)], tmp_path))
    found = get(tmp_path, str(path))
    assert tree_names(found.folder) == ["bin", "bin/tool"]
    assert (Path(found.folder) / "bin/tool").stat().st_mode & 0o7777 == 0o755
    assert get(tmp_path, str(path)).folder == found.folder
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ImageRefused, match="unsquashfs cannot"):
        get(tmp_path, str(path))


@pytest.mark.parametrize("begin, why", [
    (b"\x28\xb5\x2f\xfd", "unpack it with unzstd first"), (b"\xfd7zXZ\0", "with unxz first"),
    (b"BZh9", "with bunzip2 first"), (bytes(1024), "is not a valid tar")])
def test_a_file_that_is_no_tar_is_not_called_one(tmp_path: Path, begin: bytes, why: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(begin + bytes(4096))
    with pytest.raises(ImageRefused, match=why):
        get(tmp_path, str(path))


def tree_names(root: str) -> list[str]:
    return [str(path.relative_to(root)) for path in Path(root).rglob("*")]


@needs_squashfs
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put a device node into a squashfs")
@pytest.mark.attack("repository", "files")
def test_a_sif_files_devices_and_pipes_are_left_out(tmp_path: Path) -> None:
    made = squashfs_of([entry("ok", "x")], tmp_path, "-p", "null c 666 0 0 1 3", "-p",
                       "fifo i 666 0 0 f")
    path = tmp_path / "image.sif"
    path.write_bytes(sif_of(made))
    assert tree_names(get(tmp_path, str(path)).folder) == ["ok"]


@needs_squashfs
@pytest.mark.attack("repository", "disk")
def test_a_sif_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "image.sif"
    path.write_bytes(sif_of(squashfs_of([entry("zeros", bytes(8 << 20))], tmp_path)))
    with pytest.raises(ImageRefused, match="image_max_mib"):
        get(tmp_path, str(path), max_mib=4)
    assert list((tmp_path / "store/drafts").iterdir()) == []


def _sif(tmp_path: Path, **about: object) -> str:
    path = tmp_path / "image.sif"
    path.write_bytes(sif_of(b"hsqs" + bytes(500), **about))  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize("about, why", [
    ({"system": 5}, "encrypted or no squashfs"), ({"system": 2}, "encrypted or no squashfs"),
    ({"kind": 0x4007}, "no root file system"), ({"size": 1 << 40}, "cut off or damaged"),
    ({"size": -5}, "cut off or damaged"), ({"architecture": b"11"}, "it is for|is for linux/s390x"),
    ({}, "unsquashfs cannot read|not installed")])
def test_a_damaged_sif_file_is_refused(tmp_path: Path, about: dict[str, object], why: str) -> None:
    with pytest.raises(ImageRefused, match=why):
        get(tmp_path, _sif(tmp_path, **about))


def test_a_sif_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = sif_of(b"hsqs" + bytes(100))
    for size in (42, 60, 127, 128, 4096, 4200, 5000, 32768):
        with pytest.raises(ImageRefused):
            sif.sif_partition(_file(tmp_path, whole[:size]), "x")


def _file(tmp_path: Path, data: bytes) -> io.BufferedReader:
    path = tmp_path / "cut"
    path.write_bytes(data)
    return path.open("rb")


def test_without_unsquashfs_one_is_told_what_to_do(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sif.shutil, "which", lambda name: None)
    with pytest.raises(ImageRefused, match="install squashfs-tools, or convert"):
        get(tmp_path, _sif(tmp_path))


# ---- import ----


def test_an_imported_image_has_a_name_and_needs_no_registry(tmp_path: Path) -> None:
    image = MadeImage([tar_of(entry("a"))])
    archive = image.docker_archive(tmp_path / "a.tar")
    settings = PullSettings(str(tmp_path / "store"), registries=False)
    found = import_image(str(archive), "nowhere.example/app:1", settings, {})
    archive.unlink()
    assert pull("docker://nowhere.example/app:1", settings, {}).digest == found
    with pytest.raises(ImageRefused, match="`image_registries` forbids"):
        pull("nowhere.example/app:2", settings, {})
    with pytest.raises(ImageRefused, match="--name"):
        import_image(str(archive), "/a/path", settings, {})


def test_a_tool_of_the_field_agrees_on_the_result(tmp_path: Path, image: MadeImage) -> None:
    """umoci unpacks the same image to the same files."""
    import shutil

    if not shutil.which("umoci"):
        pytest.skip("umoci is not installed")
    layout = MadeImage(image.layers).layout(tmp_path / "layout", "v1")
    bundle = tmp_path / "bundle"
    subprocess.run(["umoci", "unpack", "--rootless", "--image", f"{layout}:v1", bundle], check=True,
                   capture_output=True)
    assert tree(str(bundle / "rootfs")) == tree(get(tmp_path, str(layout)).folder)


def test_tar_of_is_what_tar_reads(tmp_path: Path) -> None:
    """The rig's archives are real ones: the system's tar lists the same names."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(folder("a"), entry("a/b", "x"), link("c", "a")))
    listed = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["a/", "a/b", "c"]
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["a", "a/b", "c"]
