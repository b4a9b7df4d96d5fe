"""Writes the broker's view `top` as Prometheus and OpenMetrics have it.

Amounts are gauges, in base units (bytes, seconds), as these formats recommend. Names of services,
endpoints, components and reasons are labels, and the view bounds how many of them there are. Names
of actions are none: each new name would be a series for ever.

The id of the job is the label `tangram_job`: Prometheus itself gives each series a label `job`, the
name of the scrape, and would rename another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import MissingExtra, how_to_install

DASHBOARD = Path(__file__).with_name("grafana.json")
_MIB = 1 << 20

# name -> meaning, and how it is read from the view
_GAUGES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "nodes": ("nodes that the job holds", lambda v: v["nodes"]),
    "cpus_held": ("CPUs of the nodes that are up", lambda v: v["cpus"]),
    "cpus_lent": ("CPUs that are lent to actions", lambda v: v["cpus"] - v["cpus_free"]),
    "gpus_held": ("GPUs of the nodes that are up", lambda v: v["gpus"]),
    "gpus_lent": ("GPUs that are lent", lambda v: v["gpus"] - v["gpus_free"]),
    "mem_held_bytes": ("memory that may be lent", lambda v: v["mem_mib"] * _MIB),
    "mem_lent_bytes": ("memory that is lent",
                       lambda v: (v["mem_mib"] - v["mem_mib_free"]) * _MIB),
    "clients": ("clients that are connected, or in their grace",
                lambda v: v["clients"] - 1),  # all but the exporter itself
    "sessions": ("sessions that are open or wait", lambda v: v["sessions"]),
    "sessions_waiting": ("sessions that wait for admission", lambda v: v["sessions_waiting"]),
    "actions_running": ("actions that run", lambda v: v["running"]),
}
# key of a window of the view -> name and meaning
_RECENT = {
    "rate": ("actions_ended_per_second", "actions that ended a second, in the last seconds"),
    "act_s": ("act_seconds", "mean time from submission to result, of actions that ended in the "
                             "last seconds"),
    "wait_s": ("act_wait_seconds", "part of act_seconds: before units were lent"),
}
_ENDPOINT = {"inside": ("endpoint_calls_running", "calls of the endpoint that run"),
             "waiting": ("endpoint_calls_waiting", "calls of the endpoint that wait"),
             "rate_now": ("endpoint_rate", "calls a second that the endpoint takes now")}


def metric_families(view: dict[str, Any]) -> Iterator[Any]:
    """Yields the metric families of a view of `top`, each with the job as a label."""
    from prometheus_client.core import GaugeMetricFamily

    job = view["job"]

    def family(name: str, about: str, *labels: str) -> Any:
        return GaugeMetricFamily(f"tangram_{name}", about, labels=["tangram_job", *labels])

    for name, (about, value) in _GAUGES.items():
        gauge = family(name, about)
        gauge.add_metric([job], value(view))
        yield gauge
    waiting = family("actions_waiting", "actions that wait, by reason", "reason")
    for reason, count in view["reasons"].items():
        waiting.add_metric([job, reason], count)
    yield waiting
    for key, (name, about) in _RECENT.items():
        gauge = family(name, about, "window_seconds")
        for window in view["recent"]:
            if window[key] is not None:  # no mean where nothing ended
                gauge.add_metric([job, str(window["window_s"])], window[key])
        yield gauge
    resident = family("service_resident", "copies of a service that are on GPUs", "service")
    for service in view["services"]:
        resident.add_metric([job, service["name"]], len(service["stands_on"]))
    yield resident
    for key, (name, about) in _ENDPOINT.items():
        gauge = family(name, about, "endpoint")
        for endpoint in view["endpoints"]:
            gauge.add_metric([job, endpoint["name"]], endpoint[key])
        yield gauge


class _Collector:
    """Asks for a view at each scrape."""

    def __init__(self, ask: Callable[[], dict[str, Any]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Any]:
        return metric_families(self._ask())

    def describe(self) -> list[Any]:
        """Nothing: the registry would otherwise ask the broker when the collector is registered."""
        return []


def registry(ask: Callable[[], dict[str, Any]]) -> Any:
    """Returns a registry of prometheus_client.

    Args:
        ask: returns the broker's view `top`; called at each scrape.

    Raises:
        MissingExtra: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise MissingExtra("export: metrics need the package prometheus_client: "
                           f"{how_to_install('export')}") from None
    found = CollectorRegistry(auto_describe=False)
    found.register(_Collector(ask))
    return found


def as_text(metrics: Any) -> bytes:
    """Returns what a scrape answers, in Prometheus's text format, as node_exporter's textfile
    collector reads it.
    """
    from prometheus_client import generate_latest

    return bytes(generate_latest(metrics))
