"""Tells the gateway that a rank lives while the rank has no connection, and listens for its beats.

MPI gives no notice of a dead rank. While a client is open, its pings are the rank's signs of life.
Between the meeting and the first connection, and after a client was closed, a thread of the rank
says BEAT instead. So a gateway also gives up a rank that was killed in such a time, and the rank
knows at its end whether its gateway lives: to send to a dead process can hang or crash.

The thread uses MPI only under `lock`, only while no connection does, and never blocks in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...ports import ChannelLost
from ...protocol import relay
from ...protocol.liveness import Patience, Stalls
from .mpi_channel import Wire


class Presence:
    """A rank's signs of life outside of connections.

    Args:
        wire: sends and receives between ranks.
        gateway: the gateway's rank.
        idle: returns whether no connection uses `wire`.
        lose: called with the reason when the gateway counts as dead.

    Attributes:
        lock: held while `wire` is used here; a connection that begins to use it holds the lock.
    """

    def __init__(self, wire: Wire, gateway: int, idle: Callable[[], bool],
                 lose: Callable[[str], None]) -> None:
        self.lock = threading.Lock()
        self._wire, self._gateway, self._idle, self._lose = wire, gateway, idle, lose
        self._ended = threading.Event()
        self._last_sign = time.monotonic()
        self._stalls = Stalls(self._last_sign, relay.DOUBT_S)
        self._thread = threading.Thread(target=self._run, name="tangram-presence", daemon=True)

    def start(self) -> None:
        """Says BEAT from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Uses `wire` no more, except in `hears`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def hears(self) -> bool:
        """Returns whether the gateway lives; waits for a beat if none was read lately."""
        if time.monotonic() - self._last_sign <= relay.DOUBT_S:
            return True
        self._read()  # these beats may be old
        asked = time.monotonic()
        patience = Patience(asked, relay.GATEWAY_SILENCE_S, relay.DOUBT_S)
        while self._last_sign <= asked:
            if patience.over(time.monotonic()):
                return False
            time.sleep(0.01)
            self._read()
        return True

    def _run(self) -> None:
        while True:
            with self.lock:
                if self._ended.is_set() or not self._attend():
                    return
            self._ended.wait(relay.BEAT_S)

    def _attend(self) -> bool:
        """Returns whether to go on: False once the gateway counts as dead."""
        now = time.monotonic()
        if self._stalls.look(now) or not self._idle():
            self._last_sign = now  # this process was stopped, or its connection listens
        if not self._idle():
            return True
        try:
            if not self._read():
                self._lose("the gateway ended")
                return False
            if now - self._last_sign > relay.GATEWAY_SILENCE_S:
                self._lose(f"silent for {relay.GATEWAY_SILENCE_S:.0f} s")
                return False
            if now - self._last_sign <= relay.DOUBT_S and not self._wire.sending(self._gateway):
                self._wire.send(self._gateway, relay.BEAT, b"")
        except ChannelLost as error:
            self._lose(str(error))
            return False
        return True

    def _read(self) -> bool:
        """Reads what has come, which belongs to no connection; returns False for END."""
        self._wire.sweep()
        while (message := self._wire.take()) is not None:
            self._last_sign = time.monotonic()
            if message[1] == relay.END:
                return False
        return True
