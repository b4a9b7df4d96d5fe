"""The global planner against brute force and against its invariants.

The brute force below shares nothing with the planner but the values that are handed in: it counts
the costs request by request and micro-batch by micro-batch, and tries every split, layout and
assignment.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from helpers.planner_material import DENSE, HARDWARE, MOE, REQUESTS, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.layout_tree import LayoutNode, LayoutTree
from tangram_hpc.libra.planner.lengths import Ints, Strata, batch_of, sorted_requests, strata_of
from tangram_hpc.libra.planner.reprice import reprice
from tangram_hpc.libra.planner.rollout_cost import RolloutCost
from tangram_hpc.libra.planner.rollout_dp import RolloutDpTable
from tangram_hpc.libra.planner.shapes import (
    NEVER,
    Hardware,
    Layout,
    ModelShape,
    Request,
    Rollout,
    Search,
    Training,
)
from tangram_hpc.libra.planner.split import SplitPlan, dealt_to, lossy, plan
from tangram_hpc.libra.planner.train_cost import TrainCost

# ---- an independent count of costs --------------------------------------------------------------


def rollout_s(model: ModelShape, hw: Hardware, rollout: Rollout, degree: int,
              requests: Sequence[Request], ahead: int = 0, train: float = 0.0) -> float:
    """Seconds of one instance for these requests, request by request; inf where it cannot run. With
    `ahead`, the shortest period that it sustains beside a training step of that length."""
    if model.heads % degree or (model.ffn or model.expert_ffn) % degree or (
            model.kv_heads % degree and degree % model.kv_heads) or hw.gpus_per_node % degree:
        return math.inf
    copies = max(1, degree // model.kv_heads)
    kv = 2 * model.layers * model.kv_heads * model.head_dim * model.value_bytes * copies
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    common = attention + 3 * model.hidden * model.ffn + model.hidden * (2 + model.experts)
    expert = 3 * model.hidden * model.expert_ffn
    table = model.vocab * model.hidden
    weights = model.layers * (common + model.experts * expert) + table * (1 if model.tied else 2)
    free = degree * (hw.mem_bytes - hw.workspace_bytes) - weights * model.value_bytes
    room = int(free / kv * (1 - rollout.kv_loss))
    if room < max(r.prompt + r.generated for r in requests):
        return math.inf
    bandwidth = degree * hw.mem_bw * hw.mem_share
    speed = degree * hw.flops * hw.mfu_prefill
    multiply = 2 * (model.layers * (common + model.top_k * expert) + table) / speed
    carry = 2 * model.layers * 2 * (degree - 1) / degree * model.hidden * model.value_bytes / (
        hw.link_bw * hw.comm_share)
    hops = 4 * model.layers * math.log2(degree) * hw.link_latency_s + hw.step_s

    def experts(sequences: float) -> float:
        """Seconds of a step that read experts."""
        share = 0.0  # without the loss of digits of 1 - (1 - k / n) ** sequences
        if model.experts:
            missed = 1 - model.top_k / model.experts
            share = -math.expm1(sequences * math.log(missed)) if missed else 1.0
        return model.layers * model.experts * expert * share * model.value_bytes / bandwidth

    def decode(steps: float, tokens: int, reads: float, read: float) -> float:
        whole = (model.layers * common + table) * model.value_bytes
        reading = (steps * whole + reads * kv) / bandwidth + read
        return max(reading, tokens * multiply) + tokens * carry + steps * hops + (
            tokens * hw.sequence_s)

    def prefill(prompt: int) -> float:
        square = 2 * model.layers * model.heads * model.head_dim * prompt * prompt / speed
        return prompt * (multiply + carry) + square

    reads = [sum(r.prompt + t + 0.5 for t in range(r.generated)) if r.generated < 50 else
             r.generated * (r.prompt + r.generated / 2) for r in requests]
    tokens = sum(r.generated for r in requests)
    packed = max(sum(reads) / room, tokens / rollout.max_batch)
    longest = max(r.generated for r in requests)
    if ahead:
        read = sum(prefill(r.prompt) for r in requests)
        wait = train + max(r.tool_ns / 1e9 + prefill(r.prompt) for r in requests)

        def period(steps: float) -> float:
            return read + decode(steps, tokens, sum(reads), steps * experts(tokens / steps))

        def in_time(steps: float) -> bool:
            return wait + longest * period(steps) / steps <= (ahead + 1) * period(steps)

        low = high = max(packed, longest / (ahead + 1))
        while not in_time(high):
            high *= 2
        for _ in range(0 if in_time(low) else 100):
            middle = (low + high) / 2
            low, high = (low, middle) if in_time(middle) else (middle, high)
        return period(high)
    steps = max(longest, packed)
    ends = sorted(r.generated for r in requests)
    together = sum((end - start) * experts(len(ends) - k)
                   for k, (start, end) in enumerate(itertools.pairwise([0, *ends])))
    read = max(together, packed * experts(tokens / max(packed, 1)))
    # contexts that are read again, as all grow alike and do not fit
    seats = rollout.max_batch if all(r.turns == 1 for r in requests) else len(requests)
    peak = max(r.total * min(seats, sum(x.total > r.total for x in requests)
                             + sum(x.total == r.total for x in requests[k:]))
               for k, r in enumerate(requests))
    share = 1 - min(1, room / peak) ** 2
    square = 2 * model.layers * model.heads * model.head_dim / speed
    again = share * sum(r.turns * (middle * (multiply + carry) + middle ** 2 * square)
                        for r in requests if (middle := r.prompt + r.generated / 2))
    again += sum(prefill(r.prompt) for r in requests)
    bare = [prefill(r.prompt) + decode(r.generated, r.generated, x, r.generated * experts(1))
            for r, x in zip(requests, reads, strict=True)]
    alone = max(x + r.tool_ns / 1e9 for r, x in zip(requests, bare, strict=True))
    last = decode(longest, tokens, sum(reads), together) + alone - max(bare)
    return max(again + decode(steps, tokens, sum(reads), read), again + last, alone)


def divided(value: int, by: int) -> int:
    return -(-value // by)


def held_bytes(model: ModelShape, t: Training, x: Layout) -> int:
    """Weights, gradients and optimizer states of the fullest GPU."""
    layers = model.layers // x.pp
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    common = attention + 3 * model.hidden * model.ffn + model.hidden * (2 + model.experts)
    ends = model.vocab * model.hidden * (2 if x.pp == 1 and not model.tied else 1)
    dense = divided(layers * common + ends, x.tp)
    experts = divided(layers * model.experts * 3 * model.hidden * model.expert_ffn, x.tp * x.ep)
    total = 0
    for params, copies in ((dense, x.dp), (experts, x.dp // x.ep)):
        total += divided(params * model.value_bytes, copies if t.zero == 3 else 1)
        total += divided(params * t.grad_bytes, copies if t.zero >= 2 else 1)
        total += divided(params * t.optimizer_bytes, copies if t.zero >= 1 else 1)
    return total


def flow_shop(times: Sequence[float], stages: int) -> float:
    """When the last job leaves the last of `stages` equal machines, simulated job by job."""
    free = [0.0] * stages
    for took in times:
        ready = 0.0
        for k in range(stages):
            ready = free[k] = max(free[k], ready) + took
    return free[-1]


def stage_s(model: ModelShape, hw: Hardware, t: Training, x: Layout,
            lengths: Sequence[int]) -> tuple[float, float, float]:
    """(whole stage, its compute, the head) in seconds of one micro-batch."""
    layers, tokens, size = model.layers // x.pp, sum(lengths), model.value_bytes
    passes = 3 + t.recompute + t.forward_passes
    speed = x.tp * hw.flops * hw.mfu_train
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    active = attention + 3 * model.hidden * (model.ffn + model.top_k * model.expert_ffn) + (
        model.hidden * (2 + model.experts))
    flops = sum(2 * active * n + 2 * model.heads * model.head_dim * n * n for n in lengths)
    compute = passes * layers * flops / speed

    def wire(gpus: int) -> tuple[float, float]:
        near = gpus <= hw.gpus_per_node
        return ((hw.link_bw if near else hw.net_bw) * hw.comm_share,
                hw.link_latency_s if near else hw.net_latency_s)

    calls = 2 * (passes - 1) * layers
    bytes_ = tokens * model.hidden * size
    rate, hop = wire(x.tp)
    tp = calls * 2 * (x.tp - 1) * (bytes_ / x.tp / rate + hop)
    rate, hop = wire(x.tp * x.ep)
    ep = calls * (x.ep - 1) * (bytes_ * model.top_k / x.tp / x.ep / rate + hop)
    rate, hop = wire(x.gpus)
    pp = 2 * (bytes_ / x.tp / rate + hop) if x.pp > 1 else 0.0
    head = passes * 2 * model.vocab * model.hidden * tokens / speed
    return compute + tp + ep + pp, compute, head


def train_s(model: ModelShape, hw: Hardware, t: Training, x: Layout,
            lengths: Sequence[int]) -> tuple[float, int]:
    """(seconds of a step, bytes of the fullest GPU), micro-batch by micro-batch."""
    ordered = sorted(lengths, reverse=True)
    micros = [ordered[k:k + x.micro] for k in range(0, len(ordered), x.micro)]
    mine = micros[::x.dp]
    stages = [stage_s(model, hw, t, x, m) for m in mine]
    fill = flow_shop([stages[0][0]], x.pp) - stages[0][0]
    pipeline = flow_shop([s for s, _, _ in stages], x.pp) + sum(h for _, _, h in stages) + (
        (t.steps - 1) * fill)
    near = x.gpus <= hw.gpus_per_node
    rate = (hw.link_bw if near else hw.net_bw) * hw.comm_share
    hop = hw.link_latency_s if near else hw.net_latency_s
    layers = model.layers // x.pp
    attention = 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)
    common = attention + 3 * model.hidden * model.ffn + model.hidden * (2 + model.experts)
    ends = model.vocab * model.hidden * (2 if x.pp == 1 and not model.tied else 1)
    params = [(divided(layers * common + ends, x.tp), x.dp)]
    if model.experts:
        params.append((divided(layers * model.experts * 3 * model.hidden * model.expert_ffn,
                               x.tp * x.ep), x.dp // x.ep))
    rounds = 3 if t.zero == 3 else 2
    comm = sum(rounds * (copies - 1) * (p * t.grad_bytes / copies / rate + hop)
               for p, copies in params)
    under = hw.overlap * 2 / (3 + t.recompute + t.forward_passes) * max(c for _, c, _ in stages)
    slowed = under * hw.rho * min(1, comm / under) ** hw.theta
    update = sum(p / (copies if t.zero else 1) for p, copies in params) * 2 * (
        model.value_bytes + t.grad_bytes + t.optimizer_bytes) / (hw.mem_bw * hw.mem_share)
    update += hw.update_s
    tokens = sum(micros[0])
    width = 6 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * (
        model.ffn + model.top_k * model.expert_ffn)
    flying = tokens * min(x.pp, len(mine) // t.steps)
    kept = flying * model.hidden * layers + tokens * width if t.recompute else (
        flying * width * layers)
    logits = min(tokens, t.logit_chunk) * model.vocab * (4 + model.value_bytes)
    memory = held_bytes(model, t, x) + hw.workspace_bytes + (
        kept * model.value_bytes + logits) // x.tp
    return pipeline + t.steps * (max(0.0, comm - under) + slowed + update), memory


# ---- brute force --------------------------------------------------------------------------------


def all_layouts(costs: AnalyticCosts, gpus: int, search: Search) -> Iterator[Layout]:
    """Every tuple of whole numbers whose product is `gpus`, judged one by one."""
    model, t, hw = costs.model, costs.training, costs.hardware
    for tp, pp in itertools.product(range(1, gpus + 1), repeat=2):
        if gpus % (tp * pp):
            continue
        dp = gpus // (tp * pp)
        for ep, micro in itertools.product(range(1, gpus + 1), t.micro_batches):
            ok = tp in t.degrees and hw.gpus_per_node % tp == 0 and model.layers % pp == 0
            ok = ok and model.heads % tp == 0 and (model.ffn or model.expert_ffn) % tp == 0
            ok = ok and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
            ok = ok and (model.experts % ep == 0 if model.experts else ep == 1) and dp % ep == 0
            ok = ok and t.batch % (dp * micro * t.steps) == 0
            if not ok:
                continue
            each = t.batch // (dp * micro * t.steps)
            lengths = [r.total for r in costs.batch]
            mean = sum(lengths) // len(lengths)
            alone = Layout(tp, 1, 1, 1, 1)
            whole, compute, _ = stage_s(model, replace(hw, link_latency_s=0), t, alone, [mean])
            if (whole - compute) / compute > search.tp_share:
                continue
            if (pp - 1) / (pp + each - 1) <= search.bubble:
                yield Layout(tp, ep, pp, dp, micro)


def compositions(items: int, parts_most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut 0 .. items-1 into runs."""
    for cuts in itertools.chain.from_iterable(
            itertools.combinations(range(1, items), k) for k in range(min(items, parts_most))):
        edges = (0, *cuts, items)
        yield tuple(itertools.pairwise(edges))


