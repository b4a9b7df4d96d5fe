"""What an image says of its programs: WORKDIR, USER and ENV hold for commands, explicit arguments
win, and ENTRYPOINT and CMD are ignored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.image_rig import entry, folder, libraries, small

from tangram_hpc import InfeasibleRequest, LocalCluster

pytestmark = [
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs several users"),
]
PASSWD = "root:x:0:0:root:/root:/bin/sh\npg:x:105:106::/home/pg:/bin/sh\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2) as running:
        yield running


def test_commands_begin_in_its_directory_as_its_user(cluster: LocalCluster, tmp_path: Path) -> None:
    image = small(entry("etc/passwd", PASSWD), folder("task", uid=105), folder("home"),
                  folder("home/pg", uid=105, gid=106), env=["FOUND=yes", "USER=other"],
                  WorkingDir="/task", User="pg", Entrypoint=["/bin/false"], Cmd=["/bin/false"])
    layout = image.layout(tmp_path / "layout")
    tell = 'pwd; id -u; id -g; echo "$HOME $FOUND $USER"'
    own = b"/task\n105\n106\n/home/pg yes pg\n"
    with cluster.session(image=f"oci:{layout}") as session:
        assert session.image_digest == image.digest
        assert session.exec(tell).result(60).check().stdout == own
        told = session.exec(tell, user="root").result(60).check().stdout
        assert told == b"/task\n0\n0\n/root yes root\n"
        told = session.exec("pwd; id -u", user=7, cwd="/tmp").result(60).check().stdout
        assert told == b"/tmp\n7\n"
        assert session.exec("pwd", cwd="../home").result(60).check().stdout == b"/home\n"
        assert session.exec("pwd", cwd="/session").result(60).check().stdout == b"/session\n"
        session.exec("echo by-user >file; echo $$ >~/mine").result(60).check()
        assert session.read("file").result(60) == b"by-user\n"
        session.write("sub/given", b"given").result(60)
        assert session.exec("cat /task/sub/given").result(60).check().stdout == b"given"
        with session.shell() as shell:
            assert shell.run("id -u; pwd").result(60).stdout == b"105\n/task\n"
        with session.fork() as copy:
            assert copy.exec(tell).result(60).check().stdout == own
    with cluster.session(image=f"oci:{layout}", user="root") as session:
        assert session.exec("id -u").result(60).check().stdout == b"0\n"


def test_plain_commands_begin_there_however_often(cluster: LocalCluster, tmp_path: Path) -> None:
    """This also holds when the directory was replaced, which a long-lived process would not see."""
    move = (entry("bin/mv", Path("/bin/mv").read_bytes(), mode=0o755), *libraries("/bin/mv"))
    layout = small(*move, WorkingDir="/new/task").layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        for _ in range(5):  # from the second on they are served by the compiled loop
            assert session.exec("pwd; ls").result(60).check().stdout == b"/new/task\n"
        session.exec("mv /new/task /new/old").result(60).check()
        assert session.exec("pwd; ls").result(60).exit_code == 126
        session.write("/new/task/again", b"x").result(60)
        for _ in range(3):
            assert session.exec("pwd; ls").result(60).check().stdout == b"/new/task\nagain\n"


def test_an_image_without_these_is_as_before(cluster: LocalCluster, tmp_path: Path) -> None:
    layout = small(User="0:0").layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        assert session.exec("pwd; id -u").result(60).check().stdout == b"/session\n0\n"


@pytest.mark.parametrize("wrong", ["/etc/hello", "relative", "/proc/none"])
def test_a_directory_that_cannot_be_entered_refuses_the_session(
        cluster: LocalCluster, tmp_path: Path, wrong: str) -> None:
    layout = small(WorkingDir=wrong).layout(tmp_path / "layout")
    for writable in (True, False):
        session = cluster.session(image=f"oci:{layout}", writable=writable)
        with pytest.raises(InfeasibleRequest, match="correct WORKDIR of the image"):
            session.opened.result(60)


def test_a_user_that_is_not_there_fails_the_command(cluster: LocalCluster, tmp_path: Path) -> None:
    layout = small(entry("etc/passwd", PASSWD), User="nobody-knows").layout(tmp_path / "layout")
    with cluster.session(image=f"oci:{layout}") as session:
        done = session.exec("true").result(60)
        assert done.exit_code == 126 and "no user 'nobody-knows'" in done.reason
        assert session.exec("id -u", user="root").result(60).check().stdout == b"0\n"
