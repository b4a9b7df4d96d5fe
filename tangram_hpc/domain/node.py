"""Defines `NodeSpec`, what one worker offers to the broker when it joins. Pure."""

from __future__ import annotations

import msgspec


class NodeSpec(msgspec.Struct, frozen=True, array_like=True):
    """A node of a held allocation.

    Attributes:
        name: Slurm's NodeName (`SLURMD_NODENAME`); the host name without Slurm.
        host: the name of the host.
        cores: numbers of the CPUs that it lends, ordered so that neighbours in the machine are
            neighbours here.
        mem_mib: memory that it lends.
        gpus: indices of the GPUs that it lends.
        component: the het component or partition that it belongs to; empty without Slurm.
        pinned: whether processes are bound to the CPUs that they were lent. False if CPUs are only
            counted, because the node lends more CPUs than its machine has.
        ends_at_ns: when its allocation ends, in ns since the epoch; 0 if no end is known.
        backends: isolation backends that work on it for trusted code, best first.
        untrusted: isolation backends that keep code from the user's files and from the broker's
            key, best first.
        ahead: how many prefetched leases the worker takes for one CPU.
        devices: its GPUs as people read them, such as "2 x NVIDIA H200 140 GiB (cuda)".
        allocation: the job that holds the node, or `LEADER+N` for a het component; empty without
            Slurm.
        enforcement: the mechanism that keeps an action to its CPUs and memory: "cgroup2",
            "cgroup1", "affinity" or "counted".
        neighbours: which of its cores share an L3 cache, then which share a NUMA domain, as sizes
            of consecutive groups of `cores`; empty where that is not known.
        end_by_user: whether the user gave `ends_at_ns` (`tangram worker --end`). Then an end that
            Slurm names for the allocation does not replace it.
        image_root: how sessions may write the root of their image: "overlay", "fuse" or "copy";
            empty if they cannot.
        open_network: the program that gives sessions an open network: "slirp4netns"; empty if none
            works.
        why_not_open: one line that says why none works; empty if one does, or on a node that does
            not say.
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
    image_root: str = ""
    open_network: str = ""
    why_not_open: str = ""

    def ending_at(self, ends_at_ns: int) -> NodeSpec:
        """Returns this node with another end of its allocation, in ns since the epoch."""
        return msgspec.structs.replace(self, ends_at_ns=ends_at_ns)

    def held_by(self, enforcement: str) -> NodeSpec:
        """Returns this node with another enforcement."""
        return msgspec.structs.replace(self, enforcement=enforcement)

    def serves(self, component: str) -> bool:
        """Whether the node is in this het component or partition; an empty name is any."""
        return not component or component == self.component
