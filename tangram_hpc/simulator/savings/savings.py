"""Computes what the actions of a job would have needed otherwise: with one reservation per
trajectory, first come first served, with GPUs for each service alone, and on a smaller allocation.

Each alternative is a run of the simulator, which is the scheduler's own code under a simulated
clock. The job is simulated as it ran, too: how far that run is from the recorded one says how far
the others can be trusted. Every row has the same measure of what was held, which is all CPUs and
GPUs of its nodes from the beginning of the first trajectory to the last result; only for one job
for each trajectory it is what these jobs hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...accounting.record import Fold
from ...domain import event as ev
from ...domain.service import service_of
from ...errors import InvalidInput
from ...scheduler.placement.placers.placer_registry import make_placer
from ..sizing import Holding, full_holding, resized
from ..workload import Cluster, Workload, all_actions
from ..world import SimulationWorld
from .recorded_run import RecordedRun

SIMULATED_MAX = 2000  # actions; a placer needs up to 5 ms of CPU time for each
SMALLER = (0.75, 0.5)  # of the CPUs and GPUs
GROWTH_MAX = 0.10  # a smaller allocation will do if the mean ACT grows by no more
RECORDS_AGREE = 0.10  # a simulation whose mean ACT is further from the recorded one says little
K_USUAL = 4  # CPUs of a reservation, where no action needs more and some can use as many
_SECOND, _HOUR = 10**9, 3600 * 10**9

RECORDED, AS_RUN, FCFS, STATIC = "recorded", "as run", "fcfs", "static"
SERVICES, JOBS = "services", "jobs"


@dataclass(frozen=True)
class Alternative:
    """Describes one way to run the same actions. A figure is None where the way is impossible.

    Attributes:
        way: RECORDED, AS_RUN, FCFS, STATIC, SERVICES, JOBS, or a share of the allocation such as
            "75%".
        policy: The placer.
        cpus, gpus: What is held at one time, at most.
        mean_act_s: Mean time from submission to result, of actions that have one.
        step_s: From the beginning of the first trajectory to the last result.
        held_core_h, held_gpu_h: What was held during `step_s`.
        why_not: Why it is impossible; empty if it is not.
    """

    way: str
    policy: str
    cpus: int = 0
    gpus: int = 0
    mean_act_s: float | None = None
    step_s: float | None = None
    held_core_h: float | None = None
    held_gpu_h: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class TenantSavings:
    """What one of several tenants of a broker used, and would have needed otherwise.

    Attributes:
        tenant: Its name.
        trajectories, actions: How many of it were compared.
        mean_act_s: Mean time from submission to result, as recorded.
        used_core_h, used_gpu_h: What its actions held.
        part_core_h: Its part of the core-hours that the recorded run held, in proportion to those
            of its actions; None if no action held a core.
        jobs: Its actions with one job for each of its trajectories, without other tenants.
    """

    tenant: str
    trajectories: int
    actions: int
    mean_act_s: float
    used_core_h: float
    used_gpu_h: float
    part_core_h: float | None
    jobs: Alternative


@dataclass
class Savings:
    """Holds all alternatives of one job, and what they rest on.

    Attributes:
        rows: The alternatives; the first is the recorded run.
        tenants: A row for each tenant, by name; empty if all was of one.
        assumptions: Sentences that say what was assumed.
        trajectories, actions: How many were compared.
        actions_of_job: How many the job had that can be simulated.
    """

    rows: list[Alternative] = field(default_factory=list)
    tenants: list[TenantSavings] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    trajectories: int = 0
    actions: int = 0
    actions_of_job: int = 0

    def row(self, way: str) -> Alternative | None:
        """Returns the alternative of this name, if it is possible."""
        return next((r for r in self.rows if r.way == way and not r.why_not), None)

    def growth(self, way: str) -> float | None:
        """Returns by which fraction the mean ACT grows against the simulated run on the whole
        allocation; None where either is impossible.
        """
        row, whole = self.row(way), self.row(AS_RUN)
        if row is None or whole is None or not row.mean_act_s or not whole.mean_act_s:
            return None
        return row.mean_act_s / whole.mean_act_s - 1

    def error(self) -> float | None:
        """Returns by which fraction the mean ACT of the run as it was, simulated, is off the
        recorded one; None where either is not known.
        """
        recorded, again = self.row(RECORDED), self.row(AS_RUN)
        if not (recorded and again and recorded.mean_act_s and again.mean_act_s):
            return None
        return abs(again.mean_act_s / recorded.mean_act_s - 1)

    def doubt(self) -> str:
        """Returns the sentence that says that the records do not agree with their simulation;
        empty where they do, or where that is not known.
        """
        if (error := self.error()) is None or error <= RECORDS_AGREE:
            return ""
        return (f"The mean ACT of the run as it was, simulated, is {error:.0%} off the recorded "
                "one: compare the simulated rows with each other only.")

    def change(self, row: Alternative) -> float | None:
        """Returns `growth` of this row; None for the run as it was, recorded or simulated."""
        return None if row.way in (RECORDED, AS_RUN) else self.growth(row.way)

    def to_json(self) -> dict[str, Any]:
        """Returns everything for machines; units stand at the end of names."""
        told: dict[str, Any] = {
            "rows": [asdict(row) | {"act_growth": self.change(row)} for row in self.rows],
            "assumptions": self.assumptions, "trajectories": self.trajectories,
            "actions": self.actions, "actions_of_job": self.actions_of_job}
        if self.tenants:
            told["tenants"] = [asdict(row) for row in self.tenants]
        return told


def reservation(work: Workload) -> int:
    """Returns the CPUs of a reservation for one trajectory: as many as each of its actions needs,
    and K_USUAL if some action can use as many.
    """
    degrees = [a.degrees for a in all_actions(work) if a.resource == "cpu"]
    least = max((d[0] for d in degrees), default=1)
    return max(least, min(K_USUAL, max((d[-1] for d in degrees), default=1)))


def savings(run: RecordedRun, folded: Fold, static_cpus: int = 0,
            progress: Callable[[str], None] = lambda text: None) -> Savings:
    """Simulates all alternatives.

    Args:
        run: The job as the simulator can play it.
        folded: Its records.
        static_cpus: CPUs of a reservation; 0 for what `reservation` says.
        progress: Called with what is simulated next.
    """
    found = Savings(trajectories=len(run.work.trajectories), actions=len(all_actions(run.work)),
                    actions_of_job=run.actions_of_job)
    k = static_cpus or reservation(run.work)
    durations = "learned" if run.left_out.unprofiled else "oracle"
    found.rows.append(_recorded(run, folded))

    def add(way: str, policy: str, cluster: Cluster) -> None:
        progress(f"simulating {found.actions} actions: {way} ({policy})")
        found.rows.append(_simulated(way, run.work, cluster, policy, durations))

    as_run = folded.placer or "elastic"
    add(AS_RUN, as_run, run.cluster)
    add(FCFS, f"fcfs:{k}", run.cluster)
    add(STATIC, f"static:{k}", run.cluster)
    own_gpus = _with_own_gpus(run)
    if own_gpus is not None and (why_not := _differing_calls(run)):
        found.rows.append(Alternative(SERVICES, as_run, why_not=why_not))
    elif own_gpus is not None:
        add(SERVICES, as_run, own_gpus)
    add(JOBS, f"static:{k}", _room_for_all(run, k))
    full = full_holding(run.cluster)
    for share in SMALLER:
        held = Holding(*(-(-round(units * share * 100) // 100)
                         for units in (full.cpus, full.gpus)))
        if held != full and held.cpus:
            add(f"{share:.0%}", as_run, resized(run.cluster, held))
    for tenant, own in _parts_of_tenants(run, folded):
        progress(f"simulating {len(own.numbers)} actions of tenant {tenant}: {JOBS} (static:{k})")
        found.tenants.append(_of_tenant(tenant, own, folded, k, durations))
    used = sum(row.used_core_h for row in found.tenants)
    if used:
        core_h = found.rows[0].held_core_h or 0.0
        found.tenants = [replace(row, part_core_h=core_h * row.used_core_h / used)
                         for row in found.tenants]
    found.assumptions = _assumptions(run, found, k, durations)
    return found


def _parts_of_tenants(part: RecordedRun, folded: Fold) -> list[tuple[str, RecordedRun]]:
    """Returns the trajectories of each tenant, by its name; nothing if there is only one."""
    of: dict[str, list[int]] = {}
    for place, numbers in enumerate(part.played):
        of.setdefault(folded.records[numbers[0]].tenant, []).append(place)
    if len(of) < 2:
        return []
    return [(tenant, replace(
        part, played=[part.played[place] for place in of[tenant]],
        work=part.work.model_copy(update={"trajectories": tuple(
            part.work.trajectories[place] for place in of[tenant])}))) for tenant in sorted(of)]


def _of_tenant(tenant: str, own: RecordedRun, folded: Fold, k: int, durations: str
               ) -> TenantSavings:
    """Returns a tenant's row; its part of what was held is added when all rows are there."""
    records = [folded.records[number] for number in own.numbers]
    return TenantSavings(
        tenant, len(own.played), len(records),
        sum(r.end_ns - r.submit_ns for r in records) / len(records) / _SECOND,
        sum(r.cpu_held_ns for r in records) / _HOUR,
        sum(r.gpu_held_ns for r in records) / _HOUR, None,
        _simulated(JOBS, own.work, _room_for_all(own, k), f"static:{k}", durations))


