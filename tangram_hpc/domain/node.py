"""Pure. `NodeSpec`: what one worker lends, as it said when it joined."""

from __future__ import annotations

import msgspec


class NodeSpec(msgspec.Struct, frozen=True, array_like=True):
    """A node of the held allocation.

    Attributes:
        name: Slurm's NodeName (`SLURMD_NODENAME`), or the host's name without Slurm.
        component: het component or partition it belongs to; empty without Slurm.
        cores: unit numbers it lends, neighbours beside each other.
        gpus: GPU indices it lends.
        mem_mib: memory it lends.
        pinned: whether the units are real cores that processes are bound to; otherwise they are
            counted only (more units than the machine has cores).
        ends_at_ns: when its allocation ends (epoch); 0 for no known end.
        backends: isolation backends that work here for code that its user trusts, best first.
        untrusted: those that keep code from its user's files and the broker's key, best first.
        ahead: how many short leases it takes on one unit before those in front of them have ended.
        allocation: the job, or `LEADER+N` for a het component, that its node is of; empty without
            Slurm.
        enforcement: what holds an action to its cores and memory here ("cgroup2", "cgroup1",
            "affinity" or "counted").
        devices: what the GPUs that it lends are, for people ("2 x NVIDIA H200 140 GiB (cuda)").
        neighbours: which of its cores share an L3 cache, then which a NUMA domain: the sizes of
            consecutive groups of `cores`; empty where that is not known.
        end_by_user: whether `ends_at_ns` is its user's word (`tangram worker --end`); the end that
            Slurm names for the allocation does not replace it then.
    """

    name: str
    host: str
    cores: tuple[int, ...]
    mem_mib: int
    gpus: tuple[int, ...] = ()
    component: str = ""
    pinned: bool = False
    ends_at_ns: int = 0
    backends: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    ahead: int = 0
    devices: str = ""
    allocation: str = ""
    enforcement: str = ""
    neighbours: tuple[tuple[int, ...], ...] = ()
    end_by_user: bool = False

    def ending_at(self, ends_at_ns: int) -> NodeSpec:
        """The same, with this end of its allocation."""
        return msgspec.structs.replace(self, ends_at_ns=ends_at_ns)

    def held_by(self, enforcement: str) -> NodeSpec:
        """The same, with this enforcement."""
        return msgspec.structs.replace(self, enforcement=enforcement)

    def serves(self, component: str) -> bool:
        """Whether the node is in this het component or partition; an empty name is any."""
        return not component or component == self.component
