"""A Python that was built against an old C library and the headers of an old kernel, as those of
conda and uv are, to run everywhere. It lacks some functions of `os` on every system. A file that
removes them at the start of Python stands for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.root_folder_rig import make_image

from tangram_hpc import LocalCluster
from tangram_hpc.transport.socket.certificate import make_certificate

LACKING = """
import os

def without_setsid(real):
    def spawn(*args, setsid=False, **options):
        if setsid:
            raise NotImplementedError("The setsid parameter is not supported by this platform.")
        return real(*args, **options)
    return spawn

for name in ("memfd_create", "pidfd_open", "O_TMPFILE", "copy_file_range"):
    vars(os).pop(name, None)
os.posix_spawn, os.posix_spawnp = map(without_setsid, (os.posix_spawn, os.posix_spawnp))
"""


@pytest.fixture(scope="module", params=["bwrap", "process"])
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[tuple[LocalCluster, str]]:
    if request.param == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    place = tmp_path_factory.mktemp("portable")
    (place / "sitecustomize.py").write_text(LACKING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{place}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"))
        with LocalCluster(cpus=2, home=place / "home", isolation=request.param,
                          enforcement="affinity") as running:
            yield running, request.param


def test_commands_get_their_input(portable: tuple[LocalCluster, str], tmp_path: Path) -> None:
    """Also without any file of Python in sight, as in an image."""
    cluster, kind = portable
    assert cluster.submit(lambda: not hasattr(os, "memfd_create"), trusted=True).result(20)
    bwrap = kind == "bwrap"
    image = str(make_image(tmp_path / "image")) if bwrap else ""
    for writable in (False, True)[:1 + bwrap]:
        with cluster.session(image=image, writable=writable, trusted=not bwrap) as session:
            assert session.exec("cat; sleep 0.01", stdin=b"said").result(20).text == "said"
            assert session.exec(["cat"], stdin=b"said").result(20).text == "said"


def test_commands_and_shells_lead_a_process_session(portable: tuple[LocalCluster, str]) -> None:
    cluster, kind = portable
    look = "read pid name state parent group session rest </proc/self/stat; [ $pid = $session ]"
    bwrap = kind == "bwrap"
    with cluster.session(trusted=not bwrap) as session:
        assert session.exec(look, stdin=b"x").result(20).exit_code == 0
        shell = session.shell()
        assert shell.run("cd /tmp && x=5").result(20).exit_code == 0
        assert shell.run("echo $x $PWD").result(20).text == "5 /tmp\n"
        with session.pty(["/bin/sh", "-c", "tty >/dev/null && echo own terminal"]) as pty:
            assert "own terminal" in b"".join(iter(lambda: pty.read(), b"")).decode()


def test_a_certificate_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert len(make_certificate().fingerprint) == 64