def _recorded(part: RecordedRun, folded: Fold) -> Alternative:
    records = [folded.records[number] for number in part.numbers]
    end_ns = max(r.end_ns for r in records)
    core_ns = gpu_ns = 0
    for stay in part.stays:
        held_ns = stay.held_ns(part.begun_ns, end_ns)
        core_ns += len(stay.spec.cores) * held_ns
        gpu_ns += len(stay.spec.gpus) * held_ns
    full = full_holding(part.cluster)
    return Alternative(
        RECORDED, folded.placer, full.cpus, full.gpus,
        sum(r.end_ns - r.submit_ns for r in records) / len(records) / _SECOND,
        (end_ns - part.begun_ns) / _SECOND, core_ns / _HOUR, gpu_ns / _HOUR)


def _simulated(way: str, work: Workload, cluster: Cluster, policy: str, durations: str
               ) -> Alternative:
    full = full_holding(cluster)
    told = Alternative(way, policy, full.cpus, full.gpus)
    try:
        world = SimulationWorld(work, cluster, make_placer(policy), durations == "oracle")
        world.events = []
        figures = world.run().figures()
    except InvalidInput as error:
        return replace(told, why_not=str(error))
    step_s = figures["step_s"]
    told = replace(told, mean_act_s=figures["mean_act_s"], step_s=step_s,
                   held_core_h=full.cpus * step_s / 3600, held_gpu_h=full.gpus * step_s / 3600)
    if way != JOBS:
        return told
    most, core_ns = _reserved(world.events)
    return replace(told, cpus=most, held_core_h=core_ns / _HOUR)


