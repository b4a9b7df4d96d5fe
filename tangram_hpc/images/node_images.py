"""A worker's images: makes them ready without blocking its loop, and keeps those in use.

Sessions of one image wait for one pull; a pull that nobody waits for any more is killed. An image
stays locked in the store for as long as a session of this worker uses it, so that no other process
removes it. Everything here but the pulls themselves runs on the worker's loop.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..domain.image_name import parse_image_name
from ..errors import InvalidInput
from ..ports import ImageReady, ReadyImage
from .image_errors import ImageUnavailable
from .local_images import DIR, folder_kind
from .node_store import NodeStore
from .pull import IMPORTED, PullSettings
from .pull_process import PullAnswer, PullProcess

_PULLS = 4  # that run at a time on a node; more would only share its disk and its network
_Stamp = tuple[int, ...]
_NO_FILE: _Stamp = (0,)
_TRIES = 2  # an image may be removed by another process between its pull and its use


@dataclass
class _Pull:
    """A pull that is under way: its process, and who waits for it."""

    process: PullProcess
    waiting: dict[int, ImageReady] = field(default_factory=dict)
    tries: int = 1


class NodeImages:
    """Fills `ports.Images`. Create and use it on a running asyncio loop.

    Args:
        settings: where the stores are, and what may be pulled.
    """

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_PULLS, "tangram-image")
        self._store: NodeStore | None = None
        self._pulls: dict[str, _Pull] = {}
        # what was ready once, and which file it was made of; both may have changed since
        self._known: dict[str, tuple[_Stamp, ReadyImage]] = {}
        # An image that was unpacked anew while sessions use what a cleaner has left of it has two
        # folders for some time, with a lock and users each.
        self._locks: dict[str, int] = {}  # folder -> descriptor
        self._users: dict[str, set[int]] = {}  # folder -> sessions
        self._held: dict[int, ReadyImage] = {}  # session -> image that has a digest
        self._closed = False

    def open(self, session: int, image: str, then: ImageReady, origin: int = 0) -> None:
        """See `ports.Images`."""
        held = self._held.get(origin) if origin else None
        if held is not None and not self._use(session, image, held):
            return then(held, "", False)
        known = self._known.get(image)
        if known is not None and known[0] == _NO_FILE:
            if self._imported_anew(image, known[1]):
                del self._known[image]
            elif not self._use(session, image, known[1]):
                return then(known[1], "", False)
        pull = self._pulls.get(image)
        if pull is None:
            pull = self._pulls[image] = _Pull(PullProcess())
            self._start(image, pull)
        pull.waiting[session] = then

    def release(self, session: int) -> None:
        """See `ports.Images`."""
        for pull in self._pulls.values():
            if pull.waiting.pop(session, None) is not None and not pull.waiting:
                pull.process.cancel()
        held = self._held.pop(session, None)
        if held is not None:
            users = self._users[held.folder]
            users.discard(session)
            if not users:
                del self._users[held.folder]
                os.close(self._locks.pop(held.folder))

    def close(self) -> None:
        """See `ports.Images`."""
        self._closed = True
        for pull in self._pulls.values():
            pull.waiting.clear()
            pull.process.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()
        self._users.clear()
        self._held.clear()

    def _start(self, image: str, pull: _Pull) -> None:
        def ended(future: asyncio.Future[tuple[_Stamp, PullAnswer]]) -> None:
            if not future.cancelled() and not self._closed:
                self._ended(image, pull, *future.result())

        try:
            begun = self._loop.run_in_executor(self._threads, _answer, pull.process, image,
                                               self._settings, self._known.get(image))
        except RuntimeError as error:  # no thread can be started
            pull.process.cancel()  # the pool keeps the call, and makes it when it has a thread
            self._loop.call_soon(self._unbegun, image, pull,
                                 f"image: no process can be started to unpack it ({error})")
        else:
            begun.add_done_callback(ended)

    def _unbegun(self, image: str, pull: _Pull, why: str) -> None:
        """Tells all that wait for a pull that it cannot begin."""
        if self._pulls.get(image) is pull:
            del self._pulls[image]
        for then in pull.waiting.values():
            then(None, why, False)

    def _ended(self, image: str, pull: _Pull, stamp: _Stamp, answer: PullAnswer) -> None:
        if not pull.waiting:  # it was cancelled; whoever came since begins anew
            if self._pulls.get(image) is pull:
                del self._pulls[image]
            return
        if pull.process.cancelled:  # a session came after the last one had gone
            pull.process = PullProcess()
            return self._start(image, pull)
        del self._pulls[image]
        ready = ReadyImage(answer.folder, answer.digest, answer.env, answer.workdir, answer.user)
        if not answer.error:
            self._known[image] = stamp, ready
        for session, then in pull.waiting.items():
            if answer.error:
                then(None, answer.error, answer.infeasible)
            elif not (why := self._use(session, image, ready)):
                then(ready, "", False)
            elif pull.tries < _TRIES:
                self._known.pop(image, None)
                again = self._pulls.get(image)
                if again is None:
                    again = self._pulls[image] = _Pull(PullProcess(), tries=pull.tries + 1)
                    self._start(image, again)
                again.waiting[session] = then
            else:
                then(None, why, False)

    def _imported_anew(self, image: str, known: ReadyImage) -> bool:
        """Returns whether somebody has given an image's name to another one by `tangram image
        import`. A name of a registry keeps its image for as long as the worker lives."""
        try:
            self._store = self._store or NodeStore(self._settings.store)
            name = parse_image_name(image).full
            return (self._store.about_name(name) == IMPORTED
                    and self._store.digest_of_name(name) != known.digest)
        except (ImageUnavailable, OSError):
            return False

    def _use(self, session: int, name: str, image: ReadyImage) -> str:
        """Locks the image of this name for a session; returns why that cannot be done, or an empty
        text."""
        if not image.digest:
            return ""
        try:
            self._store = self._store or NodeStore(self._settings.store)
            if image.folder in self._locks:  # a cleaner may have taken files of it
                there = self._store.is_whole(image.digest) and os.path.isdir(image.folder)
            else:
                fd = self._store.hold(image.digest)
                there = fd >= 0 and os.path.isdir(image.folder)  # or it was unpacked anew
                if there:
                    self._locks[image.folder] = fd
                elif fd >= 0:
                    os.close(fd)
        except ImageUnavailable as error:
            return str(error)
        if not there:
            return f"image: {name} was removed from the store while it was opened"
        self._users.setdefault(image.folder, set()).add(session)
        self._held[session] = image
        return ""


def _answer(process: PullProcess, image: str, settings: PullSettings,
            known: tuple[_Stamp, ReadyImage] | None) -> tuple[_Stamp, PullAnswer]:
    """Unpacks an image, or finds it unpacked; blocks, so it runs in a thread. No process is started
    for a folder that holds a root file system, or for a file that has not changed since it was
    unpacked."""
    stamp = _stamp(image)
    if image.startswith("/") and os.path.isdir(image) and not folder_kind(image):
        return stamp, PullAnswer(image)
    if known is not None and known[0] == stamp:
        seen = known[1]
        return stamp, PullAnswer(seen.folder, seen.digest, seen.env, workdir=seen.workdir,
                                 user=seen.user)
    try:
        return stamp, process.answer(image, settings)
    except OSError as error:
        return stamp, PullAnswer(
            error=f"image: no process can be started to unpack it ({error.strerror})")


def _stamp(image: str) -> _Stamp:
    """Tells one state of an image's file from another; `_NO_FILE` for an image of a registry."""
    try:
        path = parse_image_name(image).path
        if not path:
            return _NO_FILE
        if os.path.isdir(path):
            path += "/manifest.json" if folder_kind(path) == DIR else "/index.json"
        found = os.stat(path)
    except (InvalidInput, OSError):
        return ()  # the pull will say what is wrong
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
