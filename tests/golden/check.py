"""Collects, compares and writes: what `make golden` and the tests call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import command, compare, journals, messages, public, runs, wire
from .digest import digest, first_difference
from .renames import Renames, read_renames

DATA = Path(__file__).parent / "data"
SECTIONS = {"names": "names", "settings": "settings", "options": "options",
            "environment": "env", "messages": "messages"}


def read(kind: str, name: str) -> dict[str, Any]:
    """A golden file; empty where there is none."""
    path = DATA / kind / f"{name}.json"
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return told


def write(kind: str, name: str, told: Mapping[str, Any]) -> Path:
    """Writes a golden file, a line an entry."""
    path = DATA / kind / f"{name}.json"
    lines = [f"{json.dumps(key)}: {json.dumps(told[key])}" for key in sorted(told)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


# ---- frozen -------------------------------------------------------------------------------------


def _wire(renames: Renames) -> dict[str, Any]:
    return wire.layouts(renames, read("frozen", "wire"))


def _replays(renames: Renames) -> dict[str, Any]:
    return dict(journals.replays())


def _command(renames: Renames) -> dict[str, Any]:
    return command.json_keys() | command.records_keys()


# Frozen files whose content is compared as it is; those of the second kind take long.
CHEAP: dict[str, Callable[[Renames], dict[str, Any]]] = {
    "wire": _wire, "constants": lambda renames: wire.constants(), "journals": _replays,
    "exit-statuses": lambda renames: command.statuses(), "json-keys": _command}
COSTLY: dict[str, Callable[[Renames], dict[str, Any]]] = {
    "figures": lambda renames: runs.figures(), "json-keys-doctor": lambda renames: command.doctor(),
    "live": lambda renames: command.live()}


def sequences(cheap: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Files with long sequences of lines: file, key, lines."""
    for key, lines in journals.stories():
        yield "stories", key, lines
    for key, lines in runs.collect(cheap):
        yield "runs", key, lines


def frozen(renames: Renames, cheap: bool = False, only: str = "") -> list[str]:
    """Every difference of the frozen class; `cheap`: of the part that takes little time."""
    lines = []
    for name, collect in {**CHEAP, **({} if cheap else COSTLY)}.items():
        if only in ("", name):
            lines += compare.frozen(f"frozen/{name}", read("frozen", name), collect(renames))
    if only in ("", "runs", "stories"):
        lines += _compare_sequences(cheap)
    return lines


def _compare_sequences(cheap: bool) -> list[str]:
    lines, seen = [], dict[str, set[str]]()
    for name, key, now in sequences(cheap):
        seen.setdefault(name, set()).add(key)
        golden = read("frozen", name)
        if key not in golden:
            lines.append(f"frozen/{name}: {key}: is new")
        elif told := first_difference(golden[key], now):
            lines.append(f"frozen/{name}: {key}: {told}")
    if not cheap:
        lines += [f"frozen/{name}: {key}: is gone" for name, keys in seen.items()
                  for key in read("frozen", name) if key not in keys]
    return lines


# ---- listed -------------------------------------------------------------------------------------


def listing(name: str, renames: Renames) -> dict[str, Any]:
    """One listing as the code has it now."""
    collect: dict[str, Callable[[], dict[str, Any]]] = {
        "names": public.names, "settings": lambda: public.settings(renames),
        "options": public.options, "environment": public.environment,
        "messages": messages.messages}
    return collect[name]()


def listed(renames: Renames) -> list[str]:
    """Every difference of the listed class that the map does not tell of."""
    lines = []
    for name, section in SECTIONS.items():
        lines += compare.listed(f"listed/{name}", section, read("listed", name),
                                listing(name, renames), renames)
    return lines + public.aliases(renames)


# ---- writing ------------------------------------------------------------------------------------


def update(kind: str) -> list[Path]:
    """Writes all files of a class as the code is now; returns their paths."""
    renames = read_renames()
    if kind == "listed":
        return [write("listed", name, listing(name, renames)) for name in SECTIONS]
    written = journals.write_missing()
    written += [write("frozen", name, collect(renames))
                for name, collect in {**CHEAP, **COSTLY}.items()]
    found: dict[str, dict[str, Any]] = {}
    for name, key, lines in sequences(cheap=False):
        found.setdefault(name, {})[key] = digest(lines)
    return written + [write("frozen", name, told) for name, told in found.items()]
