"""Scratch folders: the next worker or broker removes folders of the same user whose makers are
dead, whatever they contain, and no others."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput
from tangram_hpc.storage.rundir import (
    job_dir,
    make_job_dir,
    make_scratch,
    own_dir,
    sweep_scratch,
)

REPO = Path(__file__).resolve().parents[2]
AS_ROOT = os.geteuid() == 0
LONG_AGO = time.time() - 3600

MAKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tangram_hpc.storage.rundir import make_scratch
print(make_scratch({}, sys.argv[2], "worker"), flush=True)
time.sleep(600)
"""


def maker(base: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that lives, and the folder it made."""
    run = subprocess.Popen([sys.executable, "-c", MAKER, str(REPO), str(base)], text=True,
                           stdout=subprocess.PIPE)
    assert run.stdout is not None
    folder = Path(run.stdout.readline().strip())
    run.stdout.close()
    return run, folder


def dead_workers_folder(base: Path, name: str = "tangram-worker-dead") -> Path:
    """A dead worker's folder: its lock is held by nobody."""
    folder = base / name
    folder.mkdir(mode=0o700)
    (folder / ".alive").touch()
    (folder / "file").write_text("x")
    return folder


def test_a_folder_is_private_and_named_by_its_job(tmp_path: Path) -> None:
    folder = make_scratch({"SLURM_JOB_ID": "77"}, str(tmp_path), "worker")
    assert folder.parent == tmp_path and folder.name.startswith("tangram-worker-job77-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_scratch({}, str(tmp_path), "broker").name.startswith("tangram-broker-")
    assert folder.exists(), "its maker lives"
    with pytest.raises(InvalidInput, match=r"scratch .*set `scratch` to"):
        make_scratch({}, str(tmp_path / "none"), "worker")


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "lr=1,bs=2", "a\nb", "4711.2", "4711+1",
                                  "4711_3", "\udcff"])
def test_a_job_has_a_name_by_which_every_command_finds_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^job: .* is not a job id"):
        own_dir({"TANGRAM_HOME": str(tmp_path)}, name)


@pytest.mark.parametrize("name", ["-x", "lr=1,bs=2", "4711.2", "4711_3"])
def test_jobs_that_earlier_releases_recorded_are_read_by_their_names(
        tmp_path: Path, name: str) -> None:
    """One such job was an error of `tangram acct`, which then printed no job at all."""
    assert job_dir({"TANGRAM_HOME": str(tmp_path)}, name) == tmp_path / "jobs" / name


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b"])
def test_no_name_leads_out_of_the_folder_of_jobs(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^job: .* is not a job id"):
        job_dir({"TANGRAM_HOME": str(tmp_path)}, name)


@pytest.mark.parametrize("name", ["4711", "run 1", "exp_3", "x.1", "lr=0.1", "é"])
def test_words_of_the_users_own_name_a_job(tmp_path: Path, name: str) -> None:
    assert own_dir({"TANGRAM_HOME": str(tmp_path)}, name) == tmp_path / "jobs" / name


def test_nobody_else_may_write_beside_the_folder_of_a_job(tmp_path: Path) -> None:
    """Whatever the umask is, and also where the folder above gives its group to what is below."""
    tmp_path.chmod(0o2775)
    before = os.umask(0)
    try:
        folder = make_job_dir({"TANGRAM_HOME": str(tmp_path / "above" / "home")}, "local-1")
    finally:
        os.umask(before)
    made = (folder, folder.parent, folder.parent.parent)
    assert [stat.S_IMODE(one.stat().st_mode) & 0o777 for one in made] == [0o700] * 3
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) & 0o777 == 0o777  # that of the umask


def test_the_target_of_a_linked_home_is_made_again(tmp_path: Path) -> None:
    """Scratch file systems remove what is old, and the link in the user's home stays."""
    (tmp_path / "link").symlink_to(tmp_path / "user" / "target")
    folder = make_job_dir({"TANGRAM_HOME": str(tmp_path / "link")}, "local-1")
    assert folder.is_dir() and (tmp_path / "user/target/jobs/local-1").is_dir()
    assert stat.S_IMODE((tmp_path / "user/target").stat().st_mode) == 0o700


