"""When background processes ask for CPUs, are stopped, and give CPUs back; decided from samples."""

from __future__ import annotations

import random

from tangram_hpc.sandbox.process import background_demand as bd
from tangram_hpc.sandbox.process.background_demand import BackgroundDemand, BackgroundVerdict

MS = 1_000_000


def test_a_process_that_can_run_makes_its_init_ask_and_is_stopped_only_when_the_bucket_is_empty(
        ) -> None:
    demand, now = BackgroundDemand(), 10**12
    demand.begin(now)
    assert demand.sample(0, True, now) is BackgroundVerdict.GO_ON
    assert demand.ask(now) and not demand.ask(now)
    verdicts = []
    while BackgroundVerdict.STOP not in verdicts:
        now = demand.due
        verdicts.append(demand.sample(bd.FIRST_TICK_NS, True, now))
    assert len(verdicts) <= 1 + bd.BURST_NS // bd.FIRST_TICK_NS + 1
    assert demand.held and demand.wants
    assert not demand.ask(now)
    now = demand.due
    assert now >= 10**12 + bd.ASK_AGAIN_NS
    assert demand.sample(0, False, now) is BackgroundVerdict.GO_ON, "what is stopped uses nothing"
    assert demand.ask(now), "a request that got no answer is repeated"


def test_processes_that_wait_are_neither_stopped_nor_given_cpus_and_cost_few_samples() -> None:
    demand, now = BackgroundDemand(), 0
    demand.begin(now)
    samples = 0
    while now < 10_000 * MS:
        now = demand.due
        samples += 1
        assert demand.sample(0, False, now) is BackgroundVerdict.GO_ON and not demand.ask(now)
    assert not demand.held
    assert samples <= 10_000 * MS // bd.LAST_TICK_NS + 8


def test_a_server_that_wakes_now_and_then_needs_no_cpus_of_its_own() -> None:
    demand, now, turn = BackgroundDemand(), 0, 0
    demand.begin(now)
    while now < 20_000 * MS:
        passed, now, turn = demand.due - now, demand.due, turn + 1
        used = passed // 40  # half of its share
        assert demand.sample(used, False, now) is BackgroundVerdict.GO_ON
        assert not demand.ask(now)


def test_a_lease_ends_soon_after_nothing_can_run_and_not_before() -> None:
    demand, now = BackgroundDemand(), 0
    demand.begin(now)
    demand.lease(1, now)
    for _ in range(100):
        now = demand.due
        assert demand.sample(bd.LEASED_TICK_NS, True, now) is BackgroundVerdict.GO_ON
    idle_since = now
    while demand.sample(0, False, now) is not BackgroundVerdict.END:
        now = demand.due
    assert bd.QUIET_NS <= now - idle_since <= bd.QUIET_NS + 2 * bd.LEASED_TICK_NS


def test_a_thread_that_waits_for_a_core_keeps_the_lease() -> None:
    demand, now = BackgroundDemand(), 0
    demand.lease(1, now)
    for _ in range(100):
        now = demand.due
        assert demand.sample(0, True, now) is BackgroundVerdict.GO_ON


def test_cpu_time_used_without_a_lease_is_bounded_or_taken_from_the_next_lease() -> None:
    """A program that knows the rules: it uses several cores between two samples, and sleeps as soon
    as it has a lease.
    """
    for seed in range(20):
        random_ = random.Random(seed)
        demand, now, free_ns, paid_ns, cores = BackgroundDemand(), 0, 0, 0, 4
        demand.begin(now)
        worst = 0
        while now < 60_000 * MS:
            before, now = now, demand.due
            passed = now - before
            if demand.held:
                demand.lease(1, now)  # it comes at once
                continue
            leased = bool(demand.units)
            used = 0 if leased else random_.choice((0, passed * cores, passed // 30))
            verdict = demand.sample(used, bool(used) and random_.random() < .5, now)
            if leased:
                paid_ns += passed
                if verdict is BackgroundVerdict.END:
                    demand.begin(now)
            else:
                free_ns += used
                worst = max(worst, used)
        assert free_ns <= now // bd.SHARE + bd.BURST_NS + worst + paid_ns


def test_a_lease_lasts_until_cpu_time_used_before_it_is_paid_back() -> None:
    demand = BackgroundDemand()
    demand.begin(0)
    assert demand.sample(100 * MS, False, 80 * MS) is BackgroundVerdict.STOP
    now = 80 * MS
    demand.lease(1, now)
    while demand.sample(0, False, now) is not BackgroundVerdict.END:
        now = demand.due
    assert now - 80 * MS >= 80 * MS, "it had used 90 ms more than its share"


def test_frozen_processes_ask_for_nothing_until_the_next_action() -> None:
    demand = BackgroundDemand()
    demand.begin(0)
    demand.sample(0, True, 0)
    demand.freeze()
    assert demand.due == 0 and not demand.ask(10**12)
    demand.rest(10**12)
    demand.begin(10**12)
    demand.sample(0, True, 10**12)
    assert demand.ask(10**12)
