"""The planted bugs can still be planted; `python -m planted` looks whether they are found."""

from __future__ import annotations

from collections import Counter

import pytest

from planted import REPO, PlantedBug, planted_bugs


@pytest.mark.parametrize("bug", planted_bugs(), ids=lambda bug: bug.name)
def test_the_text_that_a_bug_replaces_occurs_once(bug: PlantedBug) -> None:
    assert (REPO / "tangram_hpc" / bug.file).read_text().count(bug.old) == 1


def test_there_are_bugs_in_every_part() -> None:
    bugs = planted_bugs()
    areas = Counter(bug.area for bug in bugs)
    assert len(bugs) >= 30 and len({bug.name for bug in bugs}) == len(bugs)
    assert {"scheduler", "broker", "worker", "client", "restart", "journal", "checkpoint",
            "spool"} <= areas.keys()
