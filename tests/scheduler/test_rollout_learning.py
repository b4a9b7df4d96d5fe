"""What a rollout pool learns of the lengths of trajectories: it learns as cmlfq alone does, its
trees are saved, loaded and replayed, and old lengths are forgotten."""

from __future__ import annotations

import msgspec
import pytest
from helpers.rollout_rig import Saves, Site, site, teach

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.rollouts import Turn
from tangram_hpc.domain.states import ActionState
from tangram_hpc.libra.simulation.rl_lengths import Source, three_phases
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.routing.cmlfq import CausalTree, Cmlfq, bucket_of
from tangram_hpc.scheduler.routing.rollout_pools import shape_of
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.speed import octaves


def test_a_rollout_pool_decides_and_learns_as_cmlfq_alone_does() -> None:
    """Plays whole trajectories of the generator of `bench/bench_routing.py`."""
    world = site(least=4, payload_edges=(1_000, 12_000), enough=8 * 24)  # 24 end in an epoch
    pool = world.pool
    alone = Cmlfq(CausalTree(shape_of(pool.spec)), pool.spec.edges)
    source, action, right = Source(three_phases(0.06, 8), 3), 0, 0
    for epoch in range(3):
        for prompt in range(8):
            for sample in range(3):
                one = source.trajectory(prompt, 9 * epoch + sample, 0.5)
                name, number, done, bucket = f"{epoch}-{prompt}-{sample}", action, 0, 0
                alone.started(number, prompt)
                for step in (*one.turns, None):
                    action += 1
                    pool.wanted(action, 1, Turn("p", name, prompt, 100, done), action)
                    _, route = pool.next()
                    routed = pool.describe(route)
                    pool.note_routed(action, routed)
                    assert routed.wanted == bucket
                    right += bucket == bucket_of(pool.spec.edges, one.generated - done)
                    pool.over(action, action)
                    if step is not None:
                        done += step.generated
                        signal = alone.tree.shape.signal(step.tool, step.chars, step.status)
                        pool.signal(1, name, signal, action)
                        bucket = alone.returned(number, signal, done)
                alone.ended(number, one.generated, epoch)
                pool.ended(1, name, one.generated, epoch)
    assert pool.queues.tree.plain() == alone.tree.plain() == pool.lesson.plain()
    counts = pool.counts
    assert counts.judged == counts.turns == action and counts.right == right > action // 2
    pool.check()


def test_learned_trees_are_saved_soon_and_use_a_hundredth_of_the_time() -> None:
    world = site(tree="/trees")
    saves = Saves(world)
    assert 0 < saves.due_s <= 10  # so much a kill may cost
    for n, (takes_s, due_s) in enumerate(((0.01, 10), (0.5, 50), (0, 10))):
        world.serve(world.turn(n))
        world.end(n, 300)
        saves.takes_s = takes_s
        saves.elapse()
        assert saves.due_s == pytest.approx(due_s) and saves.saved[-1] == n + 1
    saves.elapse()
    assert len(saves.saved) == 3  # nothing new


def test_the_epochs_of_a_new_trainer_continue_those_of_the_loaded_tree() -> None:
    world = site()
    teach(world, True)
    tree = world.pool.queues.tree
    again = site()
    again.pool.adopt_prior(tree.merged(type(tree)(tree.shape)), type(tree)(tree.shape))
    again.serve(again.turn("first"))
    again.tool("first", "tests", state=ActionState.FAILED)
    assert again.serve(again.turn("first", generated=200)) == "big"  # known from the other life
    again.end("first", 9_000, epoch=0)
    assert again.pool.queues.tree.newest == tree.newest + 1 == again.pool.lesson.newest


@pytest.mark.parametrize("steps", [
    list(range(1_763_000_000, 1_763_000_600, 2)),  # a clock
    [100 * (n // 30) for n in range(300)],  # a trainer that counts optimizer steps
    [n % 3 for n in range(300)],  # ranks that are not at the same step
    [*range(60), 1_763_000_000, *range(60, 299)],  # one wrong word
    [*range(150), *range(150)]])  # another trainer, that counts anew
def test_a_pool_keeps_enough_lengths_for_any_numbering_of_steps(steps: list[int]) -> None:
    """The pool keeps as many lengths as its estimates use, and the newest are among them."""
    world = site()
    for n, step in enumerate(steps):
        world.serve(world.turn(n))
        world.end(n, 300 if n < 290 else 9_000, epoch=step)
    for tree in (world.pool.queues.tree, world.pool.lesson):
        assert tree.root.visits >= world.pool.spec.enough
        newest = max(tree.root.by_epoch)
        assert sum(n for cell, (n, _) in tree.root.by_epoch[newest].cells.items()
                   if cell > octaves(1_000)) == 10


def test_old_lengths_are_forgotten_by_steps() -> None:
    world = site(enough=16, epochs=2)
    for n in range(40):
        world.serve(world.turn(n))
        world.end(n, 300, epoch=n // 10)
    tree = world.pool.queues.tree
    assert sorted(tree.root.by_epoch) == [2, 3] and tree.root.visits == 20


class Kept(Saves):
    """As `Saves`, with trees in the folder that were saved by an earlier broker."""

    def __init__(self, world: Site, tree: CausalTree) -> None:
        self._tree = tree
        super().__init__(world)

    def load(self, _: str) -> tuple[CausalTree, CausalTree]:
        return self._tree, self._tree


def test_a_replay_begins_with_the_trees_that_the_broker_loaded() -> None:
    teacher = site()
    teach(teacher, True)
    learned = teacher.pool.queues.tree
    world = site(tree="/trees")
    Kept(world, learned)
    assert world.pool.queues.tree.plain() == world.pool.lesson.plain() == learned.plain()
    world.serve(world.turn("first"))
    world.tool("first", "tests", state=ActionState.FAILED)
    assert world.serve(world.turn("first", generated=200)) == "big"  # only the trees say so
    world.end("first", 9_000)
    replayed = Scheduler(make_placer("elastic"))
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(world.events), type=list[ev.AnyEvent])
    for event in events:
        replayed.handle(event)
    pool = replayed.ledger.rollouts["p"]
    assert pool.queues.tree.plain() == world.pool.queues.tree.plain() != learned.plain()
    assert pool.lesson.plain() == world.pool.lesson.plain()


def test_loading_empty_trees_is_journaled_without_their_bytes() -> None:
    world = site(tree="/trees")
    Saves(world)
    assert world.events[-1] == ev.RolloutPriorLoaded(0, "p", b"", b"")
    assert world.pool.queues.tree.nodes == 1
