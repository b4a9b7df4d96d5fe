"""Frozen: what travels between processes and lies on disk, as the structs declare it.

A protocol is a family of tagged structs with one root class. Neither modules nor class names
travel, so a family is recognised by its tags and fields, and a member by its tag. The order, the
type and the default of each field are what the other side relies on.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from . import walk, where
from .renames import Renames


def layouts(renames: Renames, golden: Mapping[str, Any]) -> dict[str, Any]:
    """Every layout, by protocol and tag; untagged parts and enums by class name."""
    found: dict[str, Any] = {}
    structs = [s for s in walk.classes(msgspec.Struct) if s.__struct_config__.array_like]
    used: set[type] = set()
    for root, members in _families(structs).items():
        label = _label(root, members, golden)
        for tag, member in sorted(members.items(), key=lambda pair: str(pair[0])):
            found[f"{label} {tag!r}"] = _layout(member, renames, used)
    for struct in structs:
        if struct.__struct_config__.tag is None:
            found[f"part {renames.old_class(struct.__name__)}"] = _layout(struct, renames, used)
    for kind in used:
        found[f"enum {renames.old_class(kind.__name__)}"] = [member.value for member in kind]
    return dict(sorted(found.items()))


def constants() -> dict[str, Any]:
    """Numbers and magic words."""
    found = {label: _plain(where.resolve(place)) for label, place in where.CONSTANTS.items()}
    found["frame of a record"] = where.find("framed")(b"golden").hex()
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return list(value) if isinstance(value, tuple) else value


def _families(structs: list[Any]) -> dict[Any, dict[Any, Any]]:
    """By root class, its members by tag. A root is tagged and derives from Struct alone; it is a
    member only where nothing derives from it."""
    tagged = [s for s in structs if s.__struct_config__.tag_field]
    roots = [s for s in tagged if s.__base__ is msgspec.Struct]
    return {root: {s.__struct_config__.tag: s for s in tagged
                   if issubclass(s, root) and s is not root} for root in roots}


def _label(root: Any, members: Mapping[Any, Any], golden: Mapping[str, Any]) -> str:
    """The golden file's name for this family: the one with which it has most in common. A family
    that is new is called after its root."""
    shares: dict[str, int] = {}
    field = root.__struct_config__.tag_field
    for key, layout in golden.items():
        label, _, tag = key.rpartition(" ")
        if not isinstance(layout, dict) or layout.get("tag field") != field:
            continue
        for mine, member in members.items():
            if repr(mine) == tag:
                names = {f.partition(":")[0] for f in layout["fields"]}
                shares[label] = shares.get(label, 0) + 1 + len(
                    names & set(member.__struct_fields__))
    if shares:
        return max(shares, key=lambda label: shares[label])
    return f"{root.__module__.rpartition('.')[2]}.{root.__name__}"


def _layout(struct: Any, renames: Renames, used: set[type]) -> Any:
    """Fields in order: name, type, default."""
    name = renames.old_class(struct.__name__)
    hints = typing.get_type_hints(struct)
    fields = [f"{renames.old_field(name, field)}: {shown(hints[field], renames, used)}"
              + _default(struct, index, renames)
              for index, field in enumerate(struct.__struct_fields__)]
    if struct.__struct_config__.tag is None:
        return fields
    return {"tag field": struct.__struct_config__.tag_field, "fields": fields}


def _default(struct: Any, index: int, renames: Renames) -> str:
    defaults = struct.__struct_defaults__
    at = index - (len(struct.__struct_fields__) - len(defaults))
    if at < 0:
        return ""
    value = defaults[at]
    if value is msgspec.NODEFAULT:
        return ""
    if type(value).__module__.startswith("msgspec"):
        return f" = {value.factory.__name__}()"
    if isinstance(value, enum.Enum):
        return f" = {value.value!r}"
    kind = type(value).__name__  # the repr of a struct begins with it
    return f" = {renames.old_class(kind)}{repr(value).removeprefix(kind)}" if (
        isinstance(value, msgspec.Struct)) else f" = {value!r}"


def shown(hint: Any, renames: Renames, used: set[type] | None = None) -> str:
    """A type as text that does not depend on modules or on the version of Python."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "None"
    if hint is Any:
        return "Any"
    if hint is Ellipsis:
        return "..."
    if origin is typing.Literal:
        return " | ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted(shown(arg, renames, used) for arg in args))
    if origin is typing.Annotated:
        return shown(args[0], renames, used)
    if origin is not None:
        inner = ", ".join(shown(arg, renames, used) for arg in args)
        return f"{origin.__name__}[{inner}]"
    if used is not None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        used.add(hint)
    return renames.old_class(getattr(hint, "__name__", str(hint)))
