"""Defines what the broker may request from Slurm in addition to the job's own allocation. Pure.

An allocation is a grant of Slurm. The job's own is never requested or given back by the broker. A
satellite is a further job whose workers join the broker. A component of a heterogeneous job is an
allocation of its own, as it can be given back alone.
"""

from __future__ import annotations

import msgspec


class SatelliteShape(msgspec.Struct, frozen=True, array_like=True):
    """One kind of satellite that the user allows the broker to request.

    Attributes:
        name: what people call it. No two shapes have the same name.
        partition, qos, account: as sbatch takes them; empty for the site's default.
        nodes: how many nodes it has, each with a worker. All are given back together.
        cpus: CPUs that it requests on each node, and lends.
        mem_mib: memory of each node; 0 for the site's default.
        gpus: GPUs of each node.
        gres: how the GPUs are requested from Slurm, such as "gpu:h100:4"; empty for `gpu:N`.
        time_ns: its time limit. Until the satellite has ended, its whole time limit counts against
            the user's core-hours.
        component: the component that its workers join as.
    """

    name: str
    partition: str = ""
    qos: str = ""
    account: str = ""
    nodes: int = 1
    cpus: int = 1
    mem_mib: int = 0
    gpus: int = 0
    gres: str = ""
    time_ns: int = 3600 * 10**9
    component: str = "satellite"

    @property
    def core_ns(self) -> int:
        """The most core-ns that one satellite of this shape can use."""
        return self.nodes * self.cpus * self.time_ns


class AllocPolicy(msgspec.Struct, frozen=True, array_like=True):
    """What the user allows the broker to request and to give back. Times are in ns.

    Attributes:
        max_nodes: how many nodes of satellites may be held or requested at once; 0 to request none.
        max_core_ns: core-ns that all satellites of this job may use together. What living
            satellites could still use counts as used.
        min_nodes: how many nodes are kept even if they are idle; at least 1.
        target_ns: a satellite is requested when the queue would take longer than this to drain.
        grow_after_ns: a request is made only after such a queue was expected for this long.
        arrive_ns: expected time from a request until the satellite's worker joins; learned.
        idle_ns: an allocation that was idle for this long is given back; 0 for never.
        components: whether components of the job, and satellites that others submitted, are given
            back too.
        patience_ns: a request that waited for longer is withdrawn, if another shape may be tried.
        join_ns: a satellite whose worker has not joined this long after its start is given up.
        backoff_ns: how long no request of a shape is made after Slurm rejected one. The time
            doubles with each further rejection.
        backoff_max_ns: the longest such time.
        asks_max: how many requests may be open at once.
        shapes: what may be requested, in the order of preference.
    """

    max_nodes: int = 0
    max_core_ns: int = 0
    min_nodes: int = 1
    target_ns: int = 60 * 10**9
    grow_after_ns: int = 10 * 10**9
    arrive_ns: int = 30 * 10**9
    idle_ns: int = 0
    components: bool = False
    patience_ns: int = 600 * 10**9
    join_ns: int = 120 * 10**9
    backoff_ns: int = 60 * 10**9
    backoff_max_ns: int = 3600 * 10**9
    asks_max: int = 4
    shapes: tuple[SatelliteShape, ...] = ()

    def closed(self) -> AllocPolicy:
        """Returns this policy without permission to request anything more."""
        return msgspec.structs.replace(self, max_nodes=0)

    def shape(self, name: str) -> SatelliteShape | None:
        """Returns the shape with this name; None if the user no longer allows it."""
        return next((s for s in self.shapes if s.name == name), None)
