"""Opens, closes, copies and moves the sessions on this node, takes snapshots of them, and keeps the
order of their actions.

A session runs one command at a time, and its files are copied only between two commands. Where its
root is an overlay, its changes are frozen once as a layer, and all forks until its next action
begin with this layer. A session outlives the death of its init: its files stay, another init takes
them over, and only the action that ran is lost. How an action ended is not decided here.
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
from ...protocol.payload import SnapshotReturn, encode, owner_by_client
from ...protocol.process_frames import ExitProcess, FreezeBackground, HoldStill, SessionSecrets
from ...protocol.reading import reader
from ..files import root_record
from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt, NodeSession, NodeSnapshot
from .node_snapshots import NodeSnapshots, SnapshotReady
from .payload_cache import PayloadCache, is_snapshot
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

    def carried_out(self, attempt: NodeAttempt, payload: bytes) -> None:
        """Ends an attempt that the worker itself has carried out; `payload` is the result."""
        ...


class Sessions:
    """The sessions that are open on one worker."""

    def __init__(self, supervisor: ProcessSupervisor, dispatcher: CommandDispatcher,
                 reports: Reports, cache: PayloadCache, snapshots: NodeSnapshots,
                 images: Images | None = None) -> None:
        self._supervisor = supervisor
        self._snapshots = snapshots
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
        # the files of a fork are changes to its origin's image
        origin = self._open.get(spec.origin)
        same = origin is not None and origin.spec.image == spec.image
        self._images.open(spec.id, spec.image, lambda image, why, infeasible: self._with_image(
            session, image, why, infeasible), spec.origin if same else 0)

    def _with_image(self, session: NodeSession, image: ReadyImage | None, why: str,
                    infeasible: bool) -> None:
        """Goes on with a session whose image is ready, or ends it."""
        session.pulling = False
        if image is None:
            return self._end(session, why, infeasible)
        if self._supervisor.lies_in(image.folder):
            return self._end(session, f"image: {image.folder} holds the worker's scratch folder: "
                             "other sessions would be seen in it, and a copy of it would never "
                             "end; name the folder of another root file system", infeasible=True)
        session.image = image.digest
        session.box = msgspec.structs.replace(session.box, image=image.folder, env=image.env,
                                              workdir=image.workdir, user=image.user)
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
        if spec.snapshot:
            return self._from_snapshot(session)
        process = self._supervisor.pool(session.box).give_away()
        if process is None:
            self._supervisor.start_limiter.ask(lambda: self._build(session))
        else:
            session.process, process.session = process, spec.id
            self.up(process)

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
        """Unpacks the files of a session that moved here. Its init takes them over, as the next
        init of a session does after the death of the one before.
        """
        home, folder = self._supervisor.new_directory()

        def then(_: bytes, why: str) -> None:
            if why or self._open.get(session.id) is not session:
                self._supervisor.remove_directory(home)
                if self._open.get(session.id) is session:
                    self._end(session, "" if session.closing else why)
            else:
                self._supervisor.start_limiter.ask(lambda: self._build(session, home))

        users = self._supervisor.backends.bwrap.users if session.box.writable else ()
        self._cache.unpack(session.spec.files, folder, users, then)

    def _from_snapshot(self, session: NodeSession) -> None:
        """Begins a session with the files of a snapshot, once they are on this node."""
        session.pulling = True  # until it is False, the session has no sandbox to take down

        def then(snapshot: NodeSnapshot | None, why: str) -> None:
            if self._open.get(session.id) is not session:
                return self._snapshots.release(snapshot)
            session.pulling, session.base = False, snapshot
            if snapshot is None:
                return self._end(session, f"snapshot: {session.spec.snapshot}: {why}")
            if snapshot.digest != session.image:
                return self._end(session, f"snapshot: {session.spec.snapshot} was taken of image "
                                          f"{snapshot.digest}, and {session.spec.image} is "
                                          f"{session.image or 'a folder'} here", True)
            self._supervisor.start_limiter.ask(
                lambda: self._build(session, origin=snapshot.folder))

        self._snapshots.need(session.spec.snapshot, then)

    def _ask_copy(self, session: NodeSession) -> None:
        origin = self._open.get(session.spec.origin)
        if origin is None or origin.closing:
            return self._end(session, "origin: its session is not open on this node")
        origin.copies.append(session)
        self._next(origin)

    def _copy(self, session: NodeSession, origin: NodeSession) -> ExecutionProcess | None:
        assert origin.process is not None
        folder = session.base.folder if session.base is not None else origin.process.folder
        process = self._build(session, origin=folder)
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
            if process.fresh and not process.origin:
                self._supervisor.build_more(process)
        if session.packing:
            return process.kill()
        self._next(session)

    # ---- closing and moving ----

    def close(self, session: NodeSession) -> None:
        """Takes a sandbox down; `session_down` follows."""
        if session.closing:
            return
        session.closing = True
        if session.taking is not None and self._dispatcher.waits(session.taking):
            self._dispatcher.unstarted(session.taking, ActionState.CANCELLED,
                                       "its session was closed")
        for copy in session.copies:
            self._end(copy, "origin: its session was closed")
        session.copies.clear()
        if session.pulling:
            return self._end(session, "")
        if session.process is None:
            return  # it ends as soon as its init is forked
        if session.up:
            self._shut(session.process)
        else:  # its init may copy an image or an origin's files, which takes minutes
            session.process.kill()

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
        self._release(session)
        self._reports.session_packed(session.id, digest)

    def _shut(self, process: ExecutionProcess) -> None:
        process.send(ExitProcess())
        self._loop.call_later(_CLOSE_S, process.kill)

    def lost(self, process: ExecutionProcess, reason: str, infeasible: bool = False) -> bool:
        """Notes that an init is dead; returns whether its files are kept for another one. If so,
        `restart` must follow as soon as its descendants have ended.

        Args:
            process: the init.
            reason: why it is dead.
            infeasible: whether no init can build its sandbox.
        """
        session = self._open.get(process.session)
        if session is None:
            return False
        self._copied(session)
        session.running = 0
        session.deaths += 1
        session.up, was_up = False, session.up
        if session.still is not None:
            self.held_still(process, "its sandbox's init ended")
        if session.closing or not was_up or session.deaths > _DEATHS_MAX:
            began = session.was_up or session.spec.files  # the latter: on another node
            self._end(session, "" if session.closing else reason, infeasible and not began)
            return False
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

    def _release(self, session: NodeSession) -> None:
        if self._images is not None:
            self._images.release(session.id)
        self._changed(session)
        self._snapshots.release(session.base)
        session.base = None

    def _end(self, session: NodeSession, reason: str, infeasible: bool = False) -> None:
        self._open.pop(session.id, None)
        self._release(session)
        state = ActionState.CANCELLED if session.closing else ActionState.FAILED
        text = "its session was closed" if session.closing else reason
        taking = [session.taking] if session.taking is not None else []
        for attempt in (*session.waiting, *session.takes, *taking):
            if self._dispatcher.waits(attempt):
                self._dispatcher.unstarted(attempt, state, text)
        for copy in (*session.copies,):
            self._end(copy, "origin: its session is gone")
        self._reports.session_down(session.id, reason, infeasible)

    def idle_processes(self) -> list[ExecutionProcess]:
        """The inits in which no command runs."""
        return [one.process for one in self._open.values()
                if one.process is not None and one.up and not one.running]

    def directories_lost(self) -> None:
        """Notes that the fork server died and removed all directories: no session can go on."""
        for session in self._open.values():
            session.deaths = _DEATHS_MAX
        self._snapshots.directories_lost()

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
                session.running or session.copying or session.packing or session.freezing
                or not session.up):
            why = "nothing runs in the background of its session now"
            self._dispatcher.unstarted(attempt, ActionState.COMPLETED, why)
        elif is_snapshot(attempt.payload):
            session.takes.append(attempt)
            self._next(session)
        elif attempt.order.action.kind is Kind.EXEC or not session.up or session.process is None:
            session.waiting.append(attempt)
            self._next(session)
        else:
            self._changed(session)
            self._dispatcher.dispatch(attempt, session.process)

    def left(self, session: NodeSession, lease: int) -> None:
        """Notes that no process of a lease is left in a session."""
        if session.running == lease:
            session.running = 0
            self._next(session)

    def _next(self, session: NodeSession) -> None:
        if (session.running or not session.up or session.closing or session.packing
                or session.freezing):
            return
        while session.takes and not session.freezing:
            self._take(session, session.takes.popleft())
        if session.copies and not session.freezing:
            self._copy_all(session)
        while (session.waiting and not session.copying and not session.running
               and not session.freezing):
            attempt = session.waiting.popleft()
            if self._dispatcher.waits(attempt) and session.process is not None:
                if attempt.order.action.kind is Kind.EXEC:
                    session.running = attempt.order.lease
                self._changed(session)
                self._dispatcher.dispatch(attempt, session.process)

    # ---- snapshots and forks ----

    def _take(self, session: NodeSession, attempt: NodeAttempt) -> None:
        """Takes a snapshot for an action, if it is still wanted."""
        if not self._dispatcher.waits(attempt):
            return
        call, why = self._snapshots.wanted(attempt.payload)
        if call is None:
            return self._dispatcher.unstarted(attempt, ActionState.FAILED, f"snapshot: {why}")
        session.taking = attempt

        def then(snapshot: NodeSnapshot | None, why: str) -> None:
            session.taking = None
            if self._dispatcher.waits(attempt):
                if snapshot is None:
                    return self._dispatcher.unstarted(attempt, ActionState.FAILED,
                                                      f"snapshot: {why}")
                self._dispatcher.carried_out(attempt, encode(SnapshotReturn(call.name)))
            elif snapshot is not None:  # cancelled meanwhile
                self._snapshots.discard(snapshot)
            self._snapshots.release(snapshot)

        self._freeze(session, call.name, then)

    def _copy_all(self, session: NodeSession) -> None:
        """Begins the forks that wait for this session, in which nothing runs now."""
        assert session.process is not None
        record = root_record.recorded(session.process.folder)
        stacked = [copy for copy in session.copies if record is not None and record.way != "copy"
                   and copy.box.writable and copy.box.image == session.box.image]
        if stacked and session.frozen is None:
            init = session.process
            return self._freeze(session, "", lambda frozen, why: self._frozen(
                session, init, frozen, why))
        if session.spec.background == "run":
            session.process.send(FreezeBackground())  # the files must not change meanwhile
        while session.copies:
            copy = session.copies.popleft()
            session.copying.append(copy)
            if copy in stacked and session.frozen is not None:
                copy.base = session.frozen
                self._snapshots.use(session.frozen)
            self._supervisor.start_limiter.ask(
                lambda copy=copy: self._copy(copy, session))  # type: ignore[misc]
        if session.spec.background not in ("stop", "end"):
            self._changed(session)  # what runs in the background may change the files at any time

    def _frozen(self, session: NodeSession, init: ExecutionProcess, frozen: NodeSnapshot | None,
                why: str) -> None:
        """Goes on with the forks of a session whose files were to be frozen.

        Args:
            session: the session.
            init: its init when that began. The next one may be up by now.
            frozen: the layer; None if it could not be made.
            why: why it could not be made.
        """
        if frozen is None and session.up and session.process is init:
            copies = list(session.copies)
            session.copies.clear()
            for copy in copies:
                self._end(copy, f"fork: {why}")
        elif frozen is None:
            pass  # the forks wait for the session's next init, or were ended with the session
        elif self._open.get(session.id) is session:
            session.frozen = frozen
        else:
            self._snapshots.release(frozen)

    def _changed(self, session: NodeSession) -> None:
        """Notes that the files of a session may change from now on."""
        frozen, session.frozen = session.frozen, None
        self._snapshots.release(frozen)

    def _freeze(self, session: NodeSession, name: str, then: SnapshotReady) -> None:
        """Freezes the files of a session while nothing runs in it; `then` is called once."""
        process = session.process
        assert process is not None
        session.freezing = True

        def over(snapshot: NodeSnapshot | None, why: str) -> None:
            session.freezing = False
            if session.process is process:
                process.send(HoldStill(False))
            if snapshot is not None and (session.process is not process or not session.up):
                self._snapshots.discard(snapshot)
                self._snapshots.release(snapshot)
                snapshot, why = None, "its sandbox ended meanwhile"
            then(snapshot, why)
            self._next(session)

        def still(why: str) -> None:
            if why:
                return over(None, why)
            wanted = self._snapshots.new(name, session.base, session.spec.image, session.image)
            self._snapshots.freeze(process.folder, wanted, session.id, over)

        session.still = still
        process.send(HoldStill())

    def held_still(self, process: ExecutionProcess, why: str) -> None:
        """Notes that nothing runs in the sandbox of a session, or that `why` something may."""
        session = self._open.get(process.session)
        if session is not None and session.process is process and session.still is not None:
            still, session.still = session.still, None
            still(why)
