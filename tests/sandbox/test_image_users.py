"""Sessions whose image has several users: real numbers and owners, and still no power over anything
outside. Workers that are root have such sessions, and workers whose user has subordinate ranges;
`test_image_users_subordinate.py` runs this file as such a user."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.executor_rig import as_an_ordinary_user
from helpers.image_rig import (
    MadeImage,
    entry,
    folder,
    hard_link,
    libraries,
    reason_without_fuse,
    small,
    tar_of,
)
from helpers.image_session_rig import ImageRig, with_bwrap, with_image
from helpers.root_folder_rig import PASSWD, PROGRAMS, make_image
from test_image_session import (
    CHANGE,
    SAME,
    SEEN,
    test_a_closed_sessions_changes_are_removed,
    test_a_fork_starts_with_the_changes_to_the_image_root,
    test_a_moved_session_keeps_the_changes_to_its_image_root,
    test_a_user_is_not_found_when_passwd_is_missing_or_no_regular_file,
    test_an_image_with_files_in_place_of_folders_or_without_files_starts,
    test_an_image_with_unreadable_folders_starts_and_a_taken_mount_point_is_named,
    test_devices_of_an_image_cannot_be_opened,
    test_links_in_an_image_lead_to_no_file_of_the_node,
    test_no_program_of_an_image_runs_before_the_filter,
    test_root_inside_an_image_is_refused_mounts_namespaces_and_proc_writes,
    test_the_root_counts_against_the_disk_limit,
    test_unlinked_open_files_count_against_the_disk_limit,
)

from tangram_hpc.app import worker
from tangram_hpc.cli import main
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PullSettings, pull
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol.payload import (
    DetachableCall,
    ExecCall,
    ShellCall,
    SnapshotCall,
    TerminalCall,
)
from tangram_hpc.sandbox.manager.backends import Backends

# what holds for user 0 alone holds for several users
__all__ = [
    "test_a_closed_sessions_changes_are_removed",
    "test_a_fork_starts_with_the_changes_to_the_image_root",
    "test_a_moved_session_keeps_the_changes_to_its_image_root",
    "test_a_user_is_not_found_when_passwd_is_missing_or_no_regular_file",
    "test_an_image_with_files_in_place_of_folders_or_without_files_starts",
    "test_an_image_with_unreadable_folders_starts_and_a_taken_mount_point_is_named",
    "test_devices_of_an_image_cannot_be_opened",
    "test_links_in_an_image_lead_to_no_file_of_the_node",
    "test_no_program_of_an_image_runs_before_the_filter",
    "test_root_inside_an_image_is_refused_mounts_namespaces_and_proc_writes",
    "test_the_root_counts_against_the_disk_limit",
    "test_unlinked_open_files_count_against_the_disk_limit",
]
LEFT = "grep -l '(sleep)' /proc/[0-9]*/stat | grep -c . || :"


@pytest.fixture(scope="module")
def found() -> Backends:
    found = as_an_ordinary_user(SandboxSettings())
    if not found.bwrap.users:
        pytest.skip(f"a sandbox has one user here: {found.why_not}")
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = make_image(tmp_path_factory.mktemp("image") / "root")
    (image / "etc/group").write_text("root:x:0:\npg:x:105:\nwheel:x:10:root,pg\nbig:x:70000:pg\n")
    return image


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, image: Path, found: Backends
        ) -> Iterator[ImageRig]:
    rig = ImageRig(tmp_path_factory.mktemp("rig"), found.bwrap.users, trusted=False)
    yield from with_image(rig, image)


# ---- users ----


def test_a_command_has_the_numbers_of_its_user(rig: ImageRig) -> None:
    session = rig.start()
    outcome, back = rig.shell("id -u; id -g; id -G; echo $HOME $USER; touch /tmp/f; stat -c %u:%g "
                              "/tmp/f", session=session, user="pg", real_user=True)
    assert outcome.isolation.startswith("bwrap+overlay+users")
    assert back.stdout.decode().split("\n") == [
        "105", "105", "105 10", "/var/lib/pg pg", "105:105", ""]
    assert rig.out(session, "id -u; id -G", user="105").split() == ["105", "105", "10"]
    assert rig.out(session, "id -u; id -G", user="pg:wheel").split() == ["105", "10"]
    assert rig.out(session, "id -u; id -G; echo $HOME", user="7:8").split() == ["7", "8", "/"]
    assert rig.out(session, "id -u; id -G").split() == ["0", "0"]
    for user, why in (("nope", "no user 'nope'"), ("pg:nope", "no group 'nope'"),
                      ("70000", "below 65536"), ("5:70000", "below 65536")):
        outcome = rig.shell("true", session=session, user=user)[0]
        assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, 126)
        assert why in outcome.reason and "\n" not in outcome.reason
    rig.close_session(session)


def test_owners_are_real(rig: ImageRig) -> None:
    session = rig.start()
    text = rig.out(session, "cd /testbed && touch f && chown 105:10 f old && chmod 600 f && "
                            "stat -c '%u:%g %a' f old; mkdir -m 700 of-root; chown 70000 f || :")
    assert text.split("\n") == ["105:10 600", "105:10 644", ""]
    assert rig.out(session, "echo x >>/testbed/f; echo y >>/testbed/old; cat /testbed/f",
                   user="pg") == "x\n"
    for closed in ("touch /testbed/new", "ls /testbed/of-root", "echo x >>/etc/passwd",
                   "chown 0 /testbed/f", "kill 1", "touch /session/new", "rm /testbed/f"):
        outcome, back = rig.shell(closed, session=session, user="pg")
        assert outcome.exit_code, (closed, back)
    rig.close_session(session)


@pytest.mark.attack("repository", "processes")
def test_nobody_has_more_capabilities_than_the_documents_say(rig: ImageRig) -> None:
    session = rig.start()
    status = "grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status"
    root, other = (dict(line.split(":\t") for line in rig.out(session, status, user=user)
                        .splitlines()) for user in ("root", "pg"))
    # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE
    kept = sum(1 << cap for cap in (0, 1, 3, 4, 5, 6, 7, 10))
    assert int(root["CapEff"], 16) == int(root["CapBnd"], 16) == kept
    assert int(root["CapInh"], 16) == int(root["CapAmb"], 16) == 0
    assert {int(other[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    assert root["NoNewPrivs"] == other["NoNewPrivs"] == "1"
    assert root["Seccomp"] == other["Seccomp"] == "2"
    rig.close_session(session)


@pytest.mark.attack("repository", "files")
def test_set_uid_files_lead_nowhere(rig: ImageRig, tmp_path: Path) -> None:
    """This holds for set-uid files of a hostile image and for those that a session makes."""
    image = make_image(tmp_path / "image")
    (image / "usr/bin/id").chmod(0o6755)
    session = rig.start(image=str(image))
    rig.out(session, "cp /usr/bin/id /testbed/id; chmod 6755 /testbed/id; chown 105:105 "
                     "/testbed/id; chmod 6755 /testbed/id; mkdir /testbed/roots; "
                     "cp /usr/bin/id /testbed/roots/id; chmod 6755 /testbed/roots/id")
    # each is named `id`, as programs of uutils (Ubuntu 26.04) are one file that goes by its name
    for path in ("/usr/bin/id", "/testbed/id", "/testbed/roots/id"):
        assert rig.out(session, f"{path} -u; {path} -g", user="7").split() == ["7", "0"]
        assert rig.out(session, f"{path} -u", user="root").split() == ["0"]
    place = rig.place(session)
    assert place.stat().st_mode & 0o777 == 0o700 and place.parent.stat().st_mode & 0o077 == 0
    rig.close_session(session)


def test_shells_and_terminals_of_a_user(rig: ImageRig) -> None:
    session = rig.start()
    opened = ShellCall("run", 1, text="id -u; cd; pwd; echo " + "x" * 20_000 + " | grep -c x",
                       start=True, user="pg", stdin=b"said")
    outcome, back, _ = rig.end(rig.begin(opened, Kind.EXEC, session=session))
    assert outcome.exit_code == 0, (outcome, back)
    assert back.stdout.decode().split() == ["105", "/var/lib/pg", "1"]
    again = ShellCall("run", 1, text="cat; id -u", stdin=b"in ")
    outcome, back, _ = rig.end(rig.begin(again, Kind.EXEC, session=session))
    assert back.stdout == b"in 105\n"
    rig.end(rig.begin(ShellCall("close", 1), Kind.FILE, session=session, cores=()))
    asked = TerminalCall(ExecCall(shell="id -u; stat -c %u $(readlink /proc/self/fd/0); "
                                        "echo x >/dev/tty", user="pg"), (24, 80))
    outcome, back, _ = rig.end(rig.begin(asked, Kind.EXEC, session=session))
    assert back.stdout.replace(b"\r", b"") == b"105\n105\nx\n", back
    rig.close_session(session)


def test_a_user_can_open_its_own_input_and_outputs_by_name(rig: ImageRig) -> None:
    """As with docker. The kernel compares owners when /dev/stderr is opened."""
    session = rig.start()
    text = "cat /dev/stdin >/dev/stdout; echo told >/dev/stderr"
    outcome, back = rig.shell(text, session=session, user="pg", stdin=b"in")
    assert (outcome.exit_code, back.stdout, back.stderr) == (0, b"in", b"told\n")
    opened = ShellCall("run", 1, text=text, start=True, user="pg", stdin=b"in")
    outcome, back, _ = rig.end(rig.begin(opened, Kind.EXEC, session=session))
    assert (outcome.exit_code, back.stdout, back.stderr) == (0, b"in", b"told\n")
    rig.close_session(session)


def test_the_files_of_a_detachable_command_are_its_users(rig: ImageRig) -> None:
    session = rig.start(background="run")
    line = "stat -L -c %u /dev/fd/1; echo x >/dev/stderr; read -r word; echo $word"
    call = DetachableCall(ExecCall(shell=line, user="pg", stream=True), True)
    lease = rig.begin(call, Kind.EXEC, session=session)

    def printed(stream: int) -> bytes:
        return b"".join(data for number, data in rig.pieces.get(lease, ()) if number == stream)

    rig.until(lambda: b"\n105\n" in printed(1) and printed(2) == b"x\n")
    path = printed(1).partition(b"\n")[0].decode().partition(" ")[2]
    rig.loop.call_soon(rig.executor.give_input, lease, input_flow.SIGNAL, b"",
                       input_flow.DETACH, 0)
    assert rig.end(lease)[0].signal == input_flow.DETACH
    rig.out(session, f"echo said >{path}.in", user="pg")
    waits = f"until [ -s {path}.code ]; do sleep 0.02; done; cat {path}.code"
    assert rig.out(session, waits) == "0\n"
    assert rig.out(session, f"cat {path}.out") == "105\nsaid\n"
    rig.close_session(session)


# ---- limits, ends, forks, moves ----


def test_processes_of_other_users_are_stopped_and_ended(rig: ImageRig) -> None:
    session = rig.start()
    began = "sleep 100 & sleep 200"
    outcome, _ = rig.shell(began, session=session, user="pg", timeout_ns=300_000_000)
    assert outcome.state is ActionState.TIMEOUT, outcome
    assert rig.out(session, LEFT) == "0\n"
    rig.out(session, "sleep 100 >/dev/null 2>&1 &", user="pg")
    assert rig.out(session, LEFT) == "1\n"
    rig.close_session(session)


@pytest.mark.attack("code", "processes", "memory")
def test_limits_hold_for_other_users(rig: ImageRig) -> None:
    session = rig.start(disk_mib=8, mem_mib=64)
    outcome, _ = rig.shell("exec 3>/tmp/f; rm /tmp/f; dd if=/dev/zero bs=1M count=7 >&3 "
                           "2>/dev/null; exec 4>/tmp/g; rm /tmp/g; dd if=/dev/zero bs=1M count=7 "
                           ">&4 2>/dev/null; sleep 20", session=session, user="pg")
    assert outcome.state is ActionState.FAILED and outcome.reason.startswith("disk: "), outcome
    outcome, _ = rig.shell("dd if=/dev/zero of=/dev/null bs=200M count=90000000", session=session,
                           user="pg")
    assert outcome.state is ActionState.OUT_OF_MEMORY, outcome
    rig.close_session(session)


MADE = ("mkdir -p /srv/a/b /shut; echo s >/shut/in; echo d >/srv/a/b/c; chown -R pg /srv; "
        "chown 65534:65534 /shut/in /shut; chmod 0 /shut/in /shut; touch /tmp/t /session/h; "
        "chown 105 /tmp/t /session/h; chmod 600 /tmp/t /session/h")
OWNERS = ["105:0", "105:0", "65534:65534", "65534:65534", "105:0", "105:0", "s", "d"]
TELL = "stat -c %u:%g /srv /srv/a/b/c /shut /shut/in /tmp/t /session/h; cat /shut/in /srv/a/b/c"


def test_forks_and_later_inits_have_the_same_owners(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, MADE)
    copy = rig.start(origin=session)
    assert rig.out(copy, TELL).split() == OWNERS
    rig.kill_init(copy)
    assert rig.out(copy, TELL).split() == OWNERS
    assert rig.out(copy, "echo e >/srv/a/b/new; stat -c %u /srv/a/b/new",
                   user="pg") == "105\n"
    for one in (session, copy):
        rig.close_session(one)


def test_a_sessions_directory_may_belong_to_another_user(rig: ImageRig) -> None:
    """Its owner and mode come along with a fork, a move and a snapshot."""
    session, look = rig.start(movable=True), "stat -c %u:%a /session; cat /session/h"
    rig.out(session, "echo h >/session/h; chmod 640 /session/h; chown -R 105 /session; "
                     "chmod 700 /session")
    copy = rig.start(origin=session)
    assert rig.out(copy, look).split() == ["105:700", "h"]
    name = f"snap-{os.urandom(12).hex()}"
    outcome, _, _ = rig.end(rig.begin(SnapshotCall(name), Kind.FILE, session=session, cores=()))
    assert outcome.state is ActionState.COMPLETED, outcome
    begun = rig.start(snapshot=name)
    assert rig.out(begun, look).split() == ["105:700", "h"]
    moved = rig.start(movable=True, files=rig.packed_files(session))
    assert rig.out(moved, look).split() == ["105:700", "h"]
    for one in (copy, begun, moved):
        rig.close_session(one)


def test_a_move_keeps_the_owners(rig: ImageRig) -> None:
    session = rig.start(movable=True)
    rig.out(session, MADE)
    moved = rig.start(movable=True, files=rig.packed_files(session))
    assert rig.out(moved, TELL).split() == OWNERS
    rig.close_session(moved)


def test_files_of_other_users_are_removed(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, MADE + "; mkdir -p -m 700 /tmp/x/y; touch /tmp/x/y/z; chown -R 7:8 /tmp/x; "
                            "chmod 0 /tmp/x/y")
    place = rig.place(session)
    rig.close_session(session)
    rig.until(lambda: not place.exists())


def test_a_worker_that_dies_leaves_files_that_can_be_removed(
        tmp_path: Path, image: Path, found: Backends) -> None:
    rig = ImageRig(tmp_path, found.bwrap.users, trusted=False)
    rig.image = str(image)
    session = rig.start()
    rig.out(session, MADE)
    place = rig.place(session)
    rig.close()
    assert not place.exists() and not any(place.parent.parent.glob("*/*/changes"))


@pytest.mark.parametrize("way", ["copy", "fuse"])
def test_other_ways_have_several_users_too(way: str, tmp_path: Path, image: Path, found: Backends
                                           ) -> None:
    if way == "fuse" and (why := reason_without_fuse()):
        pytest.skip(why)
    rig = ImageRig(tmp_path, found.bwrap.users, trusted=False)
    rig.image = str(image)
    supervisor = rig.executor._supervisor
    supervisor.backends = with_bwrap(supervisor.backends, root=way)
    session = rig.start()
    assert rig.shell("true", session=session)[0].isolation == f"bwrap+{way}+users+seccomp"
    rig.out(session, MADE)
    assert rig.out(session, TELL).split() == OWNERS
    copy = rig.start(origin=session)
    assert rig.out(copy, TELL).split() == OWNERS
    rig.out(copy, CHANGE)
    assert rig.out(copy, SEEN).split() == SAME
    rig.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of several users")
def test_an_image_of_several_users(rig: ImageRig, tmp_path: Path) -> None:
    """If a file's owner is no user of the sandbox, the image is copied instead of overlaid."""
    image = make_image(tmp_path / "image")
    os.chown(image / "testbed/old", 33, 42)
    session = rig.start(image=str(image))
    assert rig.shell("echo x >>/testbed/old", session=session)[0].isolation.startswith(
        "bwrap+overlay")
    assert rig.out(session, "cat /testbed/old; stat -c %u:%g /testbed/old") == "old\nx\n33:42\n"
    os.chown(image / "testbed/old", 1 << 20, 42)
    other = rig.start(image=str(image))
    outcome, _ = rig.shell("echo x >>/testbed/old", session=other)
    assert (outcome.isolation, outcome.exit_code) == ("bwrap+copy+users+seccomp", 0)
    for one in (session, other):
        rig.close_session(one)


