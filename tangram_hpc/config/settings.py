"""Reads all settings: everything a person may set, with its default, its bounds and its origin.

A later source wins over an earlier one, key by key. A table such as `[elastic]` is one key.

1. the defaults below;
2. the site's file, `/etc/tangram/tangram.toml`;
3. the user's file, `$XDG_CONFIG_HOME/tangram/tangram.toml` (default `~/.config`);
4. the file that is named by `--config FILE` or `TANGRAM_CONFIG`;
5. `TANGRAM_*` in the environment;
6. the command line.

Settings are code: they say which code is trusted, where secrets go and what batch scripts run. So
the site's and the user's file are refused if another account could have written them
(`ownership.py`). A `tangram.toml` of the current directory, which may be somebody's repository, is
read only when it is named. An unknown key is an error with a suggestion. Every error is one line
that names the field, the source and the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from pydantic import Field, ValidationError, field_validator

from ..errors import InvalidInput
from ..scheduler.placement.placers.placer_name import NAMES as PLACERS
from ..scheduler.placement.placers.placer_name import TAIL_MAX, parse_placer_name
from .first_error import first_error
from .ownership import read_trusted
from .table_rules import SettingsTable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "TANGRAM_"
FILE = "tangram.toml"
SITE_FILE = Path("/etc/tangram") / FILE
_KIND = "config file"
# Larger amounts are typing mistakes, and messages between broker and worker cannot carry numbers
# above 2^63.
_MIB_MAX = 1 << 40
_END_MAX_S = 4_000_000_000  # as an end since the epoch, the year 2096


class Config(SettingsTable):
    """All settings, with their defaults and bounds. Names of seconds end in `_s`, of MiB in `_mib`.
    """

    placer: str = Field("elastic", description=f"one of {', '.join(PLACERS)}; elastic:TAIL with "
                                              "TAIL from 0, for the least mean completion time, to "
                                              f"{TAIL_MAX}, for a short tail")
    sync: Literal["none", "batch", "always"] = Field(
        "none", description="durability of the journal: none survives a crash of the broker, batch "
                            "and always survive a crash of its node too")
    grace_s: float = Field(30.0, ge=0, le=86400, description="seconds for which a lost client, or "
                                                             "a lost broker, may stay away")
    join_s: float = Field(120.0, gt=0, description="seconds to wait for all expected workers")
    no_worker_s: float = Field(
        900.0, ge=0, le=604800,
        description="seconds after which a broker of a Slurm job ends if it has no worker and is "
                    "of no use without one; 0: it waits for ever")
    end_margin_s: float = Field(
        60.0, ge=0, le=86400, description="a node lends nothing in the last seconds of its "
                                          "allocation; at most a third of the time that is left "
                                          "when it joins")
    end: str = Field("", description="end of the allocation that a worker lends from, if Slurm "
                                     "does not tell it: seconds since the epoch, or +SECONDS")
    once_mib: int = Field(1024, ge=1, le=_MIB_MAX,
                          description="MiB that may be kept for a requeue of actions with an "
                                      "idempotency key: their requests and results")
    kill_wait_s: float = Field(2.0, ge=0, le=600, description="seconds between SIGTERM and SIGKILL")
    output_max: int = Field(1 << 20, ge=1024, le=1 << 30, description="bytes that are kept of each "
                                                                      "output stream")
    output_bound: int = Field(
        64 << 20, ge=1024, le=128 << 20, description="bytes of each output stream that a command "
                                                     "may ask to keep")
    bind: str = Field("", description="where to listen besides the Unix socket: an address, "
                                      "an interface or a network of the host; empty: chosen so "
                                      "that other nodes can reach it; none: no TCP")
    ports: str = Field("", pattern=r"^(\d{1,5}(-\d{1,5})?)?$",
                       description="TCP ports that the broker may listen on, such as 7000-7019; "
                                   "empty: the kernel chooses")
    encryption: Literal["tls", "off"] = Field(
        "tls", description="tls: TCP connections of the job are encrypted; off: whoever sees the "
                           "network's packets reads all commands, files and results, and can "
                           "change them")
    cpus: int = Field(0, ge=0, le=65536, description="CPUs that a worker lends; 0: all that it may "
                                                     "use")
    mem_mib: int = Field(0, ge=0, le=_MIB_MAX,
                         description="memory that a worker lends in MiB; 0: what the job has")
    mem_overcommit: float = Field(
        1.0, ge=1, le=16, description="factor on the memory that a worker lends: sessions may "
                                      "declare more than the node has, as most never use it all")
    devices: str = Field(
        "", description="devices that a worker lends; empty: the GPUs that Slurm gave or that the "
                        "node has; none: no device; cpu:N or fake:N: N stand-ins (without :N as "
                        "many as Slurm gave)")
    weights_cache_mib: int = Field(
        -1, ge=-1, le=_MIB_MAX,
        description="memory of each GPU in MiB that weights may take while services are parked, "
                    "until it is needed; -1: half of the GPU, and none on stand-ins; 0: none")
    logs_mib: int = Field(0, ge=0, le=1 << 20,
                          description="MiB of the output of commands that each node keeps in the "
                                      "job's folder for `tangram logs`; the oldest is removed "
                                      "first; 0: nothing is kept")
    logs_s: float = Field(0.0, ge=0, le=1e9,
                          description="seconds after which kept output is removed while the job "
                                      "runs; 0: only as `logs_mib` says")
    disk_mib: int = Field(10240, ge=0, le=_MIB_MAX,
                          description="disk quota in MiB of a session that declares none; 0: no "
                                      "limit")
    session_pids: int = Field(1024, ge=16, le=1 << 22, description="largest number of processes in "
                                                                   "a sandbox")
    starts_max: int = Field(0, ge=0, le=4096,
                            description="sandboxes that may start at once on a node; 0: one per "
                                        "core")
    isolation: Literal["", "process", "bwrap", "podman", "apptainer", "enroot"] = Field(
        "", description="isolation backend of sessions that name none; empty: the node's best")
    enforcement: Literal["", "cgroup2", "cgroup1", "affinity", "counted"] = Field(
        "", description="how CPU limits are enforced; empty: the best method that works")
    read_paths: tuple[str, ...] = Field(
        (), description="paths of the node that untrusted sandboxes may read besides those of the "
                        "system")
    warm: int = Field(-1, ge=-1, le=4096,
                      description="sandboxes in the warm pool of a node; -1: one per core, at most "
                                  "4")
    compiled: bool = Field(True, description="whether the compiled loop may serve plain commands "
                                             "in sandboxes, if it was built")
    snapshots_max: int = Field(256, ge=1, le=1 << 16,
                               description="snapshots of sessions that a node keeps; beyond it "
                                           "those that were used least recently are removed")
    snapshots_mib: int = Field(32768, ge=1, le=_MIB_MAX,
                               description="MiB that the snapshots of a node may take")
    snapshot_idle_s: float = Field(86400.0, ge=0, le=1e9,
                                   description="seconds after which a snapshot is removed that no "
                                               "session began from; 0: never")
    image_store: str = Field("", description="node-local folder of unpacked images; it stays after "
                                             "the job, and may hold $NAME; empty: in the "
                                             "worker's scratch folder, and gone with it")
    image_store_mib: int = Field(0, ge=0, le=_MIB_MAX,
                                 description="MiB that `image_store` may hold; beyond it the "
                                             "images that were used least recently are removed; "
                                             "0: no limit")
    image_shares: tuple[str, ...] = Field(
        (), description="folders with images on a shared file system that are read before a "
                        "registry is asked, see `tangram image publish`")
    image_registries: bool = Field(True, description="whether registries may be asked for images")
    image_insecure: tuple[str, ...] = Field(
        (), description="registries, as HOST or HOST:PORT, that may be spoken to without "
                        "encryption; those on the loopback always may")
    image_max_mib: int = Field(64 << 10, ge=1, le=1 << 30,
                               description="MiB that one image may unpack to")
    scratch: str = Field("", description="node-local folder for sandboxes; empty: TMPDIR")
    gateway_spin_us: int = Field(200, ge=0, le=100000,
                                 description="microseconds for which an MPI wait spins before it "
                                             "sleeps; 0 is used where a node's ranks outnumber "
                                             "their cores")
    slurm: Literal["auto", "cli", "pyslurm"] = Field(
        "auto", description="how the broker calls Slurm; cli: by Slurm's commands; pyslurm: by "
                            "pyslurm; auto: by pyslurm if it works")
    slurm_query_s: float = Field(30.0, ge=30, le=3600,
                                 description="least seconds between two queries of the broker to "
                                             "Slurm")
    job_comment: bool = Field(
        True, description="whether the broker writes a summary into the job's Comment at its end")
    books: str = Field("", description="database of `tangram books`, such as "
                                       "postgresql://HOST/DATABASE or mariadb://HOST/DATABASE; "
                                       "empty: the file books.sqlite in TANGRAM_HOME")
    endpoints: dict[str, dict[str, Any]] = Field(
        {}, description="tables [endpoints.NAME]: APIs that somebody else serves, see endpoints.py")

    elastic: dict[str, Any] = Field(
        {}, description="table [elastic]: nodes that may be requested and given back while the job "
                        "runs, see allocations.py")
    services: dict[str, dict[str, Any]] = Field(
        {}, description="tables [services.NAME]: GPU services, as for `register_service`")
    rollouts: dict[str, dict[str, Any]] = Field(
        {}, description="tables [rollouts.NAME]: rollout pools, as for `register_rollouts`")
    tenants: dict[str, dict[str, Any]] = Field(
        {}, description="tables [tenants.NAME]: who shares the broker, with which shares, see "
                        "tenants.py")
    planner: dict[str, Any] = Field(
        {}, description="table [planner] of `tangram plan`, see config/planner/planner_settings.py")

    @field_validator("ports")
    @classmethod
    def _ascending_ports(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if value and not 1 <= int(first) <= int(last or first) <= 65535:
            raise ValueError("must be a port from 1 to 65535, or the first and the last of a range "
                             "such as 7000-7019")
        return value

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, value: str) -> str:
        if not re.fullmatch(r"|none|(cpu|fake)(:[1-9]\d{0,2})?", value):
            raise ValueError("must be empty, none, cpu, cpu:N, fake or fake:N, with N from 1 to "
                             "999")
        return value

    @field_validator("end")
    @classmethod
    def _known_end(cls, value: str) -> str:
        if not re.fullmatch(r"|\+?[1-9]\d{0,10}", value) or int(value or 0) > _END_MAX_S:
            raise ValueError("must be empty, seconds since the epoch, or + and seconds from now, "
                             f"at most {_END_MAX_S}")
        return value

    @field_validator("books")
    @classmethod
    def _known_database(cls, value: str) -> str:
        keys = [key.lower() for key, _ in parse_qsl(value.partition("?")[2],
                                                    keep_blank_values=True)]
        if re.search("//[^@]*:[^@]*@", value) or any(
                "pass" in key and key != "passfile" for key in keys):
            raise ValueError("must have no password, as `tangram config` prints it; write it into "
                             "~/.pgpass (PostgreSQL) or ~/.my.cnf (MariaDB)")
        if value and not re.match(r"(postgresql|mariadb|mysql|sqlite)(\+\w+)?://", value):
            raise ValueError("must be the URL of one of the databases that work: "
                             "postgresql://HOST/DATABASE, mariadb://HOST/DATABASE, "
                             "mysql://HOST/DATABASE or sqlite:////PATH")
        return value

    @field_validator("image_store")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("the path must begin with /")
        return value

    @field_validator("image_insecure", mode="before")
    @classmethod
    def _split_hosts(cls, value: Any) -> Any:
        return [host for host in value.split(",") if host] if isinstance(value, str) else value

    @field_validator("read_paths", "image_shares", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [path for path in re.split("[,:]", value) if path]
        for path in value if isinstance(value, list | tuple) else ():
            if not str(path).startswith("/"):
                raise ValueError("each path must begin with /")
        return value


# TANGRAM_* variables that are not settings; other modules read them.
_NOT_SETTINGS = {"ACCESS", "CONFIG", "HOME", "JOB", "GATEWAY", "WORLD_SIZE", "RUN_DIR", "DEMO",
                 "TENANT", "SCRATCH_JOB"}


@dataclass(frozen=True)
class Gathered:
    """The values of all sources together, before they are checked."""

    values: dict[str, Any]
    origin: dict[str, str]
    """Where each of the values came from, in words; fields that are absent have their default."""
    files: tuple[Path, ...]
    """The files that were read, the later ones winning."""
    ignored: Path | None
    """A `tangram.toml` of the current directory that was not read, because nothing named it."""


def gather(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Gathered:
    """Reads all sources; `overrides` are the command line's.

    Raises:
        InvalidInput: a file is refused, cannot be read or is not TOML; one line.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    files: list[Path] = []

    def take(path: Path, table: Mapping[str, Any]) -> None:
        files.append(path)
        values.update(table)
        origin.update(dict.fromkeys(table, str(path)))

    home = _home(environ)
    for path in (SITE_FILE, user_file(environ)):
        if path.is_relative_to(home) and not os.access(home, os.X_OK):
            continue  # `sudo` and `su` can leave HOME at another user's home
        text = read_trusted(path, home, _KIND)
        if text is not None:
            take(path, _parsed(text, path, _KIND))
    named = environ.get("TANGRAM_CONFIG")
    if named:
        _refuse_pipe(Path(named))
        take(Path(named), read_toml(Path(named)))
    for name, text in environ.items():
        key = name.removeprefix(ENV_PREFIX)
        if name.startswith(ENV_PREFIX) and key not in _NOT_SETTINGS:
            field = key.lower()
            if field in Config.model_fields:
                values[field], origin[field] = text, name
    for key, value in (overrides or {}).items():
        if value is not None:
            values[key], origin[key] = value, f"--{key.replace('_', '-')}"
    here = Path(FILE)
    # os.path.exists is False, and Path.exists fails, where this folder may not be searched
    unnamed = (not named and os.path.exists(here)
               and not any(here.samefile(file) for file in files))
    return Gathered(values, origin, tuple(files), here.absolute() if unnamed else None)


