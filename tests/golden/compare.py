"""Compares what was collected with a golden file; each difference is one line that says where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .renames import Renames

Listing = Mapping[str, Any]
_SHOWN = 100  # characters of a value in a line


def frozen(file: str, golden: Listing, now: Listing, part: bool = False) -> list[str]:
    """Lines about a file that must stay equal.

    Args:
        file: name of the file, for the lines.
        golden: what the file says.
        now: what was collected.
        part: only a part was collected, so that a missing key says nothing.
    """
    lines = []
    for key in golden:
        if key not in now:
            lines += [] if part else [f"{file}: {key}: is gone"]
        elif golden[key] != now[key]:
            lines.append(f"{file}: {key}: {difference(golden[key], now[key])}")
    return lines + [f"{file}: {key}: is new ({_short(now[key])})" for key in now
                    if key not in golden]


def listed(file: str, section: str, golden: Listing, now: Listing, renames: Renames) -> list[str]:
    """Lines about a file whose entries may be renamed as the map says."""
    lines, expected = [], {}
    for key, value in golden.items():
        new = renames.renamed(section, key)
        if new:
            expected[new] = (key, value)
    for new, (key, value) in expected.items():
        said = key if new == key else f"{key} (now {new})"
        if new not in now:
            lines.append(f"{file}: {said}: is gone; name its new spelling in renames.toml "
                         f"[{section}]")
        elif now[new] != value and not {key, new} & renames.changed.get(section, frozenset()):
            lines.append(f"{file}: {said}: {difference(value, now[new])}")
    for key in now:
        alias = key in golden and renames.entry_for(section, key)
        if key not in expected and not alias and key not in renames.added.get(section, ()):
            lines.append(f"{file}: {key}: is new; renames.toml has no entry that leads to it "
                         f"(a rename in [{section}], or a line of `{section}` in [added])")
    return lines + list(_stale(section, golden, renames))


def _stale(section: str, golden: Listing, renames: Renames) -> Iterator[str]:
    """Entries of the map that rename nothing."""
    used = {renames.entry_for(section, key) for key in golden}
    for old in renames.of(section):
        is_class = section == "names" and not old.startswith("tangram_hpc")
        if old not in used and not is_class and old not in renames.maps.get("modules", {}):
            yield f"renames.toml: [{section}] {old!r}: the listing has no such entry; remove it"


def difference(old: Any, new: Any, place: str = "") -> str:
    """The first place where two values differ, and both values there."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            inner = f"{place}.{key}" if place else str(key)
            if key not in new:
                return f"{inner}: is gone (was {_short(old[key])})"
            if key not in old:
                return f"{inner}: is new ({_short(new[key])})"
            if old[key] != new[key]:
                return difference(old[key], new[key], inner)
    if isinstance(old, list) and isinstance(new, list):
        for index, (was, now) in enumerate(zip(old, new, strict=False)):
            if was != now:
                return difference(was, now, f"{place}[{index}]")
        at = min(len(old), len(new))
        where = f"{place}[{at}]"
        if len(old) > at:
            return f"{where}: is gone (was {_short(old[at])})"
        return f"{where}: is new ({_short(new[at])})"
    return (f"{place}: " if place else "") + f"was {_short(old)}, is {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
