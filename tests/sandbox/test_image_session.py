"""A session with an image: a root that it writes over an image that stays as it is, user 0 alone
inside, and no power over anything else. `test_image_session_user.py` runs this file as another user
too, and `test_image_users.py` has the tests of sandboxes with several users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.image_rig import reason_without_fuse
from helpers.image_session_rig import (
    ImageRig,
    found_backends,
    image_sessions_work,
    small_image,
    with_bwrap,
    with_image,
)
from helpers.root_folder_rig import fingerprint, make_image

from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.sandbox.files import scratch
from tangram_hpc.sandbox.manager.backends import Backends

__all__ = ["found_backends", "image_sessions_work", "small_image"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, image: Path) -> Iterator[ImageRig]:
    yield from with_image(ImageRig(tmp_path_factory.mktemp("rig"), trusted=False), image)


# ---- a root that is written ----


def test_sessions_of_one_image_write_their_own_roots(rig: ImageRig) -> None:
    one, other = rig.start(), rig.start()
    made = rig.out(one, "echo new >/testbed/new && rm /testbed/old && rm -r /testbed/folder && "
                        "mkdir /testbed/folder /opt && echo x >>/etc/passwd && ls /testbed /opt")
    assert made.split() == ["/opt:", "/testbed:", "folder", "new"]
    assert rig.out(one, "ls /testbed/folder") == ""
    assert rig.out(other, "ls /testbed; cat /testbed/folder/in").split() == [
        "folder", "old", "in"]
    rig.close_session(one)
    rig.close_session(other)


def test_localhost_and_the_own_name_are_in_hosts(rig: ImageRig, tmp_path: Path) -> None:
    """Images have no /etc/hosts or an empty one, as container programs write it."""
    own = ["127.0.0.1", "sandbox"]
    added = ["127.0.0.1", "localhost", "::1", "localhost", "ip6-localhost", "ip6-loopback", *own]
    session = rig.start()
    assert rig.out(session, "cat /etc/hosts").split() == added
    rig.out(session, "echo 10.0.0.1 mirror >>/etc/hosts")
    rig.kill_init(session)
    assert rig.out(session, "cat /etc/hosts").split() == [*added, "10.0.0.1", "mirror"]
    rig.close_session(session)
    image = make_image(tmp_path / "image")
    (image / "etc/hosts").write_text("127.0.0.1 localhost\n10.0.0.1 mirror # sandbox")
    session = rig.start(image=str(image))
    assert rig.out(session, "cat /etc/hosts").split("\n") == [
        "127.0.0.1 localhost", "10.0.0.1 mirror # sandbox", "\t".join(own), ""]
    rig.close_session(session)
    session = rig.start(image=str(image), network=True)
    assert "\t".join(own) in rig.out(session, "cat /etc/hosts").splitlines()
    rig.close_session(session)


def test_commands_are_user_0_with_three_capabilities(rig: ImageRig) -> None:
    session = rig.start()
    outcome, back = rig.shell("id -u; id -g; umask; echo $HOME $USER $PATH; "
                              "grep -E '^(Cap|NoNew)' /proc/self/status", session=session)
    assert outcome.isolation == "bwrap+overlay+seccomp"
    lines = back.stdout.decode().split("\n")
    assert lines[:3] == ["0", "0", "0022"]
    assert lines[3] == "/root root /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    masks = dict(line.split(":\t") for line in lines[4:] if line)
    # CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_NET_BIND_SERVICE
    assert int(masks["CapEff"], 16) == int(masks["CapBnd"], 16) == 1 << 1 | 1 << 3 | 1 << 10
    assert int(masks["CapInh"], 16) == int(masks["CapAmb"], 16) == 0
    assert masks["NoNewPrivs"] == "1"
    rig.close_session(session)


def test_system_calls_of_package_managers_succeed(rig: ImageRig) -> None:
    """Owners and devices without effect; set-uid bits are kept, and have no effect either."""
    session = rig.start()
    text = rig.out(session, "cd /testbed && touch f && chown 105:105 f && chmod 6755 f && "
                            "mknod dev c 1 3 && mknod pipe p && stat -c '%u %a %F' f pipe && ls; "
                            "cp /usr/bin/id . && chmod 4755 id && ./id -u; "
                            "mkdir shut && echo s >shut/in && chmod 0 shut/in shut && cat shut/in")
    assert text.split("\n") == ["0 6755 regular empty file", "0 644 fifo", "f", "folder", "old",
                                "pipe", "0", "s", ""]
    rig.close_session(session)


@pytest.mark.attack("repository", "processes")
def test_root_inside_an_image_is_refused_mounts_namespaces_and_proc_writes(rig: ImageRig) -> None:
    session = rig.start()
    for attack in ("mount -t tmpfs none /root", "mount -o remount,rw /proc", "unshare --user true",
                   "unshare --mount true", "unshare --pid true", "chroot /testbed true",
                   "readlink /proc/1/root", "readlink /proc/1/fd/0", "cat /proc/1/environ",
                   "echo 9 >/proc/sys/user/max_user_namespaces", "echo 1 >/proc/1/oom_score_adj",
                   "echo 8 >/session.cpus", "touch /dev/new"):
        outcome, back = rig.shell(attack, session=session)
        assert outcome.state is ActionState.FAILED and outcome.exit_code, (attack, back)
    assert rig.out(session, "echo /*").split() == [
        "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/root", "/sbin", "/session",
        "/session.cpus", "/testbed", "/tmp", "/usr", "/var"]
    mounts = rig.out(session, "cat /proc/self/mountinfo")
    assert all("nosuid" in line for line in mounts.splitlines())
    assert rig.image not in mounts
    rig.close_session(session)


def test_trusted_code_has_the_same_root_without_the_filter(rig: ImageRig) -> None:
    session = rig.start(trusted=True)
    outcome, back = rig.shell("chown 7 /testbed/old && stat -c %u /testbed/old", session=session)
    assert (outcome.isolation, back.stdout) == ("bwrap+overlay", b"0\n")
    assert rig.shell("mount -t tmpfs none /root", session=session)[0].exit_code
    rig.close_session(session)


def test_a_session_with_writable_false_cannot_write_its_image_root(rig: ImageRig) -> None:
    session = rig.start(writable=False)
    outcome, back = rig.shell("touch /testbed/x; touch /x; touch /tmp/x /session/x; id -u; ls /",
                              session=session)
    assert outcome.isolation == "bwrap+seccomp"
    assert back.stderr.count(b"Read-only file system") == 2
    assert back.stdout.decode().split()[0] == str(os.geteuid())
    assert "image" not in back.stdout.decode().split()
    assert not outcome.exit_code
    refusal = rig.shell("true", session=session, user="pg")[0]
    assert refusal.exit_code == 126 and "writable=True" in refusal.reason
    rig.close_session(session)


def test_tmp_is_empty_and_writable_when_the_node_shows_a_path_below_it(
        tmp_path: Path, image: Path) -> None:
    shown = Path("/tmp") / f"tangram-shown-{os.getpid()}"
    shown.mkdir()
    try:
        rig = ImageRig(tmp_path, trusted=False, read_paths=(str(shown),))
        rig.image = str(image)
        session = rig.start()
        assert rig.out(session, "echo $TMPDIR; touch /tmp/x; ls /tmp").split() == ["/tmp", "x"]
        rig.close()
    finally:
        shown.rmdir()


# ---- users ----


def test_a_command_runs_as_the_image_user_that_it_names(rig: ImageRig) -> None:
    session = rig.start()
    for user in ("pg", "105"):
        assert rig.out(session, "id -u; echo $HOME $USER $LOGNAME", user=user).split() == [
            "0", "/var/lib/pg", "pg", "pg"]
    assert rig.out(session, "echo $HOME", user="root", env={"HOME": "/x"}) == "/x\n"
    rig.out(session, "echo 'new:x:7:7::/testbed:/bin/sh' >>/etc/passwd")
    assert rig.out(session, "echo $HOME", user="new") == "/testbed\n"
    for fields, why in (({"user": "nope"}, "no user 'nope' in /etc/passwd"),
                        ({"user": "8"}, "no user '8'"),
                        ({"user": "pg", "real_user": True}, "cannot have its number 105")):
        outcome = rig.shell("true", session=session, **fields)[0]
        assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, 126)
        assert why in outcome.reason and "\n" not in outcome.reason
    assert rig.out(session, "id -u", user="root", real_user=True) == "0\n"
    rig.close_session(session)


def test_a_user_is_not_found_when_passwd_is_missing_or_no_regular_file(rig: ImageRig) -> None:
    session = rig.start()
    for trick in ("rm /etc/passwd", "mkfifo /etc/passwd",
                  "rm /etc/passwd; readlink /etc/passwd || : >/etc/passwd"):
        rig.out(session, trick)
        outcome = rig.shell("true", session=session, user="pg")[0]
        assert outcome.exit_code == 126 and "no user 'pg'" in outcome.reason
    rig.close_session(session)


# ---- limits, forks, deaths, moves ----


@pytest.mark.attack("code", "disk")
def test_the_root_counts_against_the_disk_limit(rig: ImageRig) -> None:
    session = rig.start(disk_mib=20)
    fill = "for n in 1 2 3; do dd if=/dev/zero of=/testbed/f$n bs=1M count=15 2>/dev/null; done"
    outcome, _ = rig.shell(f"{fill}; sleep 20", session=session)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("disk: "), outcome
    assert rig.file("more", b"x", session=session)[0].reason.startswith("disk: ")
    rig.out(session, "rm /testbed/f*; echo fine")
    rig.close_session(session)


@pytest.mark.attack("code", "disk")
def test_unlinked_open_files_count_against_the_disk_limit(rig: ImageRig) -> None:
    session = rig.start(disk_mib=8)
    outcome, _ = rig.shell("exec 3>/testbed/f; rm /testbed/f; "
                           "dd if=/dev/zero bs=1M count=7 >&3 2>/dev/null; exec 4>/testbed/g; "
                           "rm /testbed/g; dd if=/dev/zero bs=1M count=7 >&4 2>/dev/null; sleep 20",
                           session=session)
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("disk: "), outcome
    rig.close_session(session)


def test_the_memory_limit_holds_in_an_image(rig: ImageRig) -> None:
    session = rig.start(mem_mib=64)
    rig.out(session, "echo kept >/testbed/kept")
    outcome, _ = rig.shell("dd if=/dev/zero of=/dev/null bs=200M count=90000000", session=session)
    assert outcome.state is ActionState.OUT_OF_MEMORY, outcome
    print(f"limited by {outcome.enforcement}")
    assert rig.out(session, "cat /testbed/kept") == "kept\n"
    rig.close_session(session)


CHANGE = ("echo changed >/testbed/new; rm /testbed/old; rm -r /testbed/folder; "
          "mkdir /testbed/folder; mkdir /shut; echo s >/shut/in; chmod 0 /shut/in /shut; "
          "echo h >/session/h; echo t >/tmp/t; chmod 4755 /testbed/new")
SEEN = ("cat /testbed/new /shut/in /session/h /tmp/t; ls /testbed; ls /testbed/folder; "
        "stat -c %a /testbed/new /shut")
SAME = ["changed", "s", "h", "t", "folder", "new", "4755", "0"]


def test_a_fork_starts_with_the_changes_to_the_image_root(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, CHANGE)
    copies = [rig.start(origin=session) for _ in range(2)]
    for copy in copies:
        assert rig.out(copy, SEEN).split() == SAME
        rig.out(copy, f"echo {copy} >/testbed/new; touch /testbed/old")
    assert rig.out(session, SEEN).split() == SAME
    assert [rig.out(copy, "cat /testbed/new") for copy in copies] == [f"{c}\n" for c in copies]
    assert "another" not in rig.refused(origin=session, image=rig.image, writable=False)
    assert "writable=True" in rig.refused(origin=session, writable=False)
    for one in (session, *copies):
        rig.close_session(one)


def test_a_fork_of_another_image_is_refused(rig: ImageRig, tmp_path: Path) -> None:
    session = rig.start()
    other = make_image(tmp_path / "other", ())
    assert "name that image" in rig.refused(origin=session, image=str(other))
    rig.close_session(session)


def test_a_session_outlives_its_init(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, CHANGE)
    for _ in range(2):
        rig.kill_init(session)
        assert rig.out(session, SEEN).split() == SAME
        assert rig.out(session, "touch /testbed/again; id -u") == "0\n"
        rig.out(session, "rm /testbed/again")
    rig.close_session(session)


def test_a_moved_session_keeps_the_changes_to_its_image_root(rig: ImageRig) -> None:
    session = rig.start(movable=True)
    rig.out(session, CHANGE)
    moved = rig.start(movable=True, files=rig.packed_files(session))
    assert rig.out(moved, SEEN).split() == SAME
    rig.close_session(moved)


def test_a_closed_sessions_changes_are_removed(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, "mkdir -p /a/b/c; touch /a/b/c/d; chmod 0 /a/b; rm -r /testbed")
    place = rig.place(session)
    assert scratch.changes(str(place)) in {str(p) for p in place.iterdir()}
    rig.close_session(session)
    rig.until(lambda: not place.exists())


# ---- the other ways, and none ----


def _with(rig: ImageRig, root: str) -> None:
    supervisor = rig.executor._supervisor
    supervisor.backends = with_bwrap(supervisor.backends, root=root)


@pytest.mark.parametrize("way", ["copy", "fuse"])
def test_each_way_to_build_an_image_root_gives_the_same_results(
        way: str, tmp_path: Path, image: Path) -> None:
    if way == "fuse" and (why := reason_without_fuse()):
        pytest.skip(why)
    rig = ImageRig(tmp_path, trusted=False)
    rig.image = str(image)
    _with(rig, way)
    before = fingerprint(image)
    session = rig.start(disk_mib=24)
    outcome, _ = rig.shell("true", session=session)
    assert outcome.isolation == f"bwrap+{way}+seccomp"
    rig.out(session, CHANGE)
    assert rig.out(session, SEEN).split() == SAME
    copy = rig.start(origin=session, disk_mib=24)
    assert rig.out(copy, SEEN).split() == SAME
    fill = "for n in 1 2; do dd if=/dev/zero of=/testbed/f$n bs=1M count=15 2>/dev/null; done"
    outcome, _ = rig.shell(f"{fill}; sleep 20", session=session)
    assert outcome.reason.startswith("disk: "), outcome
    rig.kill_init(copy)
    assert rig.out(copy, SEEN).split() == SAME
    rig.close()
    assert fingerprint(image) == before


def test_sandboxes_that_copy_their_image_do_not_wait_ready_made(
        tmp_path: Path, image: Path, found: Backends) -> None:
    rig = ImageRig(tmp_path, trusted=False, warm=1)
    rig.image = str(image)
    for way in dict.fromkeys(("copy", found.bwrap.root)):
        _with(rig, way)
        pool = rig.executor._supervisor.pool(rig.session(rig.start()).box)
        assert bool(pool._asked or pool._booting or pool._size) == (way != "copy")
    rig.close()


def test_a_writable_root_that_cannot_be_built_is_refused_with_the_remedy(
        rig: ImageRig, found: Backends) -> None:
    none = replace(with_bwrap(found, root=""), why_not={"image root by overlay": "too old"})
    with pytest.raises(InvalidInput, match=r"overlay: too old.*pass writable=False"):
        none.box(SessionSpec(1, image=rig.image, trusted=True))
    assert not none.box(SessionSpec(1, image=rig.image, trusted=True, writable=False)).writable
    assert not found.box(SessionSpec(1)).writable


# ---- hostile images ----

PLACES = ("session", "session.cpus", "tmp", "proc", "dev", "etc", "etc/resolv.conf", "etc/hosts",
          "etc/passwd", "etc/apt", "etc/apt/apt.conf.d", "etc/apt/apt.conf.d/00tangram", "root")


def _above(image: Path, name: str) -> Iterator[Path]:
    """The folders above a place of an image, outermost first."""
    parts = name.split("/")[:-1]
    return (image.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("up", ["/oldroot", *(pytest.param(up, marks=pytest.mark.long) for up in (
    "", "/", "../../../../../../../oldroot", "../../../../../../../..", "/proc/1/root",
    "/newroot/.."))])
@pytest.mark.attack("repository", "files")
def test_links_in_an_image_lead_to_no_file_of_the_node(
        rig: ImageRig, tmp_path: Path, up: str, writable: bool) -> None:
    """Each place that is mounted or written is a link to a folder, or to a name in one, of the
    node."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    before = fingerprint(outside)
    image = make_image(tmp_path / "image", ("sh", "cat", "ls", "touch"))
    for number, name in enumerate(PLACES):
        path = image / name
        if not any(map(os.path.islink, _above(image, name))) and path.parent.is_dir():
            if path.is_dir() and not path.is_symlink():
                path.rename(tmp_path / f"was-{number}")
            path.unlink(missing_ok=True)
            target = outside if number % 2 else outside / f"new-{number}"
            path.symlink_to(f"{up.rstrip('/')}{target}")
    for network in (False, True):
        session = rig.start(image=str(image), network=network, writable=writable)
        outcome, back = rig.shell(f"cat {outside}/secret; cat /etc/secret /session/secret "
                                  "~/secret; touch /session/a /tmp/b; ls /session /tmp /dev",
                                  session=session)
        assert b"secret\n" not in back.stdout.replace(b"secret: ", b"") and outcome.isolation
        assert rig.file("h", b"x", session=session)[0].state is ActionState.COMPLETED
        assert b"null" in back.stdout and b"\na\n" in back.stdout, back
        rig.close_session(session)
    assert fingerprint(outside) == before


