"""Keeps a worker's execution processes: its fork server, the warm pools, and each one's directory
and limits.

It knows neither leases nor sessions. All directories of one worker are below one of its own with a
random name, which is removed at the end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...domain.action import Action, Kind
from ...domain.isolation import guards_without_image
from ...domain.session import OPEN, SessionSpec
from ...errors import InvalidInput, ScratchLost
from ...ports import SandboxSettings
from ...protocol.process_frames import (
    INIT,
    RUNNER,
    RemoveDirectory,
    SandboxLimits,
    SandboxSpec,
    Setup,
)
from ...resources.cpu.enforce import Enforcer
from ..files import scratch as folders
from ..isolation import etc
from .backends import Backends
from .execution_processes import ExecutionProcess, ForkServerClient, Owner
from .pools import Pool, StartLimiter

_WARM_BOXES = 4  # most warm pools at a time; the pool that was used longest ago is dropped first
_SPARE = 4  # inits beyond one for each unit, because some actions hold no unit
_State = tuple[int, ...]  # tells a folder from another one at the same path
_RUNNER_BOX = SandboxSpec()
_FREE = SandboxLimits()


class ProcessSupervisor:
    """The execution processes of one executor.

    Args:
        owner: receives what they do and say.
        scratch: a node-local directory, made when it is missing.
        units: how many actions may run at a time.
        settings: choices of the site and the user.
        backends: the isolation backends that work here.
        enforcer: enforces CPUs, memory and the number of processes.
        pinned: whether actions are bound to their CPUs.

    Raises:
        InvalidInput: `scratch` cannot be used.
    """

    def __init__(self, owner: Owner, scratch: Path, units: int, settings: SandboxSettings,
                 backends: Backends, enforcer: Enforcer, pinned: bool) -> None:
        self.backends = backends
        self.enforcer = enforcer
        self._held = enforcer.name if pinned or "quota" in enforcer.limits else "counted"
        self._owner = owner
        self._settings = settings
        self._folder = scratch
        self._roots: list[str] = []  # folders of this fork server and of dead ones
        self._numbers = itertools.count(1)
        self._fork_server = self._make_fork_server()
        self._warm = min(units, 4) if settings.warm < 0 else settings.warm
        self._limit = max(units, self._warm) + _SPARE
        self.start_limiter = StartLimiter(settings.starts_max or max(2, os.cpu_count() or 1))
        self.runners = Pool(lambda: self._fork_server.fork(RUNNER, _RUNNER_BOX), self.start_limiter,
                            units, 0)
        self._pools: dict[tuple[SandboxSpec, _State], Pool] = {}
        if guards_without_image(backends.untrusted):
            self.pool(backends.box(SessionSpec(0))).warm_up()

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._fork_server.pid

    def pool(self, box: SandboxSpec) -> Pool:
        """Returns the pool of a box. A pool is warm from its first use until four other pools have
        been used since, or until another folder has taken the place of its image, which its
        sandboxes do not have. A pool for an open network has no warm processes, since each of them
        would need a network stack that runs.
        """
        key = box, _state_of(box.image)
        pool = self._pools.pop(key, None)
        if pool is None:
            pool = Pool(lambda: self._fork_spare(*key), self.start_limiter, self._limit, 0)
            self._cool([other for (its, _), other in self._pools.items() if its == box])
        self._pools[key] = pool  # keeps them in the order of use
        if pool.warm != self._warm and box.network != OPEN:
            pool.heat(self._warm)
            self._cool([p for p in self._pools.values() if p.warm][:-_WARM_BOXES])
        return pool

    def _fork_spare(self, box: SandboxSpec, state: _State) -> ExecutionProcess:
        process = self.fork(box)
        process.image_state = state
        return process

    def _cool(self, pools: list[Pool]) -> None:
        for pool in pools:
            for process in pool.cool():
                process.kill()

    def build_more(self, process: ExecutionProcess) -> None:
        """Builds sandboxes like that of a process for the next sessions, unless each of them would
        be a copy of an image, which takes as much of the disk as the image.
        """
        if "copy" not in process.isolation.split("+"):
            self.pool(process.box).warm_up()

    def pool_of(self, process: ExecutionProcess) -> Pool:
        """The pool of a process that has no session."""
        return (self.runners if process.kind == RUNNER
                else self._pools[process.box, process.image_state])

    def fork(self, box: SandboxSpec, home: str = "") -> ExecutionProcess:
        """Asks for an init in the directory named `home`, or in a fresh one."""
        return self._fork_server.fork(INIT, box, home)

    def new_directory(self) -> tuple[str, str]:
        """A directory name that is not in use, and its path. The directory is not made."""
        name = folders.new_name()
        return name, os.path.join(self._fork_server.root, name)

    def lies_in(self, folder: str) -> bool:
        """Returns whether the directories of the sandboxes lie in a folder."""
        folder = os.path.realpath(folder)
        return os.path.commonpath([folder, self._fork_server.root]) == folder

    def remove_directory(self, home: str) -> None:
        """Removes the directory of this name, which nobody needs any more."""
        self._fork_server.tell(RemoveDirectory(home))

    def setup(self, process: ExecutionProcess) -> Setup:
        """Makes the cgroup of a new process, if there are cgroups; returns its setup message.

        Raises:
            OSError: its limits cannot be enforced as they should.
        """
        process.group = self.enforcer.group(process.number, process.pid)
        settings, watch = self._settings, not {"memory", "pids"} <= self.enforcer.limits
        bwrap = self.backends.bwrap
        return Setup(round(settings.kill_wait_s * 1e9), settings.output_max, process.box,
                     self.backends.read, self._etc, watch, process.origin, self._held,
                     process.group.joins, settings.compiled, process.group.cpu_file,
                     settings.output_bound,
                     bwrap.root if process.box.writable else "",
                     bwrap.users if process.box.writable else (),
                     settings.keep_outputs, bwrap.old_bwrap, bwrap.resets_sigchld)

    def limits(self, action: Action, spec: SessionSpec | None) -> SandboxLimits:
        """The limits of an action: its own memory is added to its session's. A function that asked
        for no memory has no limit.
        """
        settings, mem = self._settings, action.mem_mib
        if action.kind is Kind.FUNCTION:
            return SandboxLimits(mem) if mem else _FREE
        if spec is None:
            return SandboxLimits(mem, settings.disk_mib, settings.session_pids)
        return SandboxLimits(spec.mem_mib + mem, spec.disk_mib or settings.disk_mib,
                             settings.session_pids)

    def discard(self, process: ExecutionProcess, keep: bool) -> None:
        """Removes what is left of a dead process whose descendants have ended; with `keep` its
        directory stays.
        """
        if process.group is not None:
            process.group.remove()
            process.group = None
        if not keep:
            process.remove_directory()

    def check_folder(self) -> None:
        """Call it before a failure is reported, which the loss of the folder may have caused.

        Raises:
            ScratchLost: the folder of the sandboxes is gone. All that this worker starts from now
                on would fail, and it would soon have failed all actions that wait.
        """
        root = self._fork_server.root
        # a fork server that ends by itself removes its folder, and is replaced
        if not os.path.isdir(root) and not self._fork_server.ends():
            raise ScratchLost(
                f"scratch: {root} was removed while this worker used it, as by a site that cleans "
                "/tmp when another job of the same user ends; set `scratch` to a folder that "
                "nothing cleans")

    def renew(self) -> None:
        """Replaces a fork server that died."""
        self._fork_server.close()
        self._fork_server = self._make_fork_server()

    def close(self, end_others: Callable[[], None]) -> None:
        """Ends every process, calls `end_others` for what else writes here, and removes all
        directories. Blocks until the last process is dead.
        """
        self._fork_server.close()
        end_others()
        self.enforcer.close()
        for root in self._roots:
            folders.remove(root)
        with suppress(OSError):  # other workers may use it
            self._folder.rmdir()

    def _make_fork_server(self) -> ForkServerClient:
        folder = self._folder / f"worker-{folders.new_name()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.own(self._folder)
            folder.mkdir(mode=0o700)
            # the folder inherits a set-gid bit of the one above
            os.chmod(folder, 0o700)
            # resolved: links inside a sandbox are followed by comparing with it
            root = os.path.realpath(folder)
            self._roots.append(root)
            self._etc = etc.copy_etc(self.backends.read, f"{root}/etc")
        except OSError as error:
            folders.remove(str(folder))  # the worker ends, and need not keep a full disk full
            raise InvalidInput(
                f"scratch: cannot use {self._folder} ({error.strerror}); "
                "name a writable directory on a local disk"
            ) from None
        return ForkServerClient(self._owner, root, self._numbers)


def _state_of(image: str) -> _State:
    """Tells an image's folder from another one at the same path; empty where there is no folder."""
    try:
        about = os.stat(image) if image.startswith("/") else None
    except OSError:
        return ()
    # the kernel may give a new folder the inode number of a removed one
    return (about.st_dev, about.st_ino, about.st_ctime_ns) if about is not None else ()
