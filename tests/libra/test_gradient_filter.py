"""Which gradient payloads a core rank adds, and which contributor computes which samples."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.domain.hybrid import ContributorId, GradientHeader, StepPlan
from tangram_hpc.libra.hybrid.gradient_filter import GradientFilter, contributors, split

A, B, F = ContributorId(0, 3, 0), ContributorId(2, 1, 0), ContributorId(5, 7, 0)  # F only follows
PLAN = StepPlan(step=9, version=8, epoch=4, counting=(A, ContributorId(1, 2, 1), B), following=(F,))
GOOD = GradientHeader(replica=0, generation=3, epoch=4, step=9, version=8, samples=5, size=10,
                      dtype="<f8")


def gradient_filter() -> GradientFilter:
    return GradientFilter(PLAN, {A: 5, B: 4}, 10, "<f8")


def test_a_payload_is_added_once() -> None:
    it = gradient_filter()
    assert it.missing == [0, 2]
    assert it.refusal(GOOD) == "" and it.missing == [2]
    assert it.refusal(GOOD) == "again"


@pytest.mark.parametrize(("field", "value"), [
    ("generation", 2), ("generation", 4), ("step", 8), ("step", 10), ("epoch", 3), ("version", 7),
    ("samples", 4), ("samples", 0), ("size", 11), ("dtype", "<f4"), ("replica", 1),
    ("replica", 5), ("replica", 99)])
def test_a_gradient_of_another_plan_is_refused_naming_the_field(field: str, value: Any) -> None:
    it = gradient_filter()
    assert it.refusal(msgspec.structs.replace(GOOD, **{field: value})) == field
    assert it.missing == [0, 2]
    assert it.refusal(GOOD) == ""  # and has spoilt nothing


def test_a_gradient_of_an_evicted_replica_is_refused() -> None:
    it = gradient_filter()
    it.evict(0, 2)  # another generation
    assert it.missing == [0, 2]
    it.evict(0, 3)
    it.evict(77, 1)
    assert it.missing == [2] and it.refusal(GOOD) == "again"


def test_each_core_rank_has_its_own_contributors() -> None:
    assert contributors(PLAN, 0) == [A, B] and contributors(PLAN, 1) == [ContributorId(1, 2, 1)]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_every_sample_is_computed_by_exactly_one_contributor(samples: int, parts: int) -> None:
    ranges = split(samples, parts)
    assert len(ranges) == parts
    assert [n for begin, end in ranges for n in range(begin, end)] == list(range(samples))
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
