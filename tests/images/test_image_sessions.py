"""Sessions by the name of their image: they open in it, say which one it was, or say why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest
from helpers.adapter_behaviours import eventually
from helpers.executor_rig import alive
from helpers.image_rig import needs_registry, registry, small

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.accounting.fields import as_json
from tangram_hpc.accounting.record import fold
from tangram_hpc.cli import main
from tangram_hpc.images import image_builder
from tangram_hpc.images.pull import PullSettings, pull
from tangram_hpc.storage.access import Access, mark_ended, write_access
from tangram_hpc.storage.journal_segments import read_journals

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2) as running:
        yield running


def test_a_session_opens_in_its_image_and_tells_which_it_was(
        cluster: LocalCluster, tmp_path: Path) -> None:
    image = small(env=["PATH=/bin:/opt/tools", "FOUND=yes", "HOME=/nowhere"])
    layout = image.layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        assert session.image_digest == image.digest
        done = session.exec('cat /etc/hello; echo "$PATH $FOUND $HOME"').result(60).check()
        assert done.stdout == b"hi\n/bin:/opt/tools yes /session\n"
        told = session.exec(["env"], env={"FOUND": "by me"}).result(60).check().stdout
        assert b"FOUND=by me\n" in told
        with session.fork() as copy:
            assert copy.exec("cat /etc/hello").result(60).check().stdout == b"hi\n"
            assert copy.image_digest == image.digest
        session.exec("echo x > /etc/hello").result(60).check()  # that is this session's own copy
    with cluster.session(image=f"oci:{layout}", writable=False) as session:
        assert session.exec("cat /etc/hello").result(60).check().stdout == b"hi\n"
        assert session.exec("echo x > /etc/hello").result(60).exit_code


def test_a_fork_has_the_image_of_its_origin_when_the_name_leads_to_another_one(
        cluster: LocalCluster, tmp_path: Path) -> None:
    first, second = small(), small(env=["PATH=/bin", "SECOND=yes"])
    layout = first.layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        session.exec("echo kept > /etc/mine").result(60).check()
        shutil.rmtree(layout)
        second.layout(layout)
        with session.fork() as copy, copy.fork() as again:
            for one in (copy, again):
                assert one.exec("cat /etc/mine").result(60).check().stdout == b"kept\n"
                assert one.image_digest == first.digest
        with cluster.session(image=f"oci:{layout}") as other:
            assert other.image_digest == second.digest
        shutil.rmtree(layout)
        with session.fork() as copy:
            assert copy.exec("cat /etc/mine").result(60).check().stdout == b"kept\n"


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.attack("repository", "files")
def test_a_folder_that_holds_the_sandboxes_is_no_image(
        cluster: LocalCluster, tmp_path: Path, writable: bool) -> None:
    (tmp_path / "link").symlink_to("/")
    for image in ("/", str(tmp_path / "link")):
        with pytest.raises(tangram_hpc.InfeasibleRequest, match="holds the worker's scratch"):
            cluster.session(image=image, writable=writable).opened.result(60)


def test_the_records_say_which_image_it_was(cluster: LocalCluster, tmp_path: Path) -> None:
    image = small()
    layout = image.layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        session.exec("cat /etc/hello", name="within").result(60).check()
    with cluster.session() as session:
        session.exec("true", name="without").result(60).check()
    records = {record.action.name: record
               for record in fold(read_journals(cluster.folder)).records.values()}
    assert (records["within"].image, records["without"].image) == (image.digest, "")
    assert as_json(records["within"])["image"] == image.digest


@needs_registry
def test_an_image_of_a_registry(cluster: LocalCluster, tmp_path: Path) -> None:
    image = small()
    with registry(tmp_path) as running:
        running.push("some/app", image, "v1")
        names = [f"{running.host}/some/app:v1", f"docker://{running.host}/some/app@{image.digest}"]
        for name in names:
            with cluster.session(image=name) as session:
                assert session.image_digest == image.digest
                assert session.exec("cat /etc/hello").result(60).check().stdout == b"hi\n"
        with pytest.raises(tangram_hpc.InfeasibleRequest, match="does not exist in the registry"):
            cluster.session(image=f"{running.host}/some/app:nope").opened.result(60)


def test_an_image_that_can_never_be_used_says_so(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no image")
    with pytest.raises(tangram_hpc.InfeasibleRequest, match=r"image: .*text is not a valid tar"):
        cluster.session(image=str(tmp_path / "text")).opened.result(60)
    for wrong in ("Not A Name", "./relative", "library://x"):
        with pytest.raises(tangram_hpc.InvalidInput, match=r"^image: "):
            cluster.session(image=wrong)


def test_a_folder_in_the_place_of_another_is_the_image_of_later_sessions(
        cluster: LocalCluster, tmp_path: Path) -> None:
    """Sandboxes of the earlier folder wait ready-made, and are of no use for the new one."""
    layout, image = small().layout(tmp_path / "layout"), tmp_path / "image"
    made = pull(f"oci:{layout}", PullSettings(str(tmp_path / "store")), {}).folder
    for text in ("first", "second", "third"):
        shutil.copytree(made, image, symlinks=True)
        (image / "etc/hello").write_text(text)
        for writable in (True, False, True, False):
            with cluster.session(image=str(image), writable=writable) as session:
                assert session.exec("cat /etc/hello").result(60).check().text == text
        shutil.rmtree(image)  # the next folder may get the same inode


def test_a_session_that_is_closed_while_its_image_comes_is_gone_at_once(
        cluster: LocalCluster, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts and says nothing
        session = cluster.session(image=f"127.0.0.1:{silent.getsockname()[1]}/app")
        silent.settimeout(30)
        taken, _ = silent.accept()  # so the pull is under way
        session.close()
        assert session.closed.result(20) == ""
        taken.settimeout(20)
        while taken.recv(4096):  # until the helper is dead
            pass
        taken.close()


# ---- the command line ----


def tangram(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["image", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_IMAGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "store"


def test_a_look_at_a_missing_store_does_not_make_it(
        store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An administrator who looks would own the folder, and its user could not pull into it."""
    assert json.loads(tangram(capsys, "list", "--json")[1]) == {"images": [], "bytes": 0}
    assert tangram(capsys, "prune")[:2] == (0, "removed 0, freed 0.0 MiB\n")
    status, _, err = tangram(capsys, "remove", "localhost/app:1")
    assert (status, err.count("\n")) == (2, 1) and f"{store}, which does not exist" in err
    assert not store.exists()


