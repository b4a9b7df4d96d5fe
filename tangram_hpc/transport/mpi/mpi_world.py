"""One MPI world after its ranks have met: its communicators and connections, and the way to leave
it.

Trainers have a communicator of their own; our traffic has another one, on which no rank ever blocks
inside MPI. After the meeting only one thread of a rank calls MPI for us. The module `mpi4py.MPI` is
handed in, since `mpi.py` alone may import it.

Where a rank has died or the gateway is silent, no rank may finalise, because MPI_Finalize waits for
dead ranks. `MpiWorld.leave` decides whether a rank may finalise, and ends the process without
MPI_Finalize where mpi4py would call it. Should MPI_Finalize wait for a rank that died just then,
the process ends all the same after a minute, with its own status. A program that calls MPI.Finalize
itself leaves the world there: MPI_Finalize at first deletes the attributes of COMM_SELF, and one of
these is ours.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from ...errors import BrokerUnreachable
from ...ports import ChannelLost
from ...protocol import relay
from ...protocol.liveness import Patience
from .mpi_channel import MpiChannel
from .mpi_exit import exit_status
from .mpi_presence import Presence
from .mpi_wire import MpiWire
from .rank_card import RankCard
from .timer_slack import shorten_timer_slack

_FINALIZE_S = 60  # how long MPI_Finalize may take; a gateway that was stopped is continued earlier


class MpiWorld:
    """One rank's view of the world after the meeting.

    Attributes:
        gateway: the gateway's rank in the world.
        job: the job of the gateway's broker.
        access: the path of that broker's access file.
        members: world ranks of the trainers, in ascending order.
        rank: this rank's number among the trainers.
        size: how many trainers there are.
        usable: whether MPI can carry our traffic (every rank has MPI_THREAD_MULTIPLE).
        trainers: the trainers' own communicator; on the gateway, one that contains the gateway
            alone.
        wire: sends and receives between all ranks of the world.
        shares_fate: whether the launcher ends all ranks when one exits without finalising MPI.
        dead: why nothing may be sent to the gateway any more; empty while it lives.
    """

    def __init__(self, MPI: Any, cards: Sequence[RankCard], own_finalize: bool, is_shared: bool,
                 fate_is_shared: bool) -> None:
        world = MPI.COMM_WORLD
        roles = [card.role for card in cards]
        self.gateway = roles.index("gateway")
        self.job, self.access = cards[self.gateway].job, cards[self.gateway].access
        self.members = tuple(r for r, role in enumerate(roles) if role == "trainer")
        self.usable = all(card.threads for card in cards)
        self.trainers = world.Split(roles[world.rank] == "trainer", world.rank)
        self.rank, self.size = self.trainers.rank, self.trainers.size
        self.shares_fate = fate_is_shared
        self._parting = self.trainers.Dup()  # for the trainers' agreement on finalising
        self._parting.Set_errhandler(MPI.ERRORS_RETURN)
        traffic = world.Dup()
        traffic.Set_errhandler(MPI.ERRORS_RETURN)
        self.wire = MpiWire(MPI, traffic)
        self.dead = ""
        self._oversubscribed = is_shared  # ranks of this node share its cores
        self._mpi, self._own_finalize = MPI, own_finalize
        self._opened, self._owner = 0, os.getpid()  # connections made; the process that met
        self._ending = False  # whether we already run this process's exit handlers
        # whether MPI may be finalised; None until this rank has told the gateway that it leaves
        self._parted: bool | None = None
        self._clients: list[Any] = []
        self._channel: MpiChannel | None = None
        self._presence = Presence(self.wire, self.gateway, self._idle, self.lose)

    def stay(self) -> None:
        """Tells the gateway from now on that this trainer lives, whether or not it has a client,
        and leaves the world before MPI is finalised.
        """
        atexit.register(self.leave)
        key = self._mpi.Comm.Create_keyval(delete_fn=lambda *_: self._part())
        self._mpi.COMM_SELF.Set_attr(key, None)
        if self.usable:
            self._presence.start()

    def keep(self, client: Any) -> None:
        """Keeps a client, which is closed before its rank leaves the world: the thread of its
        connection lives on when the program holds no reference to the client any more. At the end
        of the process an exit function of its own closes it: if that fails, the rank leaves all
        the same.
        """
        self._clients.append(client)
        atexit.register(client.close)

    def dial(self, spin_us: int) -> MpiChannel:
        """Opens a new connection with the broker (implements `ports.Dial`).

        Args:
            spin_us: how long a wait may spin before it sleeps, µs.

        Raises:
            BrokerUnreachable: the gateway was lost, or another client of this process uses MPI.
        """
        if self.dead:
            raise BrokerUnreachable(f"job {self.job}: the MPI gateway is lost ({self.dead})")
        shorten_timer_slack()  # for the calling thread, which is the client's own
        spin_ns = self.spin_us(spin_us) * 1000
        with self._presence.lock:
            if not self._idle():
                raise BrokerUnreachable(f"job {self.job}: another client of this process uses MPI")
            self._opened += 1
            self._channel = MpiChannel(self.wire, self.gateway, self._opened, spin_ns, self.lose)
            return self._channel

    def _idle(self) -> bool:
        """Whether no connection uses MPI."""
        return self._channel is None or self._channel.closed

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that met the world."""
        return os.getpid() != self._owner

    def spin_us(self, at_most: int) -> int:
        """Returns how long a wait may spin, µs: not at all on an oversubscribed node."""
        return 0 if self._oversubscribed else at_most

    def lose(self, why: str) -> None:
        """Sends nothing to the gateway any more; the first reason is kept."""
        self.dead = self.dead or why

    def leave(self) -> None:
        """Closes the clients, and leaves the world at a trainer's end.

        The rank tells the gateway, waits for its answer as long as its heartbeats come, and
        finalises MPI if that cannot hang. To a gateway from which nothing comes, it sends nothing.

        Under a launcher that ends all ranks together, a gateway that is only silent cannot be dead,
        because this rank lives. So the rank tells even a silent gateway, waits until a gateway that
        was stopped has been continued, and no trainer ends before all of them leave.
        """
        if self.forked:  # the child of a fork must not touch MPI
            return self._leave_child()
        if not self._mpi.Is_finalized():
            self.finalize(self._part())

    def _part(self) -> bool:
        """Tells the gateway that this rank leaves, once; returns whether MPI may be finalised. It
        is asked again where `_end` runs all exit handlers: what could hang then still can.
        """
        if self._parted is not None:
            return self._parted
        self._parted = False
        for client in self._clients:
            client.close()
        failed = hasattr(sys, "last_value")  # whether an exception ends this program
        self._presence.stop()
        can = self._gateway_lives() and self._may_finalize(b"!" if failed else b"")
        if self.shares_fate and not failed:
            can = self._all_can(can)
        if not can:
            self.lose("it did not let us finalise")
        self._parted = can
        return can

    def _gateway_lives(self) -> bool:
        if self.shares_fate:
            return True
        try:
            return not self.dead and (not self.usable or self._presence.hears())
        except ChannelLost:
            return False

    def _all_can(self, can: bool) -> bool:
        """Waits until all trainers leave; returns whether each of them may finalise MPI.

        The wait polls and sleeps, so that it keeps no core busy.
        """
        mine, least, pause = array("i", [can]), array("i", [0]), 50e-6
        try:
            request = self._parting.Iallreduce([mine, self._mpi.INT], [least, self._mpi.INT],
                                               self._mpi.MIN)
            while not request.Test():
                time.sleep(pause)
                pause = min(0.02, pause * 1.5)
        except self._mpi.Exception:
            return False
        return bool(least[0])

    def _leave_child(self) -> None:
        """Keeps mpi4py from finalising MPI when the child of a fork exits."""
        if not self._own_finalize:
            self.finalize(False)

    def finalize(self, can: bool) -> None:
        """Finalises MPI, or makes sure that it is not finalised.

        Args:
            can: whether MPI_Finalize can return.
        """
        if can and not self._mpi.Is_finalized():
            self._finalize()
        elif not self._own_finalize:
            self._end()  # at exit, mpi4py would finalise and hang

    def _finalize(self) -> None:
        """Calls MPI_Finalize, which waits for all ranks, by ctypes: mpi4py would hold the GIL, and
        the thread that bounds the wait could not run.
        """
        done = threading.Event()

        def bound() -> None:
            for _ in range(_FINALIZE_S):  # counted, as time in which this process was stopped
                if done.wait(1.0):  # must not count
                    return
            print("tangram: MPI_Finalize waits for a rank that is gone: ending without it",
                  file=sys.stderr, flush=True)
            self._end()

        threading.Thread(target=bound, name="tangram-finalize", daemon=True).start()
        # an mpi4py that finds its library only when it runs has no such symbol
        status = getattr(ctypes.CDLL(self._mpi.__file__), "MPI_Finalize", self._mpi.Finalize)()
        done.set()
        if status:
            raise self._mpi.Exception(status)

    def _end(self) -> None:
        """Runs the exit handlers that are left, and ends this process here."""
        if not self._ending:
            self._ending = True
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_status())

    def _may_finalize(self, parting: bytes) -> bool:
        wire, pause = self.wire, 50e-6
        patience, beat_at = self._patience(), time.monotonic() + relay.BEAT_S
        try:
            wire.send(self.gateway, relay.LEAVE, parting)
            while not patience.over(time.monotonic()):
                wire.sweep()
                while (message := wire.take()) is not None:
                    patience = self._patience()
                    if message[1] in (relay.PART, relay.END):
                        return message[1] == relay.PART
                if parting and not wire.sending(self.gateway):
                    return False
                if time.monotonic() > beat_at and not wire.sending(self.gateway):
                    wire.send(self.gateway, relay.BEAT, b"")
                    beat_at = time.monotonic() + relay.BEAT_S
                time.sleep(pause)
                pause = min(0.02, pause * 1.5)
        except ChannelLost:
            pass
        return False

    def _patience(self) -> Patience:
        """Returns a timeout that starts now; when it has passed, a silent gateway counts as dead.
        """
        limit_s = 2 * relay.STOPPED_S if self.shares_fate else relay.GATEWAY_SILENCE_S
        return Patience(time.monotonic(), limit_s, 1.0)
