"""The only importer of mpi4py: one MPI world of trainers and a gateway.

A job may start its trainers and one gateway as one MPI world. All ranks meet once: each tells the
others its role and version, and the world is split so that trainers have a communicator of their
own. Our traffic has another communicator, on which nobody ever blocks inside MPI; after the meeting
only one thread of a rank calls MPI for us.

mpi4py is imported inside functions, because importing it starts MPI. Where a rank has died or the
gateway is silent, nobody may finalise: MPI_Finalize waits for the dead. `MpiWorld.leave` decides
whether a rank may finalise, and ends the process without it where mpi4py would try.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from ...errors import (
    AccessError,
    BrokerUnreachable,
    InvalidInput,
    MissingExtra,
    ProtocolError,
    TangramError,
    WrongWorld,
    how_to_install,
)
from ...ports import ChannelLost
from ...protocol import relay
from ...protocol.frame import Buffer
from ...protocol.liveness import Patience
from .mpi_channel import MpiChannel
from .mpi_launch import REMEDY, Launch, launch_of, launch_rank
from .mpi_oversubscription import oversubscribed, shares_fate, wait_environment
from .mpi_shm import forget_names
from .mpi_watchdog import start_watchdog
from .timer_slack import shorten_timer_slack

_SLOT = 8192  # bytes for the card of one rank in the meeting


@dataclass(frozen=True)
class Card:
    """What a rank tells all others at the meeting.

    Attributes:
        role: "trainer" or "gateway".
        version: the rank's version of tangram_hpc.
        job: the gateway's job; empty for trainers.
        access: the path of the gateway's access file, never the key; empty for trainers.
        problem: why the gateway cannot serve; empty if it can.
        size: how many ranks were launched, as far as the rank can tell; 0 for unknown.
        source: the environment variable that told `size`.
        threads: whether MPI has MPI_THREAD_MULTIPLE on this rank.
        library: the MPI library's name and version.
    """

    role: str
    version: str
    job: str = ""
    access: str = ""
    problem: str = ""
    size: int = 0
    source: str = ""
    threads: bool = True
    library: str = ""


class MpiWorld:
    """The world after the meeting, as one rank sees it.

    Attributes:
        gateway: the gateway's rank in the world.
        job: the job of the gateway's broker.
        access: the path of that broker's access file.
        members: world ranks of the trainers, in ascending order.
        rank: this rank's number among the trainers.
        size: how many trainers there are.
        usable: whether MPI can carry our traffic (every rank has MPI_THREAD_MULTIPLE).
        trainers: the trainers' own communicator; the gateway's contains the gateway alone.
        wire: sends and receives between all ranks of the world.
        shares_fate: whether the launcher ends all ranks when one exits without finalising MPI.
        dead: why nothing may be sent to the gateway any more; empty while it lives.
    """

    def __init__(self, MPI: Any, cards: list[Card], own_finalize: bool, is_shared: bool,
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
        self._parting = self.trainers.Dup()  # where trainers agree, at the end, on finalising
        self._parting.Set_errhandler(MPI.ERRORS_RETURN)
        traffic = world.Dup()
        traffic.Set_errhandler(MPI.ERRORS_RETURN)
        self.wire = MpiWire(MPI, traffic)
        self.dead = ""
        self._oversubscribed = is_shared  # ranks of this node share its cores
        self._mpi, self._own_finalize = MPI, own_finalize
        self._opened, self._owner = 0, os.getpid()  # connections made; the process that met
        self._ending = False  # whether we already run this process's exit handlers
        self._channel: MpiChannel | None = None

    def dial(self, spin_us: int) -> MpiChannel:
        """Opens a new connection with the broker (serves `ports.Dial`).

        Args:
            spin_us: how long a wait may spin before it sleeps, µs.

        Raises:
            BrokerUnreachable: the gateway was lost, or another client of this process uses MPI.
        """
        if self.dead:
            raise BrokerUnreachable(f"job {self.job}: the MPI gateway is lost ({self.dead})")
        if self._channel is not None and not self._channel.closed:
            raise BrokerUnreachable(f"job {self.job}: another client of this process uses MPI")
        shorten_timer_slack()  # for the calling thread, which is the client's own
        self._opened += 1
        spin_ns = self.spin_us(spin_us) * 1000
        self._channel = MpiChannel(self.wire, self.gateway, self._opened, spin_ns, self.lose)
        return self._channel

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
        """Leaves the world at a trainer's end; the client must be closed.

        The rank tells the gateway, waits for its answer as long as its heartbeats come, and
        finalises MPI if that cannot hang.

        Where ranks share their fate, a gateway that is silent is not dead, or this rank would be
        dead too: it is told all the same, and no trainer ends before all of them leave.
        """
        if self.forked:  # the child of a fork must not touch MPI
            return self._leave_child()
        failed = hasattr(sys, "last_value")  # an exception ends this program
        if self._mpi.Is_finalized():
            return
        can = (not self.dead or self.shares_fate) and self._may_finalize(b"!" if failed else b"")
        if self.shares_fate and not failed:
            can = self._all_can(can)
        if not can:
            self.lose("it did not let us finalise")
        self.finalize(can)

    def _all_can(self, can: bool) -> bool:
        """Waits until all trainers leave; returns whether each of them may finalise MPI.

        The wait polls and sleeps, so that it takes no core.
        """
        mine, least, pause = array("i", [can]), array("i", [0]), 50e-6
        try:
            told = self._parting.Iallreduce([mine, self._mpi.INT], [least, self._mpi.INT],
                                            self._mpi.MIN)
            while not told.Test():
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
        """Finalises MPI, or makes sure that nothing does.

        Args:
            can: whether MPI_Finalize would return.
        """
        if can and not self._mpi.Is_finalized():
            self._mpi.Finalize()
        elif not self._own_finalize and not self._ending:
            # mpi4py would finalise at exit, and hang: run the other exit handlers and end here
            self._ending = True
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_exit_status())

    def _may_finalize(self, word: bytes) -> bool:
        wire, pause = self.wire, 50e-6
        patience = _patience()
        try:
            wire.send(self.gateway, relay.LEAVE, word)
            while not patience.over(time.monotonic()):
                wire.sweep()
                while (message := wire.take()) is not None:
                    patience = _patience()
                    if message[1] in (relay.PART, relay.END):
                        return message[1] == relay.PART
                if word and not wire.sending(self.gateway):
                    return False
                time.sleep(pause)
                pause = min(0.02, pause * 1.5)
        except ChannelLost:
            pass
        return False


def _patience() -> Patience:
    """Returns the timeout after which a silent gateway counts as dead, from now on."""
    return Patience(time.monotonic(), relay.SILENCE_S, 1.0)


class MpiWire:
    """Tagged messages between ranks, without blocking.

    It serves `mpi_channel.Wire` and the gateway's `Ranks`.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self._mpi, self._comm, self._byte = MPI, comm, MPI.BYTE
        self._status = MPI.Status()
        self._requests: list[Any] = []
        self._kept: list[tuple[int, Buffer]] = []  # of each request: its rank, and its buffer
        self._on_way: dict[int, int] = {}  # by rank: see `sending`
        self._arriving: dict[int, deque[tuple[Any, int, bytearray]]] = {}

    def send(self, rank: int, tag: int, data: Buffer) -> None:
        """Begins to send; the buffer is kept until MPI has sent it.

        Raises:
            ChannelLost: MPI refused.
        """
        try:
            request = self._comm.Isend([data, len(data), self._byte], rank, tag)
            if request.Test():
                return
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        self._requests.append(request)
        self._kept.append((rank, data))
        self._on_way[rank] = self._on_way.get(rank, 0) + len(data) + 1

    def sending(self, rank: int) -> int:
        """Returns the bytes under way to this rank; each message counts one byte more."""
        return self._on_way.get(rank, 0)

    def sweep(self) -> None:
        """Frees the buffers of finished sends.

        Raises:
            ChannelLost: MPI refused.
        """
        if not self._requests:
            return
        try:
            done = self._mpi.Request.Testsome(self._requests)
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        for index in sorted(done or (), reverse=True):
            rank, data = self._kept.pop(index)
            del self._requests[index]
            self._on_way[rank] -= len(data) + 1

    def take(self) -> tuple[int, int, bytearray] | None:
        """Returns the next whole message as (rank, tag, bytes), or None.

        Messages of one rank come in the order in which it sent them.

        Raises:
            ChannelLost: MPI refused.
        """
        status = self._status
        try:
            message = self._probe(status)
            if message is None:
                message = self._probe(status)  # MPICH: the first probe fetches, the second finds
            if message is not None:
                rank, tag = status.Get_source(), status.Get_tag()
                data = bytearray(status.Get_count(self._byte))
                request = message.Irecv([data, len(data), self._byte])
                if not self._arriving.get(rank) and request.Test():
                    return rank, tag, data
                self._arriving.setdefault(rank, deque()).append((request, tag, data))
            for rank, queue in self._arriving.items():
                if queue and queue[0][0].Test():
                    _, tag, data = queue.popleft()
                    return rank, tag, data
        except self._mpi.Exception as error:
            raise ChannelLost(f"MPI: {error}") from None
        return None

    def _probe(self, status: Any) -> Any:
        return self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)


