"""Members whose GPUs are leased from the broker: each join is an action that asks for GPUs.

The process of that action is the member. Leasing a GPU parks the rollout service that was loaded on
it; when the action ends, for whatever reason, the GPU serves rollouts again. So the broker's ledger
says who holds a GPU, and a `kill -9` of the process returns its GPU as that of any other action.

A leased member's number names the lease and not a device: the broker chooses a device each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ...domain.hybrid import AnyPoolEvent, MemberDone, MemberFailed, StageOrder
from ...domain.hybrid import ReplicaState as R
from ...errors import TangramError
from ...protocol.gradient_messages import OrderMessage
from ...transport.socket.bulk_socket import BulkLink
from .coordinator import Coordinator

Start = Callable[[int, int], "Future[Any]"]


class LeasedMember:
    """One incarnation of a leased member; implements `coordinator.Port`. When it ends, the next
    incarnation follows.

    Args:
        coordinator: Where the member is registered.
        number: The member's number.
        incarnation: The number of this incarnation.
        start: Submits the action that runs `Member.run` for (number, incarnation), and returns its
            Future. The action's process ends when the coordinator hangs up.
    """

    def __init__(self, coordinator: Coordinator, number: int, incarnation: int, start: Start
                 ) -> None:
        self._coordinator, self._start = coordinator, start
        self._number, self.incarnation = number, incarnation
        self._lock = threading.Lock()
        self._action: Future[Any] | None = None
        self._link: BulkLink | None = None
        self._waiting: list[OrderMessage] = []
        self._going = 0  # the generation whose join it was told to leave; 0 for none
        self._over = False  # whether the pool has given up this incarnation

    def tell(self, order: StageOrder, channel: tuple[str, ...]) -> None:
        """See `Port.tell`. The coordinator holds its lock meanwhile, so the answers are sent by
        another thread.
        """
        with self._lock:
            if order.stage is R.RETURNING:
                self._going = order.generation
                self._hang_up()
                return
            self._waiting.append(OrderMessage(order, channel))
            if order.stage is R.REQUESTED:
                self._going = 0
                try:
                    self._action = self._start(self._number, self.incarnation)
                except TangramError as error:
                    return self._later(MemberFailed(self._number, self.incarnation,
                                                    order.generation, str(error)))
                self._action.add_done_callback(self._ended)
            self._pass_on()
            return None

    def attach(self, link: BulkLink) -> bool:
        """Registers the connection of the action's process."""
        with self._lock:
            if self._action is None or self._going:
                return False
            self._link = link
            self._pass_on()
            return True

    def detached(self) -> None:
        """The process closed its connection or died; the action's end tells which of the two."""
        with self._lock:
            self._link = None

    def end(self) -> None:
        """See `Port.end`."""
        with self._lock:
            self._over = True
            if self._action is not None:
                self._action.cancel()

    def _pass_on(self) -> None:
        while self._link is not None and self._waiting:
            try:
                self._link.send(self._waiting.pop(0))
            except OSError:
                self._link = None

    def _hang_up(self) -> None:
        """Ends the member: closes the connection to its process, which then ends; if the process
        has not begun, cancels its action.
        """
        self._waiting.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        elif self._action is not None:
            self._action.cancel()
        if self._action is None:  # no action runs: its GPU serves rollouts
            self._later(MemberDone(self._number, self.incarnation, self._going, R.RETURNING))

    def _ended(self, action: Future[Any]) -> None:
        """Handles the action's end. Called from the client's thread, or from `cancel`."""
        threading.Thread(target=self._settle, args=(action,), daemon=True).start()

    def _settle(self, action: Future[Any]) -> None:
        with self._lock:
            self._action, self._link, going, over = None, None, self._going, self._over
            self._waiting.clear()
        if going and not over:
            self._coordinator.handle(MemberDone(self._number, self.incarnation, going, R.RETURNING))
            return
        why = "was cancelled" if action.cancelled() else str(
            action.exception() or "its process ended by itself")
        self._coordinator.lost(self._number, self.incarnation, why)
        add_leased_member(self._coordinator, self._number, self.incarnation + 1, self._start)

    def _later(self, event: AnyPoolEvent) -> None:
        threading.Thread(target=self._coordinator.handle, args=(event,), daemon=True).start()


def add_leased_member(coordinator: Coordinator, number: int, incarnation: int, start: Start
                      ) -> None:
    """Registers a member that joins by an action; from now on the pool can ask it to join.

    Args:
        coordinator: Rank 0's coordinator.
        number: The member's number, as in the pool's replicas.
        incarnation: The number of the first incarnation; each later one has the next number.
        start: See `LeasedMember`.
    """
    coordinator.adopt(number, incarnation, LeasedMember(coordinator, number, incarnation, start))