def test_a_home_with_a_quoted_tilde_is_below_the_users_home(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment file of a launcher has `TANGRAM_HOME=~/x` without a shell that expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_dir({"TANGRAM_HOME": "~/x"}, "local-1") == tmp_path / "x/jobs/local-1"


@pytest.mark.parametrize("lost", ["", ".alive"])
def test_the_folder_of_a_maker_that_lives_is_spared_though_its_lock_file_was_removed_as_old(
        tmp_path: Path, lost: str) -> None:
    """Sites remove what nobody has used in /tmp for some days: here the lock file."""
    alive, kept = maker(tmp_path)
    try:
        if lost:
            (kept / lost).unlink()
        os.utime(kept, (LONG_AGO, LONG_AGO))
        assert sweep_scratch(tmp_path) == [] and kept.is_dir()
    finally:
        alive.kill()
        alive.wait()
    assert sweep_scratch(tmp_path) == [kept]


@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="systemd-tmpfiles is missing")
def test_systemd_tmpfiles_removes_nothing_of_a_maker_that_lives(tmp_path: Path) -> None:
    base, rules = tmp_path / "base", tmp_path / "rules.conf"
    (base / "old").mkdir(parents=True)
    alive, kept = maker(base)
    (kept / "etc").mkdir()
    (kept / "etc" / "hosts").touch()
    rules.write_text(f"e {base} - - - 1ms\n")
    time.sleep(0.1)
    try:
        subprocess.run(["systemd-tmpfiles", "--clean", rules], check=True)
        assert list(base.iterdir()) == [kept], "it removed the folder that nobody uses"
        assert (kept / ".alive").exists() and (kept / "etc" / "hosts").exists()
    finally:
        alive.kill()
        alive.wait()


def test_the_next_worker_removes_scratch_of_killed_workers_and_spares_live_ones(
        tmp_path: Path) -> None:
    dead, gone = maker(tmp_path)
    alive, kept = maker(tmp_path)
    try:
        (gone / "work").mkdir()
        (gone / "work" / "file").write_text("x")
        assert sweep_scratch(tmp_path) == []
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        third = make_scratch({}, str(tmp_path), "worker")
        assert sorted(tmp_path.iterdir()) == sorted([kept, third])
    finally:
        for run in (dead, alive):
            run.kill()
            run.wait()


def test_scratch_is_not_removed_while_its_maker_is_about_to_lock_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = fcntl.flock, list[list[Path]]()

    def sweep_before(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            swept.append(sweep_scratch(tmp_path))
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_before)
    assert make_scratch({}, str(tmp_path), "broker").exists()
    assert swept == [[], []], "before the lock of the folder, and before that of its file"
    assert sweep_scratch(tmp_path) == []


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a folder to another user")
def test_scratch_of_another_user_is_not_removed(tmp_path: Path) -> None:
    foreign = dead_workers_folder(tmp_path)
    os.chown(foreign, 64321, 64321)
    assert sweep_scratch(tmp_path) == [] and (foreign / "file").exists()


def test_links_files_foreign_names_and_young_folders_are_not_removed(tmp_path: Path) -> None:
    """A young folder may not have its lock yet."""
    target = dead_workers_folder(tmp_path, "precious")
    (tmp_path / "tangram-worker-link").symlink_to(target)
    (tmp_path / "tangram-worker-file").touch()
    (tmp_path / "tangram-x").mkdir()
    (tmp_path / "tangram-worker-young").mkdir()
    (tmp_path / "tangram-probe-young").mkdir()
    (tmp_path / "tangram-notes-mine").mkdir()
    for name in ("tangram-notes-mine", "tangram-x"):
        os.utime(tmp_path / name, (LONG_AGO, LONG_AGO))
    before = sorted(tmp_path.rglob("*"))
    assert sweep_scratch(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["tangram-worker-old", "tangram-probe-old"])
