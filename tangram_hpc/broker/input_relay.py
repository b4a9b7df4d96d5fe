"""Passes input for running commands from clients to workers, and the credit for it back.

Input is not journaled: no decision depends on it. What has no credit is refused, so no client can
fill a worker's connection (`protocol/input_flow.py`). The last signal and the last size of a
terminal that come for an action which waits are kept, and sent when the action starts. What the
worker or the sandbox has lost is lost: input is never sent to a worker twice.
"""

from __future__ import annotations

from ..domain.ids import client_of
from ..protocol import message as ms
from ..protocol.frame import Buffer
from ..protocol.input_flow import DATA, PIECE_MAX, RESIZE, SIGNAL, WINDOW, InputWindow
from ..scheduler.state.ledger import Ledger
from .peers import Peers


class InputRelay:
    """The input of all running commands of one broker."""

    def __init__(self, ledger: Ledger, peers: Peers) -> None:
        self._ledger, self._peers = ledger, peers
        self._window = InputWindow()
        # by action and kind: the last size and signal that came before its start
        self._early: dict[int, dict[int, ms.Input]] = {}

    def from_client(self, client: int, message: ms.Input, payload: Buffer | None) -> str:
        """Passes input on; returns why it was refused, or an empty text. Input for an action that
        has ended is dropped without a word, as its client could not know."""
        action = self._ledger.actions.get(message.id)
        if client_of(message.id) != client:
            return "id: the action is not this client's"
        if action is None or action.outcome is not None:
            return ""
        if message.kind == DATA and not self._window.take(
                message.id, len(payload) if payload is not None else 0):
            return (f"data: the action has credit for {self._window.left(message.id)} bytes, "
                    f"and one message may have {PIECE_MAX}")
        if action.lease:
            self._send(action.lease, message, payload)
        if message.kind in (RESIZE, SIGNAL) and not (
                action.lease and self._ledger.leases[action.lease].begun):
            # a prefetched lease may come back unbegun
            self._early.setdefault(message.id, {})[message.kind] = message
        return ""

    def _send(self, lease: int, message: ms.Input, payload: Buffer | None) -> None:
        node = self._ledger.leases[lease].node
        data = payload if message.kind == DATA else None
        self._peers.send_to_worker(node, ms.Input(
            lease, message.kind, message.number, message.other, int(data is not None)), data)

    def started(self, action: int, lease: int) -> None:
        """Sends the size and the signal that came before an action started; StartAttempt has been
        sent. They are kept until a lease that has begun has them."""
        if self._early and (messages := self._early.get(action)) is not None:
            for message in messages.values():
                self._send(lease, message, None)
            if self._ledger.leases[lease].begun:
                del self._early[action]

    def credit(self, lease: int, count: int, received: int = 0) -> None:
        """Passes credit from a worker to the client of the lease's action.

        Args:
            lease: number of the lease.
            count: bytes; all that were ever allowed, if `received` is not 0.
            received: bytes that the worker has received in all, if it came back to a broker that
                was started again; otherwise 0.
        """
        action = self._ledger.leases[lease].action
        entry = self._ledger.actions.get(action)
        if entry is None or entry.outcome is not None:
            return  # only its last processes are left, and nobody would forget the credit
        if received:
            self._window.restore(action, count, received)
            return self._peers.send_to_client(
                client_of(action), ms.InputCredit(action, 0, count))
        added = self._window.grant(action, min(count, WINDOW))
        if added:
            self._peers.send_to_client(client_of(action), ms.InputCredit(
                action, added, self._window.granted()[action]))

    def rejoined(self, client: int) -> None:
        """Repeats all credit to a client whose connection was lost, and credit with it."""
        for action, total in self._window.granted().items():
            if client_of(action) == client:
                self._peers.send_to_client(client, ms.InputCredit(action, 0, total))

    def ended(self, action: int) -> None:
        """Forgets an action that has ended."""
        self._window.forget(action)
        self._early.pop(action, None)
