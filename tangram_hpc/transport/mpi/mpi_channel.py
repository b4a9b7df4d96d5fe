"""The client's connection over MPI, through the gateway rank (implements `ports.Channel`).

Only the client's own thread calls these methods, except for `wake`. No call blocks inside MPI: the
channel polls, spins for a while where cores are free, and then sleeps for longer and longer. MPI
gives no notice of a dead gateway, so a gateway that is silent for too long counts as dead
(`protocol/relay.py`); then nothing is sent any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from ...errors import ProtocolError
from ...ports import ChannelLost
from ...protocol import relay
from ...protocol.frame import Buffer, Envelope, Inbox
from ...protocol.liveness import Patience, Stalls

_BUSY_S = 0.001  # longest sleep while answers are awaited or bytes are under way
_IDLE_S = 0.05  # longest sleep otherwise
_STALLED_S = 1.0  # after a longer gap between polls, this process was stopped, not the gateway
_CLOSING_S = 0.5  # how long `close` waits for its bytes to leave


class Wire(Protocol):
    """Tagged messages between ranks, without blocking."""

    def send(self, rank: int, tag: int, data: Buffer) -> None:
        """Begins to send; raises ChannelLost if MPI refuses."""
        ...

    def sending(self, rank: int) -> int:
        """Returns how many bytes are under way to this rank."""
        ...

    def sweep(self) -> None:
        """Frees the buffers of finished sends; raises ChannelLost if MPI refuses."""
        ...

    def take(self) -> tuple[int, int, bytearray] | None:
        """Returns the next (rank, tag, bytes), or None; raises ChannelLost if MPI refuses."""
        ...


class MpiChannel:
    """One connection with the broker through the gateway.

    Args:
        wire: sends and receives between ranks; no other part of the process uses it meanwhile.
        gateway: the gateway's rank.
        number: the number of this connection, which this rank has never used before.
        spin_ns: how long a wait spins before it sleeps, ns.
        on_dead: called once, with the reason, when the gateway counts as dead.

    Attributes:
        closed: whether the client has closed the connection, which uses `wire` no more.
    """

    via = "mpi"

    def __init__(self, wire: Wire, gateway: int, number: int, spin_ns: int,
                 on_dead: Callable[[str], None]) -> None:
        self._wire, self._gateway, self._on_dead = wire, gateway, on_dead
        self._number = number.to_bytes(4, "little")
        self._begun = False  # whether the gateway confirmed our number; until then data is dropped
        self._inbox = Inbox()
        self._unsent: deque[tuple[int, Buffer]] = deque([(relay.OPEN, self._number)])
        self._wake_lock = threading.Lock()  # released by `wake`; a lock wakes within microseconds
        self._wake_lock.acquire()
        self._woken = False
        self._pace = relay.PollBackoff(spin_ns)
        self._last_sign = time.monotonic()
        self._stalls = Stalls(self._last_sign, _STALLED_S)
        self.closed = self._closing = self._lost = False

    def send(self, frame: list[Buffer]) -> None:
        """Cuts a frame into pieces and sends what the window allows; see `Channel.send`."""
        data = memoryview(b"".join(frame)) if len(frame) > 1 else memoryview(frame[0])
        for at in range(0, len(data), relay.PIECE):
            self._unsent.append((relay.DATA, data[at : at + relay.PIECE]))
        self._push()
        self._pace.moved(time.monotonic_ns())

    def wait(self, timeout_s: float, busy: bool) -> Iterator[Envelope]:
        """Polls until messages, a wake-up or the timeout; see `Channel.wait`."""
        until = time.monotonic() + timeout_s
        while True:
            self._push()
            came = False
            while (message := self._wire.take()) is not None:
                came = True
                yield from self._receive(*message)
            now = time.monotonic()
            self._check_silence(now, came)
            if self._woken:
                self._woken = False
                self._wake_lock.acquire(False)
                return
            if (came and self._begun) or now >= until:
                return
            moving = busy or bool(self._unsent) or self._wire.sending(self._gateway) > 0
            most_s = min(_BUSY_S if moving else _IDLE_S, until - now)
            pause = self._pace.pause_s(time.monotonic_ns(), most_s)
            if pause <= 0:
                os.sched_yield()
            else:
                self._wake_lock.acquire(timeout=pause)

    def wake(self) -> None:
        """Ends the sleep of `wait` within microseconds; see `Channel.wake`."""
        self._woken = True
        try:
            self._wake_lock.release()
        except RuntimeError:
            pass  # it was released already

    def close(self) -> None:
        """Tells the gateway that we close; see `Channel.close`.

        For half a second, unsent bytes are sent as the window allows. After that they are given to
        MPI without the window's limit, as the gateway must hear that we close.
        """
        if self._closing:
            return
        self._closing = True
        if not self._lost:
            self._say_close()
        self.closed = True

    def _say_close(self) -> None:
        self._unsent.append((relay.CLOSE, b""))
        patience = Patience(time.monotonic(), _CLOSING_S, _CLOSING_S / 10)
        try:
            while not patience.over(time.monotonic()) and (
                    self._unsent or self._wire.sending(self._gateway)):
                self._push()
                if self._wire.take() is not None:  # else a gateway that sends would wait
                    self._last_sign = time.monotonic()
                time.sleep(50e-6)
            if self._stalls.look(time.monotonic()):
                self._last_sign = time.monotonic()
            if self._unsent and self._gateway_unconfirmed():
                self._lose_gateway("silent")
            while self._unsent and not self._lost:
                self._wire.send(self._gateway, *self._unsent.popleft())
        except ChannelLost as error:
            self._lose_gateway(str(error))

    def abandon(self) -> None:
        """See `Channel.abandon`; the child of a fork must not touch MPI."""
        self.closed = self._closing = self._lost = True

    def _gateway_unconfirmed(self) -> bool:  # the gateway may be dead: sends to it may never end
        return time.monotonic() - self._last_sign > relay.DOUBT_S

    def _receive(self, _: int, tag: int, data: bytearray) -> Iterator[Envelope]:
        if tag == relay.OPEN:
            self._begun = data == self._number
        elif tag == relay.END:
            self._lose_gateway("the gateway ended")
            raise ChannelLost("the gateway ended")
        elif not self._begun:
            return  # the frame belongs to an older connection of this rank
        elif tag == relay.BROKER_CLOSED:
            raise ChannelLost(data.decode(errors="replace"))
        elif tag == relay.DATA:
            self._pace.moved(time.monotonic_ns())
            try:
                # The feed only reads `data` and keeps nothing of it.
                yield from self._inbox.feed(cast(bytes, data))
            except ProtocolError as error:
                raise ChannelLost(str(error)) from None

    def _push(self) -> None:
        """Sends as many bytes as the window allows; none while the gateway may be dead."""
        self._wire.sweep()
        if not self._unsent or self._gateway_unconfirmed():
            return
        while self._unsent and self._wire.sending(self._gateway) < relay.WINDOW:
            tag, data = self._unsent.popleft()
            self._wire.send(self._gateway, tag, data)

    def _check_silence(self, now: float, came: bool) -> None:
        if self._stalls.look(now) or came:
            self._last_sign = now
        if now - self._last_sign > relay.GATEWAY_SILENCE_S:
            self._lose_gateway(f"silent for {relay.GATEWAY_SILENCE_S:.0f} s")
            raise ChannelLost("the gateway is silent")

    def _lose_gateway(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._on_dead(why)
