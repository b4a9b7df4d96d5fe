"""Some seeds of the model under every placer."""

from __future__ import annotations

import pytest

from chatter.run import PLACERS, play


def whole(seed: int, placer: str) -> None:
    found = play(seed, placer)
    assert not found.law, f"play({seed}, {placer!r}): {found.law}\n{found.text}"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("placer", PLACERS)
def test_nothing_fails_and_nothing_is_left(seed: int, placer: str) -> None:
    whole(seed, placer)


def test_a_seed_gives_the_same_run_each_time() -> None:
    one, other = play(3, "elastic"), play(3, "elastic")
    assert (one.text, one.said, one.events) == (other.text, other.said, other.events)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("placer", PLACERS)
def test_five_hundred_seeds_fail_in_nothing(placer: str) -> None:
    for seed in range(1000, 1500):
        whole(seed, placer)
