"""/home/user, which programs for E2B's sandboxes name, is the directory of other sandboxes too."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.hostile_rig import reason_to_skip

from tangram_hpc import LocalCluster
from tangram_hpc.sandbox.isolation.container_runtimes import RUNTIMES, ContainerSpec


def test_commands_and_file_methods_find_it(tmp_path: Path) -> None:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    with LocalCluster(cpus=1, isolation="bwrap", home=tmp_path) as client, client.session() as s:
        assert s.exec("echo x >/home/user/a; cat ~/a; cd /home/user && pwd -P").result().text == (
            "x\n/session\n")
        s.write("/home/user/b/c", b"y").result()
        assert s.read("b/c").result() == b"y"
        assert s.exec("cat b/c", cwd="/home/user").result().text == "y"
        assert not s.exec("rm /home/user").result().ok
        assert s.exec("touch /home/other").result().exit_code == 1


@pytest.mark.parametrize(("shown", "link"), [
    ("/usr", True), ("/home/users", True), ("/home/other/venv", True), ("/home/user/venv", False),
    ("/home/user", False), ("/home", False)])
def test_paths_of_the_node_come_first(shown: str, link: bool) -> None:
    words = RUNTIMES["bwrap"].argv(ContainerSpec("/scratch", read=("/usr", shown)))
    assert ("/home/user" in words[words.index("/tmp"):]) is link
    image = RUNTIMES["bwrap"].argv(ContainerSpec("/scratch", root="/root", image="/image",
                                                 read=("/usr",)))
    assert "/home/user" not in image