# ---- the meeting -------------------------------------------------------------------------------

_met: MpiWorld | None = None


def trainers() -> Any:
    """Returns the trainers' own communicator (`tangram_hpc.comm`).

    Raises:
        WrongWorld: `connect()` has not met a gateway in this process.
    """
    if _met is not None and _met.forked:
        raise WrongWorld("tangram_hpc.comm: this process is a fork of an MPI rank, and MPI is that "
                         "rank's alone")
    if _met is None:
        raise WrongWorld("tangram_hpc.comm: there is none before connect() has met a gateway; "
                         "in a world without one use mpi4py.MPI.COMM_WORLD")
    return _met.trainers


def launched(environ: Mapping[str, str]) -> Launch:
    """Returns what the launcher says of our world; see `mpi_launch.launch_of`."""
    return launch_of(environ)


def meet(environ: Mapping[str, str], card: Card) -> MpiWorld:
    """Starts MPI and meets all ranks. Collective over the world; a second call returns the world.

    Args:
        environ: the environment, which tells what was launched.
        card: what this rank tells the others.

    Raises:
        WrongWorld: the world is not the one that was launched, or has not exactly one gateway.
        AccessError: the gateway cannot serve.
        ProtocolError: the ranks have different versions of tangram_hpc.
        MissingExtra: mpi4py is not installed.
    """
    if _met is not None:
        return _met
    sys.excepthook = _one_line(sys.excepthook, speaks(environ))
    try:
        return _bring_together(environ, card)
    except TangramError as error:
        _refusals.append(error)
        raise


