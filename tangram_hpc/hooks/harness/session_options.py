"""The arguments of `Client.session`, and time limits, as the settings of trainers and harnesses
name them.

Settings come from YAML files, JSON files and command lines, so they are checked before a session is
opened: a name that `Client.session` does not know is an error that lists the names it knows. A
network that cannot be understood is refused as well, because any other reading of it could give a
sandbox more than its user wanted. This module opens no session and imports no harness.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import tangram_hpc
from tangram_hpc.errors import InvalidInput

_KNOWN = tuple(sorted(inspect.signature(tangram_hpc.Client.session).parameters.keys() - {"self"}))
# The arguments that a harness's configuration may set beside its own keys. `env` and `files` are
# not among them, because harnesses have fields of their own for both.
_BESIDE_OTHER_KEYS = frozenset({
    "backend", "background", "background_cpus", "component", "disk", "grace_s", "idle_s", "image",
    "mem", "movable", "name", "network", "outlives", "secrets", "trajectory", "trusted", "ttl_s",
    "user", "writable"})
_NETWORKS: Mapping[str, bool | str] = {  # command lines have no booleans
    "true": True, "false": False, "off": "off", "loopback": "loopback", "open": "open",
    "host": "host"}


def session_options(told: Any, where: str = "session") -> dict[str, Any]:
    """Returns a mapping of arguments of `Client.session`, checked.

    Args:
        told: a mapping from a configuration; None for an empty one. A value of None counts as not
            given.
        where: the setting that holds the mapping, for the error.

    Raises:
        InvalidInput: it is no mapping, a name is unknown, or `network` cannot be understood.
    """
    if told is None:
        return {}
    if not hasattr(told, "items"):
        raise InvalidInput(f"{where}: {told!r:.60} is not a mapping of arguments of Client.session")
    given = {key: value for key, value in told.items() if value is not None}
    if unknown := sorted(map(str, given.keys() - set(_KNOWN))):
        raise InvalidInput(f"{where}: {unknown[0]}: Client.session has no such argument; known are "
                           f"{', '.join(_KNOWN)}")
    if "network" in given:
        given["network"] = network_option(given["network"])
    return given


def take_session_options(given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Removes the arguments of `Client.session` from a harness's keywords.

    Args:
        given: the keywords; the arguments of `Client.session` are removed from it.
        defaults: arguments for which the harness gives no value.

    Returns:
        The arguments of `Client.session`, defaults included.

    Raises:
        InvalidInput: `network` cannot be understood.
    """
    taken = {key: given.pop(key) for key in sorted(_BESIDE_OTHER_KEYS & given.keys())}
    return {**defaults, **session_options(taken)}


def network_option(asked: Any) -> bool | str | list[str]:
    """Returns what a configuration names as `network`, as `Client.session` takes it.

    Args:
        asked: a boolean, "off", "loopback", "open", "host", "true" or "false", or a list of names
            and addresses that may be reached.

    Raises:
        InvalidInput: it is nothing of this kind.
    """
    if isinstance(asked, bool):
        return asked
    if isinstance(asked, str) and asked.lower() in _NETWORKS:
        return _NETWORKS[asked.lower()]
    if isinstance(asked, Iterable) and not isinstance(asked, str | bytes | Mapping):
        return list(asked)
    raise InvalidInput(f"network: {asked!r:.60} is neither true nor false, nor one of off, "
                       'loopback, open and host, nor a list of names such as ["www.example.org"]')


def seconds_of(value: Any, where: str) -> float:
    """Returns a time limit of an adapter, checked.

    Args:
        value: the time limit in seconds.
        where: the setting that holds it, for the error.

    Raises:
        InvalidInput: it is not a number > 0.
    """
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known or not 0 < float(value) < math.inf:
        raise InvalidInput(f"{where}: {value!r} is not a number of seconds > 0")
    return float(value)
