"""The part of `Client` that opens sessions and speaks for them.

Law: a session that was asked for is kept until the broker says that it is gone, and asked for again
under its id after a lost way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from ..domain.session import SessionSpec
from ..protocol import message as ms
from .asking import Asking
from .request import environment, raw_files, session_spec, trajectory_name
from .session import Session

if TYPE_CHECKING:
    from .client import Client


class Opening(Asking):
    """See `Client`."""

    _sessions: dict[int, Session]
    _opening: set[int]

    def session(self, *, mem: int | str = 0, disk: int | str = 0, backend: str = "",
                image: str = "", network: bool = False, trusted: bool = False,
                background: str = "stop", env: Mapping[str, str] | None = None,
                files: Mapping[str, bytes | str] | None = None, idle_s: float = 0,
                grace_s: float | None = None, name: str = "", component: str = "",
                movable: bool = False, trajectory: str | int = "") -> Session:
        """A stateful sandbox: holds memory from open to close, cores only while an action runs.

        Use it as `with client.session() as s:` (or `async with`), which waits for its admission.

        Args:
            mem, disk: what it holds and what its files may take: MiB, or "2G"; no disk for the
                site's default.
            backend: `process`, `bwrap`, `podman`, `apptainer` or `enroot`; the node's best without.
            image: what its file system is made of, as the backend names images.
            network: whether it may reach a network.
            trusted: its code is your own and may see your files. Without it, opening one is refused
                where no node can keep it from them.
            background: what its leftover processes do between actions: "stop", "share" (a small
                share of one core), or "end" (killed with the action that left them).
            env: for all its commands, beneath each command's own.
            files: path -> content, written before anything else happens in it.
            idle_s: closed when nothing waited, ran or renewed it for so long; 0: never.
            grace_s: how long it outlives this client's loss; the broker's `grace_s` without.
            movable: only its files count: it goes on elsewhere when its node is drained.
            trajectory: of a rollout pool, see `rollout`: what is submitted here is its tools, but
                for files that are read and written.

        Raises:
            InvalidInput: an argument is wrong; names it.
        """
        spec = session_spec(
            SessionSpec(0), mem=mem, disk=disk, backend=backend, image=image, network=network,
            trusted=trusted, background=background, idle_s=idle_s, grace_s=grace_s, name=name,
            component=component, movable=movable)
        return self._open_session(spec, env, files, trajectory)

    def _open_session(self, spec: SessionSpec, env: Mapping[str, str] | None,
                      files: Mapping[str, bytes | str] | None,
                      trajectory: str | int = "") -> Session:
        raw, env = raw_files(files), environment(env)
        of = trajectory_name(trajectory) if trajectory != "" else ""
        with self._lock:
            self._check_open()
            spec = msgspec.structs.replace(spec, id=self._mint())
            session = Session(cast("Client", self), spec, env, of)
            self._sessions[spec.id] = session
            self._opening.add(spec.id)
            self._put(ms.RequestSession(spec))
        session.first = [session.write(path, data) for path, data in raw.items()]
        return session

    def _renew(self, session: int) -> None:
        with self._lock:
            if session in self._sessions:
                self._put(ms.RenewSession(session))

    def _release(self, session: int) -> None:
        with self._lock:
            if session in self._sessions:
                self._put(ms.ReleaseSession(session))