def brute_rollout(costs: AnalyticCosts, gpus: int, search: Search, train: float) -> float:
    """The least time over every cut and every choice of degrees; of alike instances over every
    degree."""
    ordered = sorted(costs.batch, key=lambda r: (r.total, r.prompt, r.tool_ns))

    def takes(degree: int, some: Sequence[Request]) -> float:
        return rollout_s(costs.model, costs.hardware, costs.rollout, degree, some, search.ahead,
                         train)

    dealt = math.inf
    for d in costs.rollout.degrees if search.loss or search.dealt else ():
        hands: list[list[Request]] = [[] for _ in range(gpus // d)]
        for k, request in enumerate(reversed(ordered)):
            if hands:
                hands[k % len(hands)].append(request)
        dealt = min(dealt, max((takes(d, hand) for hand in hands if hand), default=math.inf))
    if search.dealt:
        return dealt
    seconds = {(d, a, b): takes(d, ordered[a:b]) * (1 + search.loss)
               for d in costs.rollout.degrees
               for a, b in itertools.combinations(range(len(ordered) + 1), 2)}
    best = math.inf
    for runs in compositions(len(ordered), gpus):
        for degrees in itertools.product(costs.rollout.degrees, repeat=len(runs)):
            if sum(degrees) <= gpus:
                best = min(best, max(seconds[d, a, b]
                                     for d, (a, b) in zip(degrees, runs, strict=True)))
    return min(best, dealt)


def brute_force(costs: AnalyticCosts, gpus: int, search: Search) -> float:
    """Seconds of the best step over every split, layout and assignment; inf: none can run."""
    best = math.inf
    lengths = [r.total for r in costs.batch]
    for size in range(1, gpus):
        trained = math.inf
        for layout in all_layouts(costs, size, search):
            seconds, memory = train_s(costs.model, costs.hardware, costs.training, layout, lengths)
            if memory <= costs.hardware.mem_bytes:
                trained = min(trained, seconds)
        if trained < best:
            best = min(best, max(trained, brute_rollout(costs, gpus - size, search, trained)))
    return best


def random_model(r: random.Random, moe: bool) -> ModelShape:
    heads = r.choice([4, 6, 8, 12])
    ffn = r.choice([512, 1000, 2048])
    return ModelShape(
        "random", r.choice([4, 6, 8, 12]), 64 * heads, heads, r.choice([k for k in (1, 2, 4)
                                                                        if heads % k == 0]), 64,
        r.choice([0, ffn]) if moe else ffn, 32000, tied=r.random() < 0.5,
        experts=r.choice([2, 4, 6, 8]) if moe else 0, top_k=r.choice([1, 2]) if moe else 0,
        expert_ffn=r.choice([256, 300, 512]) if moe else 0)


def random_costs(seed: int, moe: bool) -> tuple[AnalyticCosts, int, Search]:
    """A small problem in which every bound of the search matters now and then."""
    r = random.Random(seed)
    model = random_model(r, moe)
    hardware = Hardware("random", r.choice([2, 4, 8]), r.choice([300, 700, 2000, 9000]) << 20,
                        r.choice([1e12, 3e13]), 1e11, r.choice([1e9, 2e10, 1e11]),
                        r.choice([1e9, 1e10]), mfu_train=r.choice([0.3, 0.5]),
                        step_s=r.choice([0.0, 1e-4, 2e-3]), workspace_bytes=50 << 20,
                        sequence_s=r.choice([0.0, 1e-5, 1e-3]), update_s=r.choice([0.0, 0.01, 3.0]))
    batch = r.choice([2, 3, 4, 5, 6])
    training = Training(batch, micro_batches=r.choice([(1,), (1, 2), (1, 2, 3)]),
                        zero=r.choice([0, 1, 2, 3]), recompute=r.random() < 0.5,
                        forward_passes=r.choice([0, 1, 2]), logit_chunk=256,
                        steps=2 if batch in (4, 6) and seed % 3 == 0 else 1)
    rollout = Rollout(degrees=r.choice([(1,), (1, 2), (1, 2, 4), (2, 4)]),
                      max_batch=r.choice([1, 2, 256]))
    turns = r.choice([1, 2, 9])
    history = [Request(r.randint(0, 300), r.randint(1, r.choice([60, 500, 4000])),
                       r.choice([0, 0, r.randint(0, 10**9)]), r.choice([1, turns]))
               for _ in range(r.randint(1, 9))]
    search = Search(tp_share=r.choice([0.05, 0.5, 9.0]), bubble=r.choice([0.1, 0.3, 0.6]))
    if r.random() < 0.5:  # a cache that is short for a few of them
        whole = RolloutCost(model, hardware, replace(rollout, kv_loss=0.0))
        room = min(filter(None, map(whole.kv_tokens, rollout.degrees)), default=0)
        wanted = int(max(x.total for x in history) * r.choice([1.0, 1.3, 2.5]))
        rollout = replace(rollout, kv_loss=max(0.04, 1 - wanted / room) if room else 0.04)
    return AnalyticCosts(model, hardware, training, rollout, history), r.randint(2, 8), search


def as_good_as_brute_force(costs: AnalyticCosts, gpus: int, search: Search) -> SplitPlan | None:
    """The plan, checked to be as short as possible; None where no plan is feasible and the planner
    says so."""
    wanted = brute_force(costs, gpus, search)
    if math.isinf(wanted):
        with pytest.raises(InvalidInput, match=f"{gpus} GPUs: "):
            plan(costs, gpus, search)
        return None
    found = plan(costs, gpus, search)
    assert found.best.step_ns / 1e9 == pytest.approx(wanted, rel=1e-6, abs=3e-8)
    assert found == plan(costs, gpus, search, memo=False)
    return found


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_plan_is_as_good_as_brute_force(moe: bool) -> None:
    found = [as_good_as_brute_force(*random_costs(seed, moe)) for seed in range(250)]
    ran = sum(one is not None for one in found)
    assert ran >= 120, "too few cases have a plan to test anything"


@pytest.mark.parametrize("cases", [16, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_plan_with_overlapping_batches_is_as_good_as_brute_force(moe: bool, cases: int) -> None:
    """Also where the router does not know lengths, or knows them only roughly."""
    ran = 0
    for seed in range(cases):
        costs, gpus, search = random_costs(1_000 + seed, moe)
        search = replace(search, ahead=seed % 4, loss=(0.0, 0.3)[seed % 3 > 0],
                         dealt=seed % 5 == 0)
        found = as_good_as_brute_force(costs, gpus, search)
        if found is None:
            continue
        for split in found.splits:
            assert split.idle <= split.spare < split.rollout_gpus, seed
            within = max(split.step_ns, 1) * (1 + 1e-6) / 1e9
            left = split.rollout_gpus - split.spare  # who lends the spare ones has as short a step
            assert brute_rollout(costs, left, search, split.price.ns / 1e9) <= within, seed
        again = reprice(costs, gpus, found.best.layout,
                         [one.degree for one in found.best.instances], search)
        assert again is not None and again.rollout_ns == found.best.rollout_ns
        ran += 1
    assert ran >= 0.4 * cases, "too few cases have a plan to test anything"


def test_every_pruning_rule_cuts_in_some_test_case() -> None:
    """The cases above do not test a pruning rule that never cuts in them."""
    cuts = set()
    for seed in range(250):
        costs, gpus, search = random_costs(seed, moe=seed % 2 == 1)
        nodes: list[LayoutNode] = []
        try:
            told = plan(costs, gpus, search, nodes.append)
        except InvalidInput:
            continue
        assert told == plan(costs, gpus, search), "the observer sees the nodes of the same plan"
        cuts |= {re.sub(r"[0-9.]+( [A-Z]iB)?", "#", node.cut) for node in nodes}
        best = {node.gpus: node.price.ns for node in nodes if node.price and not node.cut}
        assert best, "leaves that were not cut have prices"
    assert {"", "TP does not divide # GPUs", "TP does not divide a node of # GPUs",
            "PP does not divide # layers",
            "TP does not divide the model's heads or width", "EP does not divide # GPUs",
            "TP communication is # of compute, over #", "EP does not divide DP #",
            "DP does not divide a batch of #", "memory: # of #",
            "DP times micro-batch does not divide a batch of #",
            "the pipeline idles # of the time, over #"} <= cuts


def test_the_layout_tree_finds_the_layouts_of_the_brute_force() -> None:
    some = 0
    for seed in range(120):
        costs, gpus, search = random_costs(seed, moe=seed % 2 == 1)
        found = LayoutTree(costs, search).layouts(gpus)
        assert sorted(found) == sorted(all_layouts(costs, gpus, search)), seed
        noted = LayoutTree(costs, search, lambda node: None)
        assert found == noted.layouts(gpus), "the observer changes the order of layouts"
        some += len(found)
    assert some > 120


@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda m: m.name)
def test_training_prices_equal_a_count_per_request_and_micro_batch(model: ModelShape) -> None:
    r = random.Random(5)
    history = [Request(r.randint(100, 3000), int(r.lognormvariate(7, 1)) + 1, r.randint(0, 10**10))
               for _ in range(48)]
    batch = [x.total for x in history]
    for zero, recompute in itertools.product(range(4), (True, False)):
        training = Training(48, zero=zero, recompute=recompute)
        cost = TrainCost(model, HARDWARE, training, history)
        for layout in (Layout(1, 1, 1, 1, 1), Layout(2, 1, 4, 3, 2), Layout(4, 4, 2, 4, 1),
                       Layout(8, 1, 8, 6, 8)):
            seconds, memory = train_s(model, HARDWARE, training, layout, batch)
            told = cost.price(layout)
            assert told.ns / 1e9 == pytest.approx(seconds, rel=1e-8)
            assert told.mem_bytes == memory
    cost = RolloutCost(model, HARDWARE, Rollout(max_batch=8))
    ordered = sorted_requests(history)
    for degree in (1, 2, 4, 8):
        matrix = cost.matrix(degree, strata_of(history, 64))
        for a, b in itertools.combinations(range(0, 49, 3), 2):
            wanted = rollout_s(model, HARDWARE, Rollout(max_batch=8), degree, ordered[a:b])
            assert int(matrix[a, b]) / 1e9 == pytest.approx(wanted, rel=1e-8)


# ---- an engine played step by step --------------------------------------------------------------


def played_s(cost: RolloutCost, degree: int, requests: Sequence[Request]) -> float:
    """Seconds of an engine with continuous batching. The longest waiting request begins as soon as
    the batch has a place and the cache has room for its present tokens; then all running requests
    take a step. When the cache is full, the latest request is preempted and prefills again from its
    beginning."""
    room, waiting = cost.kv_tokens(degree), [(r, 0.0) for r in sorted_requests(requests)]
    running: list[tuple[Request, float]] = []
    seconds = held = 0.0
    while waiting or running:
        while waiting and len(running) < cost.rollout.max_batch and (
                held + waiting[-1][0].prompt + waiting[-1][1] + 16 <= room or not running):
            one, done = waiting.pop()
            running.append((one, done))
            held += one.prompt + done
            seconds += float(cost.prefill_s(degree, one.prompt + done, (one.prompt + done) ** 2))
        ends = min(r.generated - done for r, done in running)
        fills = (room - held) / len(running)
        steps = ends if len(running) == 1 else min(ends, fills)
        keys = held + len(running) * steps / 2
        seconds += steps * cost.step_s(degree, len(running), keys)  # as if at the middle of them
        running = [(r, done + steps) for r, done in running]
        if steps < ends:
            waiting.append(running.pop())
        running = [(r, done) for r, done in running if done + 1e-6 < r.generated]
        held = sum(r.prompt + done for r, done in running)
    return seconds


@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda m: m.name)
def test_the_rollout_time_of_an_instance_matches_a_step_by_step_engine(model: ModelShape) -> None:
    """The times nearly agree where all requests fit at once. Where requests queue, the engine is
    slower, as it reserves room and ends with few requests."""
    cost = RolloutCost(model, HARDWARE, Rollout())
    for count, mean, crowded in ((1, 3000, False), (12, 20000, False), (64, 9000, False),
                                 (100, 1500, False), (250, 1500, False), (600, 4000, True),
                                 (2000, 800, True)):
        r = random.Random(count)
        mine = [Request(r.randint(100, 2000),
                        min(30000, 1 + int(r.lognormvariate(0, 1) * mean / 1.6)))
                for _ in range(count)]
        for degree in (2, 8):
            told = int(cost.matrix(degree, strata_of(mine, 64))[0, -1]) / 1e9
            ratio = played_s(cost, degree, mine) / told
            assert 0.97 < ratio < (1.35 if crowded else 1.02), (count, mean, degree, ratio)


# ---- any assignment -----------------------------------------------------------------------------


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [items[:1], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1:]]


@pytest.mark.parametrize(("at_once", "most", "mean"), [(1, 0.30, 0.08), (3, 0.15, 0.01),
                                                        (256, 0.03, 0.002)])
def test_assigning_runs_of_sorted_lengths_is_nearly_as_good_as_any_assignment(
        at_once: int, most: float, mean: float) -> None:
    """Instances get runs of the sorted requests, as a router by length can do. Compared with the
    best of all assignments this loses little where an engine runs requests side by side."""
    lost, rollout = [], Rollout(max_batch=at_once)
    for seed in range(30):
        r = random.Random(seed)
        history = [Request(r.randint(200, 4000), min(30000, int(r.lognormvariate(8, 1.2)) + 1))
                   for _ in range(r.randint(3, 6))]
        gpus = r.choice([2, 3, 4, 6, 8])
        costs = AnalyticCosts(DENSE, HARDWARE, Training(len(history)), rollout, history)
        strata = costs.strata(64)
        table = RolloutDpTable({d: costs.segments(d, strata) for d in rollout.degrees}, gpus)
        seconds: dict[tuple[int, tuple[int, ...]], float] = {}
        best = math.inf
        for groups in partitions(list(range(len(history)))):
            for degrees in itertools.product(rollout.degrees, repeat=len(groups)):
                if sum(degrees) > gpus:
                    continue
                for d, group in zip(degrees, groups, strict=True):
                    if (d, tuple(group)) not in seconds:
                        seconds[d, tuple(group)] = rollout_s(
                            DENSE, HARDWARE, rollout, d, [history[k] for k in group])
                best = min(best, max(seconds[d, tuple(g)]
                                     for d, g in zip(degrees, groups, strict=True)))
        lost.append(table.ns(gpus) / 1e9 / best - 1)
    assert min(lost) >= -1e-7, "runs beat the best assignment"
    assert max(lost) < most and sum(lost) / len(lost) < mean, (max(lost), sum(lost) / len(lost))


# ---- invariants ---------------------------------------------------------------------------------

def planned(costs: AnalyticCosts, gpus: int, search: Search | None = None) -> SplitPlan | None:
    try:
        return plan(costs, gpus, search or Search())
    except InvalidInput:
        return None


@settings(max_examples=30, deadline=None)
@given(problems())
def test_every_split_keeps_the_invariants(problem: tuple[AnalyticCosts, int]) -> None:
    costs, gpus = problem
    found = planned(costs, gpus)
    for split in found.splits if found else ():
        assert split.train_gpus + split.rollout_gpus == gpus
        assert 0 <= split.idle <= split.spare < split.rollout_gpus
        assert sum(one.degree for one in split.instances) <= split.rollout_gpus
        at = 0
        for one in split.instances:  # every request once, in order, none left out
            assert one.first == at and one.requests > 0 and one.shortest <= one.longest
            at += one.requests
            assert costs.rollout_cost.kv_tokens(one.degree) >= one.longest
        assert at == costs.training.batch
        assert split.rollout_ns == max(one.ns for one in split.instances)
        assert split.price.mem_bytes <= HARDWARE.mem_bytes
        assert split.price == costs.train([split.layout])[0]
        assert sum(split.price.parts) == split.price.ns
    if found:
        assert [s.rank for s in found.splits] == sorted(s.rank for s in found.splits)


@settings(max_examples=15, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.02, 0.3]))
def test_a_split_with_more_rollout_gpus_costs_at_most_its_slack(
        problem: tuple[AnalyticCosts, int], slack: float) -> None:
    found = planned(*problem)
    if found is None:
        return
    one = found.roomy(slack)
    assert one in found.splits and one.step_ns <= found.best.step_ns * (1 + slack)
    assert one.rollout_gpus >= found.best.rollout_gpus
    assert slack or one == found.best
    assert not any(s.rollout_gpus > one.rollout_gpus for s in found.splits
                   if slack and s.step_ns <= found.best.step_ns * (1 + slack))


