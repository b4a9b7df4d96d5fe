"""The gateway's driver: it carries bytes between the ranks of an MPI world and the broker, unread.

Each rank has one pipe to the broker. The gateway knows the relay's tags (`protocol/relay.py`) and
nothing of what it carries. It may die at any time without harm: the broker sees connections end,
and ranks that hear no beat go to their sockets. It sends nothing to a rank that has been silent,
since MPI may hang or crash when it sends to a dead process.

When the broker dies, each rank is told that its connection ended, and asks for another one until
its grace is over. The gateway dials for it each time, so the ranks go on through the gateway once
the broker has been started again. Meanwhile the gateway looks for the broker on its own account,
and ends if there is none for longer than the ranks would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..ports import ChannelLost
from ..protocol import relay
from ..protocol.frame import Buffer
from ..protocol.liveness import Stalls

_IDLE_S = 0.001  # longest pause when nothing moves: about 1.5 % of a core
_SENDING_S = 0.0002  # longest pause while something is on its way to a rank
_HOLD = 4 << 20  # with more bytes than this on their way to a rank, its pipe is not read
_UNSENT = 64 << 20  # with more bytes than this waiting for the broker, no rank is read
_STALLED_S = 1.0  # after so long without a look, the ranks' silence proves nothing
_FALTERED_S = relay.GATEWAY_SILENCE_S / 2  # after such a stall, ranks may have given the gateway up
_FAREWELL_S = 2.0  # for the last message to reach the ranks
_STEADY_NS = 5 * 10**9  # a keep-alive pipe that lasted so long is opened again when it ends
_ORPHAN_S = 60.0  # how long ranks may take to leave when there is no broker any more
_AGAIN_NS = 10**9  # pause between two looks for a broker that is gone
KEEP_ALIVE = -1  # the name of the pipe that carries nothing and ends with the broker


class Ranks(Protocol):
    """Messages to and from the other ranks; no method blocks."""

    def send(self, rank: int, tag: int, data: Buffer) -> None:
        """Begins to send bytes to a rank."""
        ...

    def sending(self, rank: int) -> int:
        """Returns how many bytes are on their way to a rank."""
        ...

    def sweep(self) -> None:
        """Frees the buffers of messages that have been sent."""
        ...

    def take(self) -> tuple[int, int, bytearray] | None:
        """Returns the next message as (rank, tag, bytes), or None."""
        ...


class Pipes(Protocol):
    """Connections to the broker by rank; only `wait` blocks."""

    def open(self, name: int) -> None:
        """Begins to connect; bytes that are written meanwhile wait."""
        ...

    def write(self, name: int, data: Buffer) -> None:
        """Sends bytes through a rank's pipe."""
        ...

    def unsent(self) -> int:
        """Returns how many bytes wait for the broker."""
        ...

    def connected(self, name: int) -> bool:
        """Returns whether a rank's pipe has reached the broker and has not ended."""
        ...

    def hold(self, name: int, held: bool) -> None:
        """Stops reading a pipe if `held`, else reads it again."""
        ...

    def close(self, name: int) -> None:
        """Ends a pipe after the written bytes have left."""
        ...

    def wait(self, timeout_s: float) -> Iterable[tuple[int, bytes, str]]:
        """Returns what came as (rank, bytes, ""), or (rank, b"", reason) for a pipe that ended."""
        ...


@dataclass(slots=True)
class _Rank:
    """What the gateway knows of one rank.

    Attributes:
        last_received_s: when the rank's last message came, by the gateway's clock.
        known: whether a message has come, so that the rank goes on saying that it lives.
        open: whether the rank has a connection to the broker.
        left: whether the rank's program has said that it ends.
        failed: whether it has said that it ends with an error, so it will not finalise MPI.
        given_up: whether the rank counts as dead, so that nothing is sent to it.
        held: whether its pipe is not read, since too many bytes are on their way to it.
    """

    last_received_s: float
    known: bool = False
    open: bool = False
    left: bool = False
    failed: bool = False
    given_up: bool = False
    held: bool = False