def test_files_of_a_layer_keep_their_owners(rig: ImageRig, tmp_path: Path) -> None:
    """This also holds if a later layer changes them, and in an image that shares a layer."""
    about = {"uid": 105, "gid": 10}
    made = small(
        folder("home"), folder("home/pg", **about, mode=0o700), entry("home/pg/f", "f", **about),
        hard_link("home/pg/hard", "home/pg/f"),
        entry("home/pg/huge", "h", uid=70_000, gid=1 << 40),
        folder("home/pg/of-root", mode=0o700), entry("home/pg/of-root/f", "x"),
        entry("home/pg/set", "s", **about, mode=0o6755),
        entry("etc/passwd", PASSWD.replace("/var/lib/pg", "/home/pg")),
        entry("usr/bin/stat", Path("/usr/bin/stat").read_bytes(), mode=0o755),
        *libraries("/usr/bin/stat"))
    upper = tar_of(folder("home/pg", uid=105, gid=105, mode=0o755),
                   entry("home/pg/new", "n", uid=7))
    both = MadeImage([*made.layers, upper])
    settings = PullSettings(str(tmp_path / "store"))
    found = []
    for number, image in enumerate((made, both)):
        layout = image.layout(tmp_path / f"layout-{number}")
        pulled = pull(f"oci:{layout}", settings, {})
        session = rig.start(image=pulled.folder)
        found.append(rig.out(session, "cd /home/pg; stat -c '%u:%g %a' . f hard huge set").split())
        assert rig.out(session, "echo x >>~/f; cat ~/f ~/new 2>/dev/null || :", user="pg"
                       ).startswith("fx\n")
        assert rig.shell("cat ~/of-root/f", session=session, user="pg")[0].exit_code
        rig.close_session(session)
    rest = ["105:10", "644", "105:10", "644", "0:0", "644", "105:10", "755"]
    assert found == [["105:10", "700", *rest], ["105:105", "755", *rest]]
    store = NodeStore(tmp_path / "store")
    for kept in store.images():
        assert store.remove(kept.digest)
    assert store.prune_layers() > 0
    assert not list((tmp_path / "store").rglob("home")), "files are left"


