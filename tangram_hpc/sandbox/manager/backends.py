"""Finds out which isolation backends work on this node, and chooses one for each session.

When the worker starts, it builds a tiny sandbox with each backend; what cannot be built is not
offered. Two rules always hold. Untrusted code never gets a backend that cannot keep it from the
files of its user. A worker that is root never runs untrusted code in a `process` sandbox: there it
would be root among the machine's files, with nothing but Landlock to confine it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...domain.isolation import choose_isolation, lacks_image, preferred, takes_images
from ...domain.session import OPEN, SessionSpec
from ...errors import DISK_FULL, InvalidInput
from ...protocol.process_frames import SandboxSpec
from ..isolation import landlock, seccomp, visible_paths
from ..isolation.container_runtimes import RUNTIMES, missing
from ..isolation.image_root import WAYS
from ..network.open_network import STACK
from .probe import RuntimeReport, examine

_TRIAL_FILES = 32  # at least as many as a trial makes
_PROBE_S = 30.0  # to build a sandbox; a node on which many workers start at once is slow
# what `why_not` has reasons for, besides the names of backends
_ROOT_BY = "image root by "  # followed by one of WAYS
SEVERAL_USERS = "several users in an image"
OPEN_NETWORK = "open network"
_ROOT = ("this worker is root, and root runs untrusted code only in namespaces: install "
         "bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), or start the worker as "
         "an ordinary user")
# Their sandboxes leave /proc/sys and the node's devices to the user of the worker.
_ONLY_OF_USERS = ("apptainer", "enroot")
_ROOT_INSIDE = ("this worker is root, and code in it would be root of the node: install "
                "bubblewrap, or start the worker as an ordinary user")
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


def is_root() -> bool:
    """Whether processes that this one starts without namespaces would be root."""
    return os.geteuid() == 0


def _yama() -> int:
    """The kernel's `ptrace_scope`, 0 to 3; 0 where the kernel has no Yama."""
    try:
        with open(_YAMA) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def _why_no_process() -> str:
    """Why no `process` sandbox can hold untrusted code here; empty if it can."""
    if not landlock.abi():
        return "this kernel has no Landlock"
    if landlock.abi() < landlock.ABI_SCOPES:
        return "this kernel's Landlock (older than 6.12) cannot restrict signals"
    if not seccomp.available():  # without a filter the code could connect to munge's socket
        return "this kernel cannot filter system calls"
    if is_root():
        return _ROOT
    if _yama() > 1:
        return ("kernel.yama.ptrace_scope is above 1, so no file mode can be changed in it; set it "
                "to 1, or install bubblewrap")
    return ""


