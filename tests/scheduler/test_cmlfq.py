"""C-MLFQ: its estimates, when it moves a request, how trees merge and are saved, and how often its
prediction is right."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.simulation.rl_lengths import (
    Source,
    TrajectoryLengths,
    shuffled,
    three_phases,
)
from tangram_hpc.libra.simulation.rl_routing import LengthPredictor, Mlfq, play, teach
from tangram_hpc.scheduler.routing.cmlfq import (
    AGREE,
    FAILURE,
    MEAN,
    SUCCESS,
    TIMEOUT,
    CausalTree,
    Cmlfq,
    LengthEstimate,
    LengthHistogram,
    ToolSignal,
    TreeLimits,
    bucket_of,
)
from tangram_hpc.storage.cmlfq_file import load, load_all, save

EDGES = (4_000, 12_000)
SIGNALS = [ToolSignal(tool, size, status) for tool in ("a", "b") for size in (0, 2)
           for status in (SUCCESS, FAILURE, TIMEOUT)]

returns = st.lists(st.tuples(st.sampled_from(SIGNALS), st.integers(1, 3000)), max_size=6)
ends = st.tuples(st.integers(0, 3), st.integers(0, 5), returns, st.integers(1, 30_000))
histories = st.lists(ends, max_size=30)


def tree_of(history: list, shape: TreeLimits) -> CausalTree:
    """A tree that learned these (prompt, epoch, returns, tokens after the last)."""
    tree = CausalTree(shape)
    for prompt, epoch, turns, last in history:
        path, done, total = [], [], 0
        for signal, tokens in turns:
            total += tokens
            path.append(signal)
            done.append(total)
        tree.learn(prompt, epoch, path, done, total + last)
    return tree


def serialized(tree: CausalTree) -> str:
    return json.dumps(tree.plain())


# ---- what it believes ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_length_histogram_gives_the_mean_and_nearly_the_p90(lengths: list[int]) -> None:
    tally = LengthHistogram()
    for length in lengths:
        tally.add(length)
    count, mean, p90 = tally.beyond(0)
    exact = sorted(lengths)[-(-9 * len(lengths) // 10) - 1]
    assert (count, mean) == (len(lengths), sum(lengths) // len(lengths))
    assert exact * 8 // 9 - 8 <= p90 <= exact * 9 // 8 + 8  # a cell is an eighth wide


def test_an_estimate_subtracts_tokens_generated_after_the_known_prefix() -> None:
    tree = CausalTree(TreeLimits(least=4))
    long = ToolSignal("search", 2, SUCCESS)
    for _ in range(20):
        tree.learn(0, 0, [long], [100], 20_100)
    unseen = [long, ToolSignal("new", 0, SUCCESS), ToolSignal("new", 0, SUCCESS)]
    estimate = tree.estimate(0, unseen, [100, 5_100, 8_100])
    assert estimate is not None and (estimate.depth, estimate.own) == (1, True)
    assert estimate.mean == 20_000 - 8_000
    paper = CausalTree.from_plain({**tree.plain(), "shape": {
        **tree.plain()["shape"], "since": False}})
    old = paper.estimate(0, unseen, [100, 5_100, 8_100])
    assert old is not None and old.mean == 20_000


def test_the_deepest_prefix_wins_and_at_equal_depth_that_of_the_same_prompt() -> None:
    tree = CausalTree(TreeLimits(least=4))
    a, b = SIGNALS[:2]
    for _ in range(4):
        tree.learn(1, 0, [a], [10], 1_010)
        tree.learn(2, 0, [a, b], [10, 20], 9_020)
    own = tree.estimate(1, [a], [10])
    assert own is not None and own.own and own.mean == 1_000
    deeper = tree.estimate(1, [a, b], [10, 20])
    assert deeper == LengthEstimate(9_000, 9_000, 2, 4, False)
    assert tree.estimate(3, [b], [10]) is not None  # the global root knows lengths at least
    assert CausalTree().estimate(3, [b], [10]) is None


def test_a_request_starts_in_bucket_0_and_moves_where_mean_and_p90_both_reach() -> None:
    sure, torn = SIGNALS[:2]
    tree = CausalTree(TreeLimits(least=4))
    for length in (20_000,) * 20:
        tree.learn(0, 0, [sure], [0], length)
    for length in (1_000,) * 17 + (30_000,) * 3:
        tree.learn(0, 0, [torn], [0], length)
    queues = Cmlfq(tree, EDGES)
    assert queues.started(1, 0) == 0
    assert queues.returned(1, torn, 0) == 1  # mean says 1, P90 says 2: both ask for 1
    queues.started(3, 0)
    assert queues.returned(3, sure, 0) == 2
    assert queues.returned(3, torn, 0) == 2  # the prefix (sure, torn) is not known: sure holds
    for rule, bucket in ((MEAN, 1), (AGREE, 0)):
        other = Cmlfq(tree, EDGES, rule)
        assert other.started(1, 0) == 0
        assert other.returned(1, torn, 0) == bucket
    queues.dropped(3)
    queues.started(2, 0)
    assert queues.returned(2, sure, 0) == 2
    queues.ended(1, 900, 0)
    queues.dropped(2)
    queues.dropped(2)
    assert queues.under_way == 0 and tree.root.visits == 41


def test_new_bucket_edges_apply_to_running_requests() -> None:
    tree = CausalTree(TreeLimits(least=1))
    tree.learn(0, 0, [SIGNALS[0]], [0], 9_000)
    queues = Cmlfq(tree, EDGES)
    queues.started(1, 0)
    assert queues.returned(1, SIGNALS[0], 0) == 1
    queues.rebucket((20_000,))
    queues.started(2, 0)
    assert queues.returned(2, SIGNALS[0], 0) == 0
    with pytest.raises(InvalidInput, match="edges"):
        queues.rebucket((5, 5))


def test_an_epoch_with_enough_samples_replaces_older_lengths() -> None:
    tree = CausalTree(TreeLimits(enough=50))
    for epoch, length in enumerate((1_000, 3_000, 9_000)):
        for _ in range(60):
            tree.learn(0, epoch, [SIGNALS[0]], [0], length)
    estimate = tree.estimate(0, [SIGNALS[0]], [0])
    assert estimate is not None and estimate.mean == 9_000


# ---- laws of the tree ----------------------------------------------------------------------------


@given(histories, histories, histories)
@settings(max_examples=40, deadline=None)
def test_merging_trees_commutes_associates_and_equals_learning_all_histories(
        a: list, b: list, c: list) -> None:
    shape = TreeLimits(epochs=3)
    x, y, z = (tree_of(h, shape) for h in (a, b, c))
    assert serialized(x.merged(y)) == serialized(y.merged(x))
    assert serialized(x.merged(y).merged(z)) == serialized(x.merged(y.merged(z)))
    # forgotten epochs are forgotten wherever they were learned
    assert serialized(x.merged(y)) == serialized(tree_of([*a, *b], shape))
    x.merged(y).check()
    assert serialized(x) == serialized(tree_of(a, shape))  # neither was changed


@given(histories)
@settings(max_examples=60, deadline=None)
def test_a_tree_stays_within_its_node_limit_for_any_history(history: list) -> None:
    shape = TreeLimits(nodes_max=16, epochs=2)
    tree = tree_of(history, shape)
    tree.check()
    other = tree_of(history[::2], shape)
    tree.merged(other).check()
    assert serialized(tree.merged(other)) == serialized(other.merged(tree))


@given(histories)
@settings(max_examples=40, deadline=None)
def test_a_tree_survives_saving_and_loading(history: list) -> None:
    tree = tree_of(history, TreeLimits(epochs=4))
    back = CausalTree.from_plain(json.loads(serialized(tree)))
    assert serialized(back) == serialized(tree) and back.nodes == tree.nodes
    tree.learn(0, 5, SIGNALS[:2], [5, 6], 100)
    back.learn(0, 5, SIGNALS[:2], [5, 6], 100)
    assert serialized(back) == serialized(tree)  # and it learns on as the other


def test_pruning_keeps_new_and_frequent_prefixes() -> None:
    tree = CausalTree(TreeLimits(nodes_max=40))
    for i in range(40):
        tree.learn(1_000 + i, 0, [ToolSignal("rare", 0, i % 3)], [1], 10)
        tree.learn(1, 1, [SIGNALS[0]], [1], 10)
    tree.check()
    assert 1 in tree.prompts and SIGNALS[0] in tree.root.children


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def trees() -> Iterator[list[CausalTree]]:
    source = Source(three_phases(0.1, 8), 3)
    found = []
    for rank in range(3):
        queues = Cmlfq(CausalTree(), EDGES)
        teach(queues, [source.trajectory(p, rank * 4 + s, 0.5) for p in range(8)
                       for s in range(4)])
        found.append(queues.tree)
    yield found


def test_trees_of_ranks_are_kept_and_merged(trees: list[CausalTree], tmp_path: Path) -> None:
    folder = tmp_path / "trees"
    assert load_all(folder) is None
    for rank, tree in enumerate(trees):
        assert serialized(load(save(folder, rank, tree))) == serialized(tree)
    merged = load_all(folder)
    assert merged is not None
    assert serialized(merged) == serialized(trees[0].merged(trees[1]).merged(trees[2]))
    save(folder, 1, trees[0])  # replaced in one step, nothing else left
    assert sorted(os.listdir(folder)) == [f"{r}.cmlfq.json" for r in range(3)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}', "\x00",
                                  '{"format": "tangram-cmlfq/1", "shape": {}, '
                                  '"newest": Infinity, "nodes": []}',
                                  '{"format": "tangram-cmlfq/1", "shape": {}, "newest": 0, '
                                  '"nodes": [[false, 0, [["a"]], []]]}'])
def test_a_damaged_tree_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "0.cmlfq.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"0\.cmlfq\.json.*remove it") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_bad_tree_limits_and_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    for wrong in ({"payload_edges": (5, 1)}, {"payload_edges": (1, 2, 3)}, {"depth": 0},
                  {"nodes_max": 3}):
        with pytest.raises(InvalidInput, match=f"cmlfq: {next(iter(wrong))}"):
            TreeLimits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="different shapes"):
        CausalTree().merged(CausalTree(TreeLimits(depth=3)))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="name a folder"):
        save(tmp_path / "file", 0, CausalTree())


# ---- how often it is right -----------------------------------------------------------------------


def blind(ones: list[TrajectoryLengths]) -> list[TrajectoryLengths]:
    return [replace(one, turns=tuple(t._replace(tool="tool", chars=1, status=SUCCESS)
                                     for t in one.turns)) for one in ones]


def test_cmlfq_predicts_90_percent_of_buckets_and_no_more_than_blind_if_shuffled() -> None:
    source = Source(three_phases(0.06, 64), 7)
    train = [source.trajectory(p, s, 0.5) for s in range(16) for p in range(64)]
    test = [source.trajectory(p, s, 0.5) for s in range(16, 20) for p in range(64)]

    def right(make, taught: list[TrajectoryLengths], held_aside: list[TrajectoryLengths]) -> float:
        policy = make()
        teach(policy, taught, 4)
        return play(policy, held_aside, 4, learn=False).right

    def ours() -> Cmlfq:
        return Cmlfq(CausalTree(), EDGES)

    accuracy = right(ours, train, test)
    assert accuracy >= 0.9
    assert accuracy > right(lambda: Mlfq(EDGES), train, test) + 0.2
    assert accuracy > right(lambda: LengthPredictor(EDGES), train, test) + 0.2
    without = right(ours, blind(train), blind(test))
    assert right(ours, shuffled(train, 1), shuffled(test, 2)) < without + 0.05 < accuracy - 0.15


def test_the_trajectory_generator_is_seeded_and_shuffling_keeps_lengths() -> None:
    source, again = (Source(three_phases(0.1, 8), 5) for _ in range(2))
    ones = [source.trajectory(p, s, 0.3) for p in range(8) for s in range(3)]
    assert ones == [again.trajectory(p, s, 0.3) for p in range(8) for s in range(3)]
    mixed = shuffled(ones, 1)
    assert [o.generated for o in ones] == [o.generated for o in mixed]
    assert sorted(t.chars for o in ones for t in o.turns) == sorted(
        t.chars for o in mixed for t in o.turns)
    assert all(0 < o.generated <= source.causes.generated_max for o in ones)
    assert bucket_of(EDGES, 4_000) == 0 and bucket_of(EDGES, 4_001) == 1
