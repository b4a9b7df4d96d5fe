"""The sessions that are open on this node: opening, closing, copying and moving them, and the order
of their actions.

A session runs one command at a time, and its files are copied only between two commands. A session
outlives the death of its init: its files stay, another init takes them over, and only the action
that ran is lost. How an action ended is not decided here.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from ...domain.action import Kind
from ...domain.ids import client_of
from ...domain.isolation import is_runtimes_own
from ...domain.session import SessionSpec
from ...domain.states import ActionState
from ...errors import InvalidInput
from ...ports import Images, ReadyImage, Reports
from ...protocol.payload import owner_by_client
from ...protocol.process_frames import ExitProcess, FreezeBackground, SessionSecrets
from ...protocol.reading import reader
from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt, NodeSession
from .payload_cache import PayloadCache
from .process_supervisor import ProcessSupervisor

_CLOSE_S = 8.0  # after that an init that closes its sandbox is killed
_DEATHS_MAX = 8  # of one session's inits; more is no accident
_read_values = reader(list[str])


class CommandDispatcher(Protocol):
    """Starts the actions of sessions; the executor is one."""

    def dispatch(self, attempt: NodeAttempt, process: ExecutionProcess) -> None:
        """Starts an attempt in a process that is free for it."""
        ...

    def waits(self, attempt: NodeAttempt) -> bool:
        """Whether an attempt still waits to be started."""
        ...

    def unstarted(self, attempt: NodeAttempt, state: ActionState, reason: str) -> None:
        """Ends an attempt that has not run."""
        ...


class Sessions:
    """The sessions that are open on one worker."""

    def __init__(self, supervisor: ProcessSupervisor, dispatcher: CommandDispatcher,
                 reports: Reports, cache: PayloadCache, images: Images | None = None) -> None:
        self._supervisor = supervisor
        self._images = images
        self._cache = cache
        self._dispatcher = dispatcher
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, NodeSession] = {}

    def get(self, session: int) -> NodeSession | None:
        """An open session; None when it is not open here."""
        return self._open.get(session)

    # ---- opening ----

    def open(self, spec: SessionSpec) -> None:
        """Builds the sandbox of a session; `session_up` or `session_down` follows."""
        if spec.id in self._open:
            return
        try:
            box = self._supervisor.backends.box(spec)
        except InvalidInput as error:
            return self._reports.session_down(spec.id, str(error))
        session = self._open[spec.id] = NodeSession(spec, box)
        if not spec.image or self._images is None or is_runtimes_own(spec.backend, spec.image):
            return self._with_secrets(session)
        session.pulling = True
        self._images.open(spec.id, spec.image, lambda image, why, never: self._with_image(
            session, image, why, never))

    def _with_image(self, session: NodeSession, image: ReadyImage | None, why: str,
                    never: bool) -> None:
        """Goes on with a session whose image is ready, or ends it."""
        session.pulling = False
        if image is None:
            return self._end(session, why, never)
        session.image = image.digest
        session.box = msgspec.structs.replace(session.box, image=image.folder, env=image.env)
        self._with_secrets(session)

    def _with_secrets(self, session: NodeSession) -> None:
        """Reads the values of a session's secrets, if it has any, and begins with it then."""
        pairs = session.spec.secrets
        if not pairs:
            return self._begin(session)

        def then(data: bytes, why: str) -> None:
            if self._open.get(session.id) is not session:
                return
            if why or session.closing:
                return self._end(session, "" if session.closing else why)
            values = _read_values(data)
            session.secrets = {pair[0]: value for pair, value in zip(pairs, values, strict=True)}
            self._begin(session)

        self._cache.secrets([name for _, name in pairs], then)

    def _begin(self, session: NodeSession) -> None:
        spec = session.spec
        if spec.origin:
            return self._ask_copy(session)
        if spec.files:
            return self._unpack(session)
        pool = self._supervisor.pool(session.box)
        process = pool.give_away()
        if process is None:
            self._supervisor.start_limiter.ask(lambda: self._build(session))
        else:
            session.process, process.session = process, spec.id
            self.up(process)
        pool.warm_up()  # for the next session

    def _build(self, session: NodeSession, home: str = "",
               origin: str = "") -> ExecutionProcess | None:
        """Forks the init of a session, if it is still wanted."""
        if self._open.get(session.id) is not session:
            return None
        if session.closing:
            if home:
                self._supervisor.remove_directory(home)
            self._end(session, "")
            return None
        process = session.process = self._supervisor.fork(session.box, home)
        process.session, process.origin = session.id, origin
        return process

    def _unpack(self, session: NodeSession) -> None:
        """Unpacks the files of a session that moved here; its init takes them over like those of a
        dead one.
        """
        home, folder = self._supervisor.new_directory()

        def then(_: bytes, why: str) -> None:
            if why or self._open.get(session.id) is not session:
                self._supervisor.remove_directory(home)
                if self._open.get(session.id) is session:
                    self._end(session, "" if session.closing else why)
            else:
                self._supervisor.start_limiter.ask(lambda: self._build(session, home))

        self._cache.unpack(session.spec.files, folder, then)

    def _ask_copy(self, session: NodeSession) -> None:
        origin = self._open.get(session.spec.origin)
        if origin is None or origin.closing:
            return self._end(session, "origin: its session is not open on this node")
        origin.copies.append(session)
        self._next(origin)

    def _copy(self, session: NodeSession, origin: NodeSession) -> ExecutionProcess | None:
        assert origin.process is not None
        process = self._build(session, origin=origin.process.folder)
        if process is None:
            self._copied(session)
        return process

    def _copied(self, session: NodeSession) -> None:
        origin = self._open.get(session.spec.origin) if session.spec.origin else None
        if origin is not None and session in origin.copying:
            origin.copying.remove(session)
            if origin.spec.background == "run" and not origin.copying:
                self._reports.background_wants(origin.id)  # a lease continues what was frozen
            self._next(origin)

    def up(self, process: ExecutionProcess) -> None:
        """Notes that the init of a session accepts orders."""
        session = self._open[process.session]
        self._copied(session)
        if session.closing:
            return self._shut(process)
        if session.secrets:
            process.send(SessionSecrets(session.secrets))
        first, session.up = not session.was_up, True
        session.was_up = True
        if first:
            self._reports.session_up(session.id, session.image)
        if session.packing:
            return process.kill()
        self._next(session)

    # ---- closing and moving ----

    def close(self, session: NodeSession) -> None:
        """Takes a sandbox down; `session_down` follows."""
        if session.closing:
            return
        session.closing = True
        for copy in session.copies:
            self._end(copy, "origin: its session was closed")
        session.copies.clear()
        if session.pulling:
            return self._end(session, "")
        if session.up and session.process is not None:
            self._shut(session.process)  # else as soon as its init is up or forked

    def pack(self, number: int) -> None:
        """Takes a sandbox down and stores its files; `session_packed` or `session_down` follows.
        The init is killed as if by accident, so that the directory stays, and no other init
        follows.
        """
        session = self._open.get(number)
        if session is None or session.closing or session.packing:
            return
        session.packing = True
        if session.up and session.process is not None:
            # else that happens as soon as the init is up, or nothing of it is left
            session.process.kill()

    def _packed(self, session: NodeSession, process: ExecutionProcess, digest: str,
                why: str) -> None:
        process.remove_directory()
        if self._open.get(session.id) is not session:
            return
        if why or session.closing:
            return self._end(session, "" if session.closing else why)
        del self._open[session.id]
        self._release_image(session)
        self._reports.session_packed(session.id, digest)

    def _shut(self, process: ExecutionProcess) -> None:
        process.send(ExitProcess())
        self._loop.call_later(_CLOSE_S, process.kill)

    def lost(self, process: ExecutionProcess, reason: str) -> bool:
        """Notes that an init is dead; returns whether its files are kept for another one. If so,
        `restart` must follow as soon as its descendants have ended.
        """
        session = self._open.get(process.session)
        if session is None:
            return False
        self._copied(session)
        session.running = 0
        session.deaths += 1
        if session.closing or not session.up or session.deaths > _DEATHS_MAX:
            self._end(session, "" if session.closing else reason)
            return False
        session.up = False
        return True

    def restart(self, process: ExecutionProcess) -> None:
        """Builds another init for a session whose dead init has no descendants left, or packs its
        files.
        """
        session = self._open.get(process.session)
        if session is not None:
            session.process = None
            if session.packing and not session.closing:
                owner = f"{owner_by_client(client_of(session.id))}files"
                return self._cache.pack(process.folder, owner, lambda data, why: self._packed(
                    session, process, data.decode(), why))
            self._supervisor.start_limiter.ask(lambda: self._build(session, process.home))

    def _release_image(self, session: NodeSession) -> None:
        if self._images is not None:
            self._images.release(session.id)

    def _end(self, session: NodeSession, reason: str, never: bool = False) -> None:
        self._open.pop(session.id, None)
        self._release_image(session)
        state = ActionState.CANCELLED if session.closing else ActionState.FAILED
        text = "its session was closed" if session.closing else reason
        for attempt in session.waiting:
            if self._dispatcher.waits(attempt):
                self._dispatcher.unstarted(attempt, state, text)
        for copy in (*session.copies,):
            self._end(copy, "origin: its session is gone")
        self._reports.session_down(session.id, reason, never)

    def idle_processes(self) -> list[ExecutionProcess]:
        """The inits in which no command runs."""
        return [one.process for one in self._open.values()
                if one.process is not None and one.up and not one.running]

    def directories_lost(self) -> None:
        """Notes that the fork server died and removed all directories: no session can go on."""
        for session in self._open.values():
            session.deaths = _DEATHS_MAX

    def end_all(self) -> None:
        """Reports all sessions as closed, when the worker ends."""
        if self._images is not None:
            self._images.close()
        sessions, self._open = list(self._open), {}
        for session in sessions:
            self._reports.session_down(session, "its worker was closed")

    # ---- order of actions ----

    def enter(self, attempt: NodeAttempt, session: NodeSession) -> None:
        """Runs an action in a session, now or after those that wait. Files are read and written
        beside commands.
        """
        if attempt.order.action.kind is Kind.BACKGROUND and (
                session.running or session.copying or session.packing or not session.up):
            why = "nothing runs in the background of its session now"
            self._dispatcher.unstarted(attempt, ActionState.COMPLETED, why)
        elif attempt.order.action.kind is Kind.EXEC or not session.up or session.process is None:
            session.waiting.append(attempt)
            self._next(session)
        else:
            self._dispatcher.dispatch(attempt, session.process)

    def left(self, session: NodeSession, lease: int) -> None:
        """Notes that no process of a lease is left in a session."""
        if session.running == lease:
            session.running = 0
            self._next(session)

    def _next(self, session: NodeSession) -> None:
        if session.running or not session.up or session.closing or session.packing:
            return
        starts = self._supervisor.start_limiter
        if session.copies and session.spec.background == "run" and session.process is not None:
            session.process.send(FreezeBackground())  # the files must not change meanwhile
        while session.copies:
            copy = session.copies.popleft()
            session.copying.append(copy)
            starts.ask(lambda copy=copy: self._copy(copy, session))  # type: ignore[misc]
        while session.waiting and not session.copying and not session.running:
            attempt = session.waiting.popleft()
            if self._dispatcher.waits(attempt) and session.process is not None:
                if attempt.order.action.kind is Kind.EXEC:
                    session.running = attempt.order.lease
                self._dispatcher.dispatch(attempt, session.process)