def test_the_verbs_of_the_store(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                ) -> None:
    image = small()
    layout = image.layout(tmp_path / "layout")
    archive = image.docker_archive(tmp_path / "saved.tar")
    assert tangram(capsys, "pull", f"oci:{layout}")[:2] == (0, f"{image.digest} oci:{layout}\n")
    status, out, _ = tangram(capsys, "import", str(archive), "--name", "localhost/app:1", "--json")
    imported = json.loads(out)
    assert status == 0 and imported["name"] == "localhost/app:1"
    listed = json.loads(tangram(capsys, "list", "--json")[1])
    assert [(one["digest"], one["names"], one["layers"], one["in_use"])
            for one in listed["images"]] == [
        (image.digest, [f"oci:{layout}"], 2, False),
        (imported["digest"], ["localhost/app:1"], 2, False)]
    assert "localhost/app:1" in tangram(capsys, "list")[1]
    assert tangram(capsys, "pull", "localhost/app:1")[0] == 0  # no registry is asked
    assert tangram(capsys, "remove", image.digest[7:19])[0] == 0
    status, _, err = tangram(capsys, "remove", "localhost/app:2")
    assert status == 2 and "is not in the store" in err and err.count("\n") == 1
    status, out, _ = tangram(capsys, "prune", "--json")
    assert status == 0 and json.loads(out)["removed"] == [imported["digest"]]
    assert json.loads(tangram(capsys, "list", "--json")[1]) == {"images": [], "bytes": 0}


