"""Owns: which isolation backends work on this node, and which of them a session gets.

Law: found out by building a sandbox, once, when the worker starts. Code that is not trusted never
gets one that cannot keep it from its user's files. A worker that is root gives it no `process`
sandbox, in which it would be root among the machine's files with Landlock alone before them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...domain.isolation import choose, preferred, takes_image
from ...domain.session import SessionSpec
from ...errors import InvalidInput
from ...protocol.process_frames import Box
from ..isolation import landlock, seccomp, visible_paths
from ..isolation.container_runtimes import RUNTIMES, missing
from .probe import probe

_PROBE_S = 10.0
_ROOT = ("this worker is root, and root runs untrusted code only in namespaces: install "
         "bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), or start the worker as "
         "an ordinary user")
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


def is_root() -> bool:
    """Whether what this process starts would be root without namespaces of its own."""
    return os.geteuid() == 0


def _yama() -> int:
    """How far the kernel forbids to trace one's own processes: 0 to 3; 0 where it has no Yama."""
    try:
        with open(_YAMA) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Backends:
    """What works here, best first, and why the others do not.

    Attributes:
        trusted: for code that may see its user's files.
        untrusted: for code that may not.
        read: the host's paths that sandboxes may read.
    """

    trusted: tuple[str, ...] = ("process",)
    untrusted: tuple[str, ...] = ()
    why_not: dict[str, str] = field(default_factory=dict)
    read: tuple[str, ...] = ()

    @classmethod
    def probed(cls, default: str = "", read_paths: Sequence[str] = ()) -> Backends:
        """Builds a tiny sandbox with each.

        Raises:
            InvalidInput: the default is not a backend or does not work here, or a path must not
                be shown.
        """
        try:
            read = tuple(visible_paths.readable(read_paths))
        except ValueError as error:
            raise InvalidInput(f"config field `read_paths`: {error}") from None
        why_not = {name: missing(runtime) for name, runtime in RUNTIMES.items()}
        for name, runtime in RUNTIMES.items():
            if not why_not[name] and not runtime.needs_image:  # else only an image can show it
                why_not[name] = probe(runtime, "", read, _PROBE_S)
        works = tuple(name for name in RUNTIMES if not why_not[name])
        why_not["process"] = "" if landlock.abi() else "this kernel has no Landlock"
        if landlock.abi() in range(1, landlock.ABI_SCOPES):
            why_not["process"] = "this kernel's Landlock does not hold signals back"
        if not why_not["process"] and not seccomp.available():  # munge's socket would be reached
            why_not["process"] = "this kernel cannot filter system calls"
        if not why_not["process"] and is_root():
            why_not["process"] = _ROOT
        if not why_not["process"] and _yama() > 1:
            why_not["process"] = ("kernel.yama.ptrace_scope is above 1, so no file mode can be "
                                  "changed in it; set it to 1, or install bubblewrap")
        safe = () if why_not["process"] else ("process",)
        untrusted = works[:1] + safe + works[1:] if works[:1] == ("bwrap",) else safe + works
        if default and default not in ("process", *works):
            raise InvalidInput(f"config field `isolation`: {default} cannot be used here "
                               f"({why_not.get(default, 'there is no such backend')})")
        return cls(preferred(("process", *works), default), preferred(untrusted, default),
                   {name: why for name, why in why_not.items() if why}, read)

    def box(self, spec: SessionSpec) -> Box:
        """How a session's sandbox is to be built.

        Raises:
            InvalidInput: it cannot be had here.
        """
        backend = choose(self.trusted if spec.trusted else self.untrusted, spec)
        if not backend:
            raise InvalidInput(self._refusal(spec))
        if backend != "process" and RUNTIMES[backend].needs_image and not spec.image:
            raise InvalidInput(f"image: {backend} makes its sandboxes of one; name it")
        return Box(backend, spec.trusted, spec.network, spec.image)

    def _refusal(self, spec: SessionSpec) -> str:
        backend = spec.backend
        if backend in self.trusted and spec.image and not takes_image(backend, spec.image):
            return f"image: {backend} cannot make a sandbox of {spec.image!r}"
        if backend:
            why = self.why_not.get(backend, "there is no such backend")
            return f"backend: {backend} cannot be used here ({why})"
        if spec.image:
            return f"image: no backend that works here makes a sandbox of {spec.image!r}"
        return ("trusted: nothing here can keep a sandbox from your own files (bwrap: "
                f"{self.why_not.get('bwrap')}; process: {self.why_not.get('process')}); say "
                "trusted=True for code that may see them")
