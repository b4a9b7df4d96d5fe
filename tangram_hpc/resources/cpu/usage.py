"""What a sandbox has used, as far as its enforcement knows. Nothing is measured here."""

from __future__ import annotations

from typing import NamedTuple


class GroupUsage(NamedTuple):
    """What the processes of one group have used since it was made; None means unknown.

    Attributes:
        cpu_ns: CPU time.
        peak_mem_kib: the most memory.
        tasks: living processes, with each of their threads where a cgroup counts.
    """

    cpu_ns: int | None
    peak_mem_kib: int | None
    tasks: int | None
