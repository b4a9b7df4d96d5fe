"""Percentiles are by nearest rank, in `acct --by` and in the report."""

from __future__ import annotations

import pytest

from tangram_hpc.accounting.roll_up import percentile


@pytest.mark.parametrize(("count", "found"), [
    (0, [0, 0, 0]), (1, [1, 1, 1]), (2, [1, 2, 2]), (19, [10, 19, 19]), (20, [10, 19, 20]),
    (21, [11, 20, 21]), (100, [50, 95, 99]), (101, [51, 96, 100])])
def test_a_percentile_is_the_first_value_that_so_many_do_not_exceed(count: int, found: list[int]
                                                                    ) -> None:
    assert [percentile(range(1, count + 1), percent) for percent in (50, 95, 99)] == found
