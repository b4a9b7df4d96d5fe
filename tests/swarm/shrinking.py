"""Makes the plan of a failing run smaller as long as the same law breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from swarm.plan import Plan
from swarm.run import Ended, play


def minimised(ended: Ended, budget: int = 60, run: Callable[[Plan], Ended] = play) -> Ended:
    """Plays smaller plans, at most `budget`, and returns the smallest one that fails alike."""
    best, spent = ended, 0
    while spent < budget:
        for smaller in _smaller(best.plan):
            spent += 1
            found = run(smaller)
            if found.law == ended.law:
                best = found
                break
            if spent >= budget:
                break
        else:
            return best
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with half of the turns, one fault kind less, one worker or client less."""
    for part in (2, 4, 8):
        yield replace(plan, turns=plan.turns - plan.turns // part)
    for kind in plan.rates:
        yield plan.without(kind)
    if plan.workers > 1:
        yield replace(plan, workers=plan.workers - 1)
    if plan.clients > 1:
        yield replace(plan, clients=plan.clients - 1)
    if plan.checkpoint < 100_000:
        yield replace(plan, checkpoint=100_000)
