"""Figures from the rounds of `run.py`: medians with ranges, ratios to ours, and the bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import common
from peers import PEERS

OURS, FLOOR = "tangram_hpc", "ProcessPool"
DIRECT, DIRECT_TLS = "tangram_hpc, direct calls", "tangram_hpc, direct calls, TLS"
RATES = ("functions", "chunks", "commands", "sandboxed")
Rounds = Sequence[dict[str, dict[str, Any]]]


def spread(values: Iterable[float], digits: int = 3) -> dict[str, Any]:
    """The median, and the least and the greatest value."""
    some = sorted(values)
    return {"median": significant(statistics.median(some), digits),
            "range": [significant(some[0], digits), significant(some[-1], digits)]}


def significant(value: float, digits: int = 3) -> float:
    """The value with some significant digits, whole from there on."""
    return float(f"{value:.{digits}g}") if abs(value) < 10 ** digits else round(value)


def by_peer(rounds: Rounds, value: Callable[[dict[str, Any], dict[str, dict[str, Any]]],
                                            float | None]) -> dict[str, list[float]]:
    """Peer -> a value of each round that has it; `value` gets the peer's answers and the round."""
    found: dict[str, list[float]] = {}
    for told in rounds:
        for name in PEERS:
            each = value(told.get(name, {}), told)
            if each is not None:
                found.setdefault(name, []).append(each)
    return found


def _idle(rounds: Rounds) -> dict[str, Any]:
    """p50 as the median of the rounds' medians; p99 of the trips of all rounds together."""
    middles = by_peer(rounds, lambda own, _: statistics.median(own["idle"]) * 1e3
                      if "idle" in own else None)
    figures = {}
    for name, each in middles.items():
        trips = [trip for told in rounds for trip in told.get(name, {}).get("idle", [])]
        figures[name] = {"p50": spread(each), "trips": len(trips),
                         "p99": significant(common.percentiles(trips)["p99_ms"])}
    return figures


def _trajectories(rounds: Rounds) -> dict[str, Any]:
    """For each kind its cold start, the time of a step, and what a step costs over a plain child
    process of the same round; as worker-hours for a million trajectories of 150 steps too."""
    told = [each["trajectory"]["trajectory"] for each in rounds if each.get("trajectory")]
    figures = {}
    for kind in told[0] if told else ():
        over = [(statistics.mean(each[kind]["step_s"])
                 - statistics.mean(each["plain process"]["step_s"])) * 1e3 for each in told]
        figures[kind] = {
            "cold_ms": spread(each[kind]["cold_s"] * 1e3 for each in told),
            "step_ms": spread(statistics.mean(each[kind]["step_s"]) * 1e3 for each in told),
            "step_p99_ms": spread(common.percentiles(each[kind]["step_s"])["p99_ms"]
                                  for each in told),
            "overhead_ms": spread(over),
            "worker_hours_per_million": round(statistics.median(over) / 1e3 * 150e6 / 3600)}
    return figures


def _ratios(rounds: Rounds) -> dict[str, Any]:
    """Measurement -> peer -> how many times better ours is, by rounds."""
    found: dict[str, Any] = {}
    for what in (*RATES, "idle", "cold_s", "mixed"):
        def better(own: dict[str, Any], told: dict[str, dict[str, Any]], what: str = what
                   ) -> float | None:
            ours = told.get(OURS, {})
            if what not in own or what not in ours:
                return None
            if what in RATES:
                return float(ours[what] / own[what])
            middle = statistics.mean if what == "mixed" else statistics.median
            one, other = ((side[what] if isinstance(side[what], list) else [side[what]])
                          for side in (own, ours))
            return middle(one) / middle(other)

        found[what] = {name: spread(each) for name, each in by_peer(rounds, better).items()
                       if name != OURS}
    return found


def bars(figures: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the figures: name -> value, bound, and whether it is met."""
    peers = [name for name, peer in PEERS.items() if peer.schedules and not name.startswith(OURS)]
    ratio, found = figures["times_better"], {}

    def at_least(name: str, values: list[float], bound: float) -> None:
        if values:
            found[name] = {"value": min(values), "at_least": bound, "met": min(values) >= bound}

    def at_most(name: str, value: float | None, bound: float) -> None:
        if value is not None:
            found[name] = {"value": value, "at_most": bound, "met": value <= bound}

    def medians(what: str, names: Sequence[str]) -> list[float]:
        return [ratio[what][name]["median"] for name in names if name in ratio[what]]

    at_least("functions, over Ray", medians("functions", ["Ray"]), 8)
    at_least("functions, over the best scheduling peer", medians("functions", peers), 3)
    at_least("commands, over the best scheduling peer", medians("commands", peers), 1.3)
    idle, over_floor = figures["idle_ms"], figures["idle_over_floor"]
    others = [idle[name]["p99"] for name in peers if name in idle]
    for said, name in (("", OURS), (", direct calls", DIRECT), (", direct calls, TLS", DIRECT_TLS)):
        at_most(f"idle p50{said}, over {FLOOR}", over_floor.get(name, {}).get("median"), 2)
        if others and name in idle:
            at_most(f"idle p99 in ms{said}, below every scheduling peer", idle[name]["p99"],
                    min(others))
    over = figures["mixed_over_ideal"]
    at_most("mixed tasks, rigid, over the ideal", over.get(OURS, {}).get("median"), 1.12)
    at_most("mixed tasks, resizable, over the ideal",
            over.get(f"{OURS}, resizable", {}).get("median"), 0.96)
    return found


def figures(rounds: Rounds, missing: dict[str, str], failed: dict[str, str]) -> dict[str, Any]:
    """All figures of a run. `missing`: peer -> why it was not run. `failed`: peer -> how one of its
    rounds failed."""
    found: dict[str, Any] = {f"{what}_per_s": {
        name: spread(each) for name, each in by_peer(rounds, lambda own, _, what=what: own.get(what)
                                                     ).items()} for what in RATES}
    found["idle_ms"] = _idle(rounds)
    found["idle_over_floor"] = {name: spread(each) for name, each in by_peer(
        rounds, lambda own, told: statistics.median(own["idle"])
        / statistics.median(told[FLOOR]["idle"])
        if "idle" in own and "idle" in told.get(FLOOR, {}) else None).items()
        if name.startswith(OURS)}
    found["cold_s"] = {name: spread(each) for name, each in by_peer(
        rounds, lambda own, _: own.get("cold_s")).items()}
    mean = by_peer(rounds, lambda own, _: statistics.mean(own["mixed"]) * 1e3
                   if "mixed" in own else None)
    found["mixed_mean_ms"] = {name: spread(each) for name, each in mean.items()}
    found["mixed_over_ideal"] = {name: spread(each) for name, each in by_peer(
        rounds, lambda own, told: statistics.mean(own["mixed"]) / told["ideal"]["mean_s"]
        if "mixed" in own else None).items()}
    found["ideal_ms"] = spread(each["ideal"]["mean_s"] * 1e3 for each in rounds)
    found["ideal_without_waiting_ms"] = spread(each["ideal"]["bound_s"] * 1e3 for each in rounds)
    found["trajectories"] = _trajectories(rounds)
    found["times_better"] = _ratios(rounds)
    found["left_out"] = {"peers": missing, "measurements": {
        name: peer.lacks for name, peer in PEERS.items()
        if name not in missing and peer.lacks}, "failed": failed}
    found["bars"] = bars(found)
    return found
