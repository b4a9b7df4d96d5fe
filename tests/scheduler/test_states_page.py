"""docs/STATES.md is drawn from `scheduler/state/transitions.py`; `python
tests/scheduler/test_states_page.py` draws it again."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from tangram_hpc.domain import hybrid, states
from tangram_hpc.scheduler.state import transitions as t

PAGE = Path(__file__).resolve().parents[2] / "docs" / "STATES.md"
TABLES = (
    ("Action", t.ACTION_MOVES, states.ActionState),
    ("Lease", t.LEASE_MOVES, states.LeaseState),
    ("Session", t.SESSION_MOVES, states.SessionState),
    ("Node", t.NODE_MOVES, states.NodeState),
    ("Allocation", t.ALLOC_MOVES, states.AllocState),
    ("Hybrid replica", t.REPLICA_MOVES, hybrid.ReplicaState),
)


def drawn() -> str:
    """The whole page."""
    parts = ["# States\n\nDrawn from `tangram_hpc/scheduler/state/transitions.py`; a test "
             "compares them. An "
             "action ends when its result is known,\na lease when its node is clean again.\n"]
    for name, moves, kind in TABLES:
        doc = (kind.__doc__ or "").strip()
        parts.append(f"\n## {name}\n\n{doc}\n\n```mermaid\nstateDiagram-v2")
        for old in kind:
            for new in sorted(moves.get(old, ()), key=lambda s: list(kind).index(s)):
                parts.append(f"    {old.value} --> {new.value}")
        ends = [s for s in kind if not moves.get(s)]
        parts += [f"    {s.value} --> [*]" for s in ends]
        parts.append("```")
    return "\n".join(parts) + "\n"


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == drawn(), "run: python tests/scheduler/test_states_page.py"


def test_every_state_can_be_reached_and_left() -> None:
    first: dict[type[Enum], str] = {states.ActionState: "PENDING", states.LeaseState: "GRANTED",
                                    states.SessionState: "WAITING", states.NodeState: "UP",
                                    states.AllocState: "ASKED",
                                    hybrid.ReplicaState: "ROLLOUT"}
    for _, moves, kind in TABLES:
        reached = {kind(first[kind])}
        while more := {n for s in reached for n in moves.get(s, ())} - reached:
            reached |= more  # type: ignore[arg-type]
        assert reached == set(kind)


if __name__ == "__main__":
    PAGE.write_text(drawn())
