"""Harbor's environment `tangram`: each trial has a session of the job's broker.

Harbor takes a class by its path, so nothing is registered:

    harbor trial start -p TASK --agent oracle --env tangram_hpc.hooks.harbor_environment:TangramEnvironment

The trial's process reaches the broker by `TANGRAM_JOB`, `TANGRAM_ACCESS` or its Slurm job. The
session holds the task's memory while the trial lasts, and cores only while a command runs. The
image of the session is the task's `docker_image`, or the image of the Dockerfile's FROM, in which
the other steps of the Dockerfile are then carried out. No module of this package imports this one,
because it needs Harbor.

The adapter was run with Harbor 0.24.0 and 0.25.0. It also supports older revisions, which ask for
capabilities one by one, but was never run with them. `docs/trainers/HARBOR.md` lists what the
adapter cannot do.
"""  # noqa: E501 - the command line is one line

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

import tangram_hpc
from tangram_hpc.errors import ActionFailed, InvalidInput, TangramError

from .harness.dockerfile_replay import replay_dockerfile
from .harness.dockerfile_steps import base_image, working_directory
from .harness.harness_session import (
    cpus_of,
    most_output,
    stderr_of,
    whole_path,
    why_unsendable,
)
from .harness.session_options import take_session_options
from .process_client import process_client

try:
    from harbor.environments import capabilities as _capabilities
except ImportError:  # an older revision, which asks for each capability by a property
    _capabilities = None

_DOWNLOAD_MAX = 8 << 30  # bytes of one download
_EXACT = ("request", "guarantee")  # Harbor's words for cores that a command waits for
_PUBLIC, _NO_NETWORK = "public", "no-network"  # Harbor's words of `network_mode`
_OWN_KEYS = ("cpus", "shell", "dockerfile_timeout")


