"""Checks what isolates sandboxes here: programs, namespaces, Landlock and seccomp, cgroups.

The checks call the worker's own probes, which build a tiny sandbox and a tiny cgroup and remove
both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

from ..domain.isolation import guards_without_image, networks
from ..errors import InvalidInput
from ..resources.cpu import affinity, enforce
from ..sandbox.isolation import landlock, seccomp
from ..sandbox.isolation.container_runtimes import RUNTIMES
from ..sandbox.manager.backends import Backends, is_root
from ..sandbox.process import fast_path
from .check import CheckContext, CheckSpec, Finding, fail, ok, skip, warn
from .storage import scratch_base

_NEWUSER, _NEWNS = 0x10000000, 0x00020000
_REMEDY = "install bubblewrap (unprivileged user namespaces must be on), or a kernel with " \
        f"Landlock ABI {landlock.ABI_SCOPES} (Linux 6.12)"

_AS_ROOT = "install bubblewrap, or start workers as an ordinary user"


def sandboxes(context: CheckContext) -> Finding:
    """Checks which isolation backends work here, and whether one may hold untrusted code."""
    try:
        backends = Backends.probed(context.config.isolation, context.config.read_paths,
                                   str(scratch_base(context)))  # where a worker sweeps
    except InvalidInput as error:
        return fail(str(error), "correct that setting: no worker starts with it")
    lacking = "; ".join(f"{name}: {why.removeprefix(f'{name}: ')}" for name, why in
                        backends.why_not.items() if not why.endswith("is not installed"))
    if not backends.untrusted:
        return warn(f"nothing here isolates untrusted code ({lacking or 'no program'})",
                    f"{_AS_ROOT if is_root() else _REMEDY}; until then sessions need trusted=True")
    if not guards_without_image(backends.untrusted):
        return warn(f"only {', '.join(_named(backends.untrusted))} isolates untrusted code, in "
                    f"sessions with an image ({lacking or 'no other program'})",
                    f"{_AS_ROOT if is_root() else _REMEDY}; until then commands and sessions "
                    "without an image need trusted=True")
    users = ", with several users" if backends.bwrap.users else ""
    way = backends.bwrap.root
    root = f"; sessions write their image by {way}{users}" if way else ""
    root += f"; networks: {', '.join(networks(backends.untrusted, backends.open_network))}"
    return ok(f"untrusted code in {', '.join(_named(backends.untrusted))}{root}"
              f"{f' ({lacking})' if lacking else ''}")


def _named(backends: tuple[str, ...]) -> list[str]:
    """Returns the backends' names, with a note on those that need an image and were only found."""
    return [name + (" (not tried: it needs an image)" if name in RUNTIMES
                    and RUNTIMES[name].needs_image else "") for name in backends]


def kernel_isolation(context: CheckContext) -> Finding:
    """Checks what the backend `process` needs, which uses no program and no namespaces."""
    level, filtered = landlock.abi(), seccomp.available()
    text = f"Landlock {f'ABI {level}' if level else 'is not there'}, system call filter " \
           f"{'works' if filtered else 'does not'}"
    if not filtered:
        return warn(f"{text}: untrusted code in bwrap or a container may make any system call, "
                    "and records lack `+seccomp`",
                    "a kernel with seccomp filters (CONFIG_SECCOMP_FILTER); a container around "
                    "this node may forbid them")
    if is_root():
        return skip(f"{text}; a worker that is root runs untrusted code in bwrap or a container "
                    "only")
    if level >= landlock.ABI_SCOPES:
        return ok(text)
    return warn(f"{text}: `process` is for trusted code only here",
                f"a kernel with Landlock ABI {landlock.ABI_SCOPES} (Linux 6.12), or bubblewrap")


def namespaces(context: CheckContext) -> Finding:
    """Checks that a user namespace can be entered and mounted in.

    The process cannot leave the namespace again; that does no harm, as each check has a process of
    its own.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    step = "made"
    try:
        _checked(libc.unshare(_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        step = "filled"
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        step = "used"
        _checked(libc.unshare(_NEWNS))
    except OSError as error:
        return warn(f"cannot be {step}: {error.strerror}", _namespace_remedy())
    return ok("a user namespace can be made and used" + (" (as root)" if uid == 0 else ""))


def _checked(code: int) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) + (
            " (none is left to you)" if number == errno.ENOSPC else ""))


def _namespace_remedy() -> str:
    """Returns the remedy: the kernel setting that forbids namespaces, where one does."""
    for path, off, fix in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0",
         "sysctl kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
         "an AppArmor profile with `userns` for bwrap, or "
         "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ):
        try:
            if Path(path).read_text().strip() == off:
                return f"ask the site for: {fix}"
        except OSError:
            continue
    return "bwrap, apptainer and enroot need them, and a container often forbids them; `process` " \
           "does without"


def cgroups(context: CheckContext) -> Finding:
    """Checks what limits a sandbox to its cores and its memory."""
    real = len(affinity.usable())
    count = context.config.cpus or (context.place.cpus if context.place is not None else 0) or real
    try:
        best = enforce.probe(count <= real, context.config.enforcement)
    except InvalidInput as error:
        return fail(str(error), "correct that setting: no worker starts with it")
    name, limits = best.name, best.limits
    best.close()
    if {"memory", "pids"} <= limits:
        return ok(f"{name} limits {', '.join(sorted(limits))}")
    if limits:
        return warn(f"{name} limits {', '.join(sorted(limits))} only",
                    "ask the site to delegate memory and pids as well")
    return warn(f"{name}: memory and processes are measured, not limited "
                f"({_why_no_cgroup(count <= real)})",
                "works as it is; for hard limits ask the site to delegate a cgroup to the job "
                "(docs/SANDBOXES.md)")


def _why_no_cgroup(pinned: bool) -> str:
    reasons = []
    for name in ("cgroup2", "cgroup1"):
        try:
            enforce.probe(pinned, name).close()
        except InvalidInput as error:
            reasons.append(f"{name}: {_short(str(error))}")
    return "; ".join(reasons) or "the setting `enforcement` says so"


def _short(text: str) -> str:
    """Returns the first of several reasons, without the long path that it contains."""
    first = text.partition("does not work here (")[2].partition(": '/")[0]
    return re.sub(r"\[Errno \d+\] ", "", first).partition("); leave")[0]


def plain_commands(context: CheckContext) -> Finding:
    """Checks whether the compiled fast path serves plain commands."""
    if not context.config.compiled:
        return ok("Python (compiled = false)")
    if fast_path.built():
        return ok("the compiled loop")
    return warn("Python: the compiled loop was not built for this Python and machine, so a command "
                "that does nothing costs several times as much",
                "install again where there is a C compiler")


def programs(context: CheckContext) -> Finding:
    """Checks which programs that build sandboxes are on the PATH."""
    from ..sandbox.isolation.container_runtimes import missing

    there = [name for name, runtime in RUNTIMES.items() if not missing(runtime)]
    lacking = [name for name in RUNTIMES if name not in there]
    text = f"{', '.join(there) or 'none'} on the PATH; not {', '.join(lacking)}" if lacking else (
        f"{', '.join(there)} on the PATH")
    return ok(text) if there else skip(f"{text}; `process` needs none")


CHECKS = (
    CheckSpec("programs", programs),
    CheckSpec("sandboxes", sandboxes, 60.0,
              "a program that builds sandboxes hangs: try it by hand"),
    CheckSpec("plain commands", plain_commands),
    CheckSpec("kernel limits", kernel_isolation), CheckSpec("namespaces", namespaces),
    CheckSpec("cgroups", cgroups, 30.0),
)
