"""Defines `SessionSpec`, what a client asks of a session. Pure.

A session is a trajectory's sandbox, which keeps its state from one action to the next. It holds
memory while it is open, and CPUs only while one of its actions runs (allocate-on-execution,
ARL-Tangram, section 5.2). A placer that reserves CPUs for a whole session (`static:K`) says so when
it places the session, not here.
"""

from __future__ import annotations

import msgspec

from .ids import show

# What happens to the processes that an action leaves running, until the session's next action
# begins: they are stopped, or they may use a small share of one core, or they are killed with the
# action that left them.
BACKGROUNDS = ("stop", "share", "end")


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a client asks of a session.

    Attributes:
        id: number that the client chose (`domain.ids`).
        name: what people see in listings; empty for none.
        mem_mib: memory that it holds while it is open.
        component: the het component or partition on whose nodes it must be; empty for any.
        parallel: whether its actions may run at the same time; otherwise one runs after another.
        backend: one of `isolation.BACKENDS`; empty for the best that its node has.
        image: the image of its file system (`domain.image_name`); empty for the node's own file
            system.
        network: whether it may use the network.
        disk_mib: limit on the size of its files; 0 for the site's default.
        trusted: whether the user wrote its code, so that it may see the user's files.
        background: what happens to processes that outlive their action: one of `BACKGROUNDS`.
        origin: id of the session whose files it begins with, if it is a fork; 0 for none.
        idle_ns: it is closed after so long without an action and without a renewal; 0 for never.
        grace_ns: how long it stays open after its client is lost; -1 for the broker's own grace.
        movable: whether its files are all that it needs to go on. When its node is drained, it
            moves to another node with them. It loses its background processes, its host name, and
            all files outside its own directory and its temporary directory.
        files: digest of the archive of files that it begins with after a move; only the broker sets
            it.
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
        """Returns this specification, to begin on another node with the files of this digest.

        It has no origin any more: a session that moved is no longer a fork of another one.
        """
        return msgspec.structs.replace(self, origin=0, files=files)


def why_ended(session: int, reason: str) -> str:
    """Returns the reason to give for an action that ended because its session ended.

    Args:
        session: id of the session.
        reason: why the session ended; empty if its own client closed it.
    """
    return f"session {show(session)} " + (f"ended: {reason}" if reason else
                                          "was closed by its client")
