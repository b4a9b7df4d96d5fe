"""Satellites through the real drivers and a modelled Slurm, and what accounting says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.sim_material import workload

from tangram_hpc.accounting.held_usage import held, total
from tangram_hpc.accounting.record import fold
from tangram_hpc.cli import main
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.states import AllocState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.simulator.message_world import Growth, MessageWorld
from tangram_hpc.simulator.model_slurm import SlurmQueueModel
from tangram_hpc.simulator.workload import Cluster, Workload

S = 10**9
SMALL = Cluster.model_validate({"nodes": [{"name": "base", "cpus": 8, "mem_mib": 310}]})
SHAPE = SatelliteShape("spare", "cpu", cpus=8, mem_mib=600, time_ns=600 * S)
AT_ONCE = SlurmQueueModel(S)
POLICY = AllocPolicy(max_nodes=3, max_core_ns=10**15, target_ns=2 * S, grow_after_ns=S,
                     arrive_ns=2 * S, idle_ns=3 * S, join_ns=20 * S, backoff_ns=5 * S,
                     shapes=(SHAPE,))


def two_bursts(seed: int, gap_s: float = 0.0) -> Workload:
    """Two bursts of trajectories, the second one `gap_s` later."""
    parts = [workload(seed, 18), workload(seed + 1, 18)]
    found = [t.model_copy(update={"trajectory": f"{part}.{t.trajectory}",
                                  "start_s": t.start_s + part * gap_s})
             for part, work in enumerate(parts) for t in work.trajectories]
    return Workload(name="crowd", trajectories=tuple(found))


class Kept(MessageWorld):
    """Keeps all events."""

    kept: list[ev.Event]

    def _note(self, event: ev.Event) -> None:
        if not hasattr(self, "kept"):
            self.kept = []
        self.kept.append(event)
        super()._note(event)


def run(work: Workload, policy: AllocPolicy = POLICY, queue: SlurmQueueModel = AT_ONCE,
        seed: int = 1, check: bool = False) -> Kept:
    world = Kept(work, SMALL, make_placer("elastic"), False, seed=seed, check=check,
                 growth=Growth(policy, queue))
    world.run()
    return world


@pytest.mark.parametrize("seed", range(2))
def test_satellites_are_requested_for_each_burst_and_released_when_idle(seed: int) -> None:
    work = two_bursts(seed, 60.0)
    alone = MessageWorld(work, SMALL, make_placer("elastic"), False)
    slow = alone.run().step_ns
    world = run(work, seed=seed)
    asked = [e.at for e in world.kept if isinstance(e, ev.AllocationAsked)]
    released = [e.at for e in world.kept if isinstance(e, ev.AllocationReleased)]
    ended = [e.at for e in world.kept if isinstance(e, ev.AllocationEnded)]
    assert world.client is not None and world.client.step_ns < slow
    assert min(asked) < 30 * S and max(asked) > 60 * S, "each burst requests satellites"
    assert any(max(asked[:1]) < at < 60 * S for at in released), "satellites leave between bursts"
    assert len(ended) >= 1


def test_a_replay_gives_the_same_allocations_without_deciding_anew() -> None:
    world = run(two_bursts(2, 40.0))
    again = Scheduler(make_placer("elastic"))
    for event in world.kept:
        again.handle(event)
    assert again.ledger.allocs == world.scheduler.ledger.allocs
    assert run(two_bursts(2, 40.0)).kept == world.kept


def test_the_core_hours_of_the_journal_match_those_of_the_modelled_slurm() -> None:
    """Core-hours held by our journal equal those that the modelled Slurm counts; used core-hours
    equal those that all actions held."""
    world = run(two_bursts(4, 40.0))
    rows = held(world.kept)
    by_job = {r.job: r for r in rows if r.name}
    slurm = world.slurm
    assert slurm is not None and len(by_job) == len(slurm.jobs_run()) > 0
    for job, held_ns in slurm.jobs_run().items():
        assert abs(by_job[str(job)].held_ns - held_ns) <= 8 * 10**6, by_job[str(job)]
    usage = fold(world.kept).usage
    held_ns, used_ns = total(rows)
    assert used_ns == usage.lent_ns and used_ns <= held_ns


def test_a_missing_partition_is_reported_and_another_shape_is_requested() -> None:
    policy = AllocPolicy(**{f: getattr(POLICY, f) for f in POLICY.__struct_fields__}
                         | {"shapes": (SatelliteShape("odd", "nowhere", cpus=8, mem_mib=600),
                                       SHAPE)})
    world = run(two_bursts(5), policy, SlurmQueueModel(S, partitions=("cpu",)))
    told = [what for _, what in world.scheduler.ledger.allocs.told]
    assert any("odd) was refused: invalid partition" in what for what in told), told
    assert any(what.startswith("asked for spare") for what in told), told


def test_on_a_full_cluster_one_satellite_runs_and_the_work_ends() -> None:
    world = run(two_bursts(6), queue=SlurmQueueModel(S, nodes=1), check=True)
    assert world.slurm is not None
    assert len(world.slurm.jobs_run()) >= 1
    allocs = world.scheduler.ledger.allocs
    running = [e for e in allocs.satellites() if e.state is AllocState.RUNNING]
    assert len(running) <= 1


def test_tangram_sim_compares_elastic_with_static_and_with_no_satellites(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    work, cluster, scenario = (tmp_path / name for name in ("w.jsonl", "c.json", "s.toml"))
    work.write_text("\n".join([
        '{"format": "tangram-workload/1", "name": "w"}',
        *(t.model_dump_json() for t in two_bursts(1).trajectories)]))
    cluster.write_text(SMALL.model_dump_json())
    scenario.write_text("""
        [elastic]
        max_nodes = 3
        max_core_hours = 9
        idle_release_s = 3
        target_s = 2
        grow_after_s = 1
        arrive_s = 2
        [[elastic.satellites]]
        name = "spare"
        cpus = 8
        mem_mib = 600
        time_min = 10
        [slurm]
        wait_s = 1
        """)
    words = ["sim", str(work), "--cluster", str(cluster), "--policy", "elastic", "--elastic",
             str(scenario)]
    assert main(words) == 0
    told = capsys.readouterr().out
    rows = {row[0]: row for row in map(str.split, told.splitlines()[1:4])}
    assert float(rows["elastic"][6]) < float(rows["alone"][6]), told  # the step
    assert float(rows["elastic"][1]) < float(rows["static"][1]), told  # held
    assert "asked for spare" in told
    scenario.write_text("[elastic]\nmax_nodes = 3\n")
    assert main(words) == 2
    assert "max_core_hours" in capsys.readouterr().err