def test_a_used_image_is_not_removed(store: Path, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    from tangram_hpc.images.node_store import NodeStore

    layout = small().layout(tmp_path / "layout")
    tangram(capsys, "pull", f"oci:{layout}")
    held = NodeStore(store).hold(NodeStore(store).images()[0].digest)
    status, _, err = tangram(capsys, "remove", f"oci:{layout}")
    assert status == 1 and "is used by a session" in err
    assert tangram(capsys, "prune")[:2] == (0, "removed 0, freed 0.0 MiB\n")
    os.close(held)
    assert tangram(capsys, "remove", f"oci:{layout}")[0] == 0


def test_wrong_input_is_status_2_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TANGRAM_IMAGE_STORE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    status, _, err = tangram(capsys, "list")
    assert status == 2 and "`image_store` is empty" in err
    status, _, err = tangram(capsys, "pull", "Not A Name", "--store", str(tmp_path / "store"))
    assert status == 2 and "is no name of an image" in err and err.count("\n") == 1


def test_build_without_a_builder_says_so_in_one_line(
        store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = tangram(capsys, "build", str(tmp_path), "--name", "localhost/app")
    assert status == 1 and "neither buildah nor podman is installed" in err
    assert err.count("\n") == 1


@needs_registry
def test_publish_fills_a_folder_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    image = small()
    with registry(tmp_path) as running:
        running.push("app", image, "v1")
        name = f"{running.host}/app:v1"
        status, out, _ = tangram(capsys, "publish", name, "--into", str(tmp_path / "share"))
    assert (status, out) == (0, f"{image.digest} {name}\n")
    monkeypatch.setenv("TANGRAM_IMAGE_SHARES", str(tmp_path / "share"))
    monkeypatch.setenv("TANGRAM_IMAGE_REGISTRIES", "false")
    status, out, _ = tangram(capsys, "pull", name, "--store", str(tmp_path / "store"))
    assert (status, out) == (0, f"{image.digest} {name}\n")


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("buildah") or shutil.which("podman")),
                    reason="neither buildah nor podman is installed")
