"""The keys with which clients of the HTTP server prove who they are.

A key travels as `X-API-Key`, as a bearer token, as the password of Basic authentication (which is
what `http://any:KEY@host/` in a URL becomes), or as the first part of the path (`/KEY/run_code`),
because some clients can be told nothing but a URL. Only digests of keys are kept, so that neither a
core dump nor the time of a comparison tells a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidInput

KEY_MIN = 16  # characters of a key; shorter ones can be guessed


def new_key() -> str:
    """Returns a fresh key of 256 random bits, as text that a URL may hold.

    It has the form of E2B's own keys, because E2B's SDK before 2.46 refuses all others.
    """
    return f"e2b_{secrets.token_hex(32)}"


def read_keys(path: Path) -> dict[str, str]:
    """Reads a file with one client a line: its name, white space, its key. `#` begins a comment.

    Returns:
        The key of each client's name.

    Raises:
        InvalidInput: the file cannot be read, other users may read it, or a line is wrong.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # the remedy below would break it
            raise InvalidInput(f"keys: {path}: it is neither a file nor a pipe")
        if stat.S_IMODE(mode) & 0o077:
            raise InvalidInput(f"keys: other users may read {path}; run chmod 600 on it")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidInput(f"keys: {path}: {why}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or len(words[1]) < KEY_MIN or "/" in words[1]:
            raise InvalidInput(f"keys: {path}, line {number}: give a name and a key of at least "
                               f"{KEY_MIN} characters without '/'")
        if words[0] in keys:
            raise InvalidInput(f"keys: {path}, line {number}: the name {words[0]!r} occurs twice")
        keys[words[0]] = words[1]
    if not keys:
        raise InvalidInput(f"keys: {path} holds no key")
    return keys


class ClientKeys:
    """The keys that a server accepts.

    Args:
        keys: the key of each client's name.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._names = {_digest(key): name for name, key in keys.items()}

    def name_of(self, key: str) -> str:
        """Returns the name of the client with this key; empty for an unknown key. O(1)."""
        return self._names.get(_digest(key), "")

    def from_headers(self, headers: Mapping[str, str]) -> str:
        """Returns the name of the client that sent these headers (lower-case names); empty if they
        hold no known key."""
        if "x-api-key" in headers:
            return self.name_of(headers["x-api-key"])
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.name_of(value.strip())
        if scheme.lower() == "basic":
            return self.name_of(_password(value.strip()))
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(os.fsencode(key)).digest()


def _password(basic: str) -> str:
    """The password in the value of a Basic header; empty if the value is malformed."""
    try:
        return base64.b64decode(basic, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
