"""NeMo-Gym's sandbox provider `tangram`: each sandbox is a session of the job's broker.

NeMo-Gym finds the class by its entry point (group `nemo_gym.sandbox_providers`); a configuration
names it:

    sandbox:
      tangram: {backend: bwrap}

The keys below `tangram` are arguments of `Client.session` and of `TangramProvider`. Sessions are
shared, so another process of the job (a verifier, another Ray actor) can attach to a sandbox:
`serialize_handle` returns the name and token for this, and `connect` attaches. No module of this
package imports this one, because it needs NeMo-Gym. It was run with NeMo-Gym 0.7.0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

import tangram_hpc
from tangram_hpc.errors import ActionFailed, BrokerUnreachable, InvalidInput, TangramError

from .harness.harness_session import (
    cpus_of,
    most_output,
    stderr_of,
    whole_path,
    why_unsendable,
)
from .harness.session_options import take_session_options
from .process_client import process_client

_DOWNLOAD_MAX = 8 << 30  # bytes of one download
_TIMEOUT_CODE = 124  # the exit code of the program `timeout` after a time-out
_SCOPES_WITHOUT_END = ("operate",)  # NeMo-Gym's scopes whose holder may not end the sandbox


@dataclass
class Box:
    """A sandbox as this process sees it; `raw` of a SandboxHandle is such an object.

    Attributes:
        session: the session.
        workdir: the working directory of commands; empty for the session's own.
        cpus: cores that a command may use at most.
        attached: whether another process opened the session.
        may_close: whether this process may end it.
        forwards: the local addresses of its ports that `endpoint` has opened, by port.
    """

    session: tangram_hpc.Session
    workdir: str = ""
    cpus: float = 1
    attached: bool = False
    may_close: bool = True
    forwards: dict[int, Any] = field(default_factory=dict)

    def close_forwards(self) -> None:
        """Closes the local addresses of its ports."""
        while self.forwards:
            self.forwards.popitem()[1].close()


class TangramProvider:
    """Makes sandboxes that are sessions; see `SandboxProvider`.

    Args:
        default_timeout_s: the longest run time of a command that names none, in seconds; None for
            no limit. Waiting for cores does not count.
        shell: the program that runs command lines.
        options: arguments of `Client.session` for every sandbox. A sandbox's own `provider_options`
            override them, and the sandbox's image, resources and `ttl_s` override both.

    Raises:
        InvalidInput: a key is unknown.
    """

    name = "tangram"

    def __init__(self, default_timeout_s: float | None = 180, shell: str = "bash",
                 **options: Any) -> None:
        self._options = take_session_options(options, background="run")
        if options:
            raise InvalidInput(f"sandbox.tangram: {min(options)}: no such key; the keys are "
                               "default_timeout_s, shell and arguments of Client.session")
        self._default_timeout_s, self._shell = default_timeout_s, shell
        self._borrowed: list[Box] = []

    # ---- its life ----------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Opens a session and waits until commands can run in it.

        Args:
            spec: the sandbox that is asked for. Its `metadata` is not kept, its `entrypoint` is not
                started. Its `ports` need no preparation, as `endpoint` reaches any port.

        Raises:
            SandboxCreateError: the sandbox can never be opened, or was not opened within
                `ready_timeout_s`.
        """
        try:
            session = await self._open(spec)
            box = Box(session, spec.workdir or "", spec.resources.cpu or 1)
        except (TangramError, asyncio.TimeoutError) as error:
            why = str(error) or "not open in time"  # the error of a time-out has no text
            raise SandboxCreateError(f"tangram: {why}") from error
        return self._handle(box)

    async def _open(self, spec: SandboxSpec) -> tangram_hpc.Session:
        if spec.resources.gpu:
            raise InvalidInput(f"resources.gpu: {spec.resources.gpu}: a sandbox has no GPU; use 0")
        asked = dict(spec.provider_options)
        # not needed: a sandbox holds cores only while a command runs, so it requests none
        asked.pop("resource_requests", None)
        own = take_session_options(asked)
        if asked:
            raise InvalidInput(f"provider_options: {min(asked)}: no such key; the keys are "
                               "arguments of Client.session")
        options: dict[str, Any] = {**self._options, **own}
        if spec.image:
            options["image"] = spec.image.removeprefix("docker://")
        if spec.resources.memory_mib:
            options["mem"] = spec.resources.memory_mib
        if spec.resources.disk_gib:
            options["disk"] = f"{spec.resources.disk_gib}G"
        if spec.ttl_s:
            options["ttl_s"] = spec.ttl_s
        client = await asyncio.to_thread(process_client)
        session = client.session(env=spec.env, shared=True, **options)
        try:
            await asyncio.wait_for(session.opened, spec.ready_timeout_s)
            if spec.workdir:
                await session.mkdir(spec.workdir)
        except BaseException:
            session.close()
            raise
        return session

    def _handle(self, box: Box) -> SandboxHandle:
        return SandboxHandle(box.session.name, self.name, box)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Returns whether the session waits, is open, or has ended."""
        session = _box(handle).session
        if session.closed.done() or session.why_ended:
            return SandboxStatus.STOPPED
        if not session.opened.done():
            return SandboxStatus.STARTING
        failed = session.opened.exception() is not None
        return SandboxStatus.ERROR if failed else SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """Ends the sandbox and waits until its memory is free. A process that may not end the
        sandbox only detaches from it."""
        box = _box(handle)
        box.close_forwards()
        if not box.may_close:
            self._let_go(box)
            return
        box.session.close()
        await asyncio.wait([asyncio.wrap_future(box.session.closed)], timeout=10)
        if box in self._borrowed:
            self._borrowed.remove(box)

    async def aclose(self) -> None:
        """Detaches from the sandboxes of other processes. Sandboxes of this process stay open until
        `close` or the end of the process, because each sandbox may have a provider of its own."""
        for box in list(self._borrowed):
            self._let_go(box)

    def _let_go(self, box: Box) -> None:
        box.close_forwards()
        if box in self._borrowed:
            self._borrowed.remove(box)
            box.session.detach()

    # ---- its verbs ---------------------------------------------------------------------------

    async def exec(self, handle: SandboxHandle, command: str, *, cwd: str | None = None,
                   env: dict[str, str] | None = None, timeout_s: float | None = None,
                   user: str | int | None = None) -> SandboxExecResult:
        """Runs a command line. A time-out is a result with the `error_type` "timeout"; that the
        session has ended, also with its broker, is a result with the `error_type` "sandbox"."""
        box = _box(handle)
        if why := why_unsendable(command):
            return SandboxExecResult(None, f"[tangram: the command cannot be run: {why}]\n", 126)
        limit = timeout_s if timeout_s is not None else self._default_timeout_s
        who = {} if user is None or not box.session.spec.image else {"user": str(user)}
        try:
            result = await box.session.exec(
                [self._shell, "-c", command],
                cwd=whole_path(cwd, box.workdir) if cwd else box.workdir, env=env, timeout=limit,
                cpus=cpus_of(box.cpus), output_max=most_output(box.session), keep="both", **who)
        except (ActionFailed, BrokerUnreachable) as error:
            return SandboxExecResult(None, str(error), 125, "sandbox")
        state = result.state
        late = state is tangram_hpc.ActionState.TIMEOUT
        kind = "timeout" if late else (
            "oom" if state is tangram_hpc.ActionState.OUT_OF_MEMORY else None)
        return SandboxExecResult(result.text, stderr_of(result),
                                 _TIMEOUT_CODE if late else result.exit_code, kind)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copies a local file into the sandbox; missing folders are made."""
        box = _box(handle)
        await asyncio.to_thread(box.session.upload, source_path,
                                whole_path(target_path, box.workdir))

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path
                            ) -> None:
        """Copies a file of the sandbox to this machine. Raises FileNotFoundError."""
        box = _box(handle)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(box.session.download, whole_path(source_path, box.workdir),
                                target_path, max_bytes=_DOWNLOAD_MAX)

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint:
        """Returns a URL by which this process's user reaches a TCP server of the sandbox. It is on
        this machine, and leads to the sandbox until `close`. Each connection of it tries at once,
        so wait until the server listens.

        Raises:
            InvalidInput: the port is no port, or nothing can be opened on this machine.
        """
        box = _box(handle)
        if port not in box.forwards:
            box.forwards[port] = box.session.forward(port)
        return SandboxEndpoint(endpoint=box.forwards[port].url)

    # ---- other processes ---------------------------------------------------------------------

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None
                               ) -> dict[str, Any]:
        """Returns a descriptor by which another process of the job can use the sandbox. It holds a
        token.

        Args:
            handle: the sandbox.
            scope: "operate" for a process that may not end it; None for one that may.

        Raises:
            InvalidInput: the descriptor shall allow to end the sandbox, but this process may not do
                that itself.
        """
        box = _box(handle)
        may_close = scope not in _SCOPES_WITHOUT_END
        told = await asyncio.to_thread(box.session.handle, may_close)
        return {"provider": self.name, "sandbox_id": handle.sandbox_id, "session": told.text,
                "workdir": box.workdir or None, "cpus": box.cpus, "may_close": may_close}

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Attaches to the sandbox of another process.

        Args:
            descriptor: the descriptor that `serialize_handle` returned.

        Raises:
            InvalidInput: it is not such a descriptor, or no session of the job has its name and
                token.
            SessionLost: the session has ended; the message says why.
        """
        if not isinstance(descriptor.get("session"), str):
            raise InvalidInput("descriptor: it has no `session`; take it from serialize_handle")
        client = await asyncio.to_thread(process_client)
        session = await asyncio.to_thread(client.attach, descriptor["session"])
        cpus = float(descriptor.get("cpus") or 1)
        box = Box(session, descriptor.get("workdir") or "", cpus if math.isfinite(cpus) else 1,
                  attached=True, may_close=bool(descriptor.get("may_close")))
        self._borrowed.append(box)
        return self._handle(box)


def _box(handle: SandboxHandle) -> Box:
    if not isinstance(handle.raw, Box):
        raise InvalidInput(f"handle: {handle.sandbox_id!r} is no sandbox of provider tangram")
    return handle.raw
