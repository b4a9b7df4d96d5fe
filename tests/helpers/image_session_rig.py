"""Executors whose sessions have an image, and what their test files share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.executor_rig import Rig, as_an_ordinary_user
from helpers.root_folder_rig import fingerprint, make_image
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.sandbox.manager.backends import Backends


class ImageSessionRig(Rig):
    """An executor whose sessions have an image, and the users that the machine gives them."""

    image = ""
    last = 0

    def start(self, **spec: Any) -> int:
        number = self.ask(**spec)
        assert number in self.up, self.down[number]
        return number

    def refused(self, **spec: Any) -> str:
        """The reason with which a session is refused."""
        number = self.ask(**spec)
        assert number in self.down, "it was opened"
        return self.down[number]

    def ask(self, **spec: Any) -> int:
        """Requests a session, and waits until it is up or down."""
        ImageSessionRig.last += 1
        number = ImageSessionRig.last
        given = SessionSpec(number, **{"image": self.image, "trusted": False} | spec)
        self.loop.call_soon(self.executor.open_session, given)
        self.until(lambda: number in self.down or number in self.up)
        return number

    def close_session(self, session: int) -> None:
        self.loop.call_soon(self.executor.close_session, session)
        self.until(lambda: session in self.down)

    def place(self, session: int) -> Path:
        process = self.session(session).process
        assert process is not None
        return Path(process.folder)

    def kill_init(self, session: int) -> None:
        """Kills a session's init, and waits for the next one."""
        one = self.session(session)
        assert one.process is not None
        process = one.process
        os.kill(process.pid, signal.SIGKILL)
        self.until(lambda: one.process is not process and one.up)

    def packed_files(self, session: int) -> str:
        """Packs a session as a move does; returns the name of its files for `SessionSpec.files`."""
        self.loop.call_soon(self.executor.pack_session, session)
        self.until(lambda: session in self.packed or session in self.down)
        assert session in self.packed, self.down
        return self.packed[session]

    def out(self, session: int, text: str, **fields: Any) -> str:
        """What a command that succeeds says."""
        outcome, back = self.shell(text, session=session, **fields)
        assert outcome.state is ActionState.COMPLETED, (outcome, back)
        return back.stdout.decode()


def with_bwrap(backends: Backends, **found: Any) -> Backends:
    """Returns the backends as if the probe had found this out about bwrap."""
    return replace(backends, bwrap=msgspec.structs.replace(backends.bwrap, **found))


class ImageRig(ImageSessionRig):
    """The same with user 0 alone, unless the sessions are given other users."""

    def __init__(self, folder: Path, users: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(folder, **options)
        supervisor = self.executor._supervisor
        supervisor.backends = with_bwrap(supervisor.backends, users=users)


def with_image(rig: ImageSessionRig, image: Path) -> Iterator[Any]:
    """Yields the rig, whose sessions have this image; then closes the rig, and asserts that the
    image is unchanged."""
    rig.image = str(image)
    before = fingerprint(image)
    yield rig
    rig.close()
    assert fingerprint(image) == before, "a session changed its image"


@pytest.fixture(scope="module", name="found")
def found_backends() -> Backends:
    return as_an_ordinary_user(SandboxSettings())


@pytest.fixture(scope="module", autouse=True, name="works")
def image_sessions_work(found: Backends) -> None:
    if "bwrap" not in found.trusted:
        pytest.skip(f"bwrap: {found.why_not.get('bwrap')}")
    if not found.bwrap.root:
        pytest.skip(f"no root can be written here: {found.why_not}")


@pytest.fixture(scope="module", name="image")
def small_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image(tmp_path_factory.mktemp("image") / "root")
