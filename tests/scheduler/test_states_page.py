"""docs/STATES.md and the pictures are what `docs/pictures/draw.py` makes of the tree today."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path

import pytest

from tangram_hpc.domain import hybrid, states

REPO = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("draw", REPO / "docs" / "pictures" / "draw.py")
assert SPEC and SPEC.loader
DRAW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(DRAW)


def test_the_states_page_matches_the_transition_tables() -> None:
    page = (REPO / "docs" / "STATES.md").read_text()
    assert page == DRAW.states_page(), "run: python docs/pictures/draw.py"


def test_the_state_pictures_are_up_to_date() -> None:
    stale = [name for name, text in DRAW.pictures().items()
             if (REPO / "docs" / "pictures" / name).read_text() != text]
    assert stale == [], "run: python docs/pictures/draw.py"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_measured_picture_of_the_readme_is_up_to_date() -> None:
    """The README's figure, by `tangram size`: simulated, so the same on every machine."""
    picture = (REPO / "docs" / "pictures" / "act-coding-200.svg").read_text()
    assert picture == DRAW.act(DRAW.measure()), "run: python docs/pictures/draw.py --act"


def test_every_state_can_be_reached_and_left() -> None:
    first: dict[type[Enum], str] = {states.ActionState: "PENDING", states.LeaseState: "GRANTED",
                                    states.SessionState: "WAITING", states.NodeState: "UP",
                                    states.AllocState: "ASKED",
                                    hybrid.ReplicaState: "ROLLOUT"}
    for _, moves, kind in DRAW.STATES:
        reached = {kind(first[kind])}
        while more := {n for s in reached for n in moves.get(s, ())} - reached:
            reached |= more  # type: ignore[arg-type]
        assert reached == set(kind)
