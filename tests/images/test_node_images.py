"""A worker's images: one pull for all that wait, ended when nobody waits, and none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from helpers.executor_rig import alive
from helpers.image_rig import (
    MadeImage,
    entry,
    needs_squashfs,
    sif_of,
    skopeo_folder,
    squashfs_of,
    tar_of,
)

from tangram_hpc.images.node_images import NodeImages
from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PullSettings, pull
from tangram_hpc.images.pull_process import PullProcess
from tangram_hpc.ports import ReadyImage
from tangram_hpc.resources import process_tree

Said = list[tuple[ReadyImage | None, str, bool]]


def run(tmp_path: Path, test: Callable[[NodeImages], Awaitable[None]]) -> None:
    async def whole() -> None:
        images = NodeImages(PullSettings(str(tmp_path / "store")))
        try:
            await asyncio.wait_for(test(images), 60)
        finally:
            images.close()

    before = open_files()
    asyncio.run(whole())
    left = open_files() - before
    end = time.monotonic() + 10
    while left and time.monotonic() < end:  # other threads of this process open and close some
        time.sleep(0.05)
        left &= open_files()
    assert not left
    assert not [pid for pid in process_tree.descendants(os.getpid())
                if b"pull_process" in _command(pid)]


def open_files() -> set[tuple[str, str]]:
    """Number and target of each open descriptor; pipes and sockets have a target of their own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def want(images: NodeImages, said: Said, session: int, image: str) -> None:
    images.open(session, image, lambda *what: said.append(what))


