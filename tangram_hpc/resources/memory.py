"""How much memory this process's node has, and how much of it is available.

Both are figures of the machine, or of this process's cgroup where those are lower. How much is lent
is decided elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """The files of a cgroup, and of `memory.stat` the key of the cache that can be dropped."""

    limit: str
    used: str
    cache: str
    kills: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
             "memory.oom_control")
_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")


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


def oom_kills() -> int:
    """How many processes of this process's cgroup, as a rule that of its job step, the kernel has
    killed for memory; 0 where nothing counts them.
    """
    total = 0
    for folders, names in _own_cgroups():
        nearest = next(filter(None, (_read(folder / names.kills) for folder in folders)), "")
        total += _flat_keyed(nearest, "oom_kill")
    return total


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each cgroup above this process that has a limit."""
    for folders, names in _own_cgroups():
        for folder in folders:
            limit, used = _read(folder / names.limit).strip(), _read(folder / names.used).strip()
            if limit.isdigit() and used.isdigit():
                cache = _flat_keyed(_read(folder / "memory.stat"), names.cache)
                yield int(limit), int(used) - cache


def _own_cgroups() -> Iterator[tuple[list[Path], _Names]]:
    """For each version of cgroups that counts this process's memory, its cgroup and all above it,
    the nearest first, and the names in them.
    """
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), _V2
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), _V1
        else:
            continue
        here = root / path.lstrip("/")
        yield [here, *(above for above in here.parents if above.is_relative_to(root))], names


def _flat_keyed(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
