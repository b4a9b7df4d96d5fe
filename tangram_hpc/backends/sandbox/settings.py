"""Pure. What a site or a user chose for the sandboxes of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Choices for one worker.

    Attributes:
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        output_max: bytes kept of each of a command's output streams.
        warm: sandboxes of the usual kind kept ready; None: one a unit, at most 4.
        starts_max: sandboxes that are built at once; 0: one a core.
        disk_mib: what a session's files may take when it does not say; 0: no limit.
        pids: processes of one sandbox at once; 0: no limit.
        isolation: backend of sessions that name none; empty: the best that works.
        enforcement: how units are enforced; empty: the best that works.
        read_paths: more of the host's paths that sandboxes may read.
    """

    kill_wait_s: float = 2.0
    output_max: int = 1 << 20
    warm: int | None = None
    starts_max: int = 0
    disk_mib: int = 10240
    pids: int = 1024
    isolation: str = ""
    enforcement: str = ""
    read_paths: tuple[str, ...] = ()
