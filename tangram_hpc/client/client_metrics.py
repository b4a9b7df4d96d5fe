"""Metrics for a trainer's logger: sums over this client's actions, and gauges of its job.

When an action ends, the connection adds the times that came with its result to `ActionWindows`, so
no further message is needed for them. `read` returns what was added since the last reading,
together with gauges from one reply of the broker. The names in `METRIC_NAMES` are an interface,
because dashboards refer to them: names may be added, none is renamed, and every reading has all of
them.

Nothing here keeps single actions; `tangram acct` lists those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..domain.action import Action, Kind
from ..domain.states import ActionState
from ..interrupts import CallersLock
from ..protocol.message import ActionResult

_S = 1e9
_GROUPS = {Kind.EXEC: "tools", Kind.FUNCTION: "tools", Kind.CALL: "services",
           Kind.GRANT: "endpoints"}
GROUPS = ("tools", "services", "rollouts", "endpoints")
_OF_GROUP = ("count", "failed", "act_s", "act_max_s", "queue_s", "restore_s", "run_s", "system_s",
             "setup_s", "return_s")
_OF_TOOLS = ("cpu_core_s", "held_core_s")
_OF_JOB = ("nodes", "cpus_held", "cpus_lent", "gpus_held", "gpus_lent", "mem_held_mib",
           "mem_lent_mib", "actions_waiting", "actions_running", "sessions", "sessions_waiting",
           "clients")
METRIC_NAMES = (*(f"{group}/{name}" for group in GROUPS for name in _OF_GROUP),
                *(f"tools/{name}" for name in _OF_TOOLS), *(f"job/{name}" for name in _OF_JOB))


class ActionWindow(msgspec.Struct):
    """Sums over the actions of one group that ended in one window; times in ns.

    Attributes:
        count: how many actions ended.
        failed: how many of them ended in another state than COMPLETED.
        act_ns: time from submission to result, by the client's clock.
        act_max_ns: the longest time of one action from submission to result.
        queue_ns: time from submission to the last grant, at the client and at the broker.
        restore_ns: time that services needed to be brought to their GPUs.
        run_ns: run time on the nodes.
        system_ns: the rest of the ACT, see `Details.system_s`; `setup_ns` of it was spent on the
            nodes before the actions ran.
        cpu_ns: user and system time of the actions' processes.
        held_core_ns: core-ns that the actions held.
    """

    count: int = 0
    failed: int = 0
    act_ns: int = 0
    act_max_ns: int = 0
    queue_ns: int = 0
    restore_ns: int = 0
    run_ns: int = 0
    system_ns: int = 0
    setup_ns: int = 0
    cpu_ns: int = 0
    held_core_ns: int = 0

    def add(self, result: ActionResult, act_ns: int) -> None:
        """Adds the end of one action."""
        outcome, queue_ns = result.outcome, result.queue_ns
        restore_ns, run_ns, setup_ns = outcome.restore_ns, outcome.exec_ns, outcome.setup_ns
        system_ns = act_ns - queue_ns - restore_ns - run_ns
        self.count += 1
        if outcome.state is not ActionState.COMPLETED:
            self.failed += 1
        self.act_ns += act_ns
        if act_ns > self.act_max_ns:
            self.act_max_ns = act_ns
        self.queue_ns += queue_ns
        if restore_ns:
            self.restore_ns += restore_ns
        self.run_ns += run_ns
        if system_ns > 0:
            self.system_ns += system_ns
            if setup_ns > 0:
                self.setup_ns += setup_ns if setup_ns < system_ns else system_ns
        self.add_held(result)

    def add_held(self, result: ActionResult) -> None:
        """Adds what an action held and used."""
        self.cpu_ns += result.outcome.cpu_ns
        self.held_core_ns += _held_core_ns(result)

    def add_direct(self, act_ns: int, queue_ns: int, run_ns: int, failed: bool) -> None:
        """Adds a direct call: its time from call to result, the part of it in which it waited for
        units, and its run time."""
        self.count += 1
        self.failed += failed
        self.act_ns += act_ns
        self.act_max_ns = max(self.act_max_ns, act_ns)
        self.queue_ns += queue_ns
        self.run_ns += run_ns
        self.system_ns += max(0, act_ns - queue_ns - run_ns)

    def figures(self) -> dict[str, float]:
        """Returns the counts, and the mean times in seconds; 0 where no action ended."""
        def mean_s(total_ns: int) -> float:
            return total_ns / _S / max(1, self.count)

        return {"count": float(self.count), "failed": float(self.failed),
                "act_s": mean_s(self.act_ns), "act_max_s": self.act_max_ns / _S,
                "queue_s": mean_s(self.queue_ns), "restore_s": mean_s(self.restore_ns),
                "run_s": mean_s(self.run_ns), "system_s": mean_s(self.system_ns),
                "setup_s": mean_s(self.setup_ns),
                "return_s": mean_s(self.system_ns - self.setup_ns)}


class ActionWindows:
    """The windows of all groups since the last reading. Several threads may use the object.

    Attributes:
        lock: held while the windows are read or changed.
    """

    def __init__(self) -> None:
        self.lock = CallersLock()
        self._windows = _empty()

    def add(self, action: Action, result: ActionResult, act_ns: int, direct: bool = False) -> None:
        """Adds the end of one action. Operations on files belong to no group. Of an action that
        serves direct calls only what it held is added, as each call is added by itself."""
        group = "rollouts" if action.turn is not None else _GROUPS.get(action.kind)
        if group is not None:
            with self.lock:
                if direct:
                    self._windows[group].add_held(result)
                else:
                    self._windows[group].add(result, act_ns)

    def add_direct(self, act_ns: int, queue_ns: int, run_ns: int, failed: bool) -> None:
        """Adds a direct call; see `ActionWindow.add_direct`."""
        with self.lock:
            self._windows["tools"].add_direct(act_ns, queue_ns, run_ns, failed)

    def read(self, info: Mapping[str, Any], prefix: str) -> dict[str, float]:
        """Begins new windows and returns all metrics.

        Args:
            info: the broker's reply to the query "info".
            prefix: the text that is put before every name.
        """
        with self.lock:
            windows, self._windows = self._windows, _empty()
        found = {f"{group}/{name}": value for group in GROUPS
                 for name, value in windows[group].figures().items()}
        tools = windows["tools"]
        found |= {"tools/cpu_core_s": tools.cpu_ns / _S,
                  "tools/held_core_s": tools.held_core_ns / _S}
        found |= {f"job/{name}": value for name, value in _job(info).items()}
        return _named(found, METRIC_NAMES, prefix)


def _empty() -> dict[str, ActionWindow]:
    return {group: ActionWindow() for group in GROUPS}


def _named(found: Mapping[str, float], names: Iterable[str], prefix: str) -> dict[str, float]:
    return {prefix + name: float(found[name]) for name in names}


def _held_core_ns(result: ActionResult) -> int:
    """Returns the core-ns that the last lease of an action held, with all changes of its size."""
    grants, held_ns = result.grants, result.held_ns
    if not grants:
        return len(result.cores) * held_ns if held_ns > 0 else 0
    if len(grants) == 1:  # true of nearly all actions
        at, units = grants[0]
        return units * (held_ns - at) if held_ns > at else 0
    ends = [*(at for at, _ in grants[1:]), held_ns]
    return sum(units * max(0, end - at) for (at, units), end in zip(grants, ends, strict=True))


def _job(info: Mapping[str, Any]) -> dict[str, float]:
    """Returns the gauges of the whole job, from the broker's reply to the query "info"."""
    actions = info["actions"]
    return {
        "nodes": info["nodes"],
        "cpus_held": info["cpus"], "cpus_lent": info["cpus"] - info["cpus_free"],
        "gpus_held": info["gpus"], "gpus_lent": info["gpus"] - info["gpus_free"],
        "mem_held_mib": info["mem_mib"], "mem_lent_mib": info["mem_mib"] - info["mem_mib_free"],
        "actions_waiting": actions.get(ActionState.PENDING.value, 0),
        # Nodes report a start with a delay, so a short action ends as CONFIGURING.
        "actions_running": sum(actions.get(state.value, 0) for state in (
            ActionState.CONFIGURING, ActionState.RUNNING)),
        "sessions": info["sessions"], "sessions_waiting": info["sessions_waiting"],
        "clients": info["clients"],
    }
