"""Writes an action's record as plain columns of whole numbers and texts. Pure.

A database has columns and no objects, and a roll-up needs few figures of very many actions. Both
take them from the one table here, so that a figure means the same in the books and in a journal.
Amounts are in the unit that ends their name. A figure that was not measured is -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .fields import cpus_asked
from .record import ActionRecord


class FlatColumn(NamedTuple):
    """One column.

    Attributes:
        name: its name, in a database too.
        kind: `int` or `str`.
        value: returns its value.
    """

    name: str
    kind: type[int] | type[str]
    value: Callable[[ActionRecord], Any]


def storable(text: str) -> str:
    """Returns a text as every database takes it: PostgreSQL refuses the character NUL."""
    return text.replace("\0", "\ufffd") if "\0" in text else text


def _key(kind: str) -> Callable[[ActionRecord], str]:
    def name(r: ActionRecord) -> str:
        key = r.action.key
        return storable(key[len(kind):]) if key.startswith(kind) else ""

    return name


def _outcome(name: str, unknown: int = 0) -> Callable[[ActionRecord], int]:
    def figure(r: ActionRecord) -> int:
        return unknown if r.outcome is None else int(getattr(r.outcome, name))

    return figure


COLUMNS = (
    FlatColumn("submit_ns", int, lambda r: r.submit_ns),
    FlatColumn("start_ns", int, lambda r: r.start_ns),
    FlatColumn("end_ns", int, lambda r: r.end_ns),
    FlatColumn("state", str, lambda r: r.state.value),
    FlatColumn("exit_code", int, _outcome("exit_status")),
    FlatColumn("name", str, lambda r: storable(r.action.name)),
    FlatColumn("kind", str, lambda r: r.action.kind.value),
    FlatColumn("trajectory", str, lambda r: storable(r.action.trajectory_name)),
    FlatColumn("session", int, lambda r: r.action.session),
    FlatColumn("session_name", str, lambda r: storable(r.session_name)),
    FlatColumn("service", str, _key("service:")),
    FlatColumn("endpoint", str, _key("endpoint:")),
    FlatColumn("bucket", int, lambda r: -1 if r.route is None else r.route.bucket),
    FlatColumn("node", str, lambda r: storable(r.node.name) if r.node else ""),
    FlatColumn("partition_name", str, lambda r: storable(r.node.component) if r.node else ""),
    FlatColumn("req_cpus", int, cpus_asked),
    FlatColumn("ncpus", int, lambda r: r.cpus),
    FlatColumn("ngpus", int, lambda r: len(r.gpus)),
    FlatColumn("planned_ns", int, lambda r: r.planned_ns),
    FlatColumn("exec_ns", int, _outcome("exec_ns")),
    FlatColumn("cpu_held_ns", int, lambda r: r.cpu_held_ns),
    FlatColumn("cpu_ns", int, _outcome("cpu_ns")),
    FlatColumn("gpu_held_ns", int, lambda r: r.gpu_held_ns),
    FlatColumn("maxrss_kib", int, _outcome("maxrss_kib")),
    FlatColumn("energy_estimated_mj", int, _outcome("energy_mj", -1)),
    FlatColumn("tenant", str, lambda r: r.tenant),
    FlatColumn("restore_ns", int, _outcome("restore_ns")),
    FlatColumn("setup_ns", int, _outcome("setup_ns", -1)),
)
GETTERS = {column.name: column.value for column in COLUMNS}
