"""Waits for the one process that shall serve a client's direct calls (implements
`ports.DirectListener`).

The client listens, and the process on the node connects, because only the client knows beforehand
where it is. Both prove a key that is made for this one connection and travels to the node inside
the action. After the first peer that proves it, nothing listens any more.

The listener runs on a thread of its own, with the authentication that the broker has
(`asyncsock.py`), so that a stranger who connects and says nothing delays nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import secrets
import socket
import threading
from contextlib import suppress
from functools import cache

from ...ports import DirectConnection
from ...private_folder import PrivateFolder, client_folder
from .asyncsock import Listener, SocketLink, listen_tcp
from .certificate import Certificate, address_of, make_certificate

_UNIX_MAX = 100  # bytes of a Unix socket's path, less than the kernel's 107


class SocketDirectListener:
    """Listens on a Unix socket, and on TCP if other hosts shall reach this process.

    Args:
        job: the job's name, which is part of the proof.
        host: this host's address for the nodes; empty if all of them are this host.
        encrypted: whether TCP connections are encrypted.

    Attributes:
        addresses: where it listens, as `dial` takes them; none if it cannot listen.
        key: the secret that the peer must prove.
        accepted: ends with the connection of the first peer that has proven the key; with None if
            the listener was closed before.
    """

    def __init__(self, job: str, host: str = "", encrypted: bool = True) -> None:
        self.key = secrets.token_bytes(32)
        self.accepted: concurrent.futures.Future[DirectConnection | None] = (
            concurrent.futures.Future())
        self._job = job
        self._folder: PrivateFolder | None = None
        self._sockets: list[tuple[socket.socket, Certificate | None]] = []
        self.addresses: tuple[str, ...] = ()
        try:
            found = [self._listen_unix(), self._listen_tcp(host, encrypted) if host else ""]
            self.addresses = tuple(filter(None, found))
            threading.Thread(target=self._run, name="tangram-direct", daemon=True).start()
        except BaseException as error:  # such as an interruption: the thread may run or not
            self.close()
            self._close_sockets()
            self._remove_folder()
            if isinstance(error, RuntimeError):
                raise OSError(errno.EAGAIN, "no thread can be started") from None
            raise

    def close(self) -> None:
        """Stops listening; see `accepted`. Any thread may call it."""
        with suppress(concurrent.futures.InvalidStateError):
            self.accepted.set_result(None)

    def abandon(self) -> None:
        """Closes the copies of what this holds open in the child of a fork."""
        self._close_sockets()
        if self._folder is not None:
            self._folder.disown()

    def _close_sockets(self) -> None:
        for sock, _ in self._sockets:
            sock.close()

    def _listen_unix(self) -> str:
        """Listens in a folder that only this user may enter; returns the address, or an empty
        string if that cannot be done here.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return ""
        try:
            self._folder = client_folder()
            path = os.path.join(self._folder.path, "direct")
            if len(os.fsencode(path)) > _UNIX_MAX:
                raise OSError(0, "its path is too long")
            sock.bind(path)
            sock.listen()
        except OSError:
            sock.close()
            return ""
        self._sockets.append((sock, None))
        return f"unix:{path}"

    def _listen_tcp(self, host: str, encrypted: bool) -> str:
        """Listens on an address of this host; returns the address, or an empty string."""
        try:
            sock = listen_tcp(host)
        except OSError:
            return ""
        certificate = _certificate() if encrypted else None
        self._sockets.append((sock, certificate))
        return address_of(host, sock.getsockname()[1], certificate)

    def _run(self) -> None:
        try:
            asyncio.run(self._listen())
        except OSError as error:  # no descriptors are left for a loop
            with suppress(concurrent.futures.InvalidStateError):
                self.accepted.set_exception(error)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    async def _listen(self) -> None:
        listeners = [Listener(sock, self.key, self._job, self._accept, certificate)
                     for sock, certificate in self._sockets]
        try:
            await asyncio.wrap_future(self.accepted)
        finally:
            for listener in listeners:
                listener.close()

    def _accept(self, link: SocketLink) -> None:
        connection = link.detach()
        try:
            self.accepted.set_result(connection)
        except concurrent.futures.InvalidStateError:  # another one came first, or it was closed
            connection.close()


@cache
def _certificate() -> Certificate:
    """Returns the certificate of this process: making one takes some milliseconds."""
    return make_certificate()
