"""The simulated asynchronous RL pipeline: the engine, the rollouts, the stages, and the reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.planner.rollout_cost import RolloutCost
from tangram_hpc.libra.simulation.rl_engine import DecodeWork, SimulatedEngine
from tangram_hpc.libra.simulation.rl_faults import Fate, Faults
from tangram_hpc.libra.simulation.rl_lengths import Source
from tangram_hpc.libra.simulation.rl_pipeline import Pipeline, Played
from tangram_hpc.libra.simulation.rl_report import panels
from tangram_hpc.libra.simulation.rl_scenario import Scenario, read_rl_scenario, with_run
from tangram_hpc.libra.simulation.rl_systems import ABLATION, SYSTEMS, System

EXAMPLES = (Path(__file__).resolve().parents[2] / "tangram_hpc" / "libra" / "simulation"
            / "examples")
SECOND = 10**9
WHOLE = read_rl_scenario(EXAMPLES / "rl-48.toml")
MANY = with_run(WHOLE, replace(WHOLE.run, pool_slack=99.0))  # one node trains, others are lent
COST = RolloutCost(WHOLE.model, WHOLE.hardware, WHOLE.rollout)


@pytest.fixture(scope="module")
def small() -> Scenario:
    """The shipped scenario with fewer and smaller batches."""
    return with_run(WHOLE, replace(WHOLE.run, iterations=3, prompts=3, train_steps=2))


def system(name: str) -> System:
    return next(s for s in SYSTEMS if s.name == name)


@pytest.fixture(scope="module")
def played(small: Scenario) -> dict[str, Played]:
    return {one.name: Pipeline(small, one).play() for one in SYSTEMS}


# ---- the engine ----------------------------------------------------------------------------------


def run_to_the_end(engine: SimulatedEngine) -> list[tuple[int, int]]:
    """(request, end time) of all that an engine serves."""
    ends = []
    while (due := engine.due()) is not None:
        if (request := engine.finish(due)) is not None:
            ends.append((request, due))
    return ends


def cost_with_cache(tokens: int) -> RolloutCost:
    """Engines of one GPU with a cache of this many tokens."""
    per_token = WHOLE.model.kv_bytes / (1 - WHOLE.rollout.kv_loss)
    weights = WHOLE.model.params * WHOLE.model.value_bytes
    space = int(per_token * (tokens + 0.5)) + weights + WHOLE.hardware.workspace_bytes
    cost = RolloutCost(WHOLE.model, replace(WHOLE.hardware, mem_bytes=space), WHOLE.rollout)
    assert cost.kv_tokens(1) == tokens
    return cost


def test_a_request_alone_on_an_engine_takes_the_time_of_the_cost_model() -> None:
    for degree in (1, 8):
        engine = SimulatedEngine(COST, degree, 256)
        engine.add(0, DecodeWork(1, 1_000, 5_000))
        said = COST.alone_s(degree, 1_000, 5_000)
        [(_, ended)] = run_to_the_end(engine)
        assert ended / SECOND == pytest.approx(float(said), rel=0.01)


def test_later_requests_slow_a_running_request_and_all_are_served() -> None:
    alone, shared = SimulatedEngine(COST, 2, 256), SimulatedEngine(COST, 2, 256)
    for engine in (alone, shared):
        engine.add(0, DecodeWork(1, 2_000, 3_000, brought=2_000))
    for i in range(2, 30):
        shared.add(SECOND, DecodeWork(i, 2_000, 3_000))
    [(_, first)] = run_to_the_end(alone)
    ends = dict(run_to_the_end(shared))
    assert sorted(ends) == list(range(1, 30)) and ends[1] > first * 1.2
    assert shared.load == 0


class Served:
    """An engine whose invariants are checked after each change, and the requests that it has
    served."""

    def __init__(self, room: int, at_once: int) -> None:
        self.engine, self.at_once = SimulatedEngine(cost_with_cache(room), 1, at_once), at_once
        self.now, self.tokens = 0, 0
        self.ended: list[int] = []

    def look(self) -> None:
        e = self.engine
        assert e.running <= self.at_once and e.held + e.cached <= e.room
        assert e.load == 0 or e.running, "no request runs although some wait"

    def until(self, now: int | None) -> None:
        """Plays all events up to this time; None: to the end."""
        while (due := self.engine.due()) is not None and (now is None or due <= now):
            assert due >= self.now, "time does not go back"
            self.now = due
            request = self.engine.finish(due)
            if request is not None:
                self.ended.append(request)
            self.look()
        self.now = max(self.now, now or 0)


turns = st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 400), st.integers(0, 5_600),
                           st.booleans()), min_size=1, max_size=25)


@given(turns, st.sampled_from([6_000, 9_000, 40_000]), st.sampled_from([2, 8, 256]))
@settings(max_examples=60, deadline=None)
def test_every_turn_ends_once_and_the_cache_never_overflows(asked: list, room: int,
                                                            at_once: int) -> None:
    """Also where not all requests fit together: a preempted request runs again and none is
    forgotten."""
    served, taken = Served(room, at_once), []
    for request, (pause, tokens, context, off) in enumerate(asked):
        served.until(served.now + pause)
        served.engine.add(served.now, DecodeWork(request, context, tokens))
        served.look()
        if off:
            left = served.engine.remove(served.now, request)
            assert 1 <= left <= tokens
            taken.append(request)
            served.look()
    served.until(None)
    assert sorted(served.ended + taken) == list(range(len(asked)))
    assert served.engine.load == served.engine.held == 0
    assert served.engine.read >= sum(c for i, (_, _, c, _) in enumerate(asked)
                                     if i in served.ended)


@given(turns, st.sampled_from([6_000, 40_000]))
@settings(max_examples=30, deadline=None)
def test_an_engine_serves_the_same_turns_reproducibly(asked: list, room: int) -> None:
    runs = []
    for _ in range(2):
        served = Served(room, 8)
        for request, (pause, tokens, context, _) in enumerate(asked):
            served.until(served.now + pause)
            served.engine.add(served.now, DecodeWork(request, context, tokens))
        served.until(None)
        runs.append((served.ended, served.now, served.engine.busy_ns, served.engine.read))
    assert runs[0] == runs[1]


def test_a_full_cache_preempts_the_latest_request_which_prefills_again() -> None:
    engine = SimulatedEngine(cost_with_cache(10_000), 1, 256)
    for i in range(3):
        engine.add(0, DecodeWork(i, 3_000, 2_000))
    assert engine.running == 3 and engine.read == 9_000  # by what they have, not by what they get
    assert [request for request, _ in run_to_the_end(engine)] == [0, 1, 2]
    # the last had 333 tokens more when all was full; the others took the room of all its keys
    assert (engine.preempted, engine.read) == (1, 9_000 + 3_333)
    assert engine.kept(2) == 5_000  # what it had decoded before is not decoded again
    roomy = SimulatedEngine(cost_with_cache(15_000), 1, 256)
    for i in range(3):
        roomy.add(0, DecodeWork(i, 3_000, 2_000))
    run_to_the_end(roomy)
    assert (roomy.read, roomy.preempted) == (9_000, 0)


def test_a_preempted_request_resumes_before_requests_that_never_ran() -> None:
    engine = SimulatedEngine(cost_with_cache(10_000), 1, 256)
    for request, tokens in enumerate((1_500, 2_000, 2_000, 2_000)):
        engine.add(0, DecodeWork(request, 3_000, tokens))
    ends = []
    while not ends:
        due = engine.due()
        assert due is not None
        ends += [request for request in [engine.finish(due)] if request is not None]
    assert ends == [0] and engine.running == 2
    # by 2, of whose keys the others' growth has left 1000; 3 has read nothing yet
    assert engine.read == 9_000 + 3_333 - 1_000
    assert [request for request, _ in run_to_the_end(engine)] == [1, 2, 3]


def test_kv_entries_are_evicted_oldest_first_and_only_when_room_is_needed() -> None:
    engine = SimulatedEngine(cost_with_cache(10_000), 1, 256)
    now = 0
    for request in (1, 2):
        engine.add(now, DecodeWork(request, 3_900, 100))
        [(_, now)] = run_to_the_end(engine)
    assert (engine.kept(1), engine.kept(2), engine.cached) == (4_000, 4_000, 8_000)
    engine.add(now, DecodeWork(3, 4_900, 100))
    assert (engine.kept(1), engine.kept(2)) == (1_100, 4_000)  # its first tokens are left
    [(_, now)] = run_to_the_end(engine)
    assert engine.kept(1) == 1_000
    before = engine.read
    engine.add(now, DecodeWork(2, 4_200, 10))  # its tool returned 200 tokens
    assert engine.read - before == 200
    [(_, now)] = run_to_the_end(engine)
    engine.add(now, DecodeWork(1, 4_200, 10))
    assert engine.read - before == 200 + 4_200 - 790, "two requests have taken of its room"
    [(_, now)] = run_to_the_end(engine)
    before = engine.read
    engine.add(now, DecodeWork(4, 3_000, 10, brought=2_500))
    assert engine.read - before == 500


def test_a_short_kv_cache_makes_multi_turn_requests_much_slower() -> None:
    """A turn whose KV entries were evicted meanwhile prefills its whole context again."""
    def tokens_a_second(room: int) -> float:
        engine, now = SimulatedEngine(cost_with_cache(room), 1, 256), 0
        for turn in range(8):
            for request in range(20):
                engine.add(now, DecodeWork(request, 1_000 + 500 * turn, 400))
            now = run_to_the_end(engine)[-1][1]
        return 20 * 8 * 400 / (now / SECOND)

    short, enough = tokens_a_second(30_000), tokens_a_second(200_000)
    assert short < 0.6 * enough


# ---- the pipeline --------------------------------------------------------------------------------


def test_every_batch_is_trained_once_and_in_order(played: dict[str, Played],
                                                  small: Scenario) -> None:
    for run in played.values():
        assert [s.batch for s in run.steps] == [0, 1, 2]
        ends = [s.trained_at_s for s in run.steps]
        assert ends == sorted(ends) and ends[0] > 0
        tokens = [s.generated for s in run.steps]
        assert tokens == [s.generated for s in played["colocated"].steps]  # all play the same
        assert all(0 < s.p90_share <= 1 and s.rollout_s > 0 and s.train_s > 0 for s in run.steps)
        assert 0 < run.gpu_busy <= 1


def test_no_gpu_is_in_two_stages(played: dict[str, Played], small: Scenario) -> None:
    for name, run in played.items():
        for s in run.steps:
            both = s.train_gpus + s.rollout_gpus
            assert both == (96 if name.startswith("colocated") else small.run.gpus)
            degrees = sum(int(n) * int(d) for n, d in re.findall(r"(\d+)xTP(\d+)", s.degrees))
            assert degrees <= s.rollout_gpus
            assert s.lent_gpu_s <= s.rollout_gpus * s.train_s
            assert s.lent_gpu_s == 0 or name == "+ elastic"


def test_a_step_takes_the_longer_stage_and_colocated_the_sum(played: dict[str, Played],
                                                             small: Scenario) -> None:
    for name, run in played.items():
        for before, s in pairwise(run.steps):
            took = s.trained_at_s - before.trained_at_s
            if name.startswith("colocated"):
                p = small.pauses
                pause = p.weights_s + p.to_rollout_s + p.to_train_s
                assert took == pytest.approx(s.rollout_s + s.train_s + pause, abs=0.01)
            else:
                assert took >= s.train_s - 0.01


def test_the_same_seed_plays_the_same_run(small: Scenario, played: dict[str, Played]) -> None:
    again = Pipeline(small, system("+ elastic")).play()
    assert again.steps == played["+ elastic"].steps
    other = with_run(small, replace(small.run, seed=8))
    assert Pipeline(other, system("+ elastic")).play().steps != again.steps


def test_gpus_lent_to_training_shorten_it(small: Scenario) -> None:
    """Training on one node takes long; GPUs that rollout does not need are lent to it."""
    slow = replace(small, training=replace(small.training, forward_passes=60))
    slow = with_run(slow, replace(slow.run, train_steps=3, slack=99.0, pool_slack=99.0))
    lent, kept = (Pipeline(slow, replace(system("+ elastic"), elastic=e)).play()
                  for e in (True, False))
    assert lent.steps[0].train_gpus == 8
    assert sum(s.lent_gpu_s for s in lent.steps) > 0 == sum(s.lent_gpu_s for s in kept.steps)
    assert sum(s.train_s for s in lent.steps) < 0.9 * sum(s.train_s for s in kept.steps)
    assert lent.tokens_per_s > kept.tokens_per_s


def test_trajectories_of_the_next_batch_start_while_the_longest_still_run(
        small: Scenario, played: dict[str, Played]) -> None:
    mixed = with_run(small, replace(small.run, pipeline="trajectories"))
    for name in ("static-uniform", "+ elastic"):
        run = Pipeline(mixed, system(name)).play()
        assert [s.generated for s in run.steps] == [s.generated for s in played[name].steps]
        assert run.tokens_per_s > 1.1 * played[name].tokens_per_s
    alone = Pipeline(mixed, system("colocated")).play()
    assert alone.steps == played["colocated"].steps  # all roll out or all train


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_batch_starts_beyond_the_staleness_limit(small: Scenario, staleness: int) -> None:
    class Watched(Pipeline):
        lag = 0

        def _begin(self, now: int) -> None:
            super()._begin(now)
            self.lag = max(self.lag, self._last - self._trained_upto)

    run = replace(small.run, pipeline="trajectories", staleness=staleness, iterations=5)
    watched = Watched(with_run(small, run), system("static-uniform"))
    watched.play()
    assert watched.lag == staleness


# ---- faults --------------------------------------------------------------------------------------


class Checked(Pipeline):
    """Checks the invariants after each event."""

    def _after(self, at: int, do: Callable[[int], None]) -> None:
        def both(now: int) -> None:
            do(now)
            self.check()

        super()._after(at, both)


@given(st.sampled_from(["static-uniform", "planner", "+ C-MLFQ", "+ elastic", "+ elastic"]),
       st.sampled_from(["batches", "trajectories"]), st.integers(0, 1000),
       st.builds(Faults, node_s=st.sampled_from([0.0, 60.0, 300.0]),
                 engine_s=st.sampled_from([0.0, 40.0, 300.0]),
                 back_s=st.sampled_from([1.0, 30.0, 200.0]), step=st.sampled_from([0.0, 0.3]),
                 tool=st.sampled_from([0.0, 0.05])))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_pipeline_invariants_hold_under_any_faults(
        name: str, pipeline: str, seed: int, faults: Faults) -> None:
    invariants_hold(name, pipeline, seed, faults, iterations=3)


def invariants_hold(name: str, pipeline: str, seed: int, faults: Faults, iterations: int
                    ) -> Checked:
    run = replace(WHOLE.run, iterations=iterations, prompts=3, samples=8, train_steps=1, seed=seed,
                  pipeline=pipeline, pool_slack=99.0)  # one node trains: others are lent
    scenario = with_run(replace(WHOLE, faults=faults), run)
    played = Checked(scenario, system(name))
    steps = played.play().steps
    assert [s.batch for s in steps] == list(range(iterations))
    assert played._rollouts.totals.ended == iterations * scenario.batch
    ends = [s.trained_at_s for s in steps]
    assert ends == sorted(ends)
    return played


def test_faults_cost_time_and_are_reproducible_by_seed() -> None:
    faults = Faults(node_s=200, engine_s=150, back_s=20, step=0.3, tool=0.05)
    calm, hit, again = (invariants_hold("+ elastic", "trajectories", 3, f, iterations=3)
                        for f in (Faults(), faults, faults))
    assert min(hit.fate.nodes, hit.fate.engines, hit.fate.steps, hit.fate.tools) > 0
    assert vars(calm.fate)["nodes"] == calm.fate.steps == calm.fate.tools == 0
    assert hit._steps == again._steps
    assert hit._steps[2].trained_at_s > calm._steps[2].trained_at_s
    assert min(sum(s.lent_gpu_s for s in run._steps.values()) for run in (calm, hit)) > 0


@pytest.mark.parametrize(("name", "faults", "told"), [
    ("+ elastic", Faults(node_s=1, back_s=120), "node_s`: 1: 10000 .* raise it, or lower .*120"),
    ("static-uniform", Faults(engine_s=1, node_s=50, back_s=120), "engine_s`: 1: 10000 faults"),
    ("static-uniform", Faults(node_s=1, back_s=1e9), "node_s`: 1: .* no batch was trained"),
    ("static-uniform", Faults(step=0.99999), "step`: 0.99999: .* no batch was trained; lower it")])
def test_faults_that_let_no_batch_end_are_reported_in_one_line(
        name: str, faults: Faults, told: str) -> None:
    run = replace(WHOLE.run, iterations=3, prompts=3, samples=8, train_steps=1)
    with pytest.raises(InvalidInput, match=rf"^scenario: field `faults\.{told}") as found:
        Pipeline(with_run(replace(WHOLE, faults=faults), run), system(name)).play()
    assert "\n" not in str(found.value)


def test_a_dead_rollout_node_is_not_replaced_by_one_that_rollout_needs() -> None:
    run = Pipeline(MANY, system("+ elastic"))
    run._install(0)
    lending, router = run._lending, run._rollouts.router
    assert lending is not None
    first = next(iter(lending._engines))
    lending.dies(0, first)
    lending.boundary(0, sum(router.easy(one.id) for one in router.instances))
    assert not lending.out, "rollout needs all live nodes"
    lending.boundary(0, 1)
    assert lending.out


def test_a_lent_node_that_died_joining_is_not_replaced_by_one_rollout_needs() -> None:
    """The first lent node holds half as much as the others, and dies while it joins."""
    run = Pipeline(WHOLE, system("+ elastic"))
    run._install(0)
    lending, router, place = run._lending, run._rollouts.router, run._rollouts.place
    assert lending is not None
    first = next(iter(lending._engines))
    router.easy = lambda id_: 5 if place(id_).node == first else 10  # type: ignore[method-assign]
    needed = sum(router.easy(one.id) for one in router.instances) - 5
    lending.boundary(0, needed)
    assert lending.out and not lending._engines[first]
    lending.dies(0, first)
    lending.home(0)  # who was asked in its place
    now, run._stopped = 0, True  # nothing else happens
    while lending.out:
        now, _, do = run._events.pop(0)
        do(now)
    lending.returns(now, first)
    for _ in range(WHOLE.pool.retry_steps - 1):
        lending.boundary(now, needed)
        assert not lending.out, "another node is lent in its place"
    for _ in range(2):
        lending.boundary(now, needed)
    assert lending.out and not lending._engines[first]


def test_a_split_change_does_not_wait_for_a_lent_node_that_died() -> None:
    """A new split waits until all lent nodes are back, but not for a node that died on its way."""
    run = Pipeline(MANY, system("+ elastic"))
    run._install(0)
    lending = run._lending
    assert lending is not None
    lending.boundary(0, 1)
    lending.home(0)
    run._pending = run._shares
    run._go_on(0)
    for node in sorted(lending._engines):
        assert not run._stopped and lending.out
        run.fate.one_of = lambda living, n=node: n  # type: ignore[method-assign, misc]
        run._node_dies(1)
        if not lending.out:
            break
    assert run._stopped, "the split is changed"


def test_a_colocated_system_has_its_pauses_under_faults(small: Scenario) -> None:
    often = replace(small, faults=Faults(engine_s=3, back_s=1))
    steps = Pipeline(often, system("colocated")).play().steps
    test_a_step_takes_the_longer_stage_and_colocated_the_sum(
        {"colocated": Played(system("colocated"), steps)}, often)


def test_all_systems_draw_the_same_faults() -> None:
    """Deaths come at the same times in every system, however many nodes may die in it."""
    faults = Faults(node_s=50, engine_s=20, step=0.5)
    one, other = Fate(faults, 3), Fate(faults, 3)
    times: list[list[int | None]] = [[], []]
    for n in range(1, 30):
        times[0] += [one.next_node_ns(), one.next_engine_ns()]
        one.one_of([*range(n)])
        engine = other.next_engine_ns()
        times[1] += [other.next_node_ns(), engine]
    assert times[0] == times[1]
    assert [one.step_fails() for _ in range(40)] == [other.step_fails() for _ in range(40)]


@pytest.mark.long
@given(st.sampled_from(["planner", "+ degrees", "+ C-MLFQ", "+ elastic", "+ elastic"]),
       st.sampled_from(["batches", "trajectories"]), st.integers(0, 10**6),
       st.builds(Faults, node_s=st.sampled_from([0.0, 30.0, 100.0, 300.0]),
                 engine_s=st.sampled_from([0.0, 20.0, 100.0]),
                 back_s=st.sampled_from([1.0, 15.0, 100.0, 400.0]),
                 step=st.sampled_from([0.0, 0.1, 0.5]), tool=st.sampled_from([0.0, 0.05, 0.5])))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_pipeline_invariants_hold_under_many_fault_histories(
        name: str, pipeline: str, seed: int, faults: Faults) -> None:
    invariants_hold(name, pipeline, seed, faults, iterations=5)


def test_lengths_drift_as_in_the_measurements() -> None:
    source = Source(WHOLE.lengths, WHOLE.run.seed)
    for progress, low, high in ((0.0, 2_000, 3_000), (1.0, 10_500, 12_500)):
        ones = [source.trajectory(p, s, progress).generated for p in range(256) for s in range(4)]
        assert low < sum(ones) / len(ones) < high


# tokens/s of all of Libra over each baseline's: less than what four seeds gave, see docs/LIBRA.md
REACHED = {
    "batches": {"colocated": 1.85, "static-uniform": 1.60, "greedy": 1.60, "static-optimal": 1.60,
                "colocated*": 1.22, "static-optimal*": 0.97},
    "trajectories": {"colocated": 2.55, "static-uniform": 1.34, "greedy": 1.43,
                     "static-optimal": 1.34, "colocated*": 1.70, "static-optimal*": 0.97}}


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["batches", "trajectories"])
def test_the_complete_system_beats_the_baselines_on_the_shipped_scenario(pipeline: str) -> None:
    """The whole shipped scenario; it takes a minute or two for each pipeline."""
    whole = with_run(WHOLE, replace(WHOLE.run, pipeline=pipeline))
    runs = {one.name: Pipeline(whole, one).play() for one in SYSTEMS}
    uniform = runs["static-uniform"].steps
    # the longest tenth takes more than half of the rollout time
    assert sum(s.p90_share for s in uniform) / len(uniform) < 0.5
    libra = runs["+ elastic"].tokens_per_s
    for name, ratio in REACHED[pipeline].items():
        assert libra > ratio * runs[name].tokens_per_s, name
    for before, after in pairwise(ABLATION):
        assert runs[after.name].tokens_per_s >= 0.97 * runs[before.name].tokens_per_s


# ---- files and words -----------------------------------------------------------------------------


@pytest.mark.parametrize(("was", "now", "told"), [
    ('format = "tangram-rl/1"', 'format = "x"', "field `format`"),
    ("gpus = 48", "gpus = 44", "field `run.gpus`: whole nodes of 8"),
    ("gpus = 48", "gqus = 48", "field `run.gqus` is not known; did you mean `run.gpus`?"),
    ("warmup = 1", "warmup = 500", "field `run.warmup`"),
    ("weights_s = 2.0", 'weights_s = "x"', "field `pauses.weights_s`"),
    ("weights_s = 2.0", "weights_s = inf", "field `pauses.weights_s`: inf must be finite"),
    ("warmup = 1", "slack = -1", "field `run.slack`: -1 must be finite and at least 0"),
    ('pipeline = "batches"', 'pipeline = "x"', "field `run.pipeline`: 'batches' or 'trajectories'"),
    ("[router] ", "[faults]\nstep = 1.0\n[router] ",
     "field `faults.step`: must be a share below 1"),
    ("[router] ", "[faults]\nnode_s = 0.1\n[router] ",
     "field `faults.node_s`: must be 0 or at least 1"),
    ("[router] ", "[faults]\nnodes = 1\n[router] ", "field `faults.nodes` is not known"),
    ("weight = [0.80, 0.30]", "weight = [nan, 1]", "field `lengths.phases.weight`: nan"),
    ("tokens = [1000, 4000]", "tokens = [0, 4000]", "field `lengths.phases`: finish: tokens"),
    ("prompt_tokens = 1200", "prompt_tokens = 0",
     "field `lengths.prompt_tokens`: must be at least 1"),
    ("to_rollout_s = 10.8", "to_rollout_s = 180", "field `pauses.to_rollout_s`: must be less than"),
    ("to_train_s = 8.0", "to_train_s = 500", "field `pauses.to_train_s`: must be less than `pool."),
    ("uniform_degree = 2", "uniform_degree = 3", "field `baselines.uniform_degree`"),
    ("granularity = 8", "granularity = 4", "field `planner.granularity`"),
    ('model = "qwen3-14b"', 'model = "nobody"', "model 'nobody'"),
    ("[run]", "[run", "scenario")])
def test_a_wrong_rl_scenario_is_refused_in_one_line(
        was: str, now: str, told: str, tmp_path: Path) -> None:
    text = (EXAMPLES / "rl-48.toml").read_text()
    assert was in text
    (tmp_path / "rl-a800.toml").write_text((EXAMPLES / "rl-a800.toml").read_text())
    path = tmp_path / "s.toml"
    path.write_text(text.replace(was, now, 1))
    with pytest.raises(InvalidInput, match=re.escape(told)) as error:
        read_rl_scenario(path)
    assert "\n" not in str(error.value)


def test_tangram_sim_rl_prints_simulated_figures_and_draws_a_picture(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rl.svg"
    text = (EXAMPLES / "rl-48.toml").read_text()
    scenario = tmp_path / "few.toml"
    scenario.write_text(text)
    (tmp_path / "rl-a800.toml").write_text((EXAMPLES / "rl-a800.toml").read_text())
    words = ["sim", "rl", str(scenario), "--iterations", "2",
             "--systems", "static-uniform,+ elastic"]
    assert main([*words, "--plot", str(picture), "--steps"]) == 0
    told = capsys.readouterr().out
    assert "simulated" in told and "all of Libra over static-uniform" in told
    assert "static-uniform" in picture.read_text() and "simulated" in picture.read_text()
    assert main([*words, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["simulated"] is True and len(line["systems"]) == 2
    assert line["ratios"]["static-uniform"] == pytest.approx(
        line["systems"][1]["tokens_per_s"] / line["systems"][0]["tokens_per_s"], rel=1e-3)
    assert main(["sim", "rl", "rl-48", "--systems", "nobody"]) == 2
    assert "'nobody' is not one of" in capsys.readouterr().err
    assert main(["sim", "rl", "rl-48", "--plot", "x.png"]) == 2
    assert main(["sim", "rl", "no-such"]) == 2


def test_each_panel_has_one_line_per_system(played: dict[str, Played]) -> None:
    for panel in panels(list(played.values()), "small"):
        assert [line.name for line in panel.lines] == [s.name for s in SYSTEMS]
    assert {s.name for s in ABLATION} <= set(played)
