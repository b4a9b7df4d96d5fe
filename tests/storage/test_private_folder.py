"""Folders of clients: those of killed clients are removed by the next one, and no others."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram_hpc.private_folder import client_folder, is_abandoned
from tangram_hpc.storage.rundir import make_scratch

REPO = Path(__file__).resolve().parents[2]

LISTENER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tangram_hpc.transport.socket.direct_listener import SocketDirectListener
listener = SocketDirectListener("job")
ready, say = os.pipe()
child = os.fork() if sys.argv[2] == "fork" else 1
if not child:
    listener.abandon()
    os.write(say, b"x")
    time.sleep(600)
if child > 1:
    os.read(ready, 1)
print(child, *listener.addresses, flush=True)
time.sleep(600)
"""


@contextmanager
def listening(base: Path, how: str = "") -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A process that waits for its first direct call, the child it forked, and its folder."""
    run = subprocess.Popen([sys.executable, "-c", LISTENER, str(REPO), how], text=True,
                           stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(base)})
    assert run.stdout is not None
    child, _, path = run.stdout.readline().strip().partition(" unix:")
    try:
        yield run, int(child), Path(path).parent
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
        if how:
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("next_one", ["client", "worker"])
def test_the_folder_of_a_killed_client_is_removed_by_the_next_one(
        short_folder: Path, monkeypatch: pytest.MonkeyPatch, next_one: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    with listening(short_folder) as (dead, _, gone), listening(short_folder) as (_, _, kept):
        assert gone.parent == kept.parent == short_folder
        assert stat.S_IMODE(gone.stat().st_mode) == 0o700
        dead.send_signal(signal.SIGTERM)
        dead.wait()
        assert is_abandoned(gone) and is_abandoned(kept) is False
        if next_one == "worker":
            make_scratch({}, str(short_folder), "worker")
        else:
            client_folder().remove()
        assert not gone.exists() and (kept / "direct").exists()


def test_a_forked_child_that_outlives_a_client_does_not_keep_its_folder(
        short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    with listening(short_folder, "fork") as (dead, child, gone):
        dead.kill()
        dead.wait()
        os.kill(child, 0)
        client_folder().remove()
        assert not gone.exists()


def test_what_is_not_a_clients_folder_is_left_alone(
        short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    target = short_folder / "precious"
    (target / "inner").mkdir(parents=True)
    (target / ".alive").touch()
    (short_folder / "tangram-client-link").symlink_to(target)
    (short_folder / "tangram-client-new").mkdir()
    (short_folder / "tangram-client-file").touch()
    before = sorted(short_folder.rglob("*"))
    folder = client_folder()
    folder.remove()
    folder.remove()
    assert sorted(short_folder.rglob("*")) == before