def _reserved(events: list[ev.Event]) -> tuple[int, int]:
    """Returns the most CPUs that sessions reserved at one time, and their sum in core-ns."""
    since, now, most, core_ns = dict[int, tuple[int, int]](), 0, 0, 0
    for event in events:
        if isinstance(event, ev.SessionPlaced):
            since[event.session] = event.at, len(event.cores)
            now += len(event.cores)
            most = max(most, now)
        elif isinstance(event, ev.SessionClosed) and event.session in since:
            at, cores = since.pop(event.session)
            now -= cores
            core_ns += cores * (event.at - at)
    return most, core_ns


def _room_for_all(part: RecordedRun, k: int) -> Cluster:
    """Returns the cluster with so many CPUs and so much memory that no reservation waits, and with
    GPUs for each service alone.
    """
    trajectories, cluster = part.work.trajectories, _with_own_gpus(part) or part.cluster
    cpus = sum(k for t in trajectories if any(a.resource == "cpu" for n in t.turns
                                              for a in n.actions))
    mem_mib = sum(t.session.mem_mib for t in trajectories)
    first, *others = cluster.nodes
    wide = first.model_copy(update={"cpus": max(first.cpus, cpus),
                                    "mem_mib": max(first.mem_mib, mem_mib)})
    return cluster.model_copy(update={"nodes": (wide, *others)})


def _differing_calls(part: RecordedRun) -> str:
    """Returns why a service cannot keep one copy: its calls need different numbers of GPUs."""
    needs: dict[str, set[int]] = {}
    for action in all_actions(part.work):
        if name := service_of(action.resource):
            needs.setdefault(name, set()).add(action.degrees[0])
    return next((f"calls of service {name!r} differ in size: they need {min(sizes)} to "
                 f"{max(sizes)} GPUs at least, and one copy has one size"
                 for name, sizes in sorted(needs.items()) if len(sizes) > 1), "")