@settings(max_examples=15, deadline=None)
@given(problems(), st.integers(1, 4))
def test_more_overlap_or_faster_training_never_lengthens_rollout(
        problem: tuple[AnalyticCosts, int], ahead: int) -> None:
    costs, _ = problem
    strata = costs.strata(64)
    for degree in costs.rollout.degrees:
        least = costs.flow(degree, strata, ahead, 10**9)
        assert (costs.flow(degree, strata, ahead + 1, 10**9) <= least + 2).all()
        assert (least <= costs.flow(degree, strata, ahead, 10**11) + 2).all()
        assert ((least >= NEVER) == (costs.segments(degree, strata) >= NEVER)).all()


@settings(max_examples=15, deadline=None)
@given(problems())
def test_more_gpus_are_never_worse(problem: tuple[AnalyticCosts, int]) -> None:
    costs, gpus = problem
    steps = [p.best.step_ns if p else NEVER for p in (
        planned(costs, n) for n in (gpus, gpus + 1, gpus + 17))]
    assert steps == sorted(steps, reverse=True)


@settings(max_examples=15, deadline=None)
@given(problems())
def test_a_step_takes_as_long_without_its_spare_gpus_and_longer_with_one_less(
        problem: tuple[AnalyticCosts, int]) -> None:
    """Without its spare GPUs the split takes as long as before; with one GPU less it takes
    longer."""
    costs, gpus = problem
    found = planned(costs, gpus)
    if found is None:
        return
    best, search = found.best, Search(strata=128)
    best = next(s for s in plan(costs, gpus, search).splits if s.layout == best.layout)

    def step(fewer: int) -> int:
        again = planned(costs, gpus - fewer, search)
        return min((s.step_ns for s in again.splits if s.layout == best.layout),
                   default=NEVER) if again else NEVER

    assert step(best.spare) == best.step_ns
    assert step(best.spare + 1) > best.step_ns


