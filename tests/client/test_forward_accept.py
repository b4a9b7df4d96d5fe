"""A forwarded port goes on after its process had no room for one more connection."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.client.network import forward
from tangram_hpc.client.network.forward import PortForward
from tangram_hpc.protocol.port_flow import STREAMS_MAX


class Echo:
    """Stands for a `PortStream` to a server that sends back what it gets."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    def sendall(self, data: bytes) -> None:
        self._there.sendall(data)

    def recv(self, size: int) -> bytes:
        return self._here.recv(size)

    def shutdown(self, how: int) -> None:
        self._there.shutdown(how)

    def close(self) -> None:
        self._here.close()
        self._there.close()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often it failed; more failures than connections that a forward may have at once."""
    count, accept, start = itertools.count(1), socket.socket.accept, threading.Thread.start
    monkeypatch.setattr(forward, "_PAUSE_S", 0.0)
    monkeypatch.setattr(forward, "connect_port", lambda *_: Echo())

    def fails() -> bool:
        return next(count) <= STREAMS_MAX + 1

    def accepting(listener: socket.socket) -> Any:
        if fails():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    def fail(what: str) -> None:
        def starting(thread: threading.Thread) -> None:
            if getattr(thread, "_target", None).__name__ == what and fails():  # type: ignore
                raise RuntimeError("can't start new thread")
            start(thread)

        if what == "files":
            monkeypatch.setattr(socket.socket, "accept", accepting)
        else:
            monkeypatch.setattr(threading.Thread, "start", starting)

    return fail


def answer(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as local:
        local.settimeout(30)
        try:
            local.connect(path)
            local.sendall(b"ping")
            local.shutdown(socket.SHUT_WR)
            return local.recv(10)
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.mark.parametrize("what", ["files", "_serve", "_copy_back"],
                         ids=["files", "first thread", "second thread"])
def test_a_forward_goes_on_after_its_process_had_no_room(what: str, failures: Any) -> None:
    failures(what)
    with PortForward(None, None, 7000, unix=True) as local:  # type: ignore[arg-type]
        answers = [answer(local.path)]
        while not answers[-1] and len(answers) <= STREAMS_MAX + 1:
            answers.append(answer(local.path))
    assert answers[-1] == b"ping"
    assert len(answers) == (1 if what == "files" else STREAMS_MAX + 2)


def test_connections_beyond_the_streams_of_a_session_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())  # 128 before Linux 5.4
    monkeypatch.setattr(forward, "connect_port", lambda *_: Echo())
    with contextlib.ExitStack() as stack:
        with PortForward(None, None, 7000, unix=True) as local:  # type: ignore[arg-type]
            for _ in range(min(5 * STREAMS_MAX, most)):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(local.path)  # a BlockingIOError where the backlog is full
        for thread in threading.enumerate():
            if thread.name == "tangram-forward":
                thread.join(30)


def test_the_thread_of_a_closed_forward_ends() -> None:
    before = threading.active_count()
    local = PortForward(None, None, 7000, unix=True)  # type: ignore[arg-type]
    thread = next(one for one in threading.enumerate() if one.name == "tangram-forward")
    local.close()
    thread.join(30)
    assert not thread.is_alive() and threading.active_count() <= before
