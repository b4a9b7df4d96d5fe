"""What the scheduler learns of programs that always start as many workers as their largest degree,
whatever cores they have: the cost of oversubscription makes further cores worth more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tangram_hpc.domain.action import Action
from tangram_hpc.scheduler.state.estimator import Estimator

TOP = 8


def learned(serial: float, cost: Callable[[int], float]) -> int:
    """The serial fraction (1/1000) believed after 400 leases whose sizes changed while they ran;
    `cost(d)` is how many times longer d cores take than if just d workers had been started."""
    rng, estimator = random.Random(1), Estimator()
    action = Action(1, "x", degrees=tuple(range(1, TOP + 1)))

    def run_s(work: float, units: int) -> float:
        return work * (serial + (1 - serial) / units) * cost(units)

    for _ in range(400):
        estimator.began(action)
        left, spans = rng.lognormvariate(0, 0.5), []
        for _ in range(rng.randint(1, 3)):
            units, part = rng.randint(1, TOP), left * rng.uniform(0.2, 0.8)
            spans.append((units, round(run_s(part, units) * 1e9)))
            left -= part
        units = rng.randint(1, TOP)
        estimator.ended(action, [*spans, (units, round(run_s(left, units) * 1e9))], True)
    return estimator.serial(action)


@pytest.mark.parametrize("serial", [0.02, 0.1, 0.3])
def test_the_cost_of_oversubscription_lowers_the_learned_serial_fraction(serial: float) -> None:
    free = learned(serial, lambda units: 1.0)
    dear = learned(serial, lambda units: (TOP / units) ** 0.5)
    assert dear < free
    assert learned(serial, lambda units: (TOP / units) ** 0.2) <= free
