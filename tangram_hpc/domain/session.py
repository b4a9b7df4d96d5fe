"""Defines `SessionSpec`, a client's request for a session. Pure.

A session is a trajectory's sandbox, which keeps its state from one action to the next. It holds
memory while it is open, and CPUs only while one of its actions runs (allocate-on-execution,
ARL-Tangram, section 5.2). A placer that reserves CPUs for a whole session (`static:K`) says so when
it places the session, not here.
"""

from __future__ import annotations

import re

import msgspec

from .ids import show

# The treatment of processes that an action leaves running, until the session's next action begins:
# they are stopped, or they may use a small share of one core, or they are killed with the action
# that left them, or cores are leased for them while one of them can run.
BACKGROUNDS = ("stop", "share", "end", "run")

SNAPSHOT_NAME = re.compile(r"snap-[0-9a-f]{24}")


# What a session may reach: False for nothing outside of its sandbox, True for the node's whole
# network; LOOPBACK is like False and promises a loopback of the sandbox's own; OPEN is all that the
# node reaches, from a network of the sandbox's own, without the node's loopback; a tuple holds the
# entries of an allow-list (`protocol/allow_list.py`), which a proxy applies.
Network = bool | str | tuple[str, ...]
LOOPBACK = "loopback"
OPEN = "open"


def needs_namespace(network: Network) -> bool:
    """Returns whether a session needs a network namespace of its own."""
    return not isinstance(network, bool)


def leads_outside(network: Network) -> bool:
    """Whether a session connects to the outside and looks up names by itself, without a proxy."""
    return network is True or network == OPEN


class SessionSpec(msgspec.Struct, frozen=True, array_like=True):
    """A client's request for a session.

    Attributes:
        id: number that the client chose (`domain.ids`).
        name: what people see in listings; empty for none.
        mem_mib: memory that it holds while it is open.
        component: the het component or partition on whose nodes it must be; empty for any.
        parallel: whether its actions may run at the same time; otherwise one runs after another.
        backend: one of `isolation.BACKENDS`; empty for the best that its node has.
        image: the image of its file system (`domain.image_name`); empty for the node's own file
            system.
        network: what it may reach; see `Network`.
        disk_mib: limit on the size of its files; 0 for the site's default.
        trusted: whether the user wrote its code, so that the session may see the user's files.
        background: what happens to processes that outlive their action: one of `BACKGROUNDS`.
        origin: id of the session whose files it begins with, if it is a fork; 0 for none.
        idle_ns: the session is closed after this time without an action and without a renewal; 0
            for never.
        grace_ns: how long it stays open after its client is lost; -1 for the broker's own grace.
        movable: whether the session can go on from its files alone. If so, it moves to another node
            with them when its node is drained. It then loses its background processes, its host
            name, and all files outside its own directory and its temporary directory.
        files: digest of the archive of files that it begins with after a move; only the broker sets
            it.
        attach_hash: `session_token.hash_of` the token by which other clients attach; empty for a
            session that is not shared. The name of a shared session is unique while it is open.
        close_hash: the same for the token whose holder may also close the session and hold it.
        ttl_ns: it is closed so long after it opened, whatever runs in it; 0 for never.
        outlives: whether it stays open when its client goes away, until its time-to-live or its
            idle time is over.
        secrets: pairs of an environment variable of its commands and the name of the secret that is
            its value. Values are never part of a specification.
        background_cpus: with `background="run"`, the numbers of CPUs that may be leased for its
            background processes, ascending.
        writable: whether it may write the root of its image, where its backend can give it that.
        user: the user of its commands, a name or a number of its image; empty for the sandbox's
            own.
        snapshot: name of the snapshot whose files it begins with; empty for none. The broker then
            fills in `image`.
    """

    id: int
    name: str = ""
    mem_mib: int = 0
    component: str = ""
    parallel: bool = False
    backend: str = ""
    image: str = ""
    network: Network = False
    disk_mib: int = 0
    trusted: bool = False
    background: str = "stop"
    origin: int = 0
    idle_ns: int = 0
    grace_ns: int = -1
    movable: bool = False
    files: str = ""
    attach_hash: str = ""
    close_hash: str = ""
    ttl_ns: int = 0
    outlives: bool = False
    secrets: tuple[tuple[str, str], ...] = ()
    background_cpus: tuple[int, ...] = (1,)
    writable: bool = True
    user: str = ""
    snapshot: str = ""

    @property
    def shared(self) -> bool:
        """Whether other clients may attach to it."""
        return bool(self.attach_hash)

    def moved(self, files: str) -> SessionSpec:
        """Returns the specification for another node, where the session begins with these files.

        The result has no origin and no snapshot, because the archive holds their files.
        """
        return msgspec.structs.replace(self, origin=0, files=files, snapshot="")

    def with_image(self, image: str) -> SessionSpec:
        """Returns the specification with the image that its snapshot or its origin has."""
        return msgspec.structs.replace(self, image=image)

    def shown(self) -> SessionSpec:
        """Returns this specification as another client may see it: without the files that it began
        with and without what checks tokens."""
        return msgspec.structs.replace(self, origin=0, files="", attach_hash="", close_hash="")

    def for_fork(self) -> SessionSpec:
        """Returns the specification that a fork of this session begins from: the same, but not
        shared, since tokens belong to one session, and so it ends with its client."""
        return msgspec.structs.replace(self, origin=self.id, files="", attach_hash="",
                                       close_hash="", outlives=False)


def why_ended(session: int, reason: str) -> str:
    """Returns the reason to give for an action that ended because its session ended.

    Args:
        session: id of the session.
        reason: why the session ended; empty if its own client closed it.
    """
    return f"session {show(session)} " + (f"ended: {reason}" if reason else
                                          "was closed by its client")
