"""Guards how the load of GPU services is estimated from the calls that came."""

from __future__ import annotations

import pytest

from tangram_hpc.scheduler.state.demand import ONE, Calls
from tangram_hpc.scheduler.state.speed import run_ns

S = 10**9


def calls_of(work_ns: int, restore_ns: int = S) -> Calls:
    return Calls(4 * restore_ns, 1, 0, work_ns)


@pytest.mark.parametrize("windows", [0.2, 0.5, 1, 2, 5])
def test_a_steady_load_is_seen_before_its_window_has_passed(windows: float) -> None:
    calls, now, every = calls_of(5 * S), 10**15, S
    calls.came(now, 0, 5 * S)
    window = calls.window
    assert window == 40 * S
    for _ in range(round(windows * window / every)):
        now += every
        calls.came(now, 0, 5 * S)
    seen = calls.in_window(now, scaled=True) / ONE
    assert seen == pytest.approx(window / every, rel=0.25)
    if windows <= 1:
        assert calls.in_window(now, scaled=False) / ONE < 0.7 * window / every


def test_one_call_that_runs_for_long_is_not_a_load() -> None:
    """It runs for longer than a horizon, in which no other call comes."""
    calls, now = calls_of(60 * S), 10**15
    calls.came(now, 0, 60 * S)
    assert calls.window == 8 * run_ns(60 * S, 0, 1) > calls.horizon
    busy = calls.in_window(now + calls.window, scaled=True) / ONE * 60 * S / calls.window
    assert busy < 0.2


def test_the_window_follows_what_is_learned_of_the_calls() -> None:
    calls, now = calls_of(S), 10**15
    for _ in range(60):
        now += S
        calls.came(now, 0, 30 * S)
    assert 220 * S < calls.window <= 240 * S
    for _ in range(90):
        now += S
        calls.came(now, 0, S // 10)
    assert calls.window == calls.horizon == 4 * S
