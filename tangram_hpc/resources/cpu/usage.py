"""The resources that a sandbox has used, as far as its enforcement knows them.

Nothing is measured here."""

from __future__ import annotations

from typing import NamedTuple


class GroupUsage(NamedTuple):
    """What the processes of one group have used since the group was made; None means unknown.

    Attributes:
        cpu_ns: CPU time, ns.
        peak_mem_kib: the largest memory in use at one time, KiB.
        tasks: living processes, with each of their threads where a cgroup counts.
    """

    cpu_ns: int | None
    peak_mem_kib: int | None
    tasks: int | None
