"""Owns: putting a host behind the isolation that its box asks for, once, before anything else runs
in it, and how its sandbox looks from within. Must not start a command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from dataclasses import dataclass

from . import join, landlock, scratch, seccomp, tree, view
from .holders import HOLDERS, Holder
from .hostwire import Setup
from .units_file import path_of
from .ward import Beneath, Inside, Ward

INSIDE = "/session"
UNITS_INSIDE = "/session.cpus"
_READY_S = 60.0  # an image may have to be unpacked
_ERROR_MAX = 400


class Unbuildable(Exception):
    """The sandbox cannot be built; the text is one line that says why."""


@dataclass(frozen=True)
class Wall:
    """What stands around a sandbox.

    Attributes:
        isolation: what it really is, for records.
        ward: reaches its processes.
        home: the session's directory, as its commands name it.
        tmp: where they may put what is temporary.
        units: where they find how many CPUs they have.
        own_root: whether they see another root than this host's.
        keep: descriptors that hold the sandbox up.
        holder: the process that does, 0 for none.
    """

    isolation: str
    ward: Ward
    home: str
    tmp: str
    units: str
    own_root: bool = False
    keep: tuple[int, ...] = ()
    holder: int = 0


def build(setup: Setup, home: str) -> Wall:
    """Goes behind the wall; there is no way back for this process.

    Raises:
        Unbuildable: it cannot be done as promised.
    """
    box = setup.box
    try:
        if box.backend == "process":
            return _process(setup, home)
        return _held(setup, home, HOLDERS[box.backend]())
    except OSError as error:
        what = error.strerror or str(error)
        raise Unbuildable(f"backend: {box.backend} cannot build a sandbox here ({what})") from None


def _process(setup: Setup, home: str) -> Wall:
    isolation, box = "process", setup.box
    if not box.trusted:
        read = [*setup.read, view.PROC, path_of(home)]
        write = [scratch.work(home), scratch.tmp(home), *view.devices()]
        found = landlock.restrict(read, write, network=box.network)
        isolation += f"+landlock{found}"
        if seccomp.available():
            seccomp.restrict(namespaced=False, network=box.network)
            isolation += "+seccomp"
    return Wall(isolation, Beneath(), scratch.work(home), scratch.tmp(home), path_of(home))


def _held(setup: Setup, home: str, holder: Holder) -> Wall:
    box = setup.box
    before = frozenset(tree.descendants(os.getpid()))
    argv = holder.argv(home, box.image, box.network, setup.read,
                       files=((path_of(home), UNITS_INSIDE),))
    process = subprocess.Popen(argv, env=holder.env(), stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, close_fds=True)
    process.returncode = 0  # its init waits for it, not this object
    assert process.stdin and process.stdout and process.stderr
    keep = os.dup(process.stdin.fileno())
    try:
        _await_ready(process, holder.name)
        join.enter(_innermost(before))
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    os.chdir(INSIDE)
    isolation = holder.name
    if not box.trusted and seccomp.available():
        seccomp.restrict(namespaced=True, network=box.network)
        isolation += "+seccomp"
    own = frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
    return Wall(isolation, Inside(own), INSIDE, "/tmp", UNITS_INSIDE, bool(box.image), (keep,),
                process.pid)


def _innermost(before: frozenset[int]) -> int:
    """The process of the holder that is first in the deepest pid namespace.

    Raises:
        Unbuildable: the holder made none.
    """
    found: list[tuple[int, int, int]] = []
    for pid in tree.descendants(os.getpid()):
        if pid not in before:
            for line in (tree.read(f"/proc/{pid}/status") or b"").splitlines():
                if line.startswith(b"NSpid:"):
                    numbers = [int(word) for word in line.split()[1:]]
                    found.append((-len(numbers), numbers[-1], pid))
    depth, _, pid = min(found, default=(0, 0, 0))
    if depth > -2:
        raise Unbuildable("backend: its sandbox has no pid namespace of its own")
    return pid


def _await_ready(process: subprocess.Popen[bytes], name: str) -> None:
    """Waits for the holder's word from within.

    Raises:
        Unbuildable: it ended, or did not come in time.
    """
    assert process.stdout and process.stderr
    readable, _, _ = select.select([process.stdout], [], [], _READY_S)
    if readable and os.read(process.stdout.fileno(), 64):
        return
    os.kill(process.pid, signal.SIGKILL)
    text = os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace").strip()
    last = text.splitlines()[-1][:_ERROR_MAX] if text else f"no answer within {_READY_S:g} s"
    raise Unbuildable(f"backend: {name} cannot build a sandbox here ({last})")
