"""The environment variables that the processes of actions get. Pure.

Nothing of Slurm's, MPI's or this package's own may reach them. So the names that are kept are
listed, and what is not listed does not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache

_KEPT = ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "LD_LIBRARY_PATH")
_KEPT_BY_RUNNERS = (*_KEPT, "HOME", "SHELL", "VIRTUAL_ENV", "XDG_CACHE_HOME")
_PREFIXES = ("LC_",)
_PREFIXES_BY_RUNNERS = (*_PREFIXES, "PYTHON", "CONDA_")
_PATHS = ("PATH", "LD_LIBRARY_PATH")
_OF_SESSION = frozenset({"", "HOME", "TMPDIR"})  # an image does not choose these
_MADE_MAX = 64  # environments of one sandbox that are kept
CPUS_FILE = "TANGRAM_CPUS_FILE"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def beyond_locale(error: UnicodeEncodeError) -> str:
    """Says why a text cannot be handed to the kernel, in whose calls Python uses the locale's
    encoding, and what to do about it.
    """
    letter = error.object[error.start]
    return (f"the worker's locale, whose encoding is {error.encoding}, has no {letter!a}; start "
            "the worker with a locale of UTF-8, such as LC_ALL=C.UTF-8, and without PYTHONUTF8=0")


def for_child_processes(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of a worker's environment that its fork server, runners and service processes get.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT_BY_RUNNERS or name.startswith(_PREFIXES_BY_RUNNERS)
    }


def sandbox_environment(
    environ: Mapping[str, str], home: str, tmp: str, own_root: bool = False
) -> dict[str, str]:
    """The environment that every command in a sandbox begins with. If the
    sandbox has a root directory of its own, variables that hold paths of the node are left out.
    """
    kept = {n: v for n, v in environ.items() if n in _KEPT or n.startswith(_PREFIXES)}
    for name in _PATHS if own_root else ():
        kept.pop(name, None)
    return {
        "PATH": DEFAULT_PATH,
        "LANG": "C.UTF-8",
        **kept,
        "SHELL": "/bin/sh",
        "HOME": home,
        "TMPDIR": tmp,
    }


def with_image(base: Mapping[str, str], variables: Sequence[str]) -> dict[str, str]:
    """An environment with the variables that an image's programs expect, given as NAME=VALUE. The
    session's own directories stay what they are.
    """
    env = dict(base)
    for one in variables:
        name, _, value = one.partition("=")
        if name not in _OF_SESSION:
            env[name] = value
    return env


@lru_cache(maxsize=256)
def hints(units: int, most: int = 0) -> tuple[tuple[str, str], ...]:
    """Returns the variables that tell a program of its CPUs. Programs that start a fixed number of
    threads or processes get the most CPUs that the action may hold, because they cannot start more
    later, while they can share fewer cores meanwhile.
    """
    n = str(max(1, units, most))
    return (
        ("TANGRAM_CPUS", str(max(1, units))),
        ("TANGRAM_CPUS_MAX", n),
        ("OMP_NUM_THREADS", n),
        ("MAKEFLAGS", f"-j{n}"),
        ("PYTEST_XDIST_AUTO_NUM_WORKERS", n),
    )


class Grants:
    """The environments of one sandbox's commands, made once for each set of granted resources.

    Args:
        base: what every command begins with; see `sandbox_environment`.
        cpus_file: see `export_grant`.
    """

    __slots__ = ("_base", "_cpus_file", "_made")

    def __init__(self, base: Mapping[str, str], cpus_file: str = "") -> None:
        self._base = base
        self._cpus_file = cpus_file
        self._made: dict[tuple[int, int, str], dict[str, str]] = {}

    def plain(self, units: int, most: int, gpus: str) -> dict[str, str]:
        """The environment of a command that adds nothing. Do not change it."""
        key = units, most, gpus
        env = self._made.get(key)
        if env is None:
            if len(self._made) >= _MADE_MAX:
                self._made.clear()
            env = {**self._base, **dict(hints(units, most))}
            export_grant(env, units, most, gpus, self._cpus_file)
            self._made[key] = env
        return env

    def adding(self, own: Mapping[str, str], units: int, most: int, gpus: str) -> dict[str, str]:
        """The environment of a command that adds variables. They may not hide what was granted."""
        env = {**self.plain(units, most, gpus), **own}
        export_grant(env, units, most, gpus, self._cpus_file)
        return env

    def only(self, own: Mapping[str, str], units: int, most: int, gpus: str) -> dict[str, str]:
        """The environment of a command that brings all of it, except what was granted."""
        env = dict(own)
        export_grant(env, units, most, gpus, self._cpus_file)
        return env


def export_grant(env: MutableMapping[str, str], units: int, most: int, gpus: str,
                 cpus_file: str = "") -> None:
    """Writes what was granted into an environment, over whatever it holds.

    Args:
        env: the environment to change.
        units: CPUs that the action holds now.
        most: CPUs that it may hold while it runs.
        gpus: the value of CUDA_VISIBLE_DEVICES; empty for no GPU.
        cpus_file: the path of the `UnitsFile`; empty for none.
    """
    env["TANGRAM_CPUS"] = str(max(1, units))
    env["TANGRAM_CPUS_MAX"] = str(max(1, units, most))
    if cpus_file:
        env[CPUS_FILE] = cpus_file
    env["CUDA_VISIBLE_DEVICES"] = gpus
