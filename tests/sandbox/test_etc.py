"""What a sandbox has of /etc: a copy of the listed files; directories of many links are mounted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.executor_rig import Rig, as_an_ordinary_user
from helpers.small_folder import in_a_small_folder

from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.sandbox.isolation import etc, visible_paths

LINKS = [path for path in ("/etc/alternatives", "/etc/ssl/certs", "/etc/pki/ca-trust")
         if os.path.isdir(path)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if "bwrap" not in as_an_ordinary_user(SandboxSettings()).untrusted:
        pytest.skip("bwrap does not work here")
    one = Rig(tmp_path_factory.mktemp("etc"), trusted=False)
    one.open(1, backend="bwrap")
    yield one
    one.close()


def test_the_copy_has_an_empty_directory_where_one_is_mounted(tmp_path: Path) -> None:
    read = visible_paths.readable()
    assert etc.mounted(read) == LINKS
    copy = Path(etc.copy_etc(read, str(tmp_path / "etc")))
    for path in LINKS:
        assert list((copy / Path(path).relative_to("/etc")).iterdir()) == []
    assert (copy / "passwd").read_bytes() == Path("/etc/passwd").read_bytes()
    assert not (copy / "shadow").exists()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_disk_that_is_full_for_a_moment_cuts_no_file_off(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    origin = tmp_path / "origin"
    (origin / "folder").mkdir(parents=True)
    for name in ("file", "folder/file"):
        (origin / name).write_text("all of it")

    def copying(source: str, target: str, **_: object) -> None:
        Path(target).write_text("all")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(etc, "_ETC", f"{origin}/")
    monkeypatch.setattr(shutil, "copyfile", copying)
    with pytest.raises(OSError, match="No space left on device"):
        etc.copy_etc([str(origin / what)], str(tmp_path / "etc"))


def test_a_start_that_fails_for_a_full_disk_leaves_nothing_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(read: object, folder: str) -> None:
        os.mkdir(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(etc, "copy_etc", copying)
    with pytest.raises(InvalidInput, match=r"scratch: cannot use .* \(No space left on device\)"):
        Rig(tmp_path)
    assert not [*(tmp_path / "scratch").iterdir()]


def test_a_full_scratch_folder_is_not_taken_for_missing_isolation(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from tangram_hpc.errors import InvalidInput
        from tangram_hpc.sandbox.manager.backends import Backends
        try:
            print(Backends.probed(scratch=sys.argv[1]).untrusted)
        except InvalidInput as error:
            print(error)
        """
    assert in_a_small_folder(tmp_path, "4k", code) == (
        f"scratch: no sandbox can be tried in {tmp_path} (No space left on device); make room "
        "there, or set `scratch` to another node-local folder\n")


def test_the_copy_has_directories_and_what_links_to_them_with_any_cp(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the one of uutils, which Ubuntu 25.10 has, ends so for directories with `-a -H`
    cp = tmp_path / "bin" / "cp"
    cp.parent.mkdir()
    cp.write_text("#!/bin/sh\necho \"cp: -r not specified; omitting directory\" >&2\nexit 1\n")
    cp.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cp.parent}:{os.environ['PATH']}")
    origin, copy = tmp_path / "origin", tmp_path / "etc"
    (origin / "java-21" / "security").mkdir(parents=True)
    (origin / "java-21" / "security" / "policy").write_text("grant")
    (origin / "java-21" / "old").symlink_to("security/policy")
    (origin / "java-21" / "gone").symlink_to("nowhere")
    os.mkfifo(origin / "java-21" / "pipe")
    (origin / "java").symlink_to("java-21")
    (origin / "pki" / "tls").mkdir(parents=True)
    (origin / "pki" / "tls" / "cert.pem").symlink_to("../../java-21/security/policy")
    monkeypatch.setattr(etc, "_ETC", f"{origin}/")
    etc.copy_etc([str(origin / name) for name in ("java-21", "java", "pki/tls/cert.pem")],
                 str(copy))
    for name in ("java", "java-21"):
        assert (copy / name / "security" / "policy").read_text() == "grant"
        assert not (copy / name).is_symlink() and (copy / name / "old").is_symlink()
    assert os.readlink(copy / "java" / "gone") == "nowhere"
    assert (copy / "pki" / "tls" / "cert.pem").read_text() == "grant"
    assert not (copy / "pki" / "tls" / "cert.pem").is_symlink()


@pytest.mark.parametrize("path", LINKS)
def test_a_sandbox_sees_the_nodes_directories_of_links_and_cannot_change_them(rig: Rig, path: str
                                                                             ) -> None:
    outcome, back = rig.shell(f"ls -A {path}; touch {path}/mine", session=1)
    assert outcome.state is ActionState.FAILED
    assert sorted(back.stdout.decode().split()) == sorted(os.listdir(path))
    assert b"Read-only file system" in back.stderr
    assert not os.path.exists(f"{path}/mine")


def test_a_sandbox_can_look_up_its_own_name(rig: Rig) -> None:
    outcome, back = rig.shell("getent hosts $(hostname)", session=1)
    assert outcome.state is ActionState.COMPLETED and b"127.0.0.1" in back.stdout, back


def test_a_sandbox_sees_only_the_listed_files_of_etc(rig: Rig) -> None:
    _, back = rig.shell("ls -A /etc", session=1)
    listed = {path.split("/")[2] for path in visible_paths.readable() if path.startswith("/etc/")}
    assert set(back.stdout.decode().split()) <= listed