@pytest.mark.parametrize("end", ["the worker", "an epilog"])
def test_a_workers_scratch_folder_goes_with_the_users_of_its_images(
        tmp_path: Path, found: Backends, end: str) -> None:
    """Its own store is in there, and files of other users are in folders of theirs."""
    scratch = tmp_path / "tangram-node-job7-0f-n1"
    made = MadeImage([tar_of(folder("home/pg", uid=105), entry("home/pg/f", "f", uid=105))])
    layout = made.layout(tmp_path / "layout")
    pulled = pull(f"oci:{layout}", PullSettings(str(scratch / "images")), {})
    assert Path(pulled.folder, "home/pg/f").exists()
    if end == "the worker":
        asyncio.run(worker._Lent(scratch).close())
    else:
        assert main(["worker", f"--remove={scratch}"]) == 0
    assert not scratch.exists()


# ---- hostile users ----


@pytest.mark.skipif(os.geteuid() != 0, reason="only to root the devices of the node belong")
@pytest.mark.attack("code", "files")
def test_the_devices_of_the_node_stay_as_they_are(rig: ImageRig) -> None:
    names = ("null", "zero", "full", "random", "urandom", "tty")
    before = [os.stat(f"/dev/{name}") for name in names]
    session = rig.start()
    read_only = rig.start(writable=False)
    plain = rig.start(image="")
    for one in (session, read_only, plain):
        for name in names:
            assert rig.shell(f"chmod 600 /dev/{name}", session=one)[0].exit_code, name
            assert rig.shell(f"touch -d @0 /dev/{name}", session=one)[0].exit_code, name
        assert rig.out(one, "echo x >/dev/null; cat /dev/null; dd if=/dev/zero bs=1 count=0 "
                            "2>/dev/null") == ""
        rig.close_session(one)
    after = [os.stat(f"/dev/{name}") for name in names]
    assert [s.st_mode for s in before] == [s.st_mode for s in after]
    assert all(s.st_mtime for s in after)


