"""Listens to every scheduler of this process: which fact led to which decisions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from . import where


@contextlib.contextmanager
def decisions() -> Iterator[list[str]]:
    """A list that grows by one line for each decision while this lasts."""
    scheduler, lines = where.find("Scheduler"), list[str]()
    handle = scheduler.handle

    def watched(self: Any, event: Any) -> Any:
        made = handle(self, event)
        lines.extend(line(event, order) for order in made)
        return made
    scheduler.handle = watched
    try:
        yield lines
    finally:
        scheduler.handle = handle


def without_texts(value: Any) -> Any:
    """The same with `text` for each string that has a space: texts for people are listed, not
    frozen."""
    if isinstance(value, str):
        return "text" if " " in value else value
    if isinstance(value, list | tuple):
        return [without_texts(each) for each in value]
    if isinstance(value, dict):
        return {without_texts(k): without_texts(v) for k, v in value.items()}
    return value


def line(event: Any, order: Any) -> str:
    """One decision: the fact's time and kind, the decision's class, its fields in order."""
    told = [event.at, event.__struct_config__.tag, where.old_name(type(order).__name__),
            *msgspec.to_builtins(msgspec.structs.astuple(order))]
    return json.dumps(without_texts(told))
