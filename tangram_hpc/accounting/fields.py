"""Defines the columns of `tangram acct`. Pure.

Where sacct has a column, ours has its name and its format. One table holds all about a column: its
name, width, format and meaning. `as_json` has the same values for machines: whole numbers, with the
unit at the end of each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..domain.ids import show
from ..domain.states import ActionState
from ..errors import InvalidInput
from .record import ActionRecord


class Field(NamedTuple):
    """One column; `text` prints the value of a row as sacct does, and `about` explains it."""

    name: str
    width: int
    text: Callable[[Any], str]
    about: str


def stamp(ns: int) -> str:
    """Returns a time as `YYYY-MM-DDTHH:MM:SS.mmm` in local time; `Unknown` for 0, as sacct prints
    it.
    """
    if not ns:
        return "Unknown"
    return datetime.fromtimestamp(ns / 1e9).isoformat(timespec="milliseconds")


def duration(ns: int) -> str:
    """Returns a duration as `[D-]HH:MM:SS.mmm`."""
    ms = ns // 10**6
    days, ms = divmod(ms, 86_400_000)
    text = f"{ms // 3_600_000:02d}:{ms // 60_000 % 60:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}"
    return f"{days}-{text}" if days else text


def job_id(r: ActionRecord) -> str:
    """Returns the JobID of an action, `JOB.CLIENT.COUNTER`."""
    return f"{r.job}.{show(r.action.id)}"


def _exit_code(r: ActionRecord) -> str:
    """Returns `code:signal` as sacct shows it: a failure by a signal has code 0.

    Unlike sacct, it never returns `0:0` for an action that ended in another state than COMPLETED.
    """
    o = r.outcome
    if o is None:
        return "0:0"
    by_signal = o.state is ActionState.FAILED and o.signal
    return f"{0 if by_signal else o.exit_status}:{o.signal}"


def _tres(cpus: int, mem: int, gpus: int) -> str:
    parts = [f"cpu={cpus}"]
    if mem:
        parts.append(f"mem={mem}M")
    if gpus:
        parts.append(f"gres/gpu={gpus}")
    return ",".join(parts)


def _measure(r: ActionRecord, name: str) -> int | None:
    """Returns a measurement of the action's GPUs; None if nothing was measured."""
    value: int = getattr(r.outcome, name) if r.outcome is not None else -1
    return value if value >= 0 else None


def _shown(r: ActionRecord, name: str, unit: str = "") -> str:
    value = _measure(r, name)
    return "" if value is None else f"{value}{unit}"


def _energy(r: ActionRecord) -> str:
    """Returns the energy as sacct prints it: in J, thousands as K; `~` marks that it is an
    estimate.
    """
    mj = _measure(r, "energy_mj")
    if mj is None:
        return ""
    return f"~{mj / 1e6:.2f}K" if mj >= 10**6 else f"~{round(mj / 1000)}"


def _route(r: ActionRecord) -> str:
    to = r.route
    return "" if to is None else f"{to.service} bucket {to.bucket} {to.how}"


def _of(r: ActionRecord, name: str) -> Any:
    return getattr(r.outcome, name) if r.outcome is not None else 0


def _bound(r: ActionRecord, figure: str) -> str:
    """Returns ">" if this figure is a lower bound, else an empty string."""
    return ">" if r.outcome is not None and figure in r.outcome.lower_bounds else ""


def setup_and_return(r: ActionRecord) -> tuple[int, int] | None:
    """Returns both parts of the ACT in ns; None if nobody measured the set-up."""
    parts = r.parts
    if parts is None or r.outcome is None or r.outcome.setup_ns < 0:
        return None
    return parts.setup_ns, parts.return_ns


def _part(r: ActionRecord, place: int) -> str:
    parts = setup_and_return(r)
    return "" if parts is None else duration(parts[place])


def cpus_asked(r: ActionRecord) -> int:
    """Returns the fewest CPUs that an action asked for; 0 if it asked for none."""
    return r.action.degrees[0] if r.action.key == "cpu" else 0


