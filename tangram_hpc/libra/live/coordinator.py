"""Rank 0's coordinator: runs the pool's state machine from members' messages and the clock.

Invariants: one lock surrounds the pool. Every event is handled and its orders are sent under that
lock, so members receive orders in the order in which they were decided. A member may report only
about itself. A member is lost when its connection ends or when it is silent for too long; nothing
else decides that.

The coordinator's own process may be stopped (SIGSTOP, `scontrol suspend`), or its threads may not
get to run. On waking it would find every member silent and every stage overdue, although their
messages lie unread in its sockets. The coordinator therefore measures only the time in which it
ran: the pool and the liveness of members get the clock's time less all stalls
(`protocol/liveness.py`). After a stall no member is declared lost before the receiving threads had
one tick to read what has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ...domain.hybrid import (
    AnyOrder,
    AnyPoolEvent,
    EvictReplica,
    JoinEnded,
    KillMember,
    MemberFailed,
    MemberLost,
    MemberUp,
    PipelineSignal,
    ReplicaState,
    Role,
    StageOrder,
    StepBegins,
    StepPlan,
)
from ...errors import ProtocolError
from ...ports import Clock
from ...protocol.gradient_messages import Alive, MemberHello, MemberReport, OrderMessage
from ...protocol.liveness import Liveness, Stalls
from ...transport.socket.bulk_socket import BulkLink, BulkListener
from ..hybrid.hybrid_pool import HybridPool

_TICK_S = 0.5
_STALLED_S = 4 * _TICK_S  # a longer gap between two readings of the clock is a stall


class Port(Protocol):
    """The coordinator's interface to one member."""

    def tell(self, order: StageOrder, channel: tuple[str, ...]) -> None:
        """Passes an order on; must not block for long."""
        ...

    def attach(self, link: BulkLink) -> bool:
        """Registers a process that says it is this incarnation; returns False if it is not."""
        ...

    def detached(self) -> None:
        """Notes that the attached connection has ended."""
        ...

    def end(self) -> None:
        """Ends this incarnation, which the pool has given up."""
        ...


class _LinkPort:
    """Reaches a member over the connection that it opened."""

    def __init__(self, link: BulkLink) -> None:
        self._link = link

    def tell(self, order: StageOrder, channel: tuple[str, ...]) -> None:
        try:
            self._link.send(OrderMessage(order, channel))
        except OSError:
            pass  # the link's receiving thread reports the member as lost

    def attach(self, link: BulkLink) -> bool:
        return False

    def detached(self) -> None:
        pass

    def end(self) -> None:
        self._link.close()