def test_build_makes_an_image_of_a_dockerfile(store: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "file").write_text("x")
    (context / "Dockerfile").write_text("FROM scratch\nCOPY file /file\nENV A=1\n")
    assert tangram(capsys, "build", str(context), "--name", "localhost/built:1")[0] == 0
    (one,) = json.loads(tangram(capsys, "list", "--json")[1])["images"]
    assert one["names"] == ["localhost/built:1"]
    (context / "Dockerfile").write_text("FROM scratch\nCOPY nothing /file\n")
    status, _, err = tangram(capsys, "build", str(context), "--name", "localhost/built:2")
    assert status == 2 and "cannot build" in err


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("buildah"), reason="buildah is not installed")
def test_build_runs_the_steps_of_a_dockerfile(store: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no container runtime is installed, as Debian installs none with buildah."""
    archive = small().docker_archive(tmp_path / "base.tar")
    (tmp_path / "Dockerfile").write_text(
        f"FROM docker-archive:{archive}\nRUN echo made >/etc/made\n")
    assert tangram(capsys, "build", str(tmp_path), "--name", "localhost/built:1")[0] == 0
    assert {path.read_text() for path in store.rglob("etc/made")} == {"made\n"}


def test_a_build_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    (programs := tmp_path / "bin").mkdir()
    (programs / "buildah").write_text(f"""#!/bin/sh
        case $1 in
            build) trap 'touch {tmp_path}/in-order; exit 1' TERM
                sleep 60 & echo $! >{tmp_path}/step; touch {tmp_path}/builds; wait;;
            rmi) touch {tmp_path}/removed;;
        esac""")
    (programs / "buildah").chmod(0o755)
    (temporary := tmp_path / "tmp").mkdir()
    verb = subprocess.Popen(
        [sys.executable, "-m", "tangram_hpc", "image", "build", str(tmp_path), "--name",
         "localhost/built:1", "--store", str(tmp_path / "store")],
        env={**os.environ, "TMPDIR": str(temporary),
             "PATH": f"{programs}:{os.environ['PATH']}"})
    assert eventually((tmp_path / "builds").exists)
    assert [path.name[:14] for path in temporary.iterdir()] == ["tangram-build-"]
    verb.terminate()
    assert verb.wait(20) == 128 + signal.SIGTERM
    assert not [*temporary.iterdir()] and (tmp_path / "removed").exists()
    assert (tmp_path / "in-order").exists()
    assert eventually(lambda: not alive(int((tmp_path / "step").read_text())))


CHROOT = ["--isolation", "chroot"]


@pytest.mark.parametrize(("present", "hybrid", "words"), [
    ((), None, CHROOT), (("crun",), None, []), (("runc",), None, []), (("crun",), "", []),
    (("crun", "runc"), "hugetlb", CHROOT), (("runc",), "hugetlb", [])])
def test_buildah_needs_no_container_runtime(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...],
        hybrid: str | None, words: list[str]) -> None:
    """`hybrid` are the controllers of cgroup v2 in use beside those of v1; None: one version."""
    monkeypatch.setattr(image_builder, "_HYBRID", tmp_path / "controllers")
    if hybrid is not None:
        (tmp_path / "controllers").write_text(f"{hybrid}\n")
    said = tmp_path / "said"
    for name in ("buildah", *present):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho \"$@\" >>{said}\n")
        program.chmod(0o755)
    monkeypatch.delenv("BUILDAH_ISOLATION", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    image_builder.build_image(".", "", str(tmp_path / "archive"))
    assert said.read_text().split("\n")[0].split()[1:3] == (words or ["--tag", ANY])
    monkeypatch.setenv("BUILDAH_ISOLATION", "rootless")
    image_builder.build_image(".", "", str(tmp_path / "archive"))
    assert "--isolation" not in said.read_text().split("\n")[3]


def test_texts_of_an_image_that_are_no_unicode_do_not_end_the_worker(
        cluster: LocalCluster, tmp_path: Path) -> None:
    """JSON can name half of a surrogate pair, which no message can carry."""
    image = small(env=["ODD=\ud800", "FOUND=yes"])
    with cluster.session(image=f"oci:{image.layout(tmp_path / 'layout')}") as session:
        done = session.exec('echo "$FOUND ${ODD-unset}"').result(60).check()
        assert done.stdout == b"yes unset\n"
        archive = image.docker_archive(tmp_path / "saved.tar", "app:\ud800", "app:1", "app:2")
        with pytest.raises(tangram_hpc.InfeasibleRequest, match=r"app:1.*app:2") as error:
            cluster.session(image=f"docker-archive:{archive}:gone").opened.result(60)
        assert "\ud800" not in str(error.value)
        assert session.exec("echo on").result(60).check().stdout == b"on\n"


@needs_registry
def test_nodes_of_a_job_that_pull_by_the_verb_fetch_once(
        store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    image = small()
    layer, *_ = json.loads(image.manifest)["layers"]
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TANGRAM_ACCESS", raising=False)
    monkeypatch.setenv("TANGRAM_JOB", "7")
    job = tmp_path / "home/jobs/7"
    with registry(tmp_path) as running:
        running.push("some/app", image, "v1")
        pull = ("pull", f"{running.host}/some/app:v1", "--store")
        assert tangram(capsys, *pull, str(store / "before"))[0] == 0  # its broker has not started
        assert running.fetched(layer["digest"]) == 1 and not job.exists()
        job.mkdir(parents=True)
        access = Access("7", ("127.0.0.1:1",), b"k" * 32, str(job / "store"), "h", 1)
        write_access(job / "access.json", access)
        for node in ("one", "two"):
            assert tangram(capsys, *pull, str(store / node))[0] == 0
        assert running.fetched(layer["digest"]) == 2
        assert (job / "store").stat().st_mode & 0o777 == 0o700
        mark_ended(job / "access.json", "7", "now")
        shutil.rmtree(job / "store")
        assert tangram(capsys, *pull, str(store / "after"))[0] == 0
        assert running.fetched(layer["digest"]) == 3 and not (job / "store").exists()
