"""Pure. `SessionSpec`: a trajectory's stateful sandbox as its client asked for it.

A session holds memory from open to close and no cores between its actions (allocate-on-execution,
ARL-Tangram §5.2); a placer that reserves cores for whole sessions (`static:K`) says so by its
placement, not here.
"""

from __future__ import annotations

import msgspec

from .ids import show

# Between a session's actions, what they left running is stopped, has a small share of one core, or
# ("end") was killed with the action that left it.
BACKGROUNDS = ("stop", "share", "end")


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a client asks of a session.

    Attributes:
        id: minted by the client.
        mem_mib: memory held from open to close.
        component: only on nodes of this het component or partition; empty for any.
        parallel: whether its actions may run beside each other; else one after another.
        backend: one of `isolation.BACKENDS`; empty for the best that its node has.
        image: what its file system is made of, as its backend names images; empty for the node's.
        network: whether it may reach a network.
        disk_mib: what its files may take; 0 for the site's default.
        trusted: its code is its user's own and may see the user's files.
        background: what becomes of processes that outlive their action, one of `BACKGROUNDS`.
        origin: session whose files it begins with (a fork); 0 for none.
        idle_ns: closed when nothing waited, ran or renewed it for so long; 0 for never.
        grace_ns: how long it outlives the loss of its client; -1 for as long as the broker says.
        movable: its files are all that it needs to go on: when its node is drained, it goes to
            another one with them, and loses its background processes, its host's name and what
            lies outside its directory and its temporary one.
        files: digest of the files it begins with after a move; only the broker sets it.
    """

    id: int
    name: str = ""
    mem_mib: int = 0
    component: str = ""
    parallel: bool = False
    backend: str = ""
    image: str = ""
    network: bool = False
    disk_mib: int = 0
    trusted: bool = False
    background: str = "stop"
    origin: int = 0
    idle_ns: int = 0
    grace_ns: int = -1
    movable: bool = False
    files: str = ""

    def moved(self, files: str) -> SessionSpec:
        """The same, to begin elsewhere with these files: it is nobody's fork any more."""
        return msgspec.structs.replace(self, origin=0, files=files)


def why_ended(session: int, reason: str) -> str:
    """The reason of an action that ended with its session; `reason` is empty where the session's
    own client closed it."""
    return f"session {show(session)} " + (f"ended: {reason}" if reason else
                                          "was closed by its client")
