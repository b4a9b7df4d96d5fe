"""Finds the user's credentials for a registry in the files that `docker login` and `podman login`
write.

The files are read in the order of containers-auth.json(5): `$REGISTRY_AUTH_FILE`,
`$XDG_RUNTIME_DIR/containers/auth.json`, `~/.config/containers/auth.json`, then Docker's
`config.json` (`$DOCKER_CONFIG` or `~/.docker`). Programs that keep credentials (`credHelpers`,
`credsStore`) are not started. Nothing read here is ever logged or put into a message.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..domain.image_name import DEFAULT_REGISTRY
from .image_errors import ImageRefused

_FILE_MAX = 1 << 20
_DOCKERS_OWN = ("index.docker.io", "https://index.docker.io/v1")


@dataclass(frozen=True)
class RegistryCredentials:
    """What proves to a registry who the user is.

    Attributes:
        user: the name of the user.
        password: the password.
        refresh_token: a token that is given instead of both; empty for none.
        source: the file that they are from.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    refresh_token: str = field(default="", repr=False)
    source: str = ""


def find_credentials(environ: Mapping[str, str], registry: str, repository: str
                     ) -> RegistryCredentials | None:
    """Returns the credentials for an image; None if no file has any.

    Args:
        environ: the user's environment.
        registry: host and port of the registry.
        repository: the image's path there; a file may have credentials for a part of a registry.

    Raises:
        ImageRefused: a file cannot be read or is not JSON.
    """
    for path in _files(environ):
        found = _entry(_auths(path), registry, repository)
        if found is not None:
            return _decoded(found, path)
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    named = environ.get("REGISTRY_AUTH_FILE")
    if named:
        yield Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    home = environ.get("HOME", "")
    config = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
    if config:
        yield Path(config) / "containers/auth.json"
    if docker := environ.get("DOCKER_CONFIG") or (f"{home}/.docker" if home else ""):
        yield Path(docker) / "config.json"


def _auths(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_MAX)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except OSError as error:
        raise ImageRefused(f"image: the credentials file {path} cannot be read "
                           f"({error.strerror})") from None
    try:
        record = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        raise ImageRefused(f"image: the credentials file {path} is not JSON") from None
    auths = record.get("auths") if isinstance(record, dict) else None
    return auths if isinstance(auths, dict) else {}


def _entry(auths: Mapping[str, Any], registry: str, repository: str) -> Mapping[str, Any] | None:
    """Returns the entry for the longest part of the image's name."""
    known = {_plain(name): value for name, value in auths.items() if isinstance(value, dict)}
    parts = f"{registry}/{repository}".split("/")
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if registry == DEFAULT_REGISTRY:
        names += [_plain(name) for name in _DOCKERS_OWN]
    return next((known[name] for name in names if known.get(name)), None)


def _plain(name: str) -> str:
    bare = name.removeprefix("https://").removeprefix("http://").rstrip("/")
    return bare.removesuffix("/v1").removesuffix("/v2")


def _decoded(entry: Mapping[str, Any], path: Path) -> RegistryCredentials:
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return RegistryCredentials(refresh_token=token, source=str(path))
    text = entry.get("auth")
    if isinstance(text, str) and text:
        try:
            user, _, password = base64.b64decode(text, validate=True).decode().partition(":")
        except ValueError:
            raise ImageRefused(f"image: the credentials file {path} has an entry whose `auth` is "
                               "not base64") from None
        return RegistryCredentials(user, password.rstrip("\0"), source=str(path))
    name, secret = entry.get("username"), entry.get("password")
    return RegistryCredentials(name if isinstance(name, str) else "",
                               secret if isinstance(secret, str) else "", source=str(path))
