"""What a new process inherits besides descriptors, directory and environment."""

from __future__ import annotations

import os
from pathlib import Path


def surroundings() -> list[str]:
    """Returns the users, capabilities, masks, limits, cgroups and namespaces of this thread."""
    lines: list[str] = []
    with open("/proc/thread-self/status") as status:
        lines += [line for line in status if line.startswith((
            "Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed:",
            "SigBlk", "SigIgn"))]
    for name in ("limits", "cgroup", "oom_score_adj"):
        lines += Path(f"/proc/thread-self/{name}").read_text().splitlines()
    lines += [os.readlink(f"/proc/thread-self/ns/{name}") for name in ("mnt", "net", "user", "pid")]
    return [*lines, os.readlink("/proc/self/root"), str(os.nice(0))]