def test_a_step_takes_as_long_without_its_spare_gpus_with_a_routing_loss() -> None:
    r, search, spare = random.Random(1), Search(loss=0.08), 0
    history = [Request(500, int(r.lognormvariate(8, 0.6)) + 1) for _ in range(96)]
    for passes in range(4, 40, 3):
        costs = AnalyticCosts(DENSE, HARDWARE, Training(96, forward_passes=passes), Rollout(),
                              history)
        strata = costs.strata(64)
        table = RolloutDpTable({d: costs.segments(d, strata) for d in costs.rollout.degrees}, 32)
        for split in plan(costs, 32, search).splits:
            left = split.rollout_gpus - split.spare
            ways = [dealt_to(costs, d, left // d, 0, 0)[0] for d in costs.rollout.degrees]
            assert min(lossy(table.ns(left), search), *ways) <= split.step_ns
            spare += split.spare > split.idle
    assert spare > 5, "too few splits have spare GPUs to test anything"


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=70), st.sampled_from([1, 2, 4, 8]),
       st.sampled_from([DENSE, MOE]), st.sampled_from([1, 16, 256]))
def test_more_requests_never_shorten_the_rollout(
        history: list[Request], degree: int, model: ModelShape, most: int) -> None:
    cost = RolloutCost(model, HARDWARE, Rollout(max_batch=most))
    matrix = cost.matrix(degree, strata_of(history, 64)).tolist()
    n = len(matrix) - 1
    for j, i in itertools.combinations(range(n + 1), 2):
        if i < n:
            assert matrix[j][i] <= matrix[j][i + 1] + 1  # of rounding
        if j:
            assert matrix[j][i] <= matrix[j - 1][i] + 1
    assert all(matrix[k][k] == 0 for k in range(n + 1))


