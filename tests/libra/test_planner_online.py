"""The online planner beside a trainer: what it learns, when it plans, and what a plan switch must
gain."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import pytest
from helpers.planner_material import DENSE, HARDWARE, MOE, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.planner.calibrate import TRAIN, Calibrator, Learning
from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.online import Advice, OnlinePlanner
from tangram_hpc.libra.planner.place import place
from tangram_hpc.libra.planner.reprice import reprice
from tangram_hpc.libra.planner.shapes import Factors, Layout, Request, Rollout, Search, Training
from tangram_hpc.libra.planner.split import Split, plan
from tangram_hpc.libra.planner.trigger import StepFacts, Trigger, Triggers, worth

# ---- what is learned ----------------------------------------------------------------------------


def test_a_calibration_factor_is_measured_over_predicted_time() -> None:
    learned = Calibrator()
    assert learned.factors() == Factors()
    for degree, ratio in ((TRAIN, 1.3), (2, 0.5), (8, 2.0)):
        for _ in range(3):
            assert not learned.observe(degree, 1000, round(1000 * ratio), 4000.0)
    assert learned.factors() == Factors(1.3, ((2, 0.5), (8, 2.0)))


def test_noise_moves_a_factor_slowly_and_a_change_fast() -> None:
    r = random.Random(3)
    learned = Calibrator()
    for _ in range(40):
        assert not learned.observe(TRAIN, 10**6, round(10**6 * r.uniform(0.98, 1.02)), 4000.0)
    assert learned.factors().train == pytest.approx(1.0, abs=0.01)
    assert learned.observe(TRAIN, 10**6, 2 * 10**6, 4000.0), "twice as long is a change point"
    assert learned.factors().train > 1.75
    for _ in range(5):
        learned.observe(TRAIN, 10**6, 2 * 10**6, 4000.0)
    assert learned.factors().train == pytest.approx(2.0, abs=0.05)
    assert learned.changes(TRAIN) == 1
    for _ in range(10):
        learned.observe(TRAIN, 10**6, 2 * 10**6, 4000.0)
    assert learned.observe(TRAIN, 10**6, 2 * 10**6, 9000.0), "other lengths are a change point"


def test_the_first_observations_are_no_change_point() -> None:
    learned = Calibrator(Learning(least=8))
    told = [learned.observe(TRAIN, 100, 100 * k, 10.0 * k) for k in range(1, 8)]
    assert told == [False] * 7
    assert not learned.observe(TRAIN, 0, 5, 1.0) and not learned.observe(TRAIN, 5, 0, 1.0)


@pytest.mark.parametrize("time_ns", [nan, inf, -1.0])
def test_a_time_that_is_no_time_is_not_learned(time_ns: float) -> None:
    """As the mean of no samples: a factor would stay NaN, and plans with it would look free."""
    learned = Calibrator()
    learned.observe(2, 1000, 1500, 10.0)
    assert not learned.observe(2, 1000, time_ns, 10.0)  # type: ignore[arg-type]
    assert learned.factors() == Factors(1.0, ((2, 1.5),))


@given(st.lists(st.tuples(st.sampled_from([TRAIN, 1, 4]), st.integers(1, 10**12),
                          st.integers(1, 10**12), st.floats(0, 1e5)), max_size=40),
       st.integers(0, 40))
def test_a_saved_and_loaded_calibrator_continues_unchanged(
        samples: list[tuple[int, int, int, float]], at: int) -> None:
    whole, first, second = Calibrator(), Calibrator(), Calibrator()
    told = [whole.observe(*s) for s in samples]
    again = [first.observe(*s) for s in samples[:at]]
    second.load(json.loads(json.dumps(first.saved())))
    assert again + [second.observe(*s) for s in samples[at:]] == told
    assert second.factors() == whole.factors()


def test_an_unmeasured_degree_uses_the_factor_of_the_nearest_degree() -> None:
    known = Factors(1.0, ((1, 1.5), (4, 2.0)))
    assert [known.of(d) for d in (1, 2, 4, 8)] == [1.5, 1.5, 2.0, 2.0]
    assert Factors().of(2) == 1.0


# ---- what mixtures take -------------------------------------------------------------------------

PLANS = st.lists(st.tuples(st.booleans(), st.integers(1, 10**12), st.integers(1, 10**12),
                           st.floats(0, 1e5)), max_size=100)


def test_mixed_degree_plans_have_a_factor_of_their_own_relative_to_uniform_plans() -> None:
    learned = Calibrator()
    assert learned.mixed() == 1.0 and [learned.loss(x) for x in (0.0, 0.1)] == [0.0, 0.1]
    learned.observe_plan(True, 1000, 1300, 4000.0)
    assert learned.mixed() == pytest.approx(1.3 ** 0.5), "one sample weighs as much as the prior"
    for _ in range(60):
        learned.observe_plan(True, 1000, 1300, 4000.0)
    assert learned.mixed() == pytest.approx(1.3, rel=0.01), "uniform plans are as predicted"
    for _ in range(5):
        learned.observe_plan(False, 1000, 1300, 4000.0)
    assert learned.mixed() == pytest.approx(1.0), "all plans are 1.3 times as slow"
    assert learned.factors() == Factors()
    fast = Calibrator()
    fast.observe_plan(True, 1000, 700, 4000.0)
    assert fast.mixed() == 1.0, "all plans may be equally fast"
    assert learned.loss(0.0) == 0.0, "known lengths need no routing loss"


@given(st.floats(0.5, 3.0), st.floats(0.5, 3.0), st.floats(0.01, 1.0), st.integers(1, 30))
def test_a_learned_routing_loss_lies_between_its_prior_and_the_measurement(
        uniform: float, mixed: float, routing: float, samples: int) -> None:
    learned = Calibrator()
    for _ in range(samples):
        learned.observe_plan(False, 10**9, round(uniform * 10**9), 4000.0)
        learned.observe_plan(True, 10**9, round(mixed * 10**9), 4000.0)
    least, most = sorted((1.0, mixed / uniform))
    assert least - 1e-6 <= learned.mixed() <= most + 1e-6
    said, loss = (1 + routing) * learned.mixed() - 1, learned.loss(routing)
    assert loss > 0 and loss == pytest.approx(max(said, 0.001), abs=1e-9)


def test_old_samples_of_mixed_degree_plans_and_those_before_a_change_are_dropped() -> None:
    old = Calibrator(Learning(window=5))
    old.observe_plan(True, 1000, 1500, 4000.0)
    for _ in range(4):
        old.observe_plan(False, 1000, 1000, 4000.0)
    assert old.mixed() > 1.2
    old.observe_plan(False, 1000, 1000, 4000.0)
    assert old.mixed() == 1.0, "five uniform plans later"
    for tokens, ns in ((9000.0, 1000), (4000.0, 2000)):
        changed = Calibrator()
        for mixed, took in [(True, 1500), *[(False, 1000)] * 10]:
            changed.observe_plan(mixed, 1000, took, 4000.0)
        assert changed.mixed() > 1.2
        changed.observe_plan(False, 1000, ns, tokens)
        assert changed.mixed() == 1.0, "lengths or uniform plans have changed"


@given(PLANS, st.integers(0, 100))
def test_plan_time_samples_survive_saving_and_loading(
        samples: list[tuple[bool, int, int, float]], at: int) -> None:
    whole, first, second = Calibrator(), Calibrator(), Calibrator()
    for one in samples:
        whole.observe_plan(*one)
    for one in samples[:at]:
        first.observe_plan(*one)
    second.load(json.loads(json.dumps(first.saved())))
    for one in samples[at:]:
        second.observe_plan(*one)
    assert second.saved() == whole.saved() and second.mixed() == whole.mixed()


# ---- when to act --------------------------------------------------------------------------------


def facts(step: int, train: int = 100, rollout: int = 100, **more: float) -> StepFacts:
    return StepFacts(step, train, rollout, **more)  # type: ignore[arg-type]


def test_the_trigger_names_each_reason_to_plan() -> None:
    trigger = Trigger(Triggers(interval=10, warmup=2, min_history=3, cooldown=2, rejected=8))
    assert trigger.due(facts(5, queue_pressure=1.0)) == "", "too little history"
    trigger.add([Request(1, 1)] * 3)
    assert trigger.due(facts(1, queue_pressure=1.0)) == "", "warm-up"
    assert trigger.due(facts(5)) == ""
    assert "queue pressure 0.75" in trigger.due(facts(5, queue_pressure=0.75))
    assert "rollout pressure 0.90" in trigger.due(facts(5, rollout_pressure=0.9))
    assert "rollouts 1.25 times" in trigger.due(facts(5, 80, 100))
    assert "training 1.30 times" in trigger.due(facts(5, 130, 100))
    assert trigger.due(facts(5, 81, 100)) == ""
    assert trigger.due(facts(6, rejected=5)) == ""
    assert "9 rollouts refused" in trigger.due(facts(7, rejected=4))
    trigger.planned(7)
    assert trigger.due(facts(8, 50, 100)) == "", "cooldown"
    assert trigger.due(facts(9)) == "", "the refused ones are forgotten"
    assert trigger.due(facts(16)) == ""
    assert "10 steps" in trigger.due(facts(17))
    small = Trigger(Triggers(history=5))
    small.add(Request(1, k + 1) for k in range(9))
    assert [r.generated for r in small.history] == [5, 6, 7, 8, 9]


def test_a_trainer_that_goes_back_to_an_earlier_step_is_planned_for() -> None:
    trigger = Trigger(Triggers(interval=10, min_history=1, cooldown=2))
    trigger.add([Request(1, 1)])
    trigger.planned(400)
    assert trigger.due(facts(101, queue_pressure=1.0)) == "", "cooldown"
    assert trigger.due(facts(102)) == ""
    assert "queue pressure" in trigger.due(facts(103, queue_pressure=1.0))
    assert "10 steps" in trigger.due(facts(111))


def test_a_plan_switch_must_gain_more_than_it_costs() -> None:
    rules = Triggers(switch_cost_ns=15 * 10**9, min_gain=0.05, horizon=10)
    s = 10**9
    assert worth(rules, 100 * s, 90 * s).switch
    assert not worth(rules, 100 * s, 100 * s).switch
    assert not worth(rules, 100 * s, 120 * s).switch
    assert "less than 5.0%" in worth(rules, 100 * s, 96 * s).why
    assert "costs 15.0 s" in worth(rules, 10 * s, 9 * s).why
    assert not worth(rules, 15 * s, int(13.5 * s)).switch, "a gain equal to the cost is no gain"
    assert worth(rules, 16 * s, int(14.4 * s)).switch
    assert worth(rules, None, 10**15).switch
    assert worth(replace(rules, switch_cost_ns=0, min_gain=0.0), 2, 1).switch


# ---- a plan in force ----------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_repricing_the_current_plan_equals_its_planned_price(
        problem: tuple[AnalyticCosts, int], r: random.Random) -> None:
    """For its own batch the price is as planned; for another batch it is never better than a new
    plan."""
    costs, gpus = problem
    try:
        best = plan(costs, gpus, Search()).best
    except InvalidInput:
        return
    degrees = [one.degree for one in best.instances]
    again = reprice(costs, gpus, best.layout, degrees, Search())
    assert again is not None
    assert (again.price, again.rollout_ns) == (best.price, best.rollout_ns)
    other = [Request(x.prompt, max(1, round(x.generated * r.uniform(0.2, 2)))) for x in costs.batch]
    moved = AnalyticCosts(costs.model, costs.hardware, costs.training, costs.rollout, other)
    old = reprice(moved, gpus, best.layout, degrees, Search())
    if old is not None:
        assert plan(moved, gpus, Search()).best.step_ns <= old.step_ns
        assert sum(one.requests for one in old.instances) == costs.training.batch


def test_repricing_divides_requests_optimally_among_the_given_instances() -> None:
    for seed in range(30):
        r = random.Random(seed)
        history = [Request(100, r.randint(1, 9000)) for _ in range(6)]
        costs = AnalyticCosts(DENSE, HARDWARE, Training(6), Rollout(max_batch=2), history)
        degrees = [r.choice([1, 2, 4]) for _ in range(r.randint(1, 4))]
        strata = costs.strata(64)
        segments = {d: costs.segments(d, strata) for d in degrees}
        best = min(max(int(segments[d][a, b]) for d, (a, b) in zip(
            degrees, itertools.pairwise((0, *cuts, 6)), strict=True))
            for cuts in itertools.combinations_with_replacement(range(7), len(degrees) - 1))
        found = reprice(costs, 16, Layout(4, 1, 1, 1, 1), degrees, Search())
        assert found is not None and found.rollout_ns == best
        assert found.rollout_ns == max(one.ns for one in found.instances)


def test_repricing_an_infeasible_plan_gives_none() -> None:
    costs = AnalyticCosts(DENSE, HARDWARE, Training(8), Rollout(), [Request(10, 400_000)])
    assert reprice(costs, 16, Layout(8, 1, 1, 1, 1), [1], Search()) is None  # the cache
    assert reprice(costs, 16, Layout(1, 1, 1, 1, 1), [8], Search()) is None  # memory
    costs = AnalyticCosts(DENSE, HARDWARE, Training(8), Rollout(), [Request(10, 400)])
    assert reprice(costs, 16, Layout(8, 1, 1, 1, 1), [8], Search()) is not None
    for wrong in (Layout(8, 1, 1, 1, 3), Layout(4, 1, 3, 1, 1), Layout(2, 2, 1, 4, 1),
                  Layout(8, 1, 1, 2, 1)):  # batch, layers, experts, no GPU left
        assert reprice(costs, 16, wrong, [8], Search()) is None


@settings(max_examples=15, deadline=None)
@given(problems())
def test_gpu_blocks_lie_within_nodes_and_no_gpu_has_two_roles(
        problem: tuple[AnalyticCosts, int]) -> None:
    costs, gpus = problem
    try:
        splits = plan(costs, gpus, Search()).splits
    except InvalidInput:
        return
    for split in splits:
        blocks = place(split, 8)
        taken = [b.node * 8 + g for b in blocks for g in b.gpus]
        assert len(set(taken)) == len(taken) and max(taken) < gpus
        assert all(b.gpus[0] >= 0 and b.gpus[-1] < 8 for b in blocks)
        assert all(b.gpus[0] % len(b.gpus) == 0 for b in blocks)
        trained = [b for b in blocks if b.role == "train"]
        assert sum(len(b.gpus) for b in trained) == split.train_gpus
        assert [len(b.gpus) for b in blocks if b.role == "rollout"] == [
            one.degree for one in split.instances]


# ---- all of it ----------------------------------------------------------------------------------


def lengths(mean: int, seed: int, count: int = 96) -> list[Request]:
    r = random.Random(seed)
    return [Request(500, min(30000, 1 + int(r.lognormvariate(0, 0.9) * mean / 1.5)))
            for _ in range(count)]


class Truth:
    """A world in which everything takes a constant factor longer than the model predicts."""

    def __init__(self, train: float, rollout: float) -> None:
        self._factors = Factors(train, ((1, rollout),))

    def step(self, split: Split, batch: Sequence[Request]) -> tuple[int, dict[int, int]]:
        costs = AnalyticCosts(DENSE, HARDWARE, Training(96), Rollout(), batch, self._factors)
        now = reprice(costs, 48, split.layout, [x.degree for x in split.instances], Search())
        assert now is not None
        took: dict[int, int] = {}
        for one in now.instances:
            took[one.degree] = max(took.get(one.degree, 0), one.ns)
        return now.price.ns, took


def online(rules: Triggers) -> OnlinePlanner:
    def priced(history: Sequence[Request], factors: Factors) -> AnalyticCosts:
        return AnalyticCosts(DENSE, HARDWARE, Training(96), Rollout(), history, factors)

    return OnlinePlanner(priced, 48, Search(), rules, Learning())


def play_steps(planner: OnlinePlanner, truth: Truth, means: Sequence[int]) -> list[Advice]:
    """Plays steps; returns the advice of each."""
    told = []
    for step, mean in enumerate(means, 1):
        batch = lengths(mean, step)
        before = planner.now
        assert before is not None
        train_ns, rollouts = truth.step(before, batch)
        advice = planner.step(StepFacts(step, train_ns, max(rollouts.values())), batch, rollouts)
        assert (planner.now != before) == bool(
            advice and advice.verdict.switch and advice.plan and advice.plan.best != before)
        if advice:
            told.append(advice)
    return told


def test_a_planner_without_a_history_says_so() -> None:
    with pytest.raises(InvalidInput, match=r"^history: it has no request"):
        online(Triggers()).preflight([])


def test_the_online_planner_calibrates_itself_and_then_keeps_its_plan() -> None:
    planner = online(Triggers(history=192))
    planner.preflight(lengths(3000, 0))
    told = play_steps(planner, Truth(1.4, 0.7), [3000] * 25)
    assert planner.calibrator.factors().train == pytest.approx(1.4, rel=1e-6)
    assert all(f == pytest.approx(0.7, rel=1e-6) for _, f in planner.calibrator.factors().rollout)
    assert len(told) >= 2 and planner.now is not None
    switches = [a for a in told if a.verdict.switch]
    assert len(switches) <= 2, "it switches only until calibrated"


def test_the_online_planner_follows_a_drift_of_lengths() -> None:
    """As lengths grow from 2.5 K to 11.5 K tokens, rollout becomes the slower stage and gets more
    GPUs."""
    planner = online(Triggers(history=192))
    first = planner.preflight(lengths(2500, 0)).best
    told = play_steps(planner, Truth(1.0, 1.0), [2500 + 300 * k for k in range(30)] + [11500] * 15)
    assert planner.now is not None
    assert any(a.verdict.switch for a in told)
    batch = lengths(11500, 99)
    costs = AnalyticCosts(DENSE, HARDWARE, Training(96), Rollout(), batch)
    stayed = reprice(costs, 48, first.layout, [x.degree for x in first.instances], Search())
    moved = reprice(costs, 48, planner.now.layout,
                     [x.degree for x in planner.now.instances], Search())
    assert stayed and moved and moved.step_ns < 0.95 * stayed.step_ns


def test_a_restarted_online_planner_continues_unchanged() -> None:
    rules = Triggers(history=192)
    whole, first = online(rules), online(rules)
    for planner in (whole, first):
        planner.preflight(lengths(2500, 0))
    means, truth = [2500 + 900 * k for k in range(14)], Truth(1.1, 1.3)
    play_steps(whole, truth, means)
    play_steps(first, truth, means)
    second = online(rules)
    second.load(json.loads(json.dumps(first.saved())))
    assert second.saved() == first.saved() == whole.saved()
    batch = lengths(15000, 77)
    assert whole.now is not None
    train_ns, took = truth.step(whole.now, batch)
    facts = StepFacts(40, train_ns, max(took.values()))
    one, other = whole.step(facts, batch, took), second.step(facts, batch, took)
    assert one is not None and one == other
    assert online(rules).saved()["layout"] is None


def test_the_online_planner_keeps_its_plan_when_a_switch_costs_more_than_it_gains() -> None:
    planner = online(Triggers(history=192, switch_cost_ns=10**15))
    planner.preflight(lengths(2500, 0))
    first = planner.now
    told = play_steps(planner, Truth(1.0, 1.0), [2500, 4000, 6000, 8000, *[11000] * 4])
    assert told and not any(a.verdict.switch for a in told)
    assert planner.now == first


def test_a_mixture_of_experts_is_planned_online_too() -> None:
    def priced(history: Sequence[Request], factors: Factors) -> AnalyticCosts:
        return AnalyticCosts(MOE, HARDWARE, Training(96), Rollout(), history, factors)

    planner = OnlinePlanner(priced, 32, Search(granularity=8), Triggers(min_history=1), Learning())
    found = planner.preflight(lengths(3000, 1))
    assert {s.train_gpus for s in found.splits} <= {8, 16, 24}
    advice = planner.step(StepFacts(10, 10**12, 10**9), lengths(3000, 2), {})
    assert advice is not None and advice.reason.startswith("training 1000.00 times")


# ---- mixtures that a router deals badly or well -------------------------------------------------


def planner_with_loss(ahead: int = 0) -> OnlinePlanner:
    """A planner that expects a routing loss."""
    def priced(history: Sequence[Request], factors: Factors) -> AnalyticCosts:
        return AnalyticCosts(DENSE, HARDWARE, Training(192), Rollout(), history, factors)

    rules = Triggers(history=192, min_gain=0.01, horizon=100)
    return OnlinePlanner(priced, 32, Search(loss=0.02, granularity=8, ahead=ahead), rules,
                         Learning(window=16))


def long_tailed_lengths() -> list[Request]:
    """Many short requests and a few long ones: plans of mixed degrees gain a few percent."""
    r = random.Random(0)
    return [Request(500, r.randint(4000, 12_000)) for _ in range(168)] + [
        Request(500, r.randint(15_000, 30_000)) for _ in range(24)]


def play_with_mixtures(planner: OnlinePlanner, mixtures: float, steps: int, of: int = 0,
                       ahead: int = 0) -> list[bool]:
    """Plays steps in which all takes as long as predicted, except rollouts of mixed-degree plans,
    which take `mixtures` times as long. Returns whether the plan after each step is mixed."""
    told = []
    for step in range(of + 1, of + steps + 1):
        batch, now = long_tailed_lengths(), planner.now
        assert now is not None
        costs = AnalyticCosts(DENSE, HARDWARE, Training(192), Rollout(), batch)
        degrees = [x.degree for x in now.instances]
        ran = reprice(costs, 32, now.layout, degrees, Search(loss=0.02, ahead=ahead))
        assert ran is not None
        took: dict[int, int] = {}
        longer = (mixtures * 1.02 if planner.mixed else 1.0)
        for one in ran.instances:
            took[one.degree] = max(took.get(one.degree, 0), round(one.ns * longer))
        rollout_ns = round(ran.rollout_ns * (mixtures if planner.mixed else 1.0))
        planner.step(StepFacts(step, ran.price.ns, rollout_ns, queue_pressure=1.0), batch,
                     {} if ahead else took)
        told.append(planner.mixed)
    return told


@pytest.mark.parametrize("ahead", [0, 1])
def test_mixed_degree_plans_slower_than_predicted_are_left_for_uniform_ones(ahead: int) -> None:
    planner = planner_with_loss(ahead)
    planner.preflight(long_tailed_lengths())
    assert planner.mixed, "the first plan is mixed"
    told = play_with_mixtures(planner, 1.3, 16, ahead=ahead)
    at = told.index(False)
    assert at < 8 and not any(told[at:]), "mixed plans are left soon and not retried at once"
    rest = play_with_mixtures(planner, 1.3, 16 * (1 + ahead), 16, ahead)
    assert 0 < sum(rest) <= 8 and not rest[-1], "mixed plans are retried when samples are old"


@pytest.mark.parametrize("ahead", [0, 1])
def test_mixed_degree_plans_as_fast_as_predicted_are_kept(ahead: int) -> None:
    planner = planner_with_loss(ahead)
    planner.preflight(long_tailed_lengths())
    assert all(play_with_mixtures(planner, 1.0, 16, ahead=ahead))
    assert planner.calibrator.mixed() == pytest.approx(1.0, abs=1e-6)
    assert all(f == pytest.approx(1.0, abs=1e-6)
               for _, f in planner.calibrator.factors().rollout), "the loss is not a degree's"


def test_a_new_plan_is_measured_before_the_next_one_is_sought() -> None:
    planner = planner_with_loss()
    planner.preflight(long_tailed_lengths())
    told = play_with_mixtures(planner, 1.3, 8)
    at = told.index(False) + 1
    again = planner_with_loss()
    again.preflight(long_tailed_lengths())
    play_with_mixtures(again, 1.3, at)
    assert not again.mixed and not again.settled
    long = [Request(500, 20_000)] * 192
    silent = [again.step(StepFacts(at + k, 10**9, 10**9, queue_pressure=1.0), long, {})
              for k in (1, 2)]
    assert silent[0] is None and silent[1] is not None, "only the second step is measured"