def speaks(environ: Mapping[str, str]) -> bool:
    """Returns whether this rank is the one that reports what is wrong with all of them."""
    return launch_rank(environ) == 0


def _bring_together(environ: Mapping[str, str], card: Card) -> MpiWorld:
    global _met
    launch = launch_of(environ)
    is_shared = oversubscribed(environ, len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    os.environ.update(wait_environment(environ, is_shared))  # MPI reads it when it starts
    with start_watchdog(os.getpid(), launch.rank, launch.timeout_s, REMEDY):
        MPI, own_finalize = _start()
        full = {**asdict(card), "size": launch.size, "source": launch.source,
                "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE, "library": _library(MPI)}
        cards = _exchange(MPI, Card(**full))
        forget_names()  # every card has come, so every rank has left MPI_Init
        problem = complaint(cards)
        if problem is None:
            _met = MpiWorld(MPI, cards, own_finalize, is_shared, shares_fate(environ))
    if problem is not None:
        if own_finalize:
            MPI.Finalize()  # returns, as all ranks refuse alike; the launcher sees an orderly end
        raise problem
    assert _met is not None
    if card.role == "trainer":
        atexit.register(_met.leave)
        if not own_finalize:
            _note_exit_status()
    return _met


def leave_after(client: Any) -> None:
    """Closes this client before its rank leaves the world. The client is held until then, because
    its connection lives on in its thread when nobody else holds the client any more."""
    atexit.register(client.close)


def complaint(cards: list[Card]) -> TangramError | None:
    """Returns what is wrong with a world of these ranks, or None; every rank gets the same."""
    first, real = cards[0], len(cards)
    wrong = next((card for card in cards if card.size and card.size != real), None)
    if wrong is not None:
        return WrongWorld(f"the MPI world has {_ranks(real)}, but {wrong.size} were launched "
                          f"({wrong.source}); the library is {wrong.library}; {REMEDY}")
    gateways = [card for card in cards if card.role == "gateway"]
    if len(gateways) != 1:
        return WrongWorld(f"the MPI world of {_ranks(real)} has {len(gateways)} gateways, not one: "
                          "start `tangram gateway` as exactly one of its ranks, or unset "
                          "TANGRAM_GATEWAY to use the socket")
    for card in cards:
        if card.version != first.version:
            return ProtocolError(f"the ranks have tangram_hpc {first.version} and {card.version}: "
                                 "install the same on all nodes")
    if gateways[0].problem:
        return AccessError(f"the gateway: {gateways[0].problem}")
    return None


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _start() -> tuple[Any, bool]:
    """Starts MPI; returns mpi4py's module, and whether finalising is up to us."""
    ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if ours:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtra(f"TANGRAM_GATEWAY is set, but mpi4py cannot be used ({error}); "
                           f"{how_to_install('mpi')}, or unset it to use the socket") from None
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI, ours or mpi4py.rc.finalize is False


def _library(MPI: Any) -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _exchange(MPI: Any, card: Card) -> list[Card]:
    text = json.dumps(asdict(card)).encode()
    if len(text) > _SLOT:
        raise InvalidInput(f"the path of the access file is too long for MPI: {card.access[:80]}…")
    world = MPI.COMM_WORLD
    told = bytearray(_SLOT * world.size)
    world.Allgather([bytearray(text.ljust(_SLOT)), MPI.BYTE], [told, MPI.BYTE])
    slots = (told[at : at + _SLOT] for at in range(0, len(told), _SLOT))
    return [Card(**json.loads(slot)) for slot in slots]


# ---- how a program ends ------------------------------------------------------------------------


_refusals: list[TangramError] = []  # what `meet` raised; one at most


def _one_line(before: Any, aloud: bool) -> Any:
    """Returns an excepthook for a world that nobody can use.

    Rank 0 prints one line, and every rank ends with the error's status, where there would be a
    traceback from each rank. A program can still catch the error.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TangramError) or error not in _refusals:
            before(kind, error, trace)
            return
        if aloud:
            print(f"tangram: error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status)

    return hook


_noted: list[Any] = []


def _note_exit_status() -> None:
    """Wraps `sys.exit` to learn this process's exit status.

    `finalize` may have to end the process by `os._exit`, and needs the status for it, which Python
    tells no exit handler.
    """
    real = sys.exit

    def heard(status: Any = None, /) -> None:
        _noted[:] = [status]
        real(status)

    sys.exit = heard  # type: ignore[assignment]


def _exit_status() -> int:
    if hasattr(sys, "last_value"):
        return 1
    status = _noted[0] if _noted else 0
    return status if isinstance(status, int) else int(status is not None)
