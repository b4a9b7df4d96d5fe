"""The gateway's driver: for each rank one pipe to the broker, bytes both ways, unread.

Law: it knows the relay's words (`protocol/relay.py`) and nothing of what it carries. It may die at
any time and hurt nobody: the broker sees connections end, ranks hear no beat and go to their
sockets. It sends nothing to a rank that has been silent, since MPI may hang or crash on the dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..ports import ChannelLost
from ..protocol import relay
from ..protocol.frame import Buffer
from ..protocol.liveness import Stalls

_IDLE_S = 0.001  # about 1.5 % of a core when nothing moves
_SENDING_S = 0.0002  # while something is on its way
_HOLD = 4 << 20  # bytes on their way to a rank from which on its pipe is not read
_UNSENT = 64 << 20  # bytes that wait for the broker from which on ranks are not heard
_STALLED_S = 1.0  # we did not look for so long: what we did not hear is no silence
_FAREWELL_S = 2.0
_STEADY_NS = 5 * 10**9  # a keel that lasted so long is laid again
_ORPHAN_NS = 60 * 10**9  # without a broker: so long the ranks have to end by themselves
KEEL = -1  # a pipe that says nothing: its end is the broker's


class Ranks(Protocol):
    """Messages to and from the other ranks; none of these block."""

    def send(self, rank: int, tag: int, data: Buffer) -> None:
        """Begins to send."""
        ...

    def sending(self, rank: int) -> int:
        """Bytes on their way to a rank."""
        ...

    def sweep(self) -> None:
        """Lets go of what has been sent."""
        ...

    def take(self) -> tuple[int, int, bytearray] | None:
        """The next (rank, tag, bytes), or None."""
        ...


class Pipes(Protocol):
    """Connections to the broker by rank; only `wait` blocks."""

    def open(self, name: int) -> None:
        """Begins to connect; what is written meanwhile waits."""
        ...

    def write(self, name: int, data: Buffer) -> None:
        """Sends bytes."""
        ...

    def unsent(self) -> int:
        """Bytes that wait for the broker."""
        ...

    def hold(self, name: int, held: bool) -> None:
        """Stops or goes on reading a pipe."""
        ...

    def close(self, name: int) -> None:
        """Ends a pipe after what was written."""
        ...

    def wait(self, timeout_s: float) -> Iterable[tuple[int, bytes, str]]:
        """What came as (rank, bytes, ""), or (rank, b"", reason) where a pipe ended."""
        ...


@dataclass(slots=True)
class _Rank:
    heard: float
    open: bool = False
    left: bool = False
    failed: bool = False  # it will not finalise MPI
    deaf: bool = False  # taken for dead: nothing is sent to it
    owes: bool = False  # it was told that its conversation ended, and has not answered
    held: bool = False


class Gateway:
    """Carries bytes until all ranks have left.

    Args:
        ranks, pipes: the two sides.
        members: the trainers' ranks.
        now_ns: monotonic.
        yield_cpu: gives the CPU to another process between two probes.
        shares_fate: whether the launcher ends all ranks when one exits without finalising MPI, as
            `mpiexec` does. Then a gateway does not end before its ranks do, even if it has given
            them up: they may be at work over the broker's socket.
    """

    def __init__(self, ranks: Ranks, pipes: Pipes, members: Iterable[int],
                 now_ns: Callable[[], int], spin_us: int, yield_cpu: Callable[[], None],
                 shares_fate: bool = False) -> None:
        self._ranks, self._pipes, self._now_ns = ranks, pipes, now_ns
        self._yield_cpu, self._shares_fate = yield_cpu, shares_fate
        now = now_ns() / 1e9
        self._members = {rank: _Rank(now) for rank in members}
        self._pace = relay.PollBackoff(spin_us * 1000)
        self._stalls, self._beaten = Stalls(now, _STALLED_S), now
        self._keel_at = self._orphan_until = 0
        self.turns = 0  # grows as long as it lives, for a watchdog
        self.orphaned = ""  # why there is no broker any more

    def run(self) -> bool:
        """Carries until all ranks have left, or no broker is left for them; True says that all
        ranks will finalise MPI and wait for us to do so."""
        self._keel_at = self._now_ns()
        self._pipes.open(KEEL)
        while not self._over():
            self.turn()
        orderly = all(r.left and not r.failed and not r.deaf for r in self._members.values())
        self._part(relay.PART if orderly else relay.END)
        return orderly

    def turn(self) -> None:
        """Once both sides."""
        self.turns += 1
        self._ranks.sweep()
        moved = self._from_ranks()
        now_ns = self._now_ns()
        pause = 0.0 if moved else self._pace.pause_s(now_ns, self._longest())
        if not moved and not pause:
            self._yield_cpu()
        moved |= self._from_broker(pause)
        now_ns = self._now_ns()
        if moved:
            self._pace.moved(now_ns)
        self._mind(now_ns / 1e9)

    def _longest(self) -> float:
        sending = any(self._ranks.sending(rank) for rank in self._members)
        return _SENDING_S if sending else _IDLE_S

    # ---- from the ranks ----------------------------------------------------------------------

    def _from_ranks(self) -> bool:
        moved = False
        for _ in range(256):  # then the broker's turn
            if self._pipes.unsent() > _UNSENT:
                break
            message = self._ranks.take()
            if message is None:
                break
            moved |= self._hear(*message)
        return moved

    def _hear(self, rank: int, tag: int, data: bytearray) -> bool:
        member = self._members[rank]
        member.heard = self._now_ns() / 1e9
        deaf, member.deaf = member.deaf, False
        if tag in (relay.OPEN, relay.CLOSE, relay.LEAVE):
            member.owes = False
        if deaf and tag not in (relay.OPEN, relay.LEAVE):  # it lives after all: it may begin anew
            self._say(rank, relay.BROKER_CLOSED, b"the gateway had given this rank up")
        if tag == relay.DATA and member.open:
            self._pipes.write(rank, data)
        elif tag == relay.OPEN:
            member.open, member.held = True, False
            self._pipes.open(rank)
            self._say(rank, relay.OPEN, data)
        elif tag == relay.CLOSE:
            self._shut(rank)
        elif tag == relay.LEAVE:
            self._shut(rank)
            member.left, member.failed = True, bool(data)
        return True

    def _shut(self, rank: int) -> None:
        self._members[rank].open = False
        self._pipes.close(rank)

    # ---- from the broker ---------------------------------------------------------------------

    def _from_broker(self, pause_s: float) -> bool:
        moved = False
        for rank, data, reason in self._pipes.wait(pause_s):
            moved = True
            if rank == KEEL:
                self._keel_moved(reason)
            elif reason:
                # A rank that lives answers by CLOSE at once. A rank that took the gateway for dead
                # while that was stopped went to the broker's socket, which is why the broker closed
                # this pipe, and says nothing here any more, not even that it leaves.
                self._members[rank].open, self._members[rank].owes = False, True
                self._say(rank, relay.BROKER_CLOSED, reason.encode())
            else:
                self._say(rank, relay.DATA, data)
                self._hold(rank)
        return moved

    def _keel_moved(self, reason: str) -> None:
        """The broker's end of the connection that only tells us whether it lives."""
        now = self._now_ns()
        if reason and now - self._keel_at > _STEADY_NS:
            self._keel_at = now
            self._pipes.open(KEEL)  # once more: a connection may break without the broker
        elif reason and not self.orphaned:
            self.orphaned, self._orphan_until = reason, now + _ORPHAN_NS

    def _say(self, rank: int, tag: int, data: Buffer) -> None:
        member = self._members[rank]
        if member.deaf:
            return
        try:
            self._ranks.send(rank, tag, data)
        except ChannelLost:
            self._give_up(rank)

    def _hold(self, rank: int) -> None:
        member = self._members[rank]
        held = self._ranks.sending(rank) > _HOLD
        if held != member.held:
            member.held = held
            self._pipes.hold(rank, held)

    # ---- who lives ---------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        stalled = self._stalls.look(now)
        if stalled and self.orphaned:
            self._orphan_until += int(stalled * 1e9)
        for rank, member in self._members.items():
            if stalled:
                member.heard = now
            if member.held:
                self._hold(rank)
        if now - self._beaten < relay.BEAT_S:
            return
        self._beaten = now
        for rank, member in self._members.items():
            if (member.open or member.owes) and now - member.heard > relay.DEAF_S:
                self._give_up(rank)
            elif (member.open or member.left) and not self._ranks.sending(rank):
                self._say(rank, relay.BEAT, b"")

    def _give_up(self, rank: int) -> None:
        self._members[rank].deaf, self._members[rank].owes = True, False
        self._shut(rank)

    def _over(self) -> bool:
        if self.orphaned and self._now_ns() > self._orphan_until:
            return True
        return all(r.left or (r.deaf and not self._shares_fate) for r in self._members.values())

    def _part(self, tag: int) -> None:
        """The last word to everyone who listens, and a bounded time for it to arrive."""
        for rank, member in self._members.items():
            self._pipes.close(rank)
            if not member.failed:
                self._say(rank, tag, b"")
        until = self._now_ns() + int(_FAREWELL_S * 1e9)
        while self._now_ns() < until:
            self._ranks.sweep()
            if not any(self._ranks.sending(rank) for rank in self._members):
                return
            self._pipes.wait(0.001)
