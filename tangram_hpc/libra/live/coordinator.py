"""Rank 0's coordinator: the pool's state machine, fed by its members' conversations and the clock.

Law: one lock around the pool; every event goes in under it and its orders go out under it, so that
members hear them in the order in which they were decided. A member speaks of itself only. It is
lost when its conversation ends or it is silent for too long; nothing else decides that.

The coordinator's process may be stopped (SIGSTOP, `scontrol suspend`), or its threads kept from
running. On waking it would find everybody silent and every stage overdue, although what the members
said lies unread in its sockets. So its time is that in which it ran: the pool and the liveness of
members are given the clock's time less all stalls (`protocol/liveness.py`), and after a stall
nobody is judged before the threads that listen had one tick to read what has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ...domain.hybrid import (
    AnyOrder,
    AnyPoolEvent,
    Ask,
    EvictReplica,
    JoinEnded,
    Kill,
    MemberFailed,
    MemberLost,
    MemberUp,
    ReplicaState,
    Role,
    Signal,
    StepBegins,
    StepPlan,
)
from ...errors import ProtocolError
from ...ports import Clock
from ...protocol.lane import Alive, Hello, MemberReport, Told
from ...protocol.liveness import Liveness, Stalls
from ...transport.socket.lane import BulkLink, BulkListener
from ..hybrid.hybrid_pool import HybridPool

_TICK_S = 0.5
_STALLED_S = 4 * _TICK_S  # nobody looked at the clock for longer: the process was not running


class Port(Protocol):
    """Where a member is reached."""

    def tell(self, order: Ask, channel: tuple[str, ...]) -> None:
        """Hands an order on; never blocks for long."""
        ...

    def attach(self, link: BulkLink) -> bool:
        """A process says that it is this incarnation of it; False if it is not."""
        ...

    def detached(self) -> None:
        """The conversation that was attached has ended."""
        ...

    def end(self) -> None:
        """The pool has given this incarnation of it up."""
        ...


class _LinkPort:
    """A member that dialled in."""

    def __init__(self, link: BulkLink) -> None:
        self._link = link

    def tell(self, order: Ask, channel: tuple[str, ...]) -> None:
        try:
            self._link.send(Told(order, channel))
        except OSError:
            pass  # its reader sees the end and says so

    def attach(self, link: BulkLink) -> bool:
        return False

    def detached(self) -> None:
        pass

    def end(self) -> None:
        self._link.close()


class Coordinator:
    """The pool and who it speaks to.

    Args:
        channels: the addresses of each core's ranks, in the order of a replica's members.
        host, key, job: where it listens for members, and what they prove.
        silence_s: a member that says nothing for so long is lost.
        on_kill: told of a member's incarnation that has to be ended; its conversation is closed
        anyway.
        on_order: told of every order, for logs and figures; called under the lock.
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
        self._judges_from = 0  # by `_now`: until then what has arrived is read first
        self._place = {gpu: (n, at) for n, gpus in enumerate(pool.replicas)
                       for at, gpu in enumerate(gpus)}
        self._stop = threading.Event()
        self.ended_joins: list[JoinEnded] = []
        self._listener = BulkListener(host, key, job, self._serve)
        self.address = self._listener.address
        threading.Thread(target=self._watch, name="coordinator-clock", daemon=True).start()

    # ---- what the trainer says and asks ----

    def begin(self, step: int, version: int) -> StepPlan:
        """A train_step is about to begin: who counts in it."""
        orders = self.handle(StepBegins(step, version))
        plan = orders[-1] if orders else None
        assert isinstance(plan, StepPlan), f"step {step} had begun before"
        return plan

    def signal(self, signal: Signal) -> None:
        """How the stages stand; see `Signal`."""
        self.handle(signal)

    def missed(self, replica: int, why: str) -> None:
        """This replica's gradient did not come: it goes back to rollout."""
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
        """Whose each GPU is, now."""
        with self._lock:
            return self._pool.roles()

    def states(self) -> list[ReplicaState]:
        """Where each replica is on its way, now."""
        with self._lock:
            return [self._pool.state(n) for n in range(len(self._pool.replicas))]

    def adopt(self, member: int, incarnation: int, port: Port) -> None:
        """A member that is reached by another way than a conversation of its own."""
        with self._lock:
            self._ports[member] = (incarnation, port)
            self._liveness.forget(member)  # what was heard was another incarnation
            self.handle(MemberUp(member, incarnation))

    def close(self) -> None:
        """Ends every conversation; members then serve rollouts again by themselves."""
        self._stop.set()
        self._listener.close()

    def handle(self, event: AnyPoolEvent) -> list[AnyOrder]:
        """Takes a event in and carries out what follows."""
        with self._lock:
            orders = self._pool.handle(event, self._now())
            self._carry_out(orders)
            return orders

    # ---- carrying out ----

    def _carry_out(self, orders: list[AnyOrder]) -> None:
        for order in orders:
            self._on_news(order)
            match order:
                case Ask(member=member, incarnation=incarnation, core=core):
                    known = self._ports.get(member)
                    if known is not None and known[0] == incarnation:
                        _, at = self._place[member]
                        known[1].tell(order, (self._channels[core][at],))
                case Kill(member=member, incarnation=incarnation):
                    known = self._ports.get(member)
                    if known is not None and known[0] == incarnation:
                        del self._ports[member]
                        self._liveness.forget(member)
                        known[1].end()
                    self._on_kill(member, incarnation)
                case JoinEnded():
                    self.ended_joins.append(order)
                case EvictReplica() | StepPlan():
                    pass  # its core sees its channel close; the plan goes to who asked for it

    def _serve(self, link: BulkLink) -> None:
        first = link.receive()
        if first is None or not isinstance(first[0], Hello) or first[0].member not in self._place:
            return
        member, incarnation = first[0].member, first[0].incarnation
        with self._lock:
            known = self._ports.get(member)
            attached = known is not None and known[0] == incarnation and known[1].attach(link)
            if known is not None and known[0] >= incarnation and not attached:
                return  # another incarnation of it is at the coordinator
            if not attached:
                self.adopt(member, incarnation, _LinkPort(link))
                if known is not None:
                    known[1].end()
            self._liveness.hear(member, self._now())
        try:
            self._listen(link, member, incarnation)
            why = "its conversation ended"
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
                    return  # given up: hearing it would make its next incarnation silent
                self._liveness.hear(member, self._now())
            message = got[0]
            if isinstance(message, Alive):
                continue
            if not isinstance(message, MemberReport):
                raise ProtocolError("not a message that a member may send")
            if (message.event.member, message.event.incarnation) != (member, incarnation):
                raise ProtocolError(f"member {member} speaks for {message.event.member}")
            self.handle(message.event)

    def lost(self, member: int, incarnation: int, why: str) -> None:
        """This incarnation of a member is over."""
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
                if now >= self._judges_from:
                    self._judge(now)

    def _judge(self, now: int) -> None:
        """Gives up who was silent, or took, for too long; lock held."""
        for member in self._liveness.silent(now):
            self._liveness.forget(member)
            if member in self._ports:
                incarnation, port = self._ports[member]
                self.lost(member, incarnation, "was silent for too long")
                port.end()
        self._carry_out(self._pool.tick(now))

    def _now(self) -> int:
        """The clock's time without the stalls so far, in ns; lock held. A stall that ends with this
        call counts against nobody: members, too, have their whole patience again, as they may have
        been stopped together with us."""
        looked = self._clock.now_ns()
        stalled = self._stalls.look(looked)
        now = looked - round(self._stalls.total)
        if stalled:
            self._liveness.stalled(now)
            self._judges_from = now + round(_TICK_S * 1e9)
        return now
