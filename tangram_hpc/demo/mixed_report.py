"""Computes the metrics and tables of the mixed demo.

The input is the measurements of the ranks, the counts of the search server and the records folded
from the journal. An ACT lasts from submission to result; its part "system" is the time that the
action spent neither waiting, nor on bringing its service to a device, nor running. A device is busy
while a service is brought to it and while it runs calls (`GPUTime` of `tangram acct`); it is held
for the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..accounting.record import ActionRecord
from ..domain.action import Kind
from .demo_models import DEMO_MODELS, JUDGE, TEACHERS
from .search import SEARCH

EXEC = "coding exec"
KINDS = (EXEC, JUDGE, "teachers", SEARCH)
AGREE = 1e-4  # relative tolerance; batches of different sizes are padded and so rounded differently


@dataclass(frozen=True)
class ActionMetrics:
    """One kind of action: the number of actions, and the means of their ACT and its parts in
    seconds.
    """

    actions: int
    act: float
    queue: float
    restore: float
    exec: float
    system: float


@dataclass(frozen=True)
class MixedMetrics:
    """The metrics of one phase; times are in seconds and device-seconds.

    Attributes:
        phase: Name of the phase.
        devices: Devices of the cluster.
        parts: Metrics by kind of action, the keys are `KINDS`.
        step: Duration of the train step.
        busy: Device-seconds for which devices brought a service in or ran calls.
        restores: Calls for which a service was brought to a device.
        restore_share: Fraction of the calls' ACT that was spent on bringing services in.
        batch_max: Calls of the largest batch.
        throttled: Searches that got status 429.
        trajectories: Number of trajectories.
        passed: Trajectories with reward 1.
        expected: Trajectories whose drafts make reward 1 certain.
        wrong: One line for each check that failed.
        opinions: For each "TRAJECTORY MODEL", the sum of the model's log-probabilities.
        job: Job id of the phase.
    """

    phase: str
    devices: int
    parts: dict[str, ActionMetrics]
    step: float
    busy: float
    restores: int
    restore_share: float
    batch_max: int
    throttled: int
    trajectories: int
    passed: int
    expected: int
    wrong: list[str]
    opinions: dict[str, float]
    job: str

    @property
    def held(self) -> float:
        """Returns the device-seconds that were held."""
        return self.devices * self.step

    @property
    def busy_share(self) -> float:
        """Returns the fraction of the held device-seconds for which the devices were busy."""
        return self.busy / max(1e-9, self.held)


def gather_mixed(gathered: dict[str, Any], records: Sequence[ActionRecord], phase: str,
                 devices: int, served: Counter[str], throttled: int, job: str) -> MixedMetrics:
    """Returns a phase's metrics from the ranks' summary, the journal's records and the server's
    counts.
    """
    ranks = gathered["ranks"]
    calls = [call for rank in ranks for call in rank["calls"]]
    step = max(rank["step_s"] for rank in ranks)
    since = min(rank["began_ns"] for rank in ranks)
    timed = [r for r in records if r.submit_ns >= since]
    of_devices = [r for r in timed if r.action.kind is Kind.CALL and r.outcome is not None]
    passed = sum(sum(rank["rewards"]) for rank in ranks)
    names = {c["trajectory"] for c in calls}
    of_services = [c for c in calls if c["kind"] in DEMO_MODELS]
    return MixedMetrics(
        phase=phase, devices=devices, parts=_parts(ranks, calls, timed), step=step,
        busy=sum(r.gpu_held_ns for r in of_devices) / 1e9,
        restores=sum(r.outcome.restore_ns > 0 for r in of_devices if r.outcome),
        restore_share=sum(c["restore_s"] for c in of_services) / max(
            1e-9, sum(c["act_s"] for c in of_services)),
        batch_max=max((c["batch"] for c in of_services), default=0), throttled=throttled,
        trajectories=sum(len(rank["rewards"]) for rank in ranks), passed=passed,
        expected=sum(sum(rank["expected"]) for rank in ranks),
        wrong=list(_wrong(ranks, names, served)),
        opinions={k: v for rank in ranks for k, v in rank["opinions"].items()}, job=job)


def _wrong(ranks: Any, names: Iterable[str], served: Counter[str]) -> Iterable[str]:
    for rank in ranks:
        yield from (f"{name}: its reward is not the one that its drafts make certain"
                    for name in rank["wrong"])
        yield from rank["wrong_calls"]
    for name in names:
        if served[name] != 1:
            yield f"{name}: the server answered its search {served[name]} times instead of once"
    yield from (f"{name}: the server answered a search of no known trajectory"
                for name in served if name not in names)


def _parts(ranks: Any, calls: list[dict[str, Any]], timed: Sequence[ActionRecord]
           ) -> dict[str, ActionMetrics]:
    execs = [row for rank in ranks for row in rank["rows"]]
    granted = [r.planned_ns / 1e9 for r in timed if r.action.kind is Kind.GRANT]
    searches = [c for c in calls if c["kind"] == SEARCH]
    wait = sum(granted) / max(1, len(granted))  # the waiting time of grants is only in the journal
    return {
        EXEC: _part(execs),
        JUDGE: _part([c for c in calls if c["kind"] == JUDGE]),
        "teachers": _part([c for c in calls if c["kind"] in TEACHERS]),
        SEARCH: _part([{**c, "queue_s": wait} for c in searches]),
    }


def _part(rows: Sequence[dict[str, Any]]) -> ActionMetrics:
    def mean(name: str) -> float:
        total: float = sum(row.get(name, 0.0) for row in rows)
        return total / max(1, len(rows))
    act, queue, restore, run = map(mean, ("act_s", "queue_s", "restore_s", "exec_s"))
    return ActionMetrics(len(rows), act, queue, restore, run, act - queue - restore - run)


def disagreements(one: MixedMetrics, other: MixedMetrics) -> list[str]:
    """Returns a line for each trajectory and model whose answers differ between the phases.

    The weights are the same in both phases, so a difference means that a call ran on the wrong
    model.
    """
    found = []
    for key in sorted(one.opinions.keys() | other.opinions.keys()):
        here, there = one.opinions.get(key), other.opinions.get(key)
        if here is None or there is None or _apart(here, there) > AGREE:
            found.append(f"{key}: the sum of log-probabilities is {here} in one phase and {there} "
                         "in the other")
    return found


def _apart(here: float, there: float) -> float:
    return abs(there - here) / max(1.0, abs(here))


def table(shared: MixedMetrics, own: MixedMetrics) -> str:
    """Returns a table of the kinds of action for each phase, and one of the devices."""
    titles = {shared.phase: "all services share one device",
              own.phase: f"{own.devices} devices, one per service"}
    lines = []
    for one in (shared, own):
        lines.append(f"{titles[one.phase]:<40}{'actions':>8}{'mean ACT':>11}{'queue':>9}"
                     f"{'restore':>9}{'execution':>11}{'system':>9}")
        for kind in KINDS:
            p = one.parts[kind]
            lines.append(f"  {kind:<38}{p.actions:>8}{p.act * 1e3:>8.1f} ms{p.queue * 1e3:>9.1f}"
                         f"{p.restore * 1e3:>9.2f}{p.exec * 1e3:>11.1f}{p.system * 1e3:>9.1f}")
        lines.append("")
    lines.append(f"{'':<30}{'one shared':>13}{'one each':>13}")

    def row(name: str, pick: Any, form: str) -> None:
        lines.append(f"{name:<30}" + "".join(f"{format(pick(m), form):>13}" for m in (shared, own)))

    row("train step, s", lambda m: m.step, ".2f")
    row("devices", lambda m: m.devices, "d")
    row("device-seconds held", lambda m: m.held, ".1f")
    row("device-seconds busy", lambda m: m.busy, ".1f")
    row("busy share", lambda m: m.busy_share, ".1%")
    row("restores", lambda m: m.restores, "d")
    row("restore share of calls' ACT", lambda m: m.restore_share, ".2%")
    row("largest batch", lambda m: m.batch_max, "d")
    row("throttled searches", lambda m: m.throttled, "d")
    return "\n".join(lines)


def summary(shared: MixedMetrics, own: MixedMetrics) -> dict[str, Any]:
    """Returns the object that the mixed demo prints as its last line."""
    differ = disagreements(shared, own)
    runs, both = (shared, own), shared.opinions.keys() & own.opinions.keys()
    apart = max((_apart(shared.opinions[k], own.opinions[k]) for k in both), default=0.0)
    return {
        "ok": not differ and all(not m.wrong and m.passed == m.expected for m in runs),
        "step_ratio": round(own.step / shared.step, 3),
        "devices_ratio": round(own.devices / shared.devices, 2),
        "held_ratio": round(own.held / shared.held, 2),
        "trajectories": shared.trajectories,
        "rewards_ok": all(m.passed == m.expected for m in runs),
        "teachers_differ": len(differ),
        "teachers_apart_max": float(f"{apart:.2g}"),
        **{m.phase: {
            "step_s": round(m.step, 2), "devices": m.devices, "held_s": round(m.held, 1),
            "busy_s": round(m.busy, 1), "busy_share": round(m.busy_share, 4),
            "restores": m.restores, "restore_share": round(m.restore_share, 4),
            "batch_max": m.batch_max, "throttled": m.throttled, "wrong": len(m.wrong),
            "ms": {kind: _ms(p) for kind, p in m.parts.items()},
        } for m in runs},
    }


def _ms(part: ActionMetrics) -> dict[str, float]:
    values = asdict(part)
    return {"actions": values.pop("actions"), **{k: round(v * 1e3, 2) for k, v in values.items()}}