@given(st.lists(REQUESTS, min_size=1, max_size=200), st.integers(1, 300))
def test_a_batch_has_the_length_distribution_of_its_history(
        history: list[Request], batch: int) -> None:
    found = batch_of(history, batch)
    ordered = sorted_requests(history)
    assert len(found) == batch and found == sorted_requests(found)
    assert batch_of(history, len(history)) == ordered
    for k, one in enumerate(found):  # each is within one of where its share of the history lies
        at = ordered.index(one)
        assert at <= (k + 1) * len(history) / batch
        assert ordered[::-1].index(one) <= (batch - k) * len(history) / batch


@given(st.lists(REQUESTS, min_size=1, max_size=200), st.integers(1, 80))
def test_strata_conserve_requests_and_tokens(history: list[Request], most: int) -> None:
    strata = strata_of(history, most)
    assert len(strata) == min(most, len(history))
    assert int(strata.tokens.sum()) == sum(r.generated for r in history)
    assert int(strata.areas.sum()) == sum(r.generated * (2 * r.prompt + r.generated)
                                          for r in history)
    sizes = [strata.begin(k + 1) - strata.begin(k) for k in range(len(strata))]
    assert sum(sizes) == len(history) and max(sizes) - min(sizes) <= 1
    whole = RolloutCost(DENSE, HARDWARE, Rollout())
    assert int(whole.matrix(8, strata)[0, -1]) == pytest.approx(
        int(whole.matrix(8, strata_of(history, 200))[0, -1]), abs=2)