def test_an_old_scratch_folder_without_a_lock_is_removed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    os.utime(folder, (LONG_AGO, LONG_AGO))
    assert sweep_scratch(tmp_path) == [folder] and not folder.exists()


def test_only_scratch_folders_of_a_jobs_workers_are_removed_by_their_path(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A mistaken path, or a shortened option, costs no files. A folder may hold anything."""
    name = "tangram-node-job7-0f-n1"
    mistaken = ("t", "tangram-node-x", "tangram-node-job-x", "tangram-home-job7-x")
    for each in (name, *mistaken):
        (tmp_path / each / "users").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in (name, f"{tmp_path}/{name}/", f"{tmp_path}/{name}/..",
                 *(f"{tmp_path}/{each}" for each in mistaken)):
        for option in ("--remove", "--rem"):
            assert main(["worker", f"{option}={path}"]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"tangram: error: --remove: {path!r} is")
            assert said.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == sorted((name, *mistaken))
    assert main(["worker", f"--remove={tmp_path}/{name}"]) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(mistaken)


def test_node_folders_of_a_job_template_are_removed_unless_in_use_or_young(tmp_path: Path) -> None:
    """Folders of jobs whose epilog never ran are removed by the next job's worker, but never a
    folder in which a process lives or is about to."""
    dead, young, used, mine = (tmp_path / f"tangram-node-job{n}-x-n1" for n in (1, 2, 3, 4))
    for folder in (dead, young, used, mine):
        folder.mkdir(mode=0o700)
    dead_workers_folder(dead)
    (dead / ".0123456789abcdef-0" / "home").mkdir(parents=True)  # of a removal that was ended
    alive, kept = maker(used)
    for folder in (dead, used):
        os.utime(folder, (LONG_AGO, LONG_AGO))
    try:
        own = make_scratch({}, str(mine), "worker")
        assert sorted(tmp_path.iterdir()) == sorted([young, used, mine])
        assert kept.exists() and own.exists()
    finally:
        alive.kill()
        alive.wait()


def test_hostile_scratch_content_is_removed_without_touching_other_files(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    mode = (victim / "precious").stat().st_mode
    folder = dead_workers_folder(tmp_path)
    (folder / "out").symlink_to(victim)
    os.link(victim / "precious", folder / "hard")
    os.mkfifo(folder / "fifo")
    (folder / "new\nline").mkdir()
    closed = folder / "closed"
    deep = closed
    for _ in range(60):
        deep = deep / ("d" * 60)
    deep.mkdir(parents=True)
    deep.chmod(0)
    closed.chmod(0)
    assert sweep_scratch(tmp_path) == [folder] and not folder.exists()
    assert (victim / "precious").read_text() == "x"
    assert (victim / "precious").stat().st_mode == mode


def test_a_scratch_lock_that_is_a_link_or_a_pipe_is_neither_followed_nor_awaited(
        tmp_path: Path) -> None:
    """All other folders are swept nevertheless."""
    made = tmp_path / "made-by-a-lock"
    linked, piped, good = (dead_workers_folder(tmp_path, f"tangram-worker-{n}") for n in "abc")
    for folder in (linked, piped):
        (folder / ".alive").unlink()
    (linked / ".alive").symlink_to(made)
    os.mkfifo(piped / ".alive")
    assert good in sweep_scratch(tmp_path)
    assert not good.exists() and not made.exists()


def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """It could not travel in a message: broker and workers would end with a traceback."""
    path = os.fsdecode(bytes(tmp_path) + b"/\xff")
    with pytest.raises(InvalidInput, match=r"^TANGRAM_HOME: the path .*udcff.* is not UTF-8; set "):
        own_dir({"TANGRAM_HOME": path}, "7")
    with pytest.raises(InvalidInput, match=r"^scratch: the path .*udcff' is not UTF-8; set"):
        make_scratch({"TMPDIR": path}, "", "worker")