class Gateway:
    """Carries bytes until all ranks have left.

    Args:
        ranks: the connection to the other ranks.
        pipes: the connections to the broker.
        members: the trainers' ranks.
        now_ns: the monotonic clock.
        spin_us: how long it polls without a pause after the last message, in microseconds.
        yield_cpu: gives the CPU to another process between two probes.
        shares_fate: whether the launcher ends all ranks when one exits without finalising MPI, as
            `mpiexec` does. Then a gateway does not end before its ranks do, even if it has given
            them up or has no broker: they may be at work over the broker's socket, or alone.
        orphan_s: after how many seconds without a broker it ends, in which ranks give the broker up
            and leave; not where `shares_fate`.
    """

    def __init__(self, ranks: Ranks, pipes: Pipes, members: Iterable[int],
                 now_ns: Callable[[], int], spin_us: int, yield_cpu: Callable[[], None],
                 shares_fate: bool = False, orphan_s: float = _ORPHAN_S) -> None:
        self._ranks, self._pipes, self._now_ns = ranks, pipes, now_ns
        self._yield_cpu, self._shares_fate = yield_cpu, shares_fate
        now = now_ns() / 1e9
        self._members = {rank: _Rank(now) for rank in members}
        self._pace = relay.PollBackoff(spin_us * 1000)
        self._stalls, self._beaten = Stalls(now, _STALLED_S), now
        self._faltered = False  # it was stopped for so long that ranks may have given it up
        self._orphan_ns = int(orphan_s * 1e9)
        self._keep_alive_at = self._orphan_until = self._look_at = 0
        self.turns = 0  # calls of `turn`, by which a watchdog sees progress
        self.over = False  # whether all ranks have left, or no broker is left for them
        self.orphaned = ""  # why no broker can be reached now; empty while there is one

    def run(self) -> bool:
        """Carries bytes until all ranks have left, or no broker is left for them. Returns True if
        all ranks will finalise MPI and wait for this process to do so.
        """
        self._keep_alive_at = self._now_ns()
        self._pipes.open(KEEP_ALIVE)
        while not self._over():
            self.turn()
        self.over = True
        orderly = all(r.left and not r.failed and not r.given_up for r in self._members.values())
        # A rank that gave the gateway up has exited, and MPI_Finalize would wait for it. Where the
        # launcher ends all ranks together, ranks wait longer than a gateway stays stopped.
        orderly = orderly and (self._shares_fate or not self._faltered)
        self._part(relay.PART if orderly else relay.END)
        return orderly

    @property
    def abandoned(self) -> str:
        """Why ranks that have not left can reach no broker now; empty if there is one, or if all
        ranks left while it was away, as one that is started again is for some seconds."""
        return "" if all(r.left for r in self._members.values()) else self.orphaned

    def turn(self) -> None:
        """Looks once at the ranks and once at the broker, and moves what came."""
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
            moved |= self._receive(*message)
        return moved

    def _receive(self, rank: int, tag: int, data: bytearray) -> bool:
        member = self._members[rank]
        member.last_received_s, member.known = self._now_ns() / 1e9, True
        was_given_up, member.given_up = member.given_up, False
        # the rank lives after all, and may open a connection anew
        if was_given_up and tag not in (relay.OPEN, relay.LEAVE):
            self._send_to_rank(rank, relay.BROKER_CLOSED, b"the gateway had given this rank up")
        if tag == relay.DATA and member.open:
            self._pipes.write(rank, data)
        elif tag == relay.OPEN:
            member.open, member.held = True, False
            self._pipes.open(rank)
            self._send_to_rank(rank, relay.OPEN, data)
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
            if rank == KEEP_ALIVE:
                self._keep_alive_moved(reason)
            elif reason:
                self._members[rank].open = False
                self._send_to_rank(rank, relay.BROKER_CLOSED, reason.encode())
            else:
                self._send_to_rank(rank, relay.DATA, data)
                self._hold(rank)
        return moved

    def _keep_alive_moved(self, reason: str) -> None:
        """Handles the end of the pipe that carries nothing and only tells whether the broker lives.
        """
        now = self._now_ns()
        if reason and now - self._keep_alive_at > _STEADY_NS and not self.orphaned:
            self._keep_alive_at = now
            self._pipes.open(KEEP_ALIVE)  # once more: a connection may break without the broker
        elif reason:
            if not self.orphaned:
                self._orphan_until = now + self._orphan_ns
            self.orphaned, self._look_at = reason, now + _AGAIN_NS

    def _look_for_broker(self) -> None:
        """While there is no broker, dials from time to time, as one may be started again."""
        now = self._now_ns()
        if self._pipes.connected(KEEP_ALIVE):
            self.orphaned, self._keep_alive_at, self._look_at = "", now, 0
        elif self._look_at and now > self._look_at:
            self._look_at = 0  # until this attempt has failed
            self._pipes.open(KEEP_ALIVE)

    def _send_to_rank(self, rank: int, tag: int, data: Buffer) -> None:
        member = self._members[rank]
        if member.given_up:
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
        self._faltered |= stalled > _FALTERED_S
        if self.orphaned:
            self._orphan_until += int(stalled * 1e9)
            self._look_for_broker()
        for rank, member in self._members.items():
            if stalled:
                member.last_received_s = now
            if member.held:
                self._hold(rank)
        if now - self._beaten < relay.BEAT_S:
            return
        self._beaten = now
        for rank, member in self._members.items():
            if not member.known or member.failed:
                continue  # it has not begun, or it has exited
            if now - member.last_received_s > relay.RANK_SILENCE_S:
                self._give_up(rank)
            elif not self._ranks.sending(rank):
                self._send_to_rank(rank, relay.BEAT, b"")

    def _give_up(self, rank: int) -> None:
        self._members[rank].given_up = True
        self._shut(rank)

    def _over(self) -> bool:
        if self.orphaned and not self._shares_fate and self._now_ns() > self._orphan_until:
            return True
        return all(r.left or (r.given_up and not self._shares_fate) for r in self._members.values())

    def _part(self, tag: int) -> None:
        """Sends the last message to every rank that listens, and waits a bounded time for it to
        arrive.
        """
        for rank, member in self._members.items():
            self._pipes.close(rank)
            if not member.failed:
                self._send_to_rank(rank, tag, b"")
        until = self._now_ns() + int(_FAREWELL_S * 1e9)
        while self._now_ns() < until:
            self._ranks.sweep()
            if not any(self._ranks.sending(rank) for rank in self._members):
                return
            self._pipes.wait(0.001)
