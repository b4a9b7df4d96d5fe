"""Owns: a worker's side of its fork server and hosts - their sockets on asyncio's loop, and their
death certificates. Must not know of sessions or pools: it tells whoever owns it what each host
said.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import msgspec

from ...errors import ProtocolError
from ...protocol.process_frames import (
    PACKET_MAX,
    RECEIVE,
    RUNNER,
    Box,
    Broken,
    Clean,
    Died,
    Drop,
    End,
    Ended,
    Fork,
    Forked,
    Frame,
    Gone,
    Load,
    Piece,
    Ready,
    Setup,
    Tidy,
    Unforked,
    WorkerInbox,
    decode_from_fork_server,
    frame,
    packet,
)
from ...resources import tree
from ...resources.cpu.enforce import Group
from .. import environ
from ..files import scratch
from .vault import FUNCTIONS_MAX

_CLOSE_S = 12.0


class Host:
    """A forked process that runs actions.

    Attributes:
        leases: those it runs or has still to clean; in a runner the first is the one it is at, the
            others follow.
        box: what it was built as.
        home: the name of its directory; `fresh`: made for it, and of no host before.
        group: what its units are enforced by, once it lives.
        oom_kills: how often memory ran out in it, as far as that was told.
        kept: dead, and its directory is for the next host of its session.
        broken: why its sandbox does not stand, when it said so.
        spent_ns: of a runner, the CPU time that it had used when its present call began.
    """

    __slots__ = (
        "_fork_server",
        "_loop",
        "_soon",
        "_unsent",
        "bell",
        "box",
        "broken",
        "control",
        "fresh",
        "functions",
        "group",
        "home",
        "inbox",
        "isolation",
        "kept",
        "kind",
        "leases",
        "number",
        "oom_kills",
        "origin",
        "pid",
        "session",
        "spent_ns",
        "tokens",
        "up",
    )

    def __init__(self, fork_server: ForkServerClient, number: int, kind: str, box: Box) -> None:
        self._fork_server = fork_server
        self._loop = fork_server.loop
        self._unsent = bytearray()
        self.number = number
        self.kind = kind
        self.box = box
        self.home, self.fresh = "", True
        self.group: Group | None = None
        self.broken = ""
        self.isolation = ""
        self.origin = ""
        self.up = self.kept = False
        self.oom_kills = self.spent_ns = 0
        self.pid = 0
        self.control: socket.socket | None = None
        self.inbox = WorkerInbox()
        self.leases: dict[int, None] = {}
        self.functions: dict[str, None] = {}  # the digests it holds, oldest first
        self.session = 0
        self.tokens = self.bell = -1  # of a runner, see `process_frames`
        self._soon: list[bytes] = []

    def connect(self, fd: int, setup: Frame) -> None:
        """It lives, and listens at the other end of this socket."""
        self.control = socket.socket(fileno=fd)
        self.control.setblocking(False)
        if self.kind == RUNNER:
            self.tokens = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.bell, rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            socket.send_fds(self.control, [frame(setup)], [self.tokens, rope])
            os.close(rope)
        else:
            self.send(setup)

    def call(self, run: Frame) -> None:
        """Gives a runner one more call; it leaves at the end of this turn of the loop."""
        if self.control is None:
            return
        if not self._soon:
            self._loop.call_soon(self._call_now)
        self._soon.append(frame(run))

    def _call_now(self) -> None:
        if self._soon and self.control is not None:
            os.eventfd_write(self.tokens, len(self._soon))
            calls, self._soon = self._soon, []
            self._send(b"".join(calls))

    def take_back(self) -> list[int]:
        """The leases that a runner has not begun and now never will, in order; its first counts as
        begun."""
        most = len(self.leases) - 1
        taken = min(most, len(self._soon))
        del self._soon[len(self._soon) - max(0, taken) :]
        with suppress(OSError):
            while not self._unsent and self.tokens >= 0 and taken < most:
                os.read(self.tokens, 8)
                taken += 1
        leases = list(self.leases)[len(self.leases) - taken :] if taken > 0 else []
        if leases:
            self.send(Drop(tuple(leases)))
        return leases

    def send(self, message: Frame) -> None:
        """Sends or queues an order; after its death orders go nowhere."""
        self._call_now()
        self._send(frame(message))

    def load(self, digest: str, blob: bytes) -> None:
        """Gives a runner a function that it does not hold; its oldest makes room for it."""
        if digest not in self.functions:
            drop = next(iter(self.functions)) if len(self.functions) >= FUNCTIONS_MAX else ""
            self.functions.pop(drop, None)
            self.functions[digest] = None
            self.send(Load(digest, blob, drop))

    def _send(self, data: bytes) -> None:
        if self.control is None:
            return
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self.control.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # its end comes by Died
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self.control.fileno(), self._send_more)

    def _send_more(self) -> None:
        assert self.control is not None
        try:
            sent = self.control.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self.control.fileno())

    def kill(self) -> None:
        """SIGKILLs it; its owner hears of its death."""
        self._fork_server.tell(End(self.number))

    def tidy(self) -> None:
        """It is dead, and nobody needs its directory."""
        self._fork_server.tell(Tidy(self.home))

    @property
    def folder(self) -> str:
        """Its directory."""
        return os.path.join(self._fork_server.root, self.home)

    def hang_up(self) -> None:
        """Forgets its control socket."""
        if self.control is not None:
            self._loop.remove_reader(self.control.fileno())
            self._loop.remove_writer(self.control.fileno())
            self.control.close()
            self.control = None
        if self.bell >= 0:
            self._loop.remove_reader(self.bell)
            os.close(self.bell)
            self.bell = -1

    def forget(self) -> None:
        """It is dead, and what it had not begun is known."""
        if self.tokens >= 0:
            os.close(self.tokens)
            self.tokens = -1


class Owner(Protocol):
    """Who is told what hosts do."""

    def host_born(self, host: Host) -> Setup:
        """It lives; what it must be told first.

        Raises:
            OSError: it cannot be used; it is killed.
        """
        ...

    def host_up(self, host: Host) -> None:
        """It waits for orders."""
        ...

    def host_failed(self, host: Host, text: str) -> None:
        """It could not be forked."""
        ...

    def host_died(self, host: Host, status: int, clean: bool, tail: str) -> None:
        """It ended with this wait status (-1: not known)."""
        ...

    def host_clean(self, host: Host) -> None:
        """What it left when it died has ended too."""
        ...

    def fork_server_lost(self) -> None:
        """The fork server ended by itself; `host_died` follows for every host."""
        ...

    def ended(self, host: Host, message: Ended) -> None:
        """An action's outcome."""
        ...

    def gone(self, host: Host, message: Gone) -> None:
        """Nothing of an action is left."""
        ...

    def piece(self, host: Host, message: Piece) -> None:
        """A piece of an action's output."""
        ...

    def settled(self) -> None:
        """All that was heard in this turn has been told; the last word of each turn."""
        ...