def _with_own_gpus(part: RecordedRun) -> Cluster | None:
    """Returns the cluster with GPUs for each service alone, as many as each of its calls needs, and
    with no others; None if no service is called.

    The GPUs are all on the first node, and a service may be on no others. The largest blocks come
    first, so that each is aligned.
    """
    sizes: dict[str, int] = {}
    for action in all_actions(part.work):
        if name := service_of(action.resource):
            sizes[name] = max(sizes.get(name, 1), action.degrees[0])
    if not sizes:
        return None
    called = sorted((s for s in part.cluster.services if s.name in sizes),
                    key=lambda s: -sizes[s.name])
    first, *others = part.cluster.nodes
    services, used = [], 0
    for service in called:
        block = tuple(range(used, used + sizes[service.name]))
        services.append(service.model_copy(update={"node": first.name, "gpus": block}))
        used += len(block)
    weights_mib = sum(service.weights_mib for service in called)
    return part.cluster.model_copy(update={"services": tuple(services), "nodes": (
        first.model_copy(update={"gpus": used, "mem_mib": first.mem_mib + weights_mib}),
        *(node.model_copy(update={"gpus": 0}) for node in others))})


def _assumptions(run: RecordedRun, found: Savings, k: int, durations: str) -> list[str]:
    said = [
        "Every row but the recorded one is a simulation with the scheduler's own code; the row "
        "\"as run\" is the same run simulated, to compare it with the recorded one.",
        "The actions are those of the records, and a trajectory thinks as long as it did. What it "
        "submitted before its earlier actions had ended counts as submitted together with them. An "
        "action with neither a session nor a trajectory's name is a trajectory of its own.",
        f"A reservation holds {'1 CPU' if k == 1 else f'{k} CPUs'} from the beginning of its "
        "trajectory to the end, as a pod or a job of its own would; an action uses as many of "
        "them as it can. Each GPU service has at least one of the nodes' GPUs alone.",
        "\"jobs\" is one job for each trajectory, which all start at once: held are the CPUs of "
        "these jobs, each for its own time. No queue of Slurm and no start of a job is counted.",
        "Held are all CPUs and GPUs of the nodes from the beginning of the first trajectory to "
        "the last result. All nodes that the job ever had are there from the beginning.",
        "Starting a process and carrying messages count as run time, as recorded; in the "
        "simulation more CPUs shorten them too. Opening a session takes no time.",
        "Where the journal does not say how long a policy thought before a trajectory's first "
        "action, it counts as long as before the trajectory's later turns in the mean."]
    if found.row(SERVICES):
        said.append("\"services\" keeps every GPU service that was called on GPUs of its own from "
                    "the beginning of the first trajectory to the last result, as a reward model "
                    "that is deployed for the whole run: one copy on as many GPUs as each of its "
                    "calls needs at least. The job's other GPUs are not held, and its CPUs are. "
                    "\"jobs\" holds the same GPUs beside the CPUs of its jobs.")
        if run.left_out.whole_gpus:
            said.append(f"The GPUs that {run.left_out.whole_gpus} other actions held are in "
                        "neither \"services\" nor \"jobs\".")
    if found.tenants:
        said.append("A tenant's part of what was held is in proportion to what its actions held. "
                    "Its jobs are simulated without those of the other tenants.")
    left = run.left_out
    if durations == "learned":
        said.append(f"{left.unprofiled} actions could use several CPUs and nobody said how well: "
                    "their serial fraction is the one that explains best how long their class ran.")
    said += [text for number, text in (
        (left.unended, "had not started or not ended, and are left out."),
        (left.whole_gpus, "held whole GPUs, and are simulated with their CPUs only."),
        (left.retried, "started more than once, and are simulated once."),
        (left.bound, "were bound to a component, and are simulated on any node.")) if number
        for text in [f"{number} actions {text}"]]
    if found.actions < found.actions_of_job:
        cut = ", of which the last turns are left out" if run.cut else ""
        said.append(f"Compared are the {found.trajectories} trajectories that began first{cut}, "
                    f"with {found.actions} of {found.actions_of_job} actions.")
    return said
