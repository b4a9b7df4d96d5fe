"""Hostile images in each format that a session takes, beside an honest session that goes on.

A hostile image is refused in one line, or its session opens and what it holds has no effect. In
both cases no file outside changes, and the honest session keeps its files and its processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.image_rig import (
    Entry,
    MadeImage,
    RunningRegistry,
    entry,
    hard_link,
    libraries,
    link,
    programs,
    registry,
    sif_of,
    squashfs_of,
    tar_of,
)

import tangram_hpc
from tangram_hpc import LocalCluster

pytestmark = [pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed")
              for name in ("bwrap", "docker-registry", "mksquashfs", "unsquashfs")]
LIMIT_MIB = 64  # that an image may unpack to
FORMATS = ("folder", "oci", "oci-archive", "docker-archive", "sif", "registry")
OF_LAYERS = ("oci", "oci-archive", "docker-archive", "registry")
OF_MANIFESTS = ("oci", "oci-archive", "registry")


@dataclass
class Place:
    """A cluster with an honest session, a registry, and a folder that no session may change."""

    cluster: LocalCluster
    honest: tangram_hpc.Session
    registry: RunningRegistry
    outside: Path

    def harmless(self) -> None:
        """Asserts that neither the folder nor the honest session has changed."""
        assert [path.name for path in self.outside.iterdir()] == ["file"]
        assert (self.outside / "file").read_text() == "outside\n"
        told = self.honest.exec("cat /testbed/mine; kill -0 $(cat /testbed/pid) && echo alive")
        assert told.result(60).text == "mine\nalive\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    top = tmp_path_factory.mktemp("hostile")
    outside, kept = top / "outside", top / "registry"
    for folder in (outside, kept):
        folder.mkdir()
    (outside / "file").write_text("outside\n")
    layout = MadeImage([tar_of(*programs())]).layout(top / "honest")
    settings = {"scratch": str(top), "warm": 0, "image_max_mib": LIMIT_MIB}
    with registry(kept) as running, LocalCluster(2, home=top / "home", **settings) as cluster:
        with cluster.session(image=f"oci:{layout}", background="run") as honest:
            honest.write("/testbed/mine", "mine\n").result(60)
            honest.exec("sleep 1000 & echo $! >/testbed/pid").result(60).check()
            yield Place(cluster, honest, running, outside)


def named(image: MadeImage, entries: list[Entry], form: str, where: Path, place: Place) -> str:
    """Makes an image of one layer, or of the layers that it has, in a format; returns its name."""
    if form == "sif":
        path = where / "image.sif"
        path.write_bytes(sif_of(squashfs_of(entries, where)))
        return str(path)
    if form == "folder":
        (where / "root").mkdir()
        subprocess.run(["tar", "-xf", "-", "-C", str(where / "root"), "--no-same-owner", "-p"],
                       input=tar_of(*entries), check=True)
        return str(where / "root")
    if form == "registry":
        name = f"evil/{where.name.lower().replace('[', '-').rstrip(']')}"
        place.registry.push(name, image, "v1")
        return f"{place.registry.host}/{name}:v1"
    made: Callable[[Path], Path] = {"oci": image.layout, "oci-archive": image.oci_archive,
                                    "docker-archive": image.docker_archive}[form]
    return f"{form}:{made(where / 'image.tar')}"


def refused(place: Place, name: str) -> str:
    """Returns the one line with which a session of this image is refused."""
    with pytest.raises(tangram_hpc.InfeasibleRequest) as told:
        place.cluster.session(image=name).opened.result(120)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.attack("repository", "files")
def test_set_uid_files_give_no_rights(place: Place, tmp_path: Path, form: str) -> None:
    data = Path(shutil.which("id") or "").read_bytes()
    entries = [*programs(), *libraries(shutil.which("id") or ""),
               entry("opt/id", data, mode=0o6755),  # by this name, as uutils' goes by its own
               entry("etc/passwd", "root:x:0:0::/:/bin/sh\nbob:x:4000:4000::/:/bin/sh\n")]
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    with place.cluster.session(image=name) as session:
        told = session.exec("/opt/id -u; /opt/id -g", user="bob").result(60).check()
        several = "+users" in told.isolation
        assert told.text.split() == (["4000", "4000"] if several else ["0", "0"])
    place.harmless()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.attack("repository", "files")
def test_devices_cannot_be_opened(place: Place, tmp_path: Path, form: str) -> None:
    import tarfile

    entries = [*programs(), *(entry(f"bin/{name}", kind=kind, devmajor=major, devminor=minor,
                                    mode=0o666)
                              for name, kind, major, minor in (
                                  ("mem", tarfile.CHRTYPE, 1, 1), ("full", tarfile.CHRTYPE, 1, 7),
                                  ("disk", tarfile.BLKTYPE, 8, 0)))]
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    with place.cluster.session(image=name) as session:
        for device in ("mem", "full", "disk"):
            told = session.exec(f"exec 3<>/bin/{device} && test ! -f /bin/{device}").result(60)
            assert told.exit_code, device
    place.harmless()


def _links(outside: Path) -> list[Entry]:
    """Links that lead out, in the places where files are written and things are mounted."""
    return [entry for entry in programs() if entry[0].name not in ("tmp", "session", "proc")] + [
        link("tmp", str(outside)), link("session", str(outside)), link("proc", str(outside)),
        link("out", str(outside)), link("up", "../../../../../../../../.." + str(outside))]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.attack("repository", "files")
def test_links_lead_to_no_file_of_the_node(place: Place, tmp_path: Path, form: str) -> None:
    entries = _links(place.outside)
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    with place.cluster.session(image=name) as session:
        session.exec("echo x >/tmp/new; echo x >/session/new; ls /proc >/dev/null").result(60)
        for path in ("/out/file", "/up/file"):
            with pytest.raises(tangram_hpc.FileFailed):
                session.read(path).result(60)
            assert session.exec(f"cat {path}").result(60).exit_code
        for path in ("/out/file", "/up/file"):  # both lead to a place of the session's own root
            session.write(path, f"by {path}").result(60)
            assert session.exec(f"cat {path}").result(60).text == f"by {path}"
        with session.fork() as copy:
            copy.exec("echo x >/tmp/again; echo x >/out/again").result(60)
    place.harmless()


@pytest.mark.parametrize("form", OF_LAYERS)
@pytest.mark.parametrize("trick", ["absolute", "through a link"])
@pytest.mark.attack("repository", "files")
def test_absolute_names_and_high_links_lead_to_files_of_the_image(
        place: Place, tmp_path: Path, form: str, trick: str) -> None:
    evil = {"absolute": [entry(f"{place.outside}/file", "x"), entry(f"{place.outside}/new", "x"),
                         hard_link("mine", f"{place.outside}/file")],
            "through a link": [link("way", "../" * 12 + str(place.outside).lstrip("/")),
                               entry("way/file", "x"), entry("way/new", "x"),
                               hard_link("mine", "way/file")]}
    entries = [*programs(), *evil[trick]]
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    with place.cluster.session(image=name) as session:
        assert session.exec("cat /mine").result(60).text == "x"
    place.harmless()


@pytest.mark.parametrize("form", OF_LAYERS)
@pytest.mark.parametrize("trick", ["parent", "hard link"])
@pytest.mark.attack("repository", "files")
def test_path_tricks_are_refused(place: Place, tmp_path: Path, form: str, trick: str) -> None:
    evil = {"parent": [entry("../" * 12 + f"{place.outside}/new".lstrip("/"), "x")],
            "hard link": [hard_link("mine", "../" * 12 + f"{place.outside}/file".lstrip("/"))]}
    entries = [*programs(), *evil[trick]]
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    assert refused(place, name).startswith("image: ")
    place.harmless()


@pytest.mark.parametrize("form", [*OF_LAYERS, "sif"])
@pytest.mark.attack("repository", "disk")
def test_bombs_are_refused(place: Place, tmp_path: Path, form: str) -> None:
    entries = [*programs(), entry("zeros", bytes(2 * LIMIT_MIB << 20))]
    name = named(MadeImage([tar_of(*entries)]), entries, form, tmp_path, place)
    assert "image_max_mib" in refused(place, name)
    place.harmless()


@pytest.mark.parametrize("form", OF_LAYERS)
@pytest.mark.parametrize("kind", ["600 layers", "a deep folder", "a long name"])
@pytest.mark.attack("repository", "broker")
def test_absurd_layers_are_refused(place: Place, tmp_path: Path, form: str, kind: str) -> None:
    absurd = {"600 layers": [], "a deep folder": [entry("d/" * 300 + "f", "x")],
              "a long name": [entry("n" * 5000, "x")]}[kind]
    layers = [tar_of(*programs(), *absurd)] + [tar_of(entry(f"f{n}")) for n in range(
        600 if kind == "600 layers" else 0)]
    name = named(MadeImage(layers), [], form, tmp_path, place)
    assert refused(place, name).startswith("image: ")
    place.harmless()


@pytest.mark.parametrize("form", OF_MANIFESTS)
@pytest.mark.attack("repository", "memory")
def test_huge_manifests_are_refused(place: Place, tmp_path: Path, form: str) -> None:
    image = MadeImage([tar_of(*programs())])
    image.manifest = json.dumps({**json.loads(image.manifest), "pad": "x" * (5 << 20)}).encode()
    try:
        name = named(image, [], form, tmp_path, place)
    except OSError:
        assert form == "registry"
        pytest.skip("this registry takes no such manifest; tests/images/test_registry.py has one")
    assert "4194304 bytes" in refused(place, name)
    place.harmless()
