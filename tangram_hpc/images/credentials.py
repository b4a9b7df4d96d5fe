"""Finds the user's credentials for a registry in the files that `docker login` and `podman login`
write, and in the programs that these files name.

The files are read in the order of containers-auth.json(5): `$REGISTRY_AUTH_FILE`,
`$XDG_RUNTIME_DIR/containers/auth.json`, `~/.config/containers/auth.json`, then Docker's
`config.json` (`$DOCKER_CONFIG` or `~/.docker`). A file may name a program that keeps credentials
for one registry (`credHelpers`) or for all (`credsStore`): `docker-credential-NAME get` gets the
registry's name on its input and answers with JSON. The program of the registry comes before the
file's own entries, and that of all registries after them. Nothing read here is ever logged or put
into a message; a program's own error message is, as it says why it failed.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..domain.image_name import DEFAULT_REGISTRY
from .image_errors import ImageRefused, ImageUnavailable

_FILE_MAX = 1 << 20
_PROGRAM_S = 30.0  # a program that keeps credentials may ask a server
_PROGRAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_FOUND = "credentials not found"  # the beginning of a program's answer if it has none
_TOKEN_USER = "<token>"  # a program's name of the user where the secret is a refresh token
_DOCKERS_OWN = ("index.docker.io", "https://index.docker.io/v1")


@dataclass(frozen=True)
class RegistryCredentials:
    """What proves to a registry who the user is.

    Attributes:
        user: the name of the user.
        password: the password.
        refresh_token: a token that is given instead of both; empty for none.
        source: the file that they are from, or the program.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    refresh_token: str = field(default="", repr=False)
    source: str = ""


def find_credentials(environ: Mapping[str, str], registry: str, repository: str
                     ) -> RegistryCredentials | None:
    """Returns the credentials for an image; None if no file and no program has any. Blocks.

    Args:
        environ: the user's environment.
        registry: host and port of the registry.
        repository: the image's path there; a file may have credentials for a part of a registry.

    Raises:
        ImageRefused: a file cannot be read or is not JSON, or a program cannot be used.
        ImageUnavailable: a program fails or does not answer.
    """
    for path in _files(environ):
        record = _record(path)
        helpers = _mapping(record.get("credHelpers"))
        own = next((helpers[name] for name in helpers if _plain(name) == registry), None)
        if found := _asked(own, registry, environ, path):
            return found
        entry = _entry(_mapping(record.get("auths")), registry, repository)
        if entry is not None:
            return _decoded(entry, path)
        if own is None and (found := _asked(record.get("credsStore"), registry, environ, path,
                                            needed=False)):
            return found
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


def _record(path: Path) -> dict[str, Any]:
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
    return _mapping(record)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _asked(program: Any, registry: str, environ: Mapping[str, str], path: Path,
           needed: bool = True) -> RegistryCredentials | None:
    """Returns what a program has for a registry; None without a program, or if it has none.

    A program that is not installed is an error only if it is `needed`: a file that was copied from
    another machine names the store of that machine, and most images need no credentials.
    """
    if not program:
        return None
    if not isinstance(program, str) or not _PROGRAM_NAME.fullmatch(program):
        raise ImageRefused(f"image: the credentials file {path} names no program by {program!r}")
    name = f"docker-credential-{program}"
    server = f"{_DOCKERS_OWN[1]}/" if registry == DEFAULT_REGISTRY else registry
    try:
        done = subprocess.run([name, "get"], input=server, capture_output=True, text=True,
                              timeout=_PROGRAM_S, env=dict(environ), check=False)
    except FileNotFoundError as error:
        if not needed:
            return None
        raise ImageRefused(f"image: {name}, which {path} names, cannot be used "
                           f"({error.strerror}); install it, or remove the entry") from None
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "its answer is no text"
        raise ImageRefused(f"image: {name}, which {path} names, cannot be used ({why})") from None
    except subprocess.TimeoutExpired:
        raise ImageUnavailable(f"image: {name}, which {path} names, did not answer within "
                               f"{_PROGRAM_S:g} s") from None
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["no reason given"]
        if said[0].startswith(_NOT_FOUND):
            return None
        raise ImageUnavailable(f"image: {name}, which {path} names, has failed: {said[0][:200]}")
    try:
        answer = _mapping(json.loads(done.stdout))
    except (ValueError, RecursionError):
        answer = {}
    user, secret = answer.get("Username"), answer.get("Secret")
    if not isinstance(user, str) or not isinstance(secret, str):
        raise ImageRefused(f"image: {name}, which {path} names, gave no user and secret")
    if user == _TOKEN_USER:
        return RegistryCredentials(refresh_token=secret, source=name)
    return RegistryCredentials(user, secret, source=name)


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
