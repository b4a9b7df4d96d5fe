"""The cards that ranks of one MPI world exchange when they meet, and the check that they fit.

Every rank checks the same cards in the same order, so all of them come to the same result without a
further message, and all raise the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import AccessError, ProtocolError, TangramError, WrongWorld
from .mpi_launch import REMEDY


@dataclass(frozen=True)
class RankCard:
    """The facts that a rank tells all others at the meeting.

    Attributes:
        role: "trainer" or "gateway".
        version: the rank's version of tangram_hpc.
        job: the gateway's job; empty for trainers.
        access: the path of the gateway's access file, never the key; empty for trainers.
        problem: why the gateway cannot serve; empty if it can.
        size: how many ranks were launched; 0 if the rank does not know.
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


def complaint(cards: list[RankCard]) -> TangramError | None:
    """Returns the error of a world of these ranks, or None; the result is the same on every rank.
    """
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