class TangramEnvironment(BaseEnvironment):
    """One session of a broker, in which one trial runs.

    Its options come from `--ek NAME=VALUE` or `environment.kwargs`; all are optional. They are the
    arguments of `Client.session` except `env` and `files`; `cpus`, the cores of a command instead
    of the task's; `shell`, the program that runs command lines ("bash"); and `dockerfile_timeout`,
    the seconds that one RUN of a Dockerfile may take.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = take_session_options(kwargs, background="run")
        own = {key: kwargs.pop(key, None) for key in _OWN_KEYS}
        self._asked_cpus, self._build_s = own["cpus"], own["dockerfile_timeout"]
        self._shell = own["shell"] or "bash"
        self._session: tangram_hpc.Session | None = None
        self._env_of_image: dict[str, str] = {}
        self._user_of_image = ""
        self._workdir = ""
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Returns the name of this kind of environment."""
        return "tangram"

    if _capabilities is not None:

        @property
        def capabilities(self) -> Any:
            """The capabilities of an environment of this kind."""
            return _capabilities.EnvironmentCapabilities(disable_internet=True)

        @classmethod
        def resource_capabilities(cls) -> Any:
            """Returns which of the task's resources this environment can limit, and which it can
            reserve."""
            kind = getattr(_capabilities, "EnvironmentResourceCapabilities", None)
            return kind and kind(cpu_limit=True, cpu_request=True, memory_limit=True,
                                 memory_request=True)

    else:
        is_mounted, supports_gpus, can_disable_internet = False, False, True

    @classmethod
    def preflight(cls, kwargs: Any = None) -> None:
        """Connects to the broker before any trial is queued; ends the program if that fails.
        Harbor 0.26 passes the options of the environment, which are checked later."""
        try:
            process_client()
        except TangramError as error:
            raise SystemExit(f"tangram: {error}") from None

    def _validate_definition(self) -> None:
        """Refuses a task that no session can serve. Raises InvalidInput."""
        named = self._options.get("image") or self.task_env_config.docker_image
        if not named and not self._dockerfile.exists():
            raise InvalidInput(f"{self.environment_dir}: a task needs docker_image or a Dockerfile;"
                               " docker-compose.yaml cannot be served")
        if not named:
            base_image(self._dockerfile.read_text())

    @property
    def _dockerfile(self) -> Path:
        return Path(self.environment_dir) / "Dockerfile"

    @property
    def _cpus(self) -> int | tuple[int, int]:
        mode = getattr(self, "_cpu_resource_mode", None)
        exact = getattr(mode, "value", "") in _EXACT
        return cpus_of(self._asked_cpus or self.task_env_config.cpus, exact)

    # ---- its life ----------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Opens the session, waits for its admission and carries out the steps of the Dockerfile.

        Args:
            force_build: whether to use the Dockerfile although the task has a `docker_image`.

        Raises:
            InfeasibleRequest: no node can ever hold the session.
            ActionFailed: a step of the Dockerfile failed.
        """
        image = self._options.get("image") or self.task_env_config.docker_image
        replay = self._dockerfile.exists() and (not image or (
            force_build and not self._options.get("image")))
        if replay:
            image = base_image(self._dockerfile.read_text())
        client = await asyncio.to_thread(process_client)
        asked = {**self._amounts(), **self._options, "network": self._network, "image": image}
        self._session = client.session(**asked)
        try:
            await self._session.opened
            await self._prepare(replay)
            folders = " ".join(map(shlex.quote, self._writable_targets()))
            made = await self.exec(f"mkdir -p {folders} && chmod 777 {folders}", user="root")
            if made.return_code:
                raise ActionFailed(f"the folders {folders} cannot be made: {made.stderr.strip()}")
            upload = getattr(self, "_upload_environment_dir_after_start", None)
            if upload is not None:
                await upload()
        except BaseException:
            await self.stop(True)
            raise

    def _amounts(self) -> dict[str, Any]:
        """Returns the name and the amounts of the task as arguments of `Client.session`."""
        config = self.task_env_config
        memory = getattr(self, "_effective_memory_mb", config.memory_mb)
        return {"name": str(self.session_id)[-80:], "mem": memory or 0,
                "disk": getattr(config, "storage_mb", None) or 0}

    @property
    def _network(self) -> bool | str | list[str]:
        """What the session may reach, as an argument of `Client.session`: what the option `network`
        says, else the node's network. If the task allows no network, this is nothing.

        Raises:
            InvalidInput: the task has a mode that is not known.
        """
        policy = getattr(self, "_network_policy", None)
        if policy is not None:
            mode = policy.network_mode.value
        else:  # an older revision
            allowed = bool(getattr(self.task_env_config, "allow_internet", True))
            mode = _PUBLIC if allowed else _NO_NETWORK
        if mode not in (_PUBLIC, _NO_NETWORK):
            raise InvalidInput(f"network_mode: {mode!r} cannot be served; use {_PUBLIC!r} or "
                               f"{_NO_NETWORK!r}, and the option `network` for a list of names")
        asked: bool | str | list[str] = self._options.get("network", True)
        return asked if mode == _PUBLIC else False

    async def _prepare(self, replay: bool) -> None:
        """Carries out the Dockerfile if `replay` is set, and determines the working directory,
        variables and user of commands."""
        workdir = getattr(self.task_env_config, "workdir", None) or ""
        if replay:
            done = await replay_dockerfile(self._opened, self._dockerfile, cpus=self._cpus,
                                           timeout=self._build_s)
            self._env_of_image, self._user_of_image = done.env, done.user
            workdir = workdir or done.workdir
        elif self._dockerfile.exists() and not workdir:
            workdir = working_directory(self._dockerfile.read_text())
        self._workdir = workdir  # empty for that of the image
        if workdir:
            await self._opened.mkdir(workdir)

    def _writable_targets(self) -> list[str]:
        """Returns the folders that a trial writes its logs into."""
        targets = getattr(self, "_mount_targets", None)
        found: list[str] = targets(writable_only=True) if targets is not None else []
        return found or ["/logs/agent", "/logs/verifier", "/logs/artifacts"]

    async def stop(self, delete: bool) -> None:
        """Closes the session, and waits until its memory is free.

        Args:
            delete: is not used: the files of a session are removed when it ends.
        """
        session, self._session = self._session, None
        if session is not None:
            session.close()
            await asyncio.wait([asyncio.wrap_future(session.closed)], timeout=10)

    @property
    def _opened(self) -> tangram_hpc.Session:
        if self._session is None:
            raise RuntimeError("the environment is not started; call start() first")
        return self._session

    # ---- its verbs ---------------------------------------------------------------------------

    async def exec(self, command: str, cwd: str | None = None, env: dict[str, str] | None = None,
                   timeout_sec: int | None = None, user: str | int | None = None) -> ExecResult:
        """Runs a command line; see `BaseEnvironment.exec`.

        Raises:
            RuntimeError: it ran longer than `timeout_sec`. Waiting for cores does not count. Harbor
                takes a TimeoutError for the end of the whole phase, such as the agent's.
            SessionLost: the session has ended, for example with its node.
        """
        if why := why_unsendable(command):
            return ExecResult(stdout="", return_code=126,
                              stderr=f"[tangram: the command cannot be run: {why}]\n")
        whom = next((each for each in (user, getattr(self, "default_user", None),
                                       self._user_of_image or None) if each is not None), None)
        merge = getattr(self, "_merge_env", None)
        result = await self._opened.exec(
            [self._shell, "-c", command],
            cwd=whole_path(cwd, self._workdir) if cwd else self._workdir,
            env={**self._env_of_image, **((merge(env) if merge else env) or {})},
            timeout=timeout_sec,
            cpus=self._cpus, output_max=most_output(self._opened), keep="both",
            **({} if whom is None else {"user": str(whom)}))
        if result.state is tangram_hpc.ActionState.TIMEOUT:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(stdout=result.text, stderr=stderr_of(result),
                          return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file into the session; see `BaseEnvironment.upload_file`."""
        await asyncio.to_thread(self._opened.upload, source_path,
                                whole_path(target_path, self._workdir))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies a folder's content into a folder of the session, which is made if it is missing.
        """
        target = whole_path(target_dir, self._workdir)
        await self._opened.mkdir(target)
        await asyncio.to_thread(self._opened.upload, source_dir, target)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out of the session; see `BaseEnvironment.download_file`.

        Raises:
            FileNotFoundError: the file is not there.
        """
        await asyncio.to_thread(self._opened.download, whole_path(source_path, self._workdir),
                                target_path, max_bytes=_DOWNLOAD_MAX)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies a folder's content out of the session, except links and special files."""
        await asyncio.to_thread(self._opened.download, whole_path(source_dir, self._workdir),
                                target_dir, max_bytes=_DOWNLOAD_MAX, skip_others=True)