def test_many_short_requests_want_small_instances_and_few_long_ones_large() -> None:
    """The trend that Libra measured: 8 GPUs as one instance against 8 instances of one GPU."""
    cost = RolloutCost(DENSE, HARDWARE, Rollout())

    def tokens_a_second(degree: int, a_gpu: int, low: int, high: int) -> float:
        r = random.Random(1)
        mine = [Request(500, r.randint(low, high)) for _ in range(a_gpu * degree)]
        ns = int(cost.matrix(degree, strata_of(mine, 64))[0, -1])
        return 8 // degree * sum(x.generated for x in mine) / ns * 1e9

    assert tokens_a_second(1, 512, 200, 2000) > 1.3 * tokens_a_second(8, 512, 200, 2000)
    assert tokens_a_second(8, 2, 16000, 32000) > 2 * tokens_a_second(1, 2, 16000, 32000)


def test_a_problem_without_a_feasible_plan_names_the_reason() -> None:
    small = replace(HARDWARE, mem_bytes=8 << 30)
    costs = AnalyticCosts(DENSE, small, Training(16), Rollout(), [Request(10, 100)])
    with pytest.raises(InvalidInput, match=r"4 GPUs: no training layout can run in any split; "
                                           r"nearest is \d GPUs: tp.*memory: [0-9.]+ GiB of 8.0"):
        plan(costs, 4, Search())
    costs = AnalyticCosts(DENSE, HARDWARE, Training(7, micro_batches=(2,)), Rollout(),
                          [Request(10, 100)])
    with pytest.raises(InvalidInput, match="DP times micro-batch does not divide a batch of 7"):
        plan(costs, 8, Search())
    costs = AnalyticCosts(DENSE, HARDWARE, Training(16), Rollout(), [Request(10, 10**8)])
    with pytest.raises(InvalidInput, match="no training layout can run"):
        plan(costs, 64, Search())
    costs = AnalyticCosts(DENSE, HARDWARE, Training(16), Rollout(degrees=(1,)),
                          [Request(10, 400_000)])
    with pytest.raises(InvalidInput, match="64 GPUs: the rollouts cannot run in any split"):
        plan(costs, 64, Search())
    with pytest.raises(InvalidInput, match="too few"):
        plan(costs, 8, Search(granularity=8))


