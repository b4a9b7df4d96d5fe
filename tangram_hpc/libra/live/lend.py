"""Old name and arguments of `tangram_hpc.libra.live.leased_member`, kept for one release."""

from __future__ import annotations

from .coordinator import Coordinator
from .leased_member import Start, add_leased_member

__all__ = ["lend"]


def lend(desk: Coordinator, number: int, life: int, start: Start) -> None:
    """Calls `add_leased_member`, which has other names for these arguments."""
    add_leased_member(desk, number, life, start)
