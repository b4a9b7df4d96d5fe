"""Pure. Allocations that come and go beside the job's own: what may be asked of Slurm, and bounds.

An *allocation* is Slurm's grant. The job's own is never asked for nor given back. A *satellite* is
a further job whose workers join the broker; a het component of the job is an allocation too, as it
can be given back by itself.
"""

from __future__ import annotations

import msgspec


class SatelliteShape(msgspec.Struct, frozen=True, array_like=True):
    """One kind of satellite that the user lets the broker ask for.

    Attributes:
        name: what people call it; one of its own.
        partition, qos, account: as sbatch takes them; empty for the site's default.
        nodes: nodes of one, each with a worker; it is given back as a whole.
        cpus: CPUs of each node that it asks for and lends.
        mem_mib: memory of each node; 0 for the site's default.
        gpus: GPUs of each node.
        gres: what Slurm is asked for them ("gpu:h100:4"); empty for `gpu:N`.
        time_ns: its time limit; all of it counts against the user's core-hours until it has ended.
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
        """The most that one can use, in core-ns."""
        return self.nodes * self.cpus * self.time_ns


class AllocPolicy(msgspec.Struct, frozen=True, array_like=True):
    """What the user lets the broker do. Times in ns.

    Attributes:
        max_nodes: satellites' nodes held or asked for at once; 0: none is ever asked for.
        max_core_ns: what all satellites of this job together may use, in core-ns, counting what
            those that live could still use.
        min_nodes: nodes that stay, whatever idles; at least 1.
        target_ns: the queue should drain within this time; more is asked for when it will not.
        grow_after_ns: how long that must have been so.
        arrive_ns: how long a satellite is believed to take until its worker has joined; learned.
        idle_ns: what idles for so long is given back; 0 for never.
        components: whether het components and satellites that others submitted are given back too.
        patience_ns: a request that waits for longer is withdrawn if another shape may be tried.
        join_ns: a satellite whose worker has not joined so long after its start is given up.
        backoff_ns, backoff_max_ns: no request of a shape for so long after a rejection of it,
            doubling with each further one, up to the second.
        asks_max: requests made at once.
        shapes: what may be asked for, those preferred first.
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
        """The same, but nothing more is asked for."""
        return msgspec.structs.replace(self, max_nodes=0)

    def shape(self, name: str) -> SatelliteShape | None:
        """The shape of that name, if it is still one of the user's."""
        return next((s for s in self.shapes if s.name == name), None)
