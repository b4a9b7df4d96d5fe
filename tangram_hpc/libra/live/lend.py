"""Old name of `tangram_hpc.libra.live.leased_member`, kept for one release."""

from __future__ import annotations

from .leased_member import add_leased_member as lend

__all__ = ["lend"]
