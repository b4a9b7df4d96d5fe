"""How much memory this process's node has, and how much of it is available.

Both are figures of the machine, or of this process's cgroup where those are lower. How much is lent
is decided elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def total_mib() -> int:
    """The memory that this process may use, in MiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _cgroups())]) // (1 << 20)


def left_mib() -> int:
    """The memory that is still available to this process, in MiB, including page cache that the
    kernel can drop."""
    left = 1 << 62
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            left = int(line.split()[1]) << 10
    return min([left, *(limit - used for limit, used in _cgroups())]) // (1 << 20)


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each cgroup above this process that has a limit."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), _V2
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), _V1
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            limit, used = _read(folder / names[0]).strip(), _read(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used) - _cache(folder, names[2])
            if folder == root:
                break


def _cache(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
