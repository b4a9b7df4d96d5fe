"""What the ranks of one MPI world tell each other when they meet, and whether they fit together.

Every rank reads the same cards in the same order, so all of them come to the same answer without a
further message, and all raise the same error.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import AccessError, ProtocolError, TangramError, WrongWorld
from .mpi_launch import REMEDY


@dataclass(frozen=True)
class RankCard:
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


def complaint(cards: list[RankCard]) -> TangramError | None:
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
