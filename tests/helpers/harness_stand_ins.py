"""The base classes of Harbor, NeMo-Gym and Inspect AI that their adapters need to be imported,
where the packages are not installed: names, fields and defaults of their published interfaces, and
none of their behaviour but what an adapter calls. Tests with the real packages are in the long
suite.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def _module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []  # it may have modules below it
    vars(made).update(names)
    return made


@contextmanager
def _present(modules: dict[str, types.ModuleType | None], adapter: str) -> Iterator[None]:
    """Makes stand-in modules importable, and hides modules that are None; afterwards the adapter is
    removed from `sys.modules`.
    """
    names = list(modules)
    before = {name: sys.modules.pop(name) for name in [*names, adapter] if name in sys.modules}
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in [*names, adapter]:
            sys.modules.pop(name, None)
        sys.modules.update(before)


# ---- NeMo-Gym ----


class SandboxStatus(str, Enum):
    STARTING, RUNNING, PAUSED = "starting", "running", "paused"
    STOPPED, ERROR, UNKNOWN = "stopped", "error", "unknown"


@dataclass(frozen=True)
class SandboxResources:
    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    gpu: int | None = None
    gpu_type: str | None = None


@dataclass(frozen=True)
class SandboxSpec:
    image: str | None = None
    ttl_s: float | None = None
    ready_timeout_s: float | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    resources: SandboxResources = field(default_factory=SandboxResources)
    entrypoint: list[str] | None = None
    provider_options: dict[str, Any] = field(default_factory=dict)
    ports: tuple[int, ...] = ()


@dataclass
class SandboxHandle:
    sandbox_id: str
    provider_name: str
    raw: Any


@dataclass(frozen=True)
class SandboxExecResult:
    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None


@dataclass(frozen=True)
class SandboxEndpoint:
    endpoint: str
    headers: dict[str, str] = field(default_factory=dict)


class SandboxCreateError(RuntimeError):
    pass


@contextmanager
def nemo_gym_stood_in() -> Iterator[types.ModuleType]:
    """Yields the provider's module, imported over these types."""
    base = _module("nemo_gym.sandbox.providers.base", SandboxCreateError=SandboxCreateError,
                   SandboxEndpoint=SandboxEndpoint, SandboxExecResult=SandboxExecResult,
                   SandboxHandle=SandboxHandle, SandboxSpec=SandboxSpec,
                   SandboxStatus=SandboxStatus)
    above = [_module(name) for name in ("nemo_gym", "nemo_gym.sandbox",
                                        "nemo_gym.sandbox.providers")]
    with _present({each.__name__: each for each in (*above, base)},
                  "tangram_hpc.hooks.nemo_gym_provider"):
        yield importlib.import_module("tangram_hpc.hooks.nemo_gym_provider")


# ---- Inspect AI ----


@contextmanager
def inspect_stood_in() -> Iterator[types.ModuleType]:
    """Yields the sandbox's module, imported over names without behaviour."""
    kinds: dict[str, type] = {
        "SandboxEnvironment": type("SandboxEnvironment", (), {}),
        "ExecResult": make_dataclass("ExecResult", ("success", "returncode", "stdout", "stderr"))}
    kinds["SandboxEnvironmentLimits"] = type("SandboxEnvironmentLimits", (), {
        "MAX_EXEC_OUTPUT_SIZE": 10 << 20, "MAX_READ_FILE_SIZE": 100 << 20})
    errors = {name: type(name, (Exception,), {}) for name in ("OutputLimitExceededError",
                                                              "SandboxUserUnsupportedError")}
    util = _module("inspect_ai.util", sandboxenv=lambda name: lambda kind: kind, **kinds, **errors)
    tool = _module("inspect_ai.tool", ToolError=type("ToolError", (Exception,), {}))
    with _present({"inspect_ai": _module("inspect_ai"), "inspect_ai.util": util,
                   "inspect_ai.tool": tool},
                  "tangram_hpc.hooks.inspect_sandbox"):
        yield importlib.import_module("tangram_hpc.hooks.inspect_sandbox")


# ---- Harbor ----


@dataclass
class TaskEnvironment:
    """The fields of Harbor's EnvironmentConfig that an environment reads."""

    docker_image: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None


@dataclass
class ExecResult:
    return_code: int
    stdout: str | None = None
    stderr: str | None = None


class BaseEnvironment:
    """What Harbor's base class does at its construction, and the methods that a start calls."""

    def __init__(self, environment_dir: Path, environment_name: str, session_id: str,
                 trial_paths: Any, task_env_config: TaskEnvironment,
                 persistent_env: dict[str, str] | None = None,
                 default_user: str | None = None) -> None:
        self.environment_dir, self.environment_name = environment_dir, environment_name
        self.session_id, self.trial_paths = session_id, trial_paths
        self.task_env_config, self.default_user = task_env_config, default_user
        self._persistent_env = persistent_env or {}
        self._validate_definition()

    def _validate_definition(self) -> None:
        raise NotImplementedError

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return {**self._persistent_env, **(env or {})} or None

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        raise NotImplementedError


@dataclass
class EnvironmentCapabilities:
    gpus: bool = False
    disable_internet: bool = False
    mounted: bool = False


@dataclass
class EnvironmentResourceCapabilities:
    cpu_limit: bool = False
    cpu_request: bool = False
    memory_limit: bool = False
    memory_request: bool = False


@contextmanager
def harbor_stood_in(with_capabilities: bool = True) -> Iterator[types.ModuleType]:
    """Yields the environment's module, imported over these classes.

    Args:
        with_capabilities: False for an older revision, which asks for each capability by a
            property.
    """
    base = _module("harbor.environments.base", BaseEnvironment=BaseEnvironment,
                   ExecResult=ExecResult)
    said = _module("harbor.environments.capabilities",
                   EnvironmentCapabilities=EnvironmentCapabilities,
                   EnvironmentResourceCapabilities=EnvironmentResourceCapabilities)
    package = _module("harbor.environments")
    if with_capabilities:
        vars(package)["capabilities"] = said
    with _present({"harbor": _module("harbor"), package.__name__: package, base.__name__: base,
                   said.__name__: said if with_capabilities else None},
                  "tangram_hpc.hooks.harbor_environment"):
        yield importlib.import_module("tangram_hpc.hooks.harbor_environment")
