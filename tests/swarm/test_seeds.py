"""Some seeds of the swarm, and all that once broke a law."""

from __future__ import annotations

import pytest

from swarm.kept_seeds import KEPT
from swarm.plan import Plan, drawn
from swarm.run import Ended, play
from swarm.shrinking import minimised


def whole(ended: Ended) -> None:
    story = [ended.text, f"python -m swarm {ended.plan.show()} --story", *ended.log[-30:]]
    assert not ended.law, "\n".join(story)


@pytest.mark.parametrize("seed", range(30))
def test_no_law_is_broken(seed: int) -> None:
    whole(play(drawn(seed)))


@pytest.mark.parametrize("plan", [plan for plan, _ in KEPT], ids=[why for _, why in KEPT])
def test_a_seed_that_broke_a_law_breaks_none_now(plan: Plan) -> None:
    whole(play(plan))


def test_a_seed_gives_the_same_run_each_time() -> None:
    one, other = play(drawn(3)), play(drawn(3))
    assert (one.events, one.struck, one.log) == (other.events, other.struck, other.log)


@pytest.mark.parametrize("name", ["PlayedSlurm", "BrokerProcess"])
def test_a_world_that_cannot_be_set_up_says_why(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(f"swarm.job.{name}", fails)
    ended = play(drawn(3))
    assert ended.law == "OSError" and ended.events == 0
    assert ended.text.startswith("while the world was set up: ")
    assert ended.text.endswith("OSError: no space left\n")


def test_a_failing_plan_is_made_smaller() -> None:
    def run(plan: Plan) -> Ended:
        fails = plan.turns >= 50 and "kill_broker" in plan.rates
        return Ended(plan, "a law" if fails else "")

    plan = Plan(3, {"delay": 1.0, "kill_broker": 2.0, "power": 1.0}, 600, 3, 3)
    small = minimised(run(plan), run=run).plan
    assert list(small.rates) == ["kill_broker"] and small.turns < 60
    assert (small.workers, small.clients) == (1, 1)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_thousand_seeds_break_no_law() -> None:
    for seed in range(1000, 3000):
        whole(play(drawn(seed)))