def _check_room(scratch: str) -> None:
    """Refuses a scratch folder that has no room to try a sandbox in: what has failed there may work
    all the same, and a worker tries it only once.

    Raises:
        InvalidInput: the disk is full, or a quota is used up.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="tangram-probe-", dir=scratch or None) as place:
            for number in range(_TRIAL_FILES):
                with open(os.path.join(place, str(number)), "wb") as file:
                    file.write(bytes(4096))
    except OSError as error:
        if error.errno in DISK_FULL:
            raise InvalidInput(f"scratch: no sandbox can be tried in {scratch or 'TMPDIR'} "
                               f"({error.strerror}); make room there, or set `scratch` to another "
                               "node-local folder") from None


@dataclass(frozen=True)
class Backends:
    """The backends that work here.

    Attributes:
        trusted: backends for code that may see the files of its user, in order of preference.
        untrusted: backends for code that may not, in order of preference.
        why_not: for each backend that does not work, and for each way to write an image that does
            not, one line that says why.
        read: paths of the node that sandboxes may read.
        bwrap: what trying bwrap has found out, or that it is not installed.
        open_network: the program by which sandboxes of bwrap have an open network; empty where no
            program works, for which `why_not` gives the reason.
    """

    trusted: tuple[str, ...] = ("process",)
    untrusted: tuple[str, ...] = ()
    why_not: dict[str, str] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    bwrap: RuntimeReport = field(default_factory=RuntimeReport)
    open_network: str = ""

    @classmethod
    def probed(cls, default: str = "", read_paths: Sequence[str] = (), scratch: str = ""
               ) -> Backends:
        """Builds a tiny sandbox with each backend.

        Args:
            default: the backend that the setting `isolation` prefers; empty for none.
            read_paths: paths that sandboxes may read besides the system's own.
            scratch: the directory for sandboxes' files, on whose file system overlays depend;
                empty for where temporary files are.

        Raises:
            InvalidInput: `default` is unknown or does not work here, a path must not be visible, or
                the disk of `scratch` is full.
        """
        try:
            read = tuple(visible_paths.readable(read_paths))
        except ValueError as error:
            raise InvalidInput(f"config field `read_paths`: {error}") from None
        why_not = {name: missing(runtime) for name, runtime in RUNTIMES.items()}
        # the other runtimes can be tried only with an image
        bwrap = (RuntimeReport(why_not["bwrap"]) if why_not["bwrap"]
                 else examine(RUNTIMES["bwrap"], "", read, _PROBE_S, scratch))
        why_not |= {"bwrap": bwrap.why_not, OPEN_NETWORK: bwrap.why_not or bwrap.why_not_open,
                    SEVERAL_USERS: bwrap.why_no_users,
                    **{_ROOT_BY + way: why for way, why in bwrap.why_no_root.items()}}
        if bwrap.why_not or bwrap.why_no_root:
            _check_room(scratch)
        if is_root():
            for name in _ONLY_OF_USERS:
                why_not[name] = why_not[name] or _ROOT_INSIDE
        works = tuple(name for name in RUNTIMES if not why_not[name])
        why_not["process"] = _why_no_process()
        safe = () if why_not["process"] else ("process",)
        untrusted = works[:1] + safe + works[1:] if works[:1] == ("bwrap",) else safe + works
        if default and default not in ("process", *works):
            raise InvalidInput(f"config field `isolation`: {default} cannot be used here "
                               f"({why_not.get(default, 'there is no such backend')})")
        return cls(preferred(("process", *works), default), preferred(untrusted, default),
                   {name: why for name, why in why_not.items() if why}, read, bwrap,
                   "" if why_not[OPEN_NETWORK] else STACK)

    def box(self, spec: SessionSpec) -> SandboxSpec:
        """Chooses how the sandbox of a session is built.

        Raises:
            InvalidInput: no backend that works here can build it.
        """
        backend = choose_isolation(self.trusted if spec.trusted else self.untrusted, spec)
        if not backend:
            raise InvalidInput(self._refusal(spec))
        if spec.network == OPEN and not self.open_network:
            raise InvalidInput("network: an open one cannot be built here "
                               f"({self.why_not.get(OPEN_NETWORK, 'it was not tried')})")
        writable = bool(spec.image) and spec.writable and backend == "bwrap"
        if writable and not self.bwrap.root:
            raise InvalidInput("image: no root that can be written can be built here "
                               f"({self._why_no_root()}); pass writable=False for one that is "
                               "read-only")
        return SandboxSpec(backend, spec.trusted, spec.network, spec.image, writable)

    def _why_no_root(self) -> str:
        found = (f"{way}: {why}" for way in WAYS if (why := self.why_not.get(_ROOT_BY + way)))
        return "; ".join(found) or "it was not tried"

    def _refusal(self, spec: SessionSpec) -> str:
        backend = spec.backend
        if why := lacks_image(self.trusted if spec.trusted else self.untrusted, spec):
            return why
        if backend in self.trusted and spec.image and not takes_images(backend):
            return f"image: {backend} cannot build a sandbox from {spec.image!r}"
        if backend:
            why = self.why_not.get(backend, "there is no such backend")
            return f"backend: {backend} cannot be used here ({why})"
        if spec.image:
            return f"image: no backend that works here builds a sandbox from {spec.image!r}"
        return ("trusted: nothing here can keep a sandbox from your own files (bwrap: "
                f"{self.why_not.get('bwrap')}; process: {self.why_not.get('process')}); say "
                "trusted=True for code that may see them")
