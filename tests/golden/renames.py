"""The map from old to new spellings, as `renames.toml` writes it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("renames.toml")
SECTIONS = ("modules", "names", "settings", "options", "env", "messages")
_BOUNDARY = ".( :"


@dataclass(frozen=True)
class Renames:
    """Old to new spellings by section, and what is new or may differ in each listing.

    Attributes:
        maps: by section, old spelling to new one; an empty new one says that it is gone.
        added: by section, spellings that the listing does not have.
        changed: by section, spellings whose content may differ.
    """

    maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    added: Mapping[str, frozenset[str]] = field(default_factory=dict)
    changed: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of(self, section: str) -> dict[str, str]:
        """The map that counts for one listing: modules are prefixes of names."""
        own = dict(self.maps.get(section, {}))
        return {**self.maps.get("modules", {}), **own} if section == "names" else own

    def renamed(self, section: str, key: str) -> str:
        """The new spelling of a key; empty when it is gone. The longest entry that fits wins."""
        return _mapped(self.of(section), key, section == "messages")

    def entry_for(self, section: str, key: str) -> str:
        """The entry that renames this old key; empty for none."""
        return _entry(self.of(section), key, section == "messages")

    def old_class(self, name: str) -> str:
        """The old name of a class that is now called so."""
        for old, new in self.maps.get("names", {}).items():
            if new.rpartition(".")[2] == name and "(" not in new:
                return old.rpartition(".")[2]
        return name

    def old_field(self, owner: str, name: str) -> str:
        """The old name of a field; `owner` is the old name of its class."""
        for old, new in self.maps.get("names", {}).items():
            if old.rpartition(".")[0] == owner and new.rpartition(".")[2] == name:
                return old.rpartition(".")[2]
        return name


def read_renames(path: Path = FILE) -> Renames:
    """The checked-in map.

    Raises:
        ValueError: a section is not known.
    """
    told: dict[str, Any] = tomllib.loads(path.read_text())
    added, changed = told.pop("added", {}), told.pop("changed", {})
    for section in [*told, *added, *changed]:
        if section not in SECTIONS:
            raise ValueError(f"{path.name}: section {section!r} is not one of "
                             f"{', '.join(SECTIONS)}, added, changed")
    return Renames(told, {k: frozenset(v) for k, v in added.items()},
                   {k: frozenset(v) for k, v in changed.items()})


def _entry(entries: Mapping[str, str], key: str, whole: bool) -> str:
    if whole:
        return key if key in entries else ""
    fits = [old for old in entries
            if key == old or (key.startswith(old) and key[len(old)] in _BOUNDARY)]
    return max(fits, key=len, default="")


def _mapped(entries: Mapping[str, str], key: str, whole: bool) -> str:
    old = _entry(entries, key, whole)
    if not old:
        return key
    return entries[old] + key[len(old):] if entries[old] else ""
