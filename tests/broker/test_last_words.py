"""A broker that cannot write any more tells everybody why before it ends."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of

from tangram_hpc import BrokerUnreachable, LocalCluster


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_clients_of_a_broker_whose_disk_is_full_are_told_at_once(
        small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(cpus=2, mem_mib=500, home=small_disk, grace_s=60) as cluster:
        (listens, *_) = json.loads(cluster.access.read_text())["addresses"]
        scratch = Path(listens.removeprefix("unix:")).parent
        assert scratch.is_dir()
        waits = cluster.submit("sleep 100")
        assert cluster.submit("true").result(60).ok
        (small_disk / "filler").write_bytes(b"x" * 1_000_000)
        room = os.statvfs(small_disk)
        (small_disk / "more").write_bytes(b"x" * (room.f_bavail * room.f_frsize))
        began = time.monotonic()
        with pytest.raises(BrokerUnreachable, match=f"where it writes .TANGRAM_HOME {small_disk}"):
            while True:
                cluster.submit("true").result(60)
        with pytest.raises(BrokerUnreachable, match="No space left on device"):
            waits.result(60)
        assert time.monotonic() - began < 30, "they waited for another broker"
        assert broker_of(cluster).wait(30) == 1
        assert not scratch.exists()
    assert "it is started again" not in capfd.readouterr().err