class ForkServerClient:
    """Starts the fork server process and speaks to it; at most one per executor."""

    def __init__(self, owner: Owner, root: str, numbers: Iterator[int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.root = root
        self._owner = owner
        self._numbers = numbers
        self._hosts: dict[int, Host] = {}
        self._unclean: dict[int, Host] = {}
        self._unsent: list[bytes] = []
        self._closed = False
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tangram_hpc.sandbox.process.fork_server",
                 str(there.fileno())],
                pass_fds=(there.fileno(),),
                env=environ.for_hosts(os.environ),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = here
        here.send(os.fsencode(root))
        here.setblocking(False)
        self.loop.add_reader(here.fileno(), self._turn, self._on_packet)

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._process.pid

    def fork(self, kind: str, box: Box, home: str = "") -> Host:
        """Asks for a host, in the directory of one that died or a fresh one; `host_up`,
        `host_failed` or `host_died` follows."""
        host = Host(self, next(self._numbers), kind, box)
        host.home, host.fresh = home or scratch.new_name(), not home
        self._hosts[host.number] = host
        self.tell(Fork(host.number, kind, host.home, host.fresh))
        return host

    def tell(self, message: Frame) -> None:
        """Sends or queues an order to the fork server."""
        self._unsent.append(packet(message))
        if len(self._unsent) == 1:
            self._tell_more()

    def _tell_more(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                self.loop.add_writer(self._socket.fileno(), self._tell_more)
                return
            except OSError:  # it is gone, as its reader will see
                self._unsent.clear()
                return
            del self._unsent[0]
        self.loop.remove_writer(self._socket.fileno())

    # ---- what it says ----

    def _turn(self, hear: Callable[..., object], *what: Host) -> None:
        hear(*what)
        self._owner.settled()

    def _on_packet(self) -> None:
        try:
            size = array.array("i").itemsize
            data, more, _, _ = self._socket.recvmsg(
                PACKET_MAX, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, more = b"", []
        if not data:
            return self._lost()
        fds = array.array("i", b"".join(bytes(item[2]) for item in more))
        message = decode_from_fork_server(data)
        if isinstance(message, Forked):
            self._forked(message, fds[0])
        elif isinstance(message, Unforked):
            self._owner.host_failed(self._hosts.pop(message.number), message.text)
        elif isinstance(message, Died):
            self._died(message)
        elif isinstance(message, Clean):
            host = self._unclean.pop(message.number, None)
            if host is not None:
                self._owner.host_clean(host)

    def _forked(self, message: Forked, fd: int) -> None:
        host = self._hosts[message.number]
        host.pid = message.pid
        try:
            host.connect(fd, self._owner.host_born(host))
        except OSError as error:
            host.broken = f"enforcement: {error.strerror or error}"
            return host.kill()
        if host.kind == RUNNER:
            self.loop.add_reader(host.bell, self._turn, self._on_bell, host)
            host.up, host.isolation = True, "process"
            host.spent_ns = tree.cpu_ns(host.pid)
            self._owner.host_up(host)
        else:
            self.loop.add_reader(fd, self._turn, self._on_data, host)

    def _on_bell(self, host: Host) -> None:
        rung = os.read(host.bell, 64)
        while self._on_data(host):
            pass
        if not rung and host.control is not None:  # it has closed what it needs
            host.hang_up()
            host.kill()

    def _died(self, message: Died) -> None:
        host = self._hosts.get(message.number)
        if host is None:
            return
        while host.control is not None and self._on_data(host):
            pass  # what it said before it died comes first
        host.hang_up()
        del self._hosts[message.number]
        if not message.clean:
            self._unclean[message.number] = host
        self._owner.host_died(host, message.status, message.clean, message.tail)

    def _lost(self) -> None:
        """The fork server itself died: its hosts end by their own signal."""
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_writer(self._socket.fileno())
        hosts, self._hosts = list(self._hosts.values()), {}
        unclean, self._unclean = list(self._unclean.values()), {}
        for host in hosts:
            while self._on_data(host):
                pass
            host.hang_up()
        self._owner.fork_server_lost()  # first, as a death asks for a new host
        for host in hosts:
            self._owner.host_died(host, -1, True, "")
        for host in unclean:
            self._owner.host_clean(host)

    def _on_data(self, host: Host) -> bool:
        """Handles what a host said; returns whether there may be more."""
        if host.control is None:
            return False
        try:
            data = host.control.recv(RECEIVE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # its death certificate follows; a runner may only have closed its socket
            host.hang_up()
            host.kill()
            return False
        try:
            for message in host.inbox.feed(data):
                if isinstance(message, Ended):
                    self._owner.ended(host, message)
                elif isinstance(message, Gone):
                    self._owner.gone(host, message)
                elif isinstance(message, Ready):
                    if not host.up:
                        host.up, host.isolation = True, message.isolation
                        self._owner.host_up(host)
                elif isinstance(message, Broken):
                    host.broken = message.text
                else:
                    self._owner.piece(host, message)
        except (ProtocolError, msgspec.DecodeError):
            host.hang_up()
            host.kill()
            return False
        return True

    def close(self) -> None:
        """Ends the fork server and with it every host; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        for host in self._hosts.values():
            host.hang_up()
            host.forget()
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_writer(self._socket.fileno())
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
