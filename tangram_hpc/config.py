"""Everything a person may set, with its default, its bounds and where it came from.

Law: defaults < config file < `TANGRAM_*` environment < command line. An unknown key is an error
with a suggestion; every error is one line that names the field, the source and the remedy. The file
is TOML: `$TANGRAM_CONFIG`, or `tangram.toml` where the command is started.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .core.placers.registry import NAMES as PLACERS
from .core.placers.registry import make_placer
from .errors import InvalidInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "TANGRAM_"


class Config(BaseModel):
    """All settings. Seconds end in `_s`, MiB in `_mib`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    placer: str = Field("elastic", description=f"one of {', '.join(PLACERS)}")
    sync: Literal["none", "batch", "always"] = Field(
        "none", description="journal: none survives the broker's death, batch and always the node's"
    )
    grace_s: float = Field(30.0, ge=0, le=86400, description="how long a lost client may be away")
    join_s: float = Field(120.0, gt=0, description="how long to wait for all expected workers")
    end_margin_s: float = Field(
        60.0, ge=0, le=86400, description="a node lends no more so long before its allocation "
                                          "ends; at most a third of what is left when it joins")
    end: str = Field("", description="when the allocation ends that a worker lends of, if Slurm "
                                     "does not say it: seconds since the epoch, or +SECONDS")
    once_mib: int = Field(1024, ge=1, description="how much may be kept for a requeue of actions "
                                                  "with `once`: what they are to do, and results")
    kill_wait_s: float = Field(2.0, ge=0, le=600, description="SIGTERM to SIGKILL")
    output_max: int = Field(1 << 20, ge=1024, le=1 << 30, description="bytes kept of each stream")
    bind: str = Field("", description="where to listen besides the Unix socket: an address, "
                                      "an interface or a network of the host; empty: chosen so "
                                      "that other nodes reach it; `none` for no TCP")
    cpus: int = Field(0, ge=0, le=65536, description="CPUs a worker lends; 0 for all it may use")
    mem_mib: int = Field(0, ge=0, description="memory a worker lends; 0 for what the job has")
    mem_overcommit: float = Field(
        1.0, ge=1, le=16, description="a worker lends so many times its memory: sessions may "
                                      "declare more than there is, as most never use it")
    devices: str = Field(
        "", description="devices a worker lends: empty for the GPUs that Slurm gave or that are "
                        "there; `none`; `cpu:N` or `fake:N` stand-ins, without N as many as Slurm "
                        "gave")
    disk_mib: int = Field(10240, ge=0, description="disk of a session that names none; 0: no limit")
    session_pids: int = Field(1024, ge=16, le=1 << 22, description="processes of one sandbox")
    starts_max: int = Field(0, ge=0, le=4096,
                            description="sandboxes that start at once on a node; 0: one per core")
    isolation: Literal["", "process", "bwrap", "podman", "apptainer", "enroot"] = Field(
        "", description="backend of sessions that name none; empty for the node's best")
    enforcement: Literal["", "cgroup2", "cgroup1", "affinity", "counted"] = Field(
        "", description="how units are enforced; empty for the best that works")
    read_paths: tuple[str, ...] = Field(
        (), description="paths of the node that untrusted sandboxes may read besides the system's")
    warm: int = Field(-1, ge=-1, le=4096,
                      description="sandboxes kept ready; -1: one per core, at most 4")
    compiled: bool = Field(True, description="plain commands in sandboxes may be served by the "
                                             "compiled loop, where it was built")
    scratch: str = Field("", description="node-local folder for sandboxes; empty for TMPDIR")
    gateway_spin_us: int = Field(200, ge=0, le=100000,
                                 description="how long an MPI wait spins before it sleeps; not at "
                                 "all where a node's ranks outnumber their cores")
    slurm: Literal["auto", "cli", "pyslurm"] = Field(
        "auto", description="how the broker talks to Slurm: its commands, pyslurm, or pyslurm "
                            "where it works")
    slurm_query_s: float = Field(30.0, ge=30, le=3600,
                                 description="least time between two of its questions to Slurm")
    job_comment: bool = Field(
        True, description="at its end the broker puts a summary into the job's Comment")
    endpoints: dict[str, dict[str, Any]] = Field(
        {}, description="tables [endpoints.NAME]: somebody else's APIs, see endpoints.py")

    elastic: dict[str, Any] = Field(
        {}, description="table [elastic]: nodes that may be asked for and given back while the "
                        "job runs, see allocations.py")
    services: dict[str, dict[str, Any]] = Field(
        {}, description="GPU services by name, as for `register_service`")
    rollouts: dict[str, dict[str, Any]] = Field(
        {}, description="rollout pools over them by name, as for `register_rollouts`")
    planner: dict[str, Any] = Field(
        {}, description="table [planner] of `tangram plan`, see planning/settings.py")

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, value: str) -> str:
        if not re.fullmatch(r"|none|(cpu|fake)(:[1-9]\d{0,2})?", value):
            raise ValueError("empty, none, cpu, cpu:N, fake or fake:N, N from 1 to 999")
        return value

    @field_validator("end")
    @classmethod
    def _known_end(cls, value: str) -> str:
        if not re.fullmatch(r"|\+?[1-9]\d{0,10}", value):
            raise ValueError("empty, seconds since the epoch, or + and seconds from now")
        return value

    @field_validator("read_paths", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [path for path in re.split("[,:]", value) if path]
        for path in value if isinstance(value, list | tuple) else ():
            if not str(path).startswith("/"):
                raise ValueError("paths begin with /")
        return value


# Read by other parts, not settings: they say where things are.
_NOT_SETTINGS = {"ACCESS", "CONFIG", "HOME", "JOB", "GATEWAY", "WORLD_SIZE", "RUN_DIR", "DEMO"}


def load_config(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None,
                folder: Path | None = None) -> Config:
    """The settings in force.

    Raises:
        InvalidInput: a field is unknown or wrong; one line.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    named = environ.get("TANGRAM_CONFIG")
    path = Path(named) if named else (folder or Path.cwd()) / "tangram.toml"
    if named or path.exists():
        for key, value in read_toml(path).items():
            values[key], origin[key] = value, str(path)
    for name, text in environ.items():
        key = name.removeprefix(ENV_PREFIX)
        if name.startswith(ENV_PREFIX) and key not in _NOT_SETTINGS:
            field = key.lower()
            if field in Config.model_fields:
                values[field], origin[field] = text, name
    for key, value in (overrides or {}).items():
        if value is not None:
            values[key], origin[key] = value, f"--{key.replace('_', '-')}"
    return _checked(values, origin)


def read_toml(path: Path, what: str = "config file") -> dict[str, Any]:
    """A TOML file; `what` names its kind in an error.

    Raises:
        InvalidInput: it cannot be read or is no TOML; one line.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} {path}: not a text file") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{what} {path}: {error}") from None


def _checked(values: dict[str, Any], origin: dict[str, str]) -> Config:
    try:
        config = Config(**values)
        make_placer(config.placer)
        return config
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = origin.get(key, "default")
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, Config.model_fields, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise InvalidInput(f"config field `{key}` ({where}) is not known{hint}") from None
        raise InvalidInput(f"config field `{key}` ({where}): {first['msg']}, got "
                           f"{first['input']!r}") from None
    except InvalidInput as error:
        raise InvalidInput(f"config field `placer` ({origin.get('placer', 'default')}): {error}"
                           ) from None