@pytest.fixture(params=["layout", "skopeo's folder"])
def layout(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    image = MadeImage([tar_of(entry("a", "1"))], env=["A=1"])
    if request.param == "layout":
        return str(image.layout(tmp_path / "layout"))
    return str(skopeo_folder(tmp_path / "folder", image))


@pytest.mark.parametrize("rule", [["-mtime", "+30"], ["-name", "*"]])
def test_a_session_after_a_cleaner_has_the_whole_image(tmp_path: Path, rule: list[str]) -> None:
    """A cleaner takes old files of an image that a session of this worker uses."""
    layout = str(MadeImage([tar_of(entry("a", "1", mtime=1))]).layout(tmp_path / "layout"))

    async def test(images: NodeImages) -> None:
        said: Said = []
        want(images, said, 1, layout)
        await until(lambda: len(said) == 1)
        subprocess.run(["find", tmp_path / "store", "-type", "f", *rule, "-delete"], check=True)
        for session in (2, 3):
            want(images, said, session, layout)
        await until(lambda: len(said) == 3)
        first, second = said[0][0], said[1][0]
        assert first is not None and second is not None and said[2] == (second, "", False)
        assert second.digest == first.digest and second.folder != first.folder
        assert (Path(second.folder) / "a").read_text() == "1"
        images.open(4, layout, lambda *got: said.append(got), 1)  # a fork of the first session
        await until(lambda: len(said) == 4)
        assert said[3] == (second, "", False)
        store = NodeStore(tmp_path / "store")
        drafts = tmp_path / "store" / "drafts"
        for used in (1, 0):  # how many folders hold what the cleaner has left to a session
            for left in drafts.iterdir():
                os.utime(left, (0, 0))
            store.sweep_drafts()
            assert len(list(drafts.iterdir())) == used
            images.release(1)
        for session in (2, 3, 4):
            assert store.in_use(first.digest)
            images.release(session)
        assert not store.in_use(first.digest)

    run(tmp_path, test)


def test_an_image_that_was_removed_and_pulled_by_another_process_is_found_anew(
        tmp_path: Path, layout: str) -> None:
    settings = PullSettings(str(tmp_path / "store"))
    pull(layout, settings, {})  # a process that pulls keeps the descriptor of a namespace

    async def test(images: NodeImages) -> None:
        said: Said = []
        want(images, said, 1, layout)
        await until(lambda: len(said) == 1)
        images.release(1)
        first = said[0][0]
        assert first is not None and NodeStore(tmp_path / "store").remove(first.digest)
        pull(layout, settings, {})
        want(images, said, 2, layout)
        await until(lambda: len(said) == 2)
        second = said[1][0]
        assert second is not None and (Path(second.folder) / "a").read_text() == "1"

    run(tmp_path, test)


def test_sessions_of_one_image_share_one_pull(tmp_path: Path, layout: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = PullProcess.answer
    monkeypatch.setattr(PullProcess, "answer", lambda process, image, settings: (
        calls.append(image), real(process, image, settings))[1])

    async def test(images: NodeImages) -> None:
        said: Said = []
        for session in range(20):
            want(images, said, session, layout)
        await until(lambda: len(said) == 20)
        ready = said[0][0]
        assert ready is not None and all(one == (ready, "", False) for one in said)
        assert (Path(ready.folder) / "a").read_text() == "1" and ready.env == ("A=1",)
        want(images, said, 99, layout)  # its file is the one that was unpacked: no pull
        await until(lambda: len(said) == 21)
        assert calls == [layout]
        store = NodeStore(tmp_path / "store")
        for session in (*range(20), 99):
            assert store.in_use(ready.digest)
            images.release(session)
        assert not store.in_use(ready.digest)
        assert store.remove(ready.digest)
        want(images, said, 100, layout)  # it is gone, and is pulled again
        await until(lambda: len(said) == 22)
        again = said[21][0]
        assert again is not None and again.digest == ready.digest and len(calls) == 2

    run(tmp_path, test)


@pytest.mark.parametrize("what", ["time", "lock"])
def test_a_store_that_fails_ends_no_worker(tmp_path: Path, layout: str, what: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    async def test(images: NodeImages) -> None:
        broken: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: broken.append(about))
        said: Said = []
        want(images, said, 1, layout)
        await until(lambda: said)
        ready = said[0][0]
        assert ready is not None
        images.release(1)
        if what == "lock":
            monkeypatch.setattr(fcntl, "flock", failing)
        else:  # refused as on a read-only file system, but to root, too
            used = tmp_path / "store/images" / ready.digest[7:] / "used"
            used.unlink()
            used.symlink_to(used.name)
        want(images, said, 2, layout)
        await until(lambda: len(said) == 2 or broken)
        assert not broken
        assert said[1] == ((ready, "", False) if what == "time" else (
            None, f"image_store {tmp_path / 'store'}: No locks available", False))

    run(tmp_path, test)


def test_a_pull_without_a_thread_is_told_and_the_next_one_may_have_one(
        tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith("tangram-image"):
            raise RuntimeError("can't start new thread")  # as where `pids.max` is used up
        start(thread)

    async def test(images: NodeImages) -> None:
        said: Said = []
        with monkeypatch.context() as used_up:
            used_up.setattr(threading.Thread, "start", starting)
            for session in (1, 2):
                want(images, said, session, layout)
            await until(lambda: len(said) == 2)
        why = "image: no process can be started to unpack it (can't start new thread)"
        assert said == [(None, why, False)] * 2
        want(images, said, 3, layout)
        await until(lambda: len(said) == 3)
        assert said[2][0] is not None

    run(tmp_path, test)


def test_a_file_that_was_replaced_is_unpacked_again(tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"

    async def test(images: NodeImages) -> None:
        digests = []
        for number in range(3):
            if number != 1:
                made = MadeImage([tar_of(entry("a", str(number)))])
                made.oci_archive(tmp_path / f"new{number}.tar").replace(archive)
            said: Said = []
            want(images, said, number + 1, f"oci-archive:{archive}")
            await until(lambda said=said: said)
            assert said[0][0] is not None, said
            digests.append(said[0][0].digest)
        assert digests[0] == digests[1] != digests[2] == made.digest

    run(tmp_path, test)


def test_a_name_that_was_imported_anew_leads_to_the_new_image(tmp_path: Path) -> None:
    made = [MadeImage([tar_of(entry("a", str(number)))]) for number in range(2)]

    async def test(images: NodeImages) -> None:
        digests = []
        for number in (0, 0, 1, 1):
            if made[number].digest not in digests:
                archive = made[number].oci_archive(tmp_path / f"{number}.tar")
                importing = (
                    "import sys; from tangram_hpc.images.pull import PullSettings, import_image; "
                    "import_image(sys.argv[1], 'mine:1', PullSettings(sys.argv[2]), {})")
                subprocess.run([sys.executable, "-c", importing, str(archive),
                                str(tmp_path / "store")], check=True)
            said: Said = []
            want(images, said, len(digests) + 1, "mine:1")
            await until(lambda said=said: said)
            assert said[0][0] is not None, said
            digests.append(said[0][0].digest)
        assert digests == [made[number].digest for number in (0, 0, 1, 1)]

    run(tmp_path, test)


def test_a_folder_needs_no_process(tmp_path: Path) -> None:
    (tmp_path / "root/bin").mkdir(parents=True)

    async def test(images: NodeImages) -> None:
        said: Said = []
        want(images, said, 1, str(tmp_path / "root"))
        await until(lambda: said)
        assert said == [(ReadyImage(str(tmp_path / "root")), "", False)]
        assert not (tmp_path / "store").exists()

    run(tmp_path, test)


def test_never_and_not_now_are_told_apart(tmp_path: Path, layout: str) -> None:
    async def test(images: NodeImages) -> None:
        said: Said = []
        want(images, said, 1, str(tmp_path / "nothing"))
        await until(lambda: said)
        os.chmod(tmp_path / "store", 0o777)
        want(images, said, 2, layout)
        await until(lambda: len(said) == 2)
        first, why, never = said[0]
        (second, why2, never2), = [one for one in said if "image_store" in one[1]]
        assert first is None and never and "No such file" in why
        assert second is None and not never2 and "others may write into it" in why2

    run(tmp_path, test)


@pytest.fixture
def silent() -> Iterator[str]:
    """A registry that says nothing: its connections stay in the queue of its socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_pull_that_nobody_waits_for_is_killed(tmp_path: Path, silent: str) -> None:
    async def test(images: NodeImages) -> None:
        said: Said = []
        name = f"{silent}/app"
        for session in (1, 2):
            want(images, said, session, name)
        await until(lambda: (tmp_path / "store/locks/all").exists())
        images.release(1)
        await asyncio.sleep(0.05)
        assert images._pulls and not images._pulls[name].process.cancelled
        images.release(2)
        await until(lambda: not images._pulls)
        assert said == []
        want(images, said, 3, name)  # and another session may begin anew
        images.release(3)
        want(images, said, 4, name)  # also while the killed one is not gone yet
        await until(lambda: images._pulls and not images._pulls[name].process.cancelled)

    run(tmp_path, test)
    assert not list((tmp_path / "store/drafts").iterdir())


@needs_squashfs
def test_a_killed_pull_leaves_no_unsquashfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    pid = tmp_path / "store/pid"
    image = tmp_path / "image.sif"
    image.write_bytes(sif_of(squashfs_of([entry("a", "1")], tmp_path)))
    slow = tmp_path / "tools/unsquashfs"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")

    async def test(images: NodeImages) -> None:
        said: Said = []
        want(images, said, 1, str(image))
        await until(lambda: said or (pid.exists() and pid.read_text().strip()))
        assert said == []
        images.release(1)
        await until(lambda: not alive(int(pid.read_text())))

    run(tmp_path, test)


def test_the_helper_ends_with_its_worker(tmp_path: Path, silent: str) -> None:
    import json
    import subprocess
    import sys

    helper = subprocess.Popen([sys.executable, "-m", "tangram_hpc.images.pull_process"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(json.dumps({"image": f"{silent}/app", "settings": {
        "store": str(tmp_path / "store")}}).encode() + b"\n")
    helper.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        helper.wait(1)
    helper.stdin.close()
    assert helper.wait(10) != 0
    helper.stdout.close()


def test_the_helper_cannot_write_beside_its_stores(tmp_path: Path) -> None:
    """Were an archive to lead it out after all, the kernel would refuse."""
    import subprocess
    import sys

    from tangram_hpc.sandbox.isolation import landlock

    if landlock.abi() < 2:
        pytest.skip("this kernel's Landlock does not allow links between folders")
    text = ("import sys; from tangram_hpc.images.pull_process import _confine;"
            "from tangram_hpc.images.pull import PullSettings;"
            f"_confine(PullSettings({str(tmp_path / 'store')!r}));"
            f"open({str(tmp_path / 'store/in')!r}, 'w'); open('/dev/null', 'w');"
            f"open({str(tmp_path / 'out')!r}, 'w')")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr and str(tmp_path / "out") in done.stderr
    assert os.listdir(tmp_path / "store") == ["in"] and not (tmp_path / "out").exists()