def test_splits_keep_the_granularity_and_the_minimum_gpus() -> None:
    costs = AnalyticCosts(DENSE, HARDWARE, Training(96), Rollout(), [Request(500, 2000)])
    found = plan(costs, 48, Search(granularity=8, min_train=10, min_rollout=12))
    assert {s.train_gpus for s in found.splits} <= {16, 24, 32}
    assert all(s.rollout_gpus >= 12 for s in found.splits)


def test_the_rollout_table_is_computed_once_for_all_splits() -> None:
    """The table and its prices take most of the time; they are made once, not once per split."""
    class Counted(AnalyticCosts):
        asked = 0

        def segments(self, degree: int, strata: Strata) -> Ints:
            self.asked += 1
            return super().segments(degree, strata)

    r = random.Random(1)
    history = [Request(r.randint(200, 2000), min(38000, 1 + int(r.lognormvariate(0, 1.1) * 2000)))
               for _ in range(960)]

    def planned_in(memo: bool) -> tuple[float, SplitPlan, int]:
        took = []
        for _ in range(3):
            costs = Counted(DENSE, HARDWARE, Training(960), Rollout(), history)
            began = time.process_time()
            found = plan(costs, 128, Search(), memo=memo)
            took.append(time.process_time() - began)
        return min(took), found, costs.asked

    memo_s, found, asked = planned_in(True)
    anew_s, again, asked_anew = planned_in(False)
    assert found == again
    assert asked == 4 and asked_anew >= 4 * len(found.splits) >= 60
    assert anew_s > 3 * memo_s  # 10 times on a quiet machine; see bench_planner.py


@given(st.integers(1, 1 << 22), st.sampled_from([64, 4096, 1 << 16]), st.sampled_from([DENSE, MOE]))
@settings(max_examples=20, deadline=None)
def test_cost_sums_do_not_overflow_64_bits(tokens: int, batch: int, model: ModelShape) -> None:
    """With the longest requests and the largest batches that are allowed."""
    costs = AnalyticCosts(model, HARDWARE, Training(batch), Rollout(), [Request(tokens, tokens)])
    layouts = [Layout(8, 1, 4, 16, 1), Layout(1, 1, 1, 1, 8)]
    for layout, price in zip(layouts, costs.train(layouts), strict=True):
        seconds = stage_s(model, HARDWARE, costs.training, layout, [2 * tokens])[1]
        assert price.ns >= min(NEVER, 0.99e9 * seconds * batch / layout.dp)
        assert price.mem_bytes > HARDWARE.workspace_bytes
    strata = costs.strata(64)
    assert int(strata.areas.sum()) == 3 * tokens * tokens * batch
    matrix = costs.segments(8, strata)
    assert int(matrix.min()) == 0 and int(matrix[0, -1]) > 0
