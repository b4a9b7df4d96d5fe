"""Frozen: what a replay of journals gives, those of older releases among them.

The files in `data/journals` were written once and are never written again: `story-PLACER-5` by the
last release that wrote version 5, the others by the code of the day. From version 7 on they hold a
pool that goes on from trees which were learned before. A replay yields the decisions that the
scheduler made, what it would do next, and what `tangram acct` and `tangram info` show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from . import watch, where
from .digest import digest
from .shell import clean, told
from .story import Story

FOLDER = Path(__file__).parent / "data" / "journals"
# Placers and seeds; together the kept ones hold every kind of fact.
STORIES = (("elastic", 46), ("paper", 59), ("fcfs:4", 2), ("elastic", 6), ("first-fit", 14),
           ("static:1", 6))
_KEPT = STORIES[:3]
_STEPS, _BATCH = 300, 7


def write_missing() -> list[Path]:
    """Writes a journal of the present version for each story that has none; returns their paths."""
    constants, written = where.CONSTANTS, []
    magic, version = where.resolve(constants["journal magic"]), where.resolve(
        constants["journal version"])
    for placer, seed in _KEPT:
        path = FOLDER / f"story-{placer.replace(':', '-')}-{version}"
        if not path.exists():
            events = Story(placer, seed, with_prior=True).play(_STEPS).events
            path.write_bytes(magic + b"".join(
                where.find("framed")(msgspec.msgpack.encode(events[at:at + _BATCH]))
                for at in range(0, len(events), _BATCH)))
            written.append(path)
    return written


def stories() -> Iterator[tuple[str, list[str]]]:
    """The facts and the decisions of every story, told anew by the code as it is."""
    for placer, seed in STORIES:
        told = Story(placer, seed).play(_STEPS)
        yield f"story {placer} {seed}: facts", [_fact(event) for event in told.events]
        yield f"story {placer} {seed}: decisions", [watch.line(*pair) for pair in told.orders]


def replays() -> Iterator[tuple[str, Any]]:
    """What each journal gives."""
    for path in sorted(FOLDER.iterdir()):
        events = list(where.find("read_journal")(path))
        scheduler, lines = where.find("Scheduler")(where.find("make_placer")("elastic"), 0), []
        for event in events:
            lines += [watch.line(event, order) for order in scheduler.handle(event)]
        now = events[-1].at
        yield f"{path.name}: facts", digest([_fact(event) for event in events])
        yield f"{path.name}: decisions", digest(lines)
        yield f"{path.name}: next plan", [_fact(event) for event in scheduler.plan(now)]
        state = {}
        for part in ("info", "nodes", "services", "pending"):
            state |= where.find(part)(scheduler, "4711", now)
        yield f"{path.name}: state", watch.without_texts(json.loads(json.dumps(state)))
        yield from _accounts(path)


def _accounts(path: Path) -> Iterator[tuple[str, Any]]:
    """What `tangram acct` says of it."""
    with clean() as home:
        folder = home / "home" / "jobs" / "golden"
        folder.mkdir(parents=True)
        (folder / "journal").write_bytes(path.read_bytes())
        rows = told(["acct", "-j", "golden", "--json"])
        yield f"{path.name}: acct", digest([json.dumps(watch.without_texts(r)) for r in
                                            rows.get("actions", [rows])])
        held = told(["acct", "-j", "golden", "--held", "--json"])
        yield f"{path.name}: acct --held", watch.without_texts(held)


def _fact(event: Any) -> str:
    return json.dumps(watch.without_texts(msgspec.to_builtins(event)))
