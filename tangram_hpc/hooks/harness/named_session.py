"""A session of the job that processes of one user share by a name: the first of them opens it, and
later ones attach to it.

Some agents start a tool server for each call, so what a call leaves behind must outlive the server.
The broker keeps the names of shared sessions unique, so of several processes that open a name at
the same moment one succeeds, and the others attach. All of them know the session's token without
having met: it is derived from the name, the session's options and a secret in the job's folder,
which the first process writes. No process therefore leaves a session that others cannot reach,
whenever it is killed. One that asks for other options has another token, and is refused.

Invariant: the secret is in a file of mode 0600 that belongs to this user, beside the job's access
file, and in no argument, environment variable, message or log.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram_hpc import Client, Session, find_access
from tangram_hpc.errors import AccessError, InfeasibleRequest, InvalidInput, SessionLost

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_FILE = "shared-sessions.key"  # in the job's folder
_CLOSING_S = 30.0  # how long a session that is closing may keep its name from the next one
_PAUSE_S = 0.1


def session_name(name: Any, where: str) -> str:
    """Returns a name that sessions are shared by, checked.

    Args:
        name: the name.
        where: the setting that holds it, for the error.

    Raises:
        InvalidInput: it is not such a name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(f"{where}: {name!r:.80} is not 1 to 64 letters, digits and the "
                           "characters . _ -, of which a letter or digit comes first")
    return name


async def named_session(client: Client, name: str, options: Mapping[str, Any]
                        ) -> tuple[Session, str]:
    """Attaches to the session of this name, or opens it; waits for its admission.

    Args:
        client: the client of the job.
        name: the session's name.
        options: arguments of `Client.session`, with `outlives` and what ends such a session.

    Returns:
        The session, and in one line why the session that had this name before has ended; an empty
        text if there was none, or if the session is open already.

    Raises:
        InvalidInput: the session can never open, an option is wrong, or a session with this name
            and other options is open.
        AccessError: the job's folder cannot be used.
    """
    text = json.dumps([name, options], sort_keys=True, default=str)
    token = hmac.new(await asyncio.to_thread(_secret_of_job), text.encode(),
                     hashlib.sha256).hexdigest()
    until, ended = time.monotonic() + _CLOSING_S, ""
    refusal: InfeasibleRequest | None = None
    while True:
        try:
            session = await asyncio.to_thread(client.attach, name=name, token=token)
            await session.opened
            return session, ended
        except InfeasibleRequest:
            raise
        except SessionLost as error:
            ended = str(error).removeprefix("attach: ")
        except InvalidInput:  # no session has this name and token
            if refusal is not None:
                raise InvalidInput(
                    f"{refusal}; those who share a session by its name ask for the same options "
                    f"(here {_shown(options)}), or take another name") from None
        session = client.session(name=name, token=token, shared=True, **options)
        try:
            await session.opened
            return session, ended
        except InfeasibleRequest as error:
            if repr(name) not in str(error) or time.monotonic() > until:
                raise  # the name is not what was refused
            refusal = error  # another process was quicker, or the former session is still closing
        await asyncio.sleep(_PAUSE_S)


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def _secret_of_job() -> bytes:
    """Returns the secret that all processes of this user in this job share. Blocks.

    Raises:
        AccessError: it can be neither read nor written, or others can read it.
    """
    path = find_access(os.environ).parent / _KEY_FILE
    try:
        if not path.exists():
            _write_once(path)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise AccessError(f"{path}: it must belong to you and have mode 0600; remove it")
            return file.read()
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror}; sessions are shared by a secret in this "
                          "file") from None


def _write_once(path: Path) -> None:
    """Writes a new secret, unless another process has just done so. A link appears with its whole
    content or not at all, and never replaces a file, also on NFS."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(secrets.token_hex(24))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