class Coordinator:
    """The pool, and the connections to its members.

    Args:
        pool: The pool's state machine; used only under the coordinator's lock.
        clock: The source of time.
        channels: For each core the addresses of its ranks' gradient channels, in the order of a
            replica's members.
        host, key, job: Where to listen for members, and the secret and job name that they must
            prove.
        silence_s: A member that sends nothing for this time is lost.
        on_kill: Called with the member and the incarnation that has to be ended; the connection to
            it is closed in any case.
        on_order: Called with every order, for logs and metrics, while the lock is held.

    Attributes:
        ended_joins: Every `JoinEnded` so far, oldest first.
        address: Where members dial.
    """

    def __init__(self, pool: HybridPool, clock: Clock, channels: list[list[str]], host: str,
                 key: bytes, job: str, *, silence_s: float = 30.0,
                 on_kill: Callable[[int, int], None] = lambda member, incarnation: None,
                 on_order: Callable[[AnyOrder], None] = lambda order: None) -> None:
        self._pool, self._clock, self._channels = pool, clock, channels
        self._on_kill, self._on_news = on_kill, on_order
        self._lock = threading.RLock()
        self._ports: dict[int, tuple[int, Port]] = {}
        self._liveness = Liveness(round(silence_s * 1e9))
        self._stalls = Stalls(clock.now_ns(), _STALLED_S * 1e9)
        self._silence_counts_from = 0  # by `_now`: before this time no member is lost by silence
        self._place = {gpu: (n, at) for n, gpus in enumerate(pool.replicas)
                       for at, gpu in enumerate(gpus)}
        self._stop = threading.Event()
        self.ended_joins: list[JoinEnded] = []
        self._listener = BulkListener(host, key, job, self._serve)
        self.address = self._listener.address
        threading.Thread(target=self._watch, name="coordinator-clock", daemon=True).start()

    # ---- calls of the trainer ----

    def begin(self, step: int, version: int) -> StepPlan:
        """Begins a train_step; returns the plan that says which replicas count in it."""
        orders = self.handle(StepBegins(step, version))
        plan = orders[-1] if orders else None
        assert isinstance(plan, StepPlan), f"step {step} had begun before"
        return plan

    def signal(self, signal: PipelineSignal) -> None:
        """Tells the pool how long the stages take; see `PipelineSignal`."""
        self.handle(signal)

    def missed(self, replica: int, why: str) -> None:
        """Sends a replica back to rollout because its gradient did not arrive."""
        with self._lock:
            for member in self._pool.replicas[replica]:
                if member in self._ports:
                    incarnation = self._ports[member][0]
                    generation = self._pool.generation(replica)
                    self.handle(MemberFailed(member, incarnation, generation, why))
                    return

    @property
    def news(self) -> list[JoinEnded]:
        """Old name of `ended_joins`, kept for one release."""
        return self.ended_joins

    def roles(self) -> dict[int, Role]:
        """The current role of each GPU."""
        with self._lock:
            return self._pool.roles()

    def states(self) -> list[ReplicaState]:
        """The current state of each replica."""
        with self._lock:
            return [self._pool.state(n) for n in range(len(self._pool.replicas))]

    def adopt(self, member: int, incarnation: int, port: Port) -> None:
        """Registers a member that is reached through `port`, not over a connection of its own."""
        with self._lock:
            self._ports[member] = (incarnation, port)
            self._liveness.forget(member)  # its last message was an earlier incarnation's
            self.handle(MemberUp(member, incarnation))

    def close(self) -> None:
        """Closes every connection; members then serve rollouts again by themselves."""
        self._stop.set()
        self._listener.close()

    def handle(self, event: AnyPoolEvent) -> list[AnyOrder]:
        """Handles an event and carries out the orders that follow from it."""
        with self._lock:
            orders = self._pool.handle(event, self._now())
            self._carry_out(orders)
            return orders

    # ---- carrying out ----

    def _carry_out(self, orders: list[AnyOrder]) -> None:
        for order in orders:
            self._on_news(order)
            match order:
                case StageOrder(member=member, incarnation=incarnation, core=core):
                    known = self._ports.get(member)
                    if known is not None and known[0] == incarnation:
                        _, at = self._place[member]
                        known[1].tell(order, (self._channels[core][at],))
                case KillMember(member=member, incarnation=incarnation):
                    known = self._ports.get(member)
                    if known is not None and known[0] == incarnation:
                        del self._ports[member]
                        self._liveness.forget(member)
                        known[1].end()
                    self._on_kill(member, incarnation)
                case JoinEnded():
                    self.ended_joins.append(order)
                case EvictReplica() | StepPlan():
                    pass  # the core sees its channel close; `begin` returns the plan

    def _serve(self, link: BulkLink) -> None:
        first = link.receive()
        if (first is None or not isinstance(first[0], MemberHello)
            or first[0].member not in self._place):
            return
        member, incarnation = first[0].member, first[0].incarnation
        with self._lock:
            known = self._ports.get(member)
            attached = known is not None and known[0] == incarnation and known[1].attach(link)
            if known is not None and known[0] >= incarnation and not attached:
                return  # a newer incarnation, or this one, is registered already
            if not attached:
                self.adopt(member, incarnation, _LinkPort(link))
                if known is not None:
                    known[1].end()
            self._liveness.hear(member, self._now())
        try:
            self._listen(link, member, incarnation)
            why = "its connection ended"
        except ProtocolError as error:
            why = str(error)
        if known is not None and attached:
            with self._lock:
                if member in self._ports and self._ports[member][0] == incarnation:
                    self._liveness.forget(member)
            known[1].detached()
        else:
            self.lost(member, incarnation, why)

    def _listen(self, link: BulkLink, member: int, incarnation: int) -> None:
        while (got := link.receive()) is not None:
            with self._lock:
                if member not in self._ports or self._ports[member][0] != incarnation:
                    # This incarnation was given up. To count its message as a sign of life would
                    # mix it up with the next incarnation, which would soon look silent.
                    return
                self._liveness.hear(member, self._now())
            message = got[0]
            if isinstance(message, Alive):
                continue
            if not isinstance(message, MemberReport):
                raise ProtocolError("not a message that a member may send")
            if (message.event.member, message.event.incarnation) != (member, incarnation):
                raise ProtocolError(f"member {member} reported about member {message.event.member}")
            self.handle(message.event)

    def lost(self, member: int, incarnation: int, why: str) -> None:
        """Reports that this incarnation of a member has ended."""
        with self._lock:
            known = self._ports.get(member)
            if known is not None and known[0] == incarnation:
                del self._ports[member]
                self._liveness.forget(member)
                self.handle(MemberLost(member, incarnation, why))

    def _watch(self) -> None:
        while not self._stop.wait(_TICK_S):
            with self._lock:
                now = self._now()
                if now >= self._silence_counts_from:
                    self._give_up_overdue(now)

    def _give_up_overdue(self, now: int) -> None:
        """Gives up members that were silent for too long and stages that took too long; lock held.
        """
        for member in self._liveness.silent(now):
            self._liveness.forget(member)
            if member in self._ports:
                incarnation, port = self._ports[member]
                self.lost(member, incarnation, "was silent for too long")
                port.end()
        self._carry_out(self._pool.tick(now))

    def _now(self) -> int:
        """The clock's time in ns without the stalls so far; lock held.

        After a stall that ends with this call, every member has its full `silence_s` again, because
        members may have been stopped together with this process.
        """
        looked = self._clock.now_ns()
        stalled = self._stalls.look(looked)
        now = looked - round(self._stalls.total)
        if stalled:
            self._liveness.stalled(now)
            self._silence_counts_from = now + round(_TICK_S * 1e9)
        return now