@pytest.mark.parametrize("writable", [True, False])
def test_an_image_with_files_in_place_of_folders_or_without_files_starts(
        rig: ImageRig, tmp_path: Path, writable: bool) -> None:
    image = make_image(tmp_path / "image", ("sh", "ls", "touch"))
    for name in ("session", "tmp", "proc", "dev"):
        (image / name).write_text("a file")
    session = rig.start(image=str(image), writable=writable)
    assert "null" in rig.out(session, "touch /tmp/x /session/x; ls /proc/self /dev")
    rig.close_session(session)
    bare = tmp_path / "bare"
    bare.mkdir()
    session = rig.start(image=str(bare), writable=writable)
    outcome = rig.shell("true", session=session)[0]
    assert outcome.exit_code == 127 and "/bin/sh" in outcome.reason, outcome
    assert rig.file("h", b"x", session=session)[0].state is ActionState.COMPLETED
    rig.close_session(session)


def test_an_image_with_unreadable_folders_starts_and_a_taken_mount_point_is_named(
        rig: ImageRig, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    (image / "session.cpus").mkdir()
    assert "/session.cpus is a folder" in rig.refused(image=str(image))
    (image / "session.cpus").rmdir()
    for name in ("testbed", "var", "root"):
        (image / name).chmod(0)
    session = rig.start(image=str(image))
    assert rig.out(session, "cat /testbed/old; touch ~/x /var/x; ls ~") == "old\nx\n"
    rig.close_session(session)
    for name in ("testbed", "var", "root"):
        (image / name).chmod(0o755)


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.attack("repository", "processes", "keys")
def test_no_program_of_an_image_runs_before_the_filter(rig: ImageRig, tmp_path: Path,
                                                       writable: bool) -> None:
    """Neither the image's `cat` nor what its loader would load keeps the sandbox alive."""
    image = make_image(tmp_path / "image", ("sh", "ls", "readlink"))
    for name in ("cat", "bwrap", "tangram"):
        (image / "usr/bin" / name).write_text("#!/bin/sh\necho ran >/session/ran; sleep 99\n")
        (image / "usr/bin" / name).chmod(0o755)
    (image / "etc/ld.so.preload").write_text("/testbed/none.so\n")
    session = rig.start(image=str(image), writable=writable)
    text = rig.out(session, "ls /session; ls /proc/1/exe || true")
    assert "ran" not in text
    rig.close_session(session)


def test_an_image_that_is_missing_or_no_folder_is_refused_in_one_line(
        rig: ImageRig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for writable in (True, False):
        for name, why in (("gone", "No such file"), ("file", "Not a directory")):
            reason = rig.refused(image=str(tmp_path / name), writable=writable)
            assert reason.startswith("image: ") and why in reason and "\n" not in reason, reason


def test_an_image_path_may_hold_separators_of_mount_options(rig: ImageRig, tmp_path: Path) -> None:
    """The path of an image is the user's: it may hold what separates mount options."""
    image = make_image(tmp_path / "a,b:c\\d e", ("sh", "ls"))
    session = rig.start(image=str(image))
    assert rig.out(session, "echo >/testbed/x; ls /testbed").split() == ["folder", "old", "x"]
    rig.close_session(session)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.attack("repository", "files")
def test_devices_of_an_image_cannot_be_opened(rig: ImageRig, tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", ("sh", "cat"))
    os.mknod(image / "testbed/zero", 0o20666, os.makedev(1, 5))
    for writable in (True, False):
        session = rig.start(image=str(image), writable=writable)
        outcome, back = rig.shell("exec 3</testbed/zero", session=session)
        assert outcome.exit_code and b"Permission denied" in back.stderr, back
        rig.close_session(session)


def test_an_image_that_the_user_cannot_read_is_refused_in_one_line(
        rig: ImageRig, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is closed to root")
    reason = rig.refused(image="/root")
    assert reason.startswith("image: ") and "\n" not in reason