FIELDS = (
    Field("JobID", 22, job_id, "job, client and the client's own counter"),
    Field("JobIDRaw", 22, job_id, "same as JobID"),
    Field("JobName", 16, lambda r: r.action.name, "the action's class"),
    Field("User", 10, lambda r: r.user, "who ran the job"),
    Field("Account", 10, lambda r: r.account, "the Slurm account of the job"),
    Field("Partition", 10, lambda r: r.node.component if r.node else "", "component of the node"),
    Field("NodeList", 14, lambda r: r.node.name if r.node else "None assigned", "where it ran"),
    Field("NNodes", 6, lambda r: "1" if r.node else "0", "number of nodes"),
    Field("State", 14, lambda r: r.state.value, "Slurm's state words"),
    Field("ExitCode", 8, _exit_code, "exit code:signal"),
    Field("Submit", 23, lambda r: stamp(r.submit_ns), "when it was submitted"),
    Field("Start", 23, lambda r: stamp(r.start_ns), "when its units were lent"),
    Field("End", 23, lambda r: stamp(r.end_ns), "when its result was known"),
    Field("Elapsed", 13, lambda r: duration(r.elapsed_ns), "Start to End"),
    Field("ElapsedRaw", 10, lambda r: str(r.elapsed_ns // 10**9), "Elapsed in whole seconds"),
    Field("Planned", 13, lambda r: duration(r.planned_ns), "Submit to Start"),
    Field("Setup", 13, lambda r: _part(r, 0), "from the order to its node until it ran"),
    Field("ExecTime", 13, lambda r: duration(_of(r, "exec_ns")), "run time on the node"),
    Field("Return", 13, lambda r: _part(r, 1), "the rest of its ACT: order and result under way"),
    Field("ReqCPUS", 8, lambda r: str(cpus_asked(r)), "the fewest CPUs it asked for"),
    Field("NCPUS", 6, lambda r: str(r.cpus), "the most CPUs it held"),
    Field("AllocCPUS", 9, lambda r: str(r.cpus), "same as NCPUS"),
    Field("NTasks", 6, lambda r: "1", "always 1"),
    Field("CPUTime", 13, lambda r: duration(r.cpu_held_ns), "CPUs held x time"),
    Field("CPUTimeRAW", 10, lambda r: str(r.cpu_held_ns // 10**9), "CPUTime in whole seconds"),
    Field("TotalCPU", 13, lambda r: _bound(r, "cpu") + duration(_of(r, "cpu_ns")),
          "user + system time used; >: at least"),
    Field("MaxRSS", 10, lambda r: f"{_bound(r, 'maxrss')}{_of(r, 'maxrss_kib')}K",
          "largest resident set; >: at least"),
    Field("ReqMem", 8, lambda r: f"{r.action.mem_mib}M", "memory asked for"),
    Field("ReqTRES", 24, lambda r: _tres(cpus_asked(r), r.action.mem_mib, r.action.gpus),
          "what it asked for"),
    Field("AllocTRES", 24, lambda r: _tres(r.cpus, r.action.mem_mib, len(r.gpus)),
          "what it held"),
    Field("Timelimit", 13, lambda r: duration(r.action.timeout_ns) if r.action.timeout_ns
          else "UNLIMITED", "limit on run time"),
    Field("Restarts", 8, lambda r: (">" if r.lost_ahead else "") + str(max(0, r.attempt - 1)),
          "starts beyond the first; >: at least"),
    Field("Reason", 30, lambda r: (r.outcome.reason if r.outcome else "") or "None",
          "why it ended so"),
    Field("AdminComment", 12, lambda r: "", "always empty; tools for sacct ask for it"),
    Field("Cost", 10, lambda r: f"{_of(r, 'cost_micro') / 1e6:g}", "what its caller says it cost"),
    Field("Once", 16, lambda r: r.action.once, "its caller's name for this work"),
    Field("Trajectory", 16, lambda r: r.action.trajectory_name,
          "of a rollout's turn, or of a tool: whose it is"),
    Field("Route", 24, _route, "of a rollout's turn: service, bucket, and how its KV got there"),
    Field("Session", 10, lambda r: show(r.action.session), "the session it ran in"),
    Field("SessionName", 16, lambda r: r.session_name, "the name of the session it ran in"),
    Field("Client", 20, lambda r: f"{r.client} {r.client_name}".strip(),
          "number and name of the client that submitted it"),
    Field("Tenant", 12, lambda r: r.tenant, "the training run or team it counts for"),
    Field("Image", 19, lambda r: r.image, "digest of the image of its session"),
    Field("Rank", 5, lambda r: str(r.rank) if r.rank >= 0 else "", "MPI rank of its client"),
    Field("Isolation", 10, lambda r: str(_of(r, "isolation") or ""), "isolation it really had"),
    Field("Enforcement", 12, lambda r: str(_of(r, "enforcement") or ""), "how units were enforced"),
    Field("GPUTime", 13, lambda r: duration(r.gpu_held_ns),
          "GPUs held x time, its share of a batch"),
    Field("Restore", 13, lambda r: duration(_of(r, "restore_ns")),
          "bringing its service onto the GPUs"),
    Field("Batch", 6, lambda r: str(_of(r, "batch") or 1), "calls that ran as one with it"),
    Field("DirectCalls", 11, lambda r: str(_of(r, "direct_calls") or ""),
          "direct calls that it served"),
    Field("DirectTime", 13, lambda r: duration(_of(r, "direct_ns")) if _of(r, "direct_calls")
          else "", "run time of these calls, of its ExecTime"),
    Field("GPUUtil", 8, lambda r: _shown(r, "gpu_util_pct"),
          "mean use of its GPUs, %; sacct: gres/gpuutil in TRESUsageInAve"),
    Field("GPUMaxMem", 10, lambda r: _shown(r, "gpu_max_mem_mib", "M"),
          "the most taken on its GPUs; sacct: gres/gpumem in TRESUsageInMax"),
    Field("ConsumedEnergy", 14, _energy, "J its GPUs drew for it; ~: an estimate"),
)
# the columns of --brief, of -X, and of actions
BRIEF = "JobID,State,ExitCode"
OF_JOBS = "JobID,User,NodeList,NCPUS,State,Elapsed,CPUTime,TotalCPU"
DEFAULT = "JobID,JobName,NodeList,NCPUS,State,ExitCode,Planned,Elapsed,TotalCPU"


_WHOLE_SECONDS = frozenset({"Submit", "Start", "End", "Elapsed", "Planned", "Setup", "ExecTime",
                            "Return", "CPUTime", "TotalCPU", "Timelimit", "GPUTime", "Restore",
                            "DirectTime"})
_MARKED = frozenset({"TotalCPU", "MaxRSS", "Restarts", "ConsumedEnergy"})


def as_sacct(field: Field, text: str) -> str:
    """Returns a column's text exactly as sacct writes it: times have whole seconds, but for a CPU
    time below an hour, and nothing marks a bound or an estimate.
    """
    if field.name in _MARKED:
        text = text.lstrip(">~")
    if field.name == "TotalCPU" and text.startswith("00:") and not text.endswith(".000"):
        return text.removeprefix("00:")
    return text.partition(".")[0] if field.name in _WHOLE_SECONDS else text


_AMOUNTS = frozenset({"MaxRSS", "ReqMem", "ReqTRES", "AllocTRES", "GPUMaxMem"})
_UNITS = "KMGTP"


def in_unit(field: Field, text: str, unit: str) -> str:
    """Returns a column's text with all amounts of memory in one unit, as `sacct --units` does.

    Args:
        field: the column.
        text: its text.
        unit: one of K, M, G, T and P, powers of 1024.
    """
    def converted(found: re.Match[str]) -> str:
        value = int(found[1]) * 1024.0 ** (_UNITS.index(found[2]) - _UNITS.index(unit))
        return f"{value:.0f}{unit}" if value.is_integer() else f"{value:.2f}{unit}"

    return re.sub(r"(\d+)([KM])(?=,|$)", converted, text) if field.name in _AMOUNTS else text


def choose_fields(text: str, among: Sequence[Field] = FIELDS, listed_by: str = "tangram acct -e",
                  source: str = "--format") -> list[tuple[Field, int]]:
    """Returns the columns of a format such as `JobID%20,State`, with their widths.

    A width below 0 aligns left.

    Args:
        text: the format.
        among: the columns that there are.
        listed_by: the command that lists them.
        source: where the format was written, for an error.

    Raises:
        InvalidInput: a column is not known, or a width is not a number.
    """
    chosen, by_name = [], {f.name.lower(): f for f in among}
    for part in text.split(","):
        name, _, width = part.strip().partition("%")
        known = by_name.get(name.lower())
        if known is None:
            raise InvalidInput(f"{source}: {name!r} is not a column; see `{listed_by}`")
        try:
            chosen.append((known, int(width) if width else known.width))
        except ValueError:
            raise InvalidInput(f"{source}: {part!r}: the width is not a number") from None
    return chosen


def as_json(r: ActionRecord) -> dict[str, Any]:
    """Returns a record for machines: whole numbers, with the unit at the end of each name."""
    o, split = r.outcome, setup_and_return(r)
    return {
        "job_id": job_id(r), "job": r.job, "action": show(r.action.id), "name": r.action.name,
        "kind": r.action.kind.value, "key": r.action.key, "trajectory": r.action.trajectory_name,
        "route": None if r.route is None else {
            "pool": r.route.pool, "service": r.route.service, "wanted": r.route.wanted,
            "bucket": r.route.bucket, "how": r.route.how, "move_ns": r.route.move_ns},
        "once": r.action.once, "user": r.user, "account": r.account,
        "session": show(r.action.session), "session_name": r.session_name,
        "client": r.client, "client_name": r.client_name,
        "image": r.image, "tenant": r.tenant,
        "rank": r.rank, "node": r.node.name if r.node else "",
        "host": r.node.host if r.node else "", "component": r.node.component if r.node else "",
        "state": r.state.value, "exit_code": o.exit_status if o else 0,
        "signal": o.signal if o else 0, "reason": o.reason if o else "",
        "submit_ns": r.submit_ns, "start_ns": r.start_ns, "end_ns": r.end_ns,
        "planned_ns": r.planned_ns, "elapsed_ns": r.elapsed_ns,
        "restore_ns": o.restore_ns if o else 0,
        "setup_ns": split and split[0], "return_ns": split and split[1],
        "exec_ns": o.exec_ns if o else 0, "cpu_ns": o.cpu_ns if o else 0,
        "maxrss_kib": o.maxrss_kib if o else 0, "req_cpus": cpus_asked(r),
        "ncpus": r.cpus, "cpu_held_ns": r.cpu_held_ns, "mem_mib": r.action.mem_mib,
        "gpus": list(r.gpus), "gpu_held_ns": r.gpu_held_ns, "batch": _of(r, "batch") or 1,
        "timeout_ns": r.action.timeout_ns,
        "attempt": r.attempt, "attempt_at_least": r.lost_ahead,
        "lower_bounds": list(o.lower_bounds) if o else [],
        "cost_micro": o.cost_micro if o else 0,
        "direct_calls": o.direct_calls if o else 0, "direct_ns": o.direct_ns if o else 0,
        "grants": [[at, list(cores)] for at, cores in r.grants],
        "isolation": o.isolation if o else "", "enforcement": o.enforcement if o else "",
        "gpu_util_pct": _measure(r, "gpu_util_pct"),
        "gpu_max_mem_mib": _measure(r, "gpu_max_mem_mib"),
        "energy_estimated_mj": _measure(r, "energy_mj"),
    }
