"""bubblewrap before 0.8, as Red Hat 8 and 9 and Ubuntu 22.04 have it. A program that refuses the
later options, and passes all else on, stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ordinary_user import ordinary_user
from helpers.other_bwrap import cluster_with
from helpers.root_folder_rig import make_image

from tangram_hpc import LocalCluster

EARLY = """#!/bin/sh
for word; do
    case $word in
    --help) exec {bwrap} --help 2>&1 | grep -v -e --disable-userns -e --perms -e --size; exit ;;
    --disable-userns | --perms | --size) echo "bwrap: Unknown option $word" >&2; exit 1 ;;
    esac
done
exec {bwrap} "$@"
"""
# with what every shell has, as the image has nothing else
LOOK = """
while read -r line; do
    case $line in *" /dev/shm "*) echo "$line" ;; esac
done </proc/mounts
[ -k /dev/shm ] && echo x >/dev/shm/new && echo written
"""

# enters a process whose user namespace is that of the machine
NO_NAMESPACE = """
import os, signal
from tangram_hpc.sandbox.isolation import join
pid = os.fork()
if not pid:
    signal.pause()
try:
    join.enter(pid, bar_users=True)
except OSError as error:
    print(error)
os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_with(EARLY, tmp_path_factory.mktemp("early")) as (found, running):
        assert found.bwrap.old_bwrap
        yield running


@pytest.mark.parametrize("trusted", [False, True])
def test_commands_make_no_user_namespaces(cluster: LocalCluster, trusted: bool) -> None:
    with cluster.session(trusted=trusted) as session:
        done = session.exec("unshare --user true; echo $?; echo 9 >/proc/sys/user/"
                            "max_user_namespaces; cat /proc/sys/user/max_user_namespaces").result()
    assert done.text.split() == ["1", "0"]


@pytest.mark.parametrize("image", ["none", "read-only", "writable"])
def test_shared_memory_is_limited_and_everybodys(cluster: LocalCluster, tmp_path: Path, image: str
                                                 ) -> None:
    root = "" if image == "none" else str(make_image(tmp_path / "image"))
    with cluster.session(image=root, writable=image == "writable") as session:
        mount, last = session.exec(LOOK).result().text.splitlines()
    assert "size=65536k" in mount and last == "written"


def test_the_machine_itself_is_never_barred_from_user_namespaces() -> None:
    with ordinary_user() as user:  # root could do it
        told = user.run("-c", NO_NAMESPACE)
    assert "it has no user namespace of its own" in told.stdout, told.stderr