@pytest.mark.attack("code", "processes")
def test_users_cannot_reach_the_pause_process(rig: ImageRig) -> None:
    session = rig.start()
    for user in ("root", "pg"):
        for attack in ("readlink /proc/1/fd/0", "readlink /proc/1/root", "cat /proc/1/environ",
                       "cat /proc/1/fd/0", "echo 1 >/proc/1/oom_score_adj"):
            outcome, back = rig.shell(attack, session=session, user=user)
            assert outcome.exit_code and not back.stdout, (attack, user, back)
        rig.shell("kill -9 1", session=session, user=user)
    assert rig.out(session, "id -u", user="pg") == "105\n"
    rig.close_session(session)


@pytest.mark.attack("code", "processes")
def test_a_fork_bomb_of_many_users_is_stopped(tmp_path: Path, found: Backends) -> None:
    """The kernel limits each user separately; the sandbox's own limit counts all users together."""
    rig = ImageRig(tmp_path, found.bwrap.users, trusted=False, session_pids=20)
    rig.image = str(make_image(tmp_path / "image", (*PROGRAMS, "setpriv")))
    session = rig.start()
    bomb = ("i=1000; while :; do i=$((i+1)); setpriv --reuid $i --regid $i --clear-groups "
            "sleep 60 & done")
    outcome, back = rig.shell(bomb, session=session)
    assert outcome.state is ActionState.FAILED, (outcome, back)
    assert outcome.reason.startswith("pids: ") or b"fork" in back.stderr, (outcome, back)
    rig.close()


def test_small_system_v_memory_is_there(rig: ImageRig, tmp_path: Path) -> None:
    """PostgreSQL needs it. Larger segments would be memory that nobody measures."""
    image = make_image(tmp_path / "image", (*PROGRAMS, "ipcmk"))
    session = rig.start(image=str(image))
    rig.out(session, "ipcmk -M 100", user="pg")
    if "memory" not in rig.executor._supervisor.enforcer.limits:
        outcome, back = rig.shell("ipcmk -M 8192", session=session, user="pg")
        assert outcome.exit_code and b"not implemented" in back.stderr, back
    rig.close_session(session)


def test_the_signal_of_a_user_reaches_its_own_processes_only(rig: ImageRig) -> None:
    session = rig.start()
    rig.out(session, "sleep 50 >/dev/null 2>&1 &")
    outcome, _ = rig.shell("kill -9 -1; echo alive", session=session, user="pg")
    assert outcome.isolation
    assert rig.out(session, LEFT) == "1\n"
    rig.close_session(session)
