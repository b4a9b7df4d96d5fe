"""Which actions of a recorded run belong to one trajectory: those that a session, or a name of the
same client, connects, however many steps that takes.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.accounting.record import ActionRecord
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.simulator.savings.run_witness import RunWitness, group_by_trajectory


def record(number: int, session: int, trajectory: str) -> ActionRecord:
    return ActionRecord("4711", "me", Action(
        mint(1, 100 + number), "tool", session=mint(1, session) if session else 0,
        trajectory=trajectory), number)


def connected(records: list[ActionRecord]) -> list[set[int]]:
    """The groups, by joining sets that share a session or a name until none do."""
    found: list[tuple[set[object], set[int]]] = []
    for r in records:
        keys: set[object] = {key for key in (r.action.session, r.action.trajectory) if key} or {
            ("alone", r.action.id)}
        ids = {r.action.id}
        for other in [each for each in found if each[0] & keys]:
            found.remove(other)
            keys, ids = keys | other[0], ids | other[1]
        found.append((keys, ids))
    return [ids for _, ids in found]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "t0", "t1", "t2", "t3"])),
                max_size=60))
def test_groups_are_what_sessions_and_names_connect(drawn: list[tuple[int, str]]) -> None:
    records = [record(number, *of) for number, of in enumerate(drawn)]
    groups = [[r.action.id for r in group]
              for group in group_by_trajectory(records, RunWitness())]
    assert all(group == sorted(group) for group in groups)  # in the order of submission
    assert sorted(map(sorted, connected(records))) == sorted(groups)


def test_a_trajectory_with_a_new_sandbox_for_each_turn_stays_one() -> None:
    records = [record(10 * turn + n, turn + 1 if n else 0, "t0")
               for turn in range(40) for n in range(3)]
    assert len(group_by_trajectory(records, RunWitness())) == 1
