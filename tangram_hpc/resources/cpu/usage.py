"""Owns: what a sandbox has used, as far as its enforcement can tell. Must not measure."""

from __future__ import annotations

from typing import NamedTuple


class Usage(NamedTuple):
    """What the processes of one group have used since it was made; None: cannot be told.

    `tasks` counts the living processes, with each of their threads where a cgroup counts.
    """

    cpu_ns: int | None
    peak_mem_kib: int | None
    tasks: int | None
