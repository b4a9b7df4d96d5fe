"""One live replay: a `LocalCluster` with virtual CPUs, the driver, and records from its journal.

Grants, starts and ends in the records come from the broker's journal; the time of submission comes
from the client. All times are in workload time: wall time divided by `scale`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...accounting.record import ActionRecord, fold
from ...app.local import LocalCluster
from ...errors import InfeasibleRequest, InvalidInput
from ...scheduler.placement.placers.placer_registry import make_placer
from ...storage.journal import read_journal
from ..run_records import FORMAT, Record, RunRecords
from ..simulate import simulate
from ..workload import Cluster, Workload, all_actions
from .drive import Driver, Sent

_SCALE_MIN = 1e-9  # 1 ns, the clock's unit, for each second; far below, quotients are infinite


@dataclass(slots=True)
class Replay:
    """The records of a workload's live run, and those of its simulation."""

    live: RunRecords
    simulated: RunRecords

    def comparison(self) -> dict[str, Any]:
        """The mean action completion times, live and simulated, and the ratio live over simulated.
        """
        live, simulated = (run.figures()["mean_act_s"] for run in (self.live, self.simulated))
        return {"live_mean_act_s": live, "sim_mean_act_s": simulated,
                "ratio": live / simulated if simulated else None}


def first(work: Workload, count: int) -> Workload:
    """The first trajectories of a workload."""
    if count < 1:
        raise InvalidInput(f"--first {count}: must be at least 1")
    return Workload(name=work.name, trajectories=work.trajectories[:count])


def replay(work: Workload, cluster: Cluster, policy: str, scale: float, seed: int = 0) -> Replay:
    """Runs a workload live and simulated.

    Raises:
        InvalidInput: The workload cannot be replayed here; one line says why.
    """
    nodes, placer = cluster.node_specs(), make_placer(policy)
    _check(work, cluster, scale)
    simulated = simulate(work, cluster, placer, seed=seed)
    with tempfile.TemporaryDirectory(prefix="tangram-replay-") as home:
        local = LocalCluster(cpus=len(nodes[0].cores), mem_mib=nodes[0].mem_mib, placer=policy,
                             workers=len(nodes), home=home)
        with local:
            assert local.client is not None
            driver = Driver(local.client, scale, placer.reserve > 0)
            asyncio.run(driver.run(work.trajectories))
        folded = fold(read_journal(local.folder / "journal")).records
    names = [node.name for node in nodes]
    rows = _rows(work, driver, folded, names, scale)
    head = {"format": FORMAT, "workload": work.name, "policy": policy, "durations": "oracle",
            "seed": seed, "live": True, "scale": scale}
    return Replay(RunRecords(head, rows, max((r.end for r in rows), default=0)), simulated)


def _check(work: Workload, cluster: Cluster, scale: float) -> None:
    if not 0 < scale <= 1:
        raise InvalidInput(f"--scale {scale:g}: must be above 0 and at most 1")
    if scale < _SCALE_MIN:
        raise InvalidInput(f"--scale {scale:g}: must be at least {_SCALE_MIN:g}")
    others = sorted({a.resource for a in all_actions(work)} - {"cpu"})
    if others:
        raise InvalidInput(f"workload {work.name}: replay runs CPU actions only, it has "
                           f"{', '.join(others)}; `tangram sim` plays them")
    kinds = {(len(n.cores), n.mem_mib) for n in cluster.node_specs()}
    if len(kinds) > 1:
        raise InvalidInput("cluster: a replay needs nodes of one size; this cluster has several")
    most = max((a.degrees[0] for a in all_actions(work)), default=1)
    if most > min(cpus for cpus, _ in kinds):
        raise InfeasibleRequest(f"workload {work.name}: an action needs {most} CPUs and no node "
                                "has as many")


def _rows(work: Workload, driver: Driver, folded: dict[int, ActionRecord], names: list[str],
          scale: float) -> list[Record]:
    """The records in the order of the workload."""
    def at(epoch_ns: int) -> int:
        return round((epoch_ns - driver.begun_ns) / scale)

    rows = [_row(work, sent, folded[sent.future.action], names, at)
            for sent in driver.sent]
    return sorted(rows, key=lambda row: row.order)


def _row(work: Workload, sent: Sent, told: ActionRecord, names: list[str], at: Any) -> Record:
    assert told.node is not None
    place = {core: i for i, core in enumerate(told.node.cores)}
    node = names[int(told.node.name.removeprefix("local"))] if len(names) > 1 else names[0]
    grants = [(at(since), len(cores), _ids(cores, place)) for since, cores in told.grants]
    start = grants[0][0]
    return Record((sent.trajectory, sent.turn, sent.index, 0),
                  work.trajectories[sent.trajectory].trajectory, sent.work,
                  min(at(sent.submit_ns), start), start, node, grants, end=at(told.end_ns),
                  state=told.state.value)


def _ids(cores: Iterable[int], place: dict[int, int]) -> tuple[int, ...]:
    return tuple(place[core] for core in cores)