def user_file(environ: Mapping[str, str]) -> Path:
    """Returns the path of the user's settings file, by the XDG base directories. It need not exist.
    """
    base = environ.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # unset, or a relative path; the XDG standard says to ignore both
        base = str(_home(environ) / ".config")
    return Path(base) / "tangram" / FILE


def _refuse_pipe(path: Path) -> None:
    """Refuses a pipe, such as a shell's `<(...)`: its second reader finds it empty, which is a file
    without settings, and all processes of a job read the file.
    """
    with contextlib.suppress(OSError):  # its reader says what is wrong
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise InvalidInput(f"{_KIND} {path}: it is a pipe, which can be read only once; write "
                               "the settings into a file")


def _home(environ: Mapping[str, str]) -> Path:
    try:
        return Path(environ.get("HOME") or Path.home()).absolute()
    except RuntimeError:
        raise InvalidInput("HOME is not set, and this user id has no entry in the password "
                           "database; set HOME") from None


def load_config(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, *,
                say: bool = True) -> Config:
    """Returns the settings in force.

    Args:
        environ: the environment.
        overrides: values from the command line, which win unless they are None.
        say: whether to warn on stderr about a `tangram.toml` of the current directory that is not
            read, and about misspelt variables; False where another process of the same job warns.

    Raises:
        InvalidInput: a field is unknown or wrong, or a file is refused; one line.
    """
    found = gather(environ, overrides)
    if say and found.ignored is not None:
        print(f"tangram: warning: {ignored_line(found.ignored, environ)}", file=sys.stderr)
    for line in misspelt_variables(environ) if say else ():
        print(f"tangram: warning: {line}", file=sys.stderr)
    return checked(found)


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns a line about each variable that has nearly the name of a setting, and is none.

    Variables that resemble no setting may be somebody else's.
    """
    lines = []
    for name in environ:
        key = name.removeprefix(ENV_PREFIX)
        if not name.startswith(ENV_PREFIX) or key in _NOT_SETTINGS:
            continue
        near = difflib.get_close_matches(key.lower(), Config.model_fields, n=1, cutoff=0.8)
        if near and key.lower() not in Config.model_fields:
            lines.append(f"{name} is not a setting and has no effect; did you mean "
                         f"{ENV_PREFIX}{near[0].upper()}?")
    return lines


def ignored_line(path: Path, environ: Mapping[str, str]) -> str:
    """Returns the warning about a file in the current directory that is not read: why, and the
    remedy.
    """
    return (f"{path} is not read: settings that lie in the current directory count only when they "
            f"are named. If they are yours, say `--config {FILE}` or TANGRAM_CONFIG={path} (in a "
            f"batch script `tangram template render -o config={FILE}`), or move them to "
            f"{user_file(environ)}")


def read_toml(path: Path, what: str = _KIND) -> dict[str, Any]:
    """Returns the content of a TOML file; `what` names its kind in an error.

    Raises:
        InvalidInput: the file cannot be read or is not TOML; one line.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"), path, what)
    except OSError as error:
        raise InvalidInput(f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} {path}: not a text file") from None


def _parsed(text: str, path: Path, what: str) -> dict[str, Any]:
    try:
        # some editors begin a file with a byte order mark, which tomllib does not take
        table: dict[str, Any] = tomllib.loads(text.removeprefix("\ufeff"))
        return table
    except (ValueError, RecursionError) as error:  # a number too long, too deep a table
        raise InvalidInput(f"{what} {path}: {error}") from None


def checked(found: Gathered) -> Config:
    """Returns the settings in force, checked.

    Raises:
        InvalidInput: a field is unknown or wrong; the text names it, its source and the remedy.
    """
    values, origin = found.values, found.origin
    try:
        config = Config(**values)
        parse_placer_name(config.placer)
        return config
    except ValidationError as error:
        may_be_secret = any(each["loc"][:1] == ("books",) for each in error.errors())
        field, said = first_error(error, Config, show_value=not may_be_secret)
        where = origin.get(field.partition(".")[0], "default")
        raise InvalidInput(f"config field `{field}` ({where}): {said}") from None
    except InvalidInput as error:
        raise InvalidInput(f"config field `placer` ({origin.get('placer', 'default')}): {error}"
                           ) from None
