"""The init of a sandbox: it runs the commands one at a time, and no process outlives its action
unnoticed.

An event loop waits for its worker's orders, SIGCHLD, the command's output and deadlines. User's
programs run only as its children. As a subreaper it adopts every orphan of a command, so it knows
when nothing is left. Plain commands are served by the fast path (`fast_path.py`), which hands back
everything else. An init knows no other sandbox.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from types import FrameType

import msgspec

from ...domain.outcome import Outcome, too_long
from ...domain.states import ActionState
from ...protocol import input_flow
from ...protocol.payload import (
    SHELL_ENDED,
    DetachableCall,
    ErrorReturn,
    ExecCall,
    ExecReturn,
    FileCall,
    Payload,
    ShellCall,
    TerminalCall,
    decode,
    encode,
)
from ...protocol.process_frames import (
    NEVER_BUILT,
    RECEIVE,
    Broken,
    ConnectPort,
    CreditInput,
    Ended,
    ExitProcess,
    FreezeBackground,
    FromProcess,
    GiveInput,
    Gone,
    HeldStill,
    HoldStill,
    KillCommand,
    LeaseBackground,
    OutputChunk,
    PortBytes,
    PortCredit,
    PortEnded,
    ProcessInbox,
    Ready,
    RunAction,
    SessionSecrets,
    Setup,
    Units,
    frame,
)
from ...resources import process_tree
from .. import environment
from ..files import confine, file_answers, frozen_files, scratch
from ..files.fresh_folders import FreshFolders, Unemptied
from ..network.port_streams import PortStreams
from ..shells.detachable_command import DetachableCommand, DetachableCommands
from ..shells.shell_command import ShellCommand
from ..shells.shell_process import ShellProcess
from ..shells.shells import NoShell, Shells, SparingProcesses
from ..shells.terminal_command import TerminalCommand
from . import fast_path, isolation_setup, users
from .background_processes import BackgroundProcesses, LeftoverOutput
from .bootstrap import open_oom_score
from .command import LOOK_NS, Command, changed_signals
from .leased_background import LeasedBackground, Unstoppable
from .resource_usage import GroupCpu, ResourceUsage
from .sandbox_meter import SandboxMeter
from .units_file import UnitsFile
from .unstartable import Unstartable

_SOON_NS = 2_000_000  # if a command ends sooner, its pipes are read only at its end
_AGAIN_NS = 20_000_000  # between two attempts to kill the processes that are left
_END_S = 5.0
_AnyCommand = ExecCall | ShellCall | TerminalCall | DetachableCall
_Wrapped = TerminalCall | DetachableCall  # around an ExecCall
_ALONE = (ActionState.TIMEOUT, ActionState.CANCELLED)  # ends no earlier command's processes
_FIRST = b"500"  # oom_score_adj of a command: the kernel kills it before its init


class Init:
    """The init of one sandbox.

    Attributes:
        _control: the socket to its worker.
        _place: its scratch directory.
        _home: the session's directory.
        _begin: the directory in which commands begin and to which paths are relative: the WORKDIR
            of the image if it has one, else `_home`.
        _user: the user that the image names; empty for user 0.
        _built: whether the sandbox has been built, so that the attributes below exist.
        _folders: what is emptied after an action without a session.
        _isolation: what isolates the sandbox; `_processes` reaches everything in it.
        _group_cpu: the CPU time of its cgroup; `_meter` measures memory, processes and disk.
        _background: what outlived its action.
        _shells: the shells that live on between their commands.
        _detachable: the commands that can go to the background, or are there.
        _ports: the streams to ports of the sandbox.
        _fast_path: serves plain commands; None where it is not built or not wanted.
        _command: the running command; None between commands.
        _watch_at: when to begin to read the command's output (monotonic ns); 0 once that has begun.
        _file_mib: the limit in MiB on the size of one file; 0 for none.
        _ending: whether the loop stops; `_closing`: whether the files are removed then.
        _status: the exit status of this process.
        _wake: a pipe with a byte for each signal.
    """

    def __init__(self, control: socket.socket, home: str) -> None:
        self._control, self._control_fd = control, control.fileno()
        self._place = home
        self._built = False
        self._setup: Setup
        self._isolation: isolation_setup.SandboxIsolation
        self._folders: FreshFolders
        self._group_cpu: GroupCpu
        self._meter: SandboxMeter
        self._background: BackgroundProcesses
        self._processes: SparingProcesses
        self._shells: Shells
        self._detachable: DetachableCommands
        self._ports: PortStreams
        self._devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._units = UnitsFile(home)
        self._score = open_oom_score()
        self._inbox = ProcessInbox()
        self._fast_path: fast_path.FastPath | None = None
        self._command: Command | None = None
        self._watch_at = 0
        self._file_mib = 0
        self._ending = self._closing = False
        self._status = 0
        self._wake, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, where: None)
        signal.signal(signal.SIGINT, lambda number, where: None)  # as in the fork server
        signal.signal(signal.SIGTERM, self._on_term)
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def _on_term(self, number: int, where: FrameType | None) -> None:
        self._ending = True

    def serve(self) -> int:
        """Serves until its worker closes it or goes away; then nothing beneath it is left. Returns
        the exit status.
        """
        try:
            while not self._ending:
                if self._fast_path is not None and self._stands() == self._fast_path.stands:
                    self._serve_fast_path(self._fast_path)
                    continue
                self._turn()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone
        finally:
            self._end()
        return self._status

    def _turn(self) -> None:
        """Waits for the next event and handles it."""
        now = time.monotonic_ns()
        due = self._due(now)
        for fd, _ in self._poll.poll(max(0, -((now - due) // 1_000_000)) if due else None):
            if fd == self._wake:
                os.read(fd, 512)
                self._reap()
            elif fd == self._control_fd:
                self._receive()
            elif self._built and (shell := self._shells.by_fd.get(fd)) is not None:
                self._on_shell(shell, fd)
            elif self._built and fd in self._ports.fds:
                self._ports.ready(fd)
            elif self._built and fd in self._background.output.fds:
                self._background.output.read(fd)
            else:
                self._read(fd)
        if self._command is not None:
            self._command.mark_time()
        if due and time.monotonic_ns() >= due:
            if self._command is not None:
                self._tick(self._command)
            else:
                try:
                    self._background.tick()
                except Unstoppable as error:
                    self._fall(str(error))

    def _due(self, now: int) -> int:
        """When to wake without an event (monotonic ns); 0 for never."""
        command = self._command
        if command is None:
            return self._background.due if self._built else 0
        due = self._watch_at
        for other in (command.act_at, command.output_at, command.chase_at, self._meter.due,
                      command.usage.look_at):
            if other and (not due or other < due):
                due = other
        return min(due, now + LOOK_NS) if command.act_at else due

    # ---- the fast path ----

    def _stands(self) -> tuple[int, int, bool]:
        """What the fast path takes for granted; the last element is whether a command can be served
        now.
        """
        idle = (self._command is None and not self._background.there and self._inbox.empty
                and not self._shells and not self._ports and not self._meter.over(self._file_mib))
        return self._units.now, self._file_mib, idle

    def _serve_fast_path(self, served: fast_path.FastPath) -> None:
        back = served.serve()
        if back is fast_path.ReturnCode.READ:
            self._obey(served.data)
        elif back is fast_path.ReturnCode.RUNNING:
            self._take_over(served)
        elif back is fast_path.ReturnCode.GONE:
            self._ending = True
        elif back is fast_path.ReturnCode.FELL:
            self._fall()
        elif back is fast_path.ReturnCode.FRESHEN:
            (run,) = self._inbox.feed(served.data)
            assert isinstance(run, RunAction)
            self._freshen(run.lease)
        else:
            self._turn()

    def _take_over(self, served: fast_path.FastPath) -> None:
        """Takes over a running command that the fast path started."""
        (run,) = self._inbox.feed(served.data)
        assert isinstance(run, RunAction)
        call = decode(run.payload)
        assert isinstance(call, ExecCall)
        command = self._command_of(run, call)
        command.adopt(served.command)
        self._begun(command)
        self._reap()

    def _learn(self, run: RunAction) -> None:
        """Tells the fast path of an order that was served: further ones like it are plain."""
        if self._fast_path is None or 0 < run.timeout_ns <= self._fast_path.patience_ns:
            return
        if not run.keep and self._folders.never_empty:
            return
        shared = bool(run.limits.mem_mib) and not self._setup.watch
        processes = run.limits.pids if self._isolation.pause is not None else 0
        env = self._grants.plain(run.units, run.most, run.gpus)
        # the order's units: on a full disk the file may hold an older number
        self._fast_path.learn(run, env, shared, processes, (run.units, self._file_mib, True))

    # ---- orders ----

    def _receive(self) -> None:
        self._obey(self._control.recv(RECEIVE))

    def _obey(self, data: bytes) -> None:
        if not data:
            self._ending = True
        for order in self._inbox.feed(data):
            if isinstance(order, RunAction):
                self._run(order)
            elif isinstance(order, KillCommand):
                self._kill(order)
            elif isinstance(order, Units):
                if (self._command is not None and self._command.run.lease == order.lease) or (
                        self._background.leased.resize(order.lease, order.units)):
                    self._units.write(order.units)
            elif isinstance(order, LeaseBackground):
                self._units.write(order.units)
                self._background.leased.lease(order)
            elif isinstance(order, GiveInput):
                if self._command is not None and self._command.run.lease == order.lease:
                    self._give(self._command, order)
            elif isinstance(order, Setup):
                self._build(order)
            elif isinstance(order, ConnectPort | PortBytes | PortCredit | PortEnded):
                if self._built:
                    self._ports.obey(order)
            elif isinstance(order, SessionSecrets):
                self._make_grants(order.values)
            elif isinstance(order, FreezeBackground):
                self._background.freeze()
            elif isinstance(order, HoldStill):
                self._hold_still(order.hold)
            elif isinstance(order, ExitProcess):
                if self._built:
                    self._background.leased.close()
                self._ending = self._closing = True

    def _hold_still(self, hold: bool) -> None:
        """Stops the background processes while the worker freezes the files, or lets them go on.
        """
        if not hold:
            return self._background.release()
        why = "a command still runs" if self._command is not None else ""
        try:
            self._background.hold_still()
        except OSError as error:
            why = f"its background processes could not be stopped ({error.strerror})"
        self._send(HeldStill(why))

    def _build(self, setup: Setup) -> None:
        """Isolates this process; ends it when that cannot be done."""
        self._group_cpu = GroupCpu(setup.cpu_file)
        try:
            if setup.origin:
                frozen_files.begin(setup.origin, self._place, setup.box.image)
            self._isolation = isolation_setup.build(setup, self._place)
        except (isolation_setup.Unbuildable, scratch.Uncopied, OSError) as error:
            if isinstance(error, isolation_setup.Unbuildable) and error.infeasible:
                self._status = NEVER_BUILT
            return self._fall(str(error))
        self._setup, self._home = setup, self._isolation.home
        self._begin = setup.box.workdir or self._home
        self._user = users.of_image(setup.box.user)
        self._folders = FreshFolders(
            self._home, self._isolation.tmp, self._isolation.pause is not None,
            self._isolation.nodes, self._isolation.changes is not None)
        self._make_grants({})
        self._shells, self._ports = Shells(self._poll), PortStreams(self._poll, self._send)
        self._detachable = DetachableCommands(self._home, self._isolation)
        self._processes = SparingProcesses(self._isolation.processes, self._shells)
        self._meter = SandboxMeter((self._home, self._isolation.tmp), self._processes,
                                   self._isolation.nodes, self._isolation.changes)
        self._background = BackgroundProcesses(self._processes, LeasedBackground(
            self._processes, self._group_cpu, self._meter, self._send, self._isolation,
            setup.watch), LeftoverOutput(self._poll))
        self._built = True
        if setup.compiled and fast_path.serves(self._isolation):
            doors = (self._control_fd, self._wake, self._units.fd, self._score, self._devnull,
                     self._group_cpu.fd)
            self._fast_path = fast_path.FastPath(doors, changed_signals(), self._isolation,
                                                 setup.output_max, setup.watch,
                                                 self._begin, self._folders.paths)
        if self._isolation.pause is not None:
            self._poll.register(self._isolation.pause.gone_fd, select.POLLIN)
        self._send(Ready(self._isolation.name))

    def _make_grants(self, secret: dict[str, str]) -> None:
        """Makes the environments of the commands that follow."""
        base = environment.sandbox_environment(os.environ, self._home, self._isolation.tmp,
                                               self._isolation.own_root)
        if self._isolation.changes is not None:
            base |= users.of_root(self._home)
        base = environment.with_image(base, self._setup.box.env)
        if self._isolation.helper is not None:
            base |= self._isolation.helper.variables()
        self._grants = environment.Grants({**base, **secret}, self._isolation.units)
        if self._fast_path is not None:
            self._fast_path.forget()

    def _run(self, run: RunAction) -> None:
        try:
            call = decode(run.payload)
        except msgspec.DecodeError as error:
            return self._refuse(run, 0, f"payload: not in the protocol ({error})")
        if isinstance(call, FileCall):
            return self._file(run, call)
        if isinstance(call, ShellCall) and call.op == "close":
            self._shells.close(call.shell)
            outcome = Outcome(ActionState.COMPLETED, isolation=self._isolation.name)
            return self._send(Ended(run.lease, outcome, None, True))
        if not isinstance(call, _AnyCommand):
            return self._refuse(run, 0, f"payload: a sandbox cannot run a {type(call).__name__}")
        try:
            asked, (call, identity) = call, self._as_user(call)
            command = self._command_of(run, self._beginning(call))
            command.identity = identity
            self._limit_files(run.limits.disk_mib)
            self._background.wake()
            for path, data in command.call.files.items():
                confine.write(self._begin, path, data, 0o644)
            self._units.write(run.units)
            self._start(command)
        except confine.PathRefused as error:
            return self._refuse(run, 0, f"files: {error}")
        except NoShell as error:
            return self._refuse(run, 0, error.reason, ErrorReturn(SHELL_ENDED, error.reason))
        except Unstartable as error:
            if isinstance(call, ShellCall):
                self._shells.not_started(call.shell, error)
            return self._refuse(run, error.code, error.reason)
        if isinstance(call, ExecCall) and call is asked and identity is None:
            self._learn(run)
        self._begun(command)

    def _as_user(self, call: _AnyCommand) -> tuple[_AnyCommand, users.Identity | None]:
        """Returns the call with the variables of the user that it asks for, and the numbers of that
        user; None if these are the numbers of this process.

        Raises:
            UnknownUser: the sandbox has no such user.
        """
        changes = self._isolation.changes
        there = changes.users if changes is not None else None
        command = call.command if isinstance(call, _Wrapped) else call
        if isinstance(command, ShellCall):
            env, identity = users.user_of(ExecCall(user=command.user), there, self._user)
            return msgspec.structs.replace(command, env=env | command.env), identity
        env, identity = users.user_of(command, there, self._user)
        if not env or not command.clean_env:
            return call, identity
        command = msgspec.structs.replace(command, env=env | command.env)
        if isinstance(call, _Wrapped):
            return msgspec.structs.replace(call, command=command), identity
        return command, identity

    def _beginning(self, call: _AnyCommand) -> _AnyCommand:
        """Returns the call with its directory, if the image names a WORKDIR."""
        if self._begin == self._home:
            return call
        if isinstance(call, _Wrapped):
            command = self._beginning(call.command)
            return msgspec.structs.replace(call, command=command)
        return msgspec.structs.replace(call, cwd=os.path.join(self._begin, call.cwd))

    def _command_of(self, run: RunAction, call: _AnyCommand) -> Command:
        """Raises Unstartable: it asks for more output than the site allows."""
        most = max(self._setup.output_max, self._setup.output_bound)
        asked = call.command if isinstance(call, _Wrapped) else call
        if asked.output_max > most:
            raise Unstartable(126, f"output_max: {asked.output_max} bytes are more than the site's "
                                   f"bound of {most}; ask for less, or raise output_bound")
        others = (frozenset(self._processes.pids()) if self._background.there
                  else self._shells.inside())
        self._processes.command_begins(others)
        usage = ResourceUsage(self._group_cpu, self._isolation.pause is not None, others)
        kept, isolation = self._setup.output_max, self._isolation.name
        if isinstance(call, ShellCall):
            return self._shells.command(run, call, kept, isolation, usage, self._grants)
        if isinstance(call, TerminalCall):
            return TerminalCommand(run, call, most, isolation, usage)  # it may last for days
        if isinstance(call, DetachableCall):
            return DetachableCommand(run, call, kept, isolation, usage, self._detachable,
                                     self._shells.inside())
        return Command(run, call, kept, isolation, usage)

    def _begun(self, command: Command) -> None:
        run = command.run
        self._command = command
        command.mark_time()
        command.usage.begin(command.started_ns)
        self._meter.begin(run.limits, self._setup.watch, command.started_ns)
        self._watch_at = command.started_ns + _SOON_NS
        if command.call.stream or command.terminal is not None:
            self._watch(command)
        if isinstance(command, ShellCommand):
            self._shells.began(command)
        if command.terminal is not None:
            self._credit(command, input_flow.WINDOW)

    def _on_shell(self, shell: ShellProcess, fd: int) -> None:
        """Serves a pipe of a shell; reports the command that has ended in it, if one has."""
        self._shells.ready(shell, fd)
        command = self._command
        if isinstance(command, ShellCommand) and command.shell is shell:
            command.look(self._grants)
            if command.status is not None:
                self._reap()

    def _start(self, command: Command) -> None:
        """Starts a command so that the kernel kills it before its init when memory runs out in the
        cgroup. In a user namespace, where only the sandbox's own processes count, the command has
        its limit of processes before it can fork, unless background processes leave no room under
        it: then as soon as it has started.
        """
        limits = command.run.limits
        shared = limits.mem_mib and not self._setup.watch
        few = limits.pids if self._isolation.pause is not None else 0
        if shared:
            os.pwrite(self._score, _FIRST, 0)
        try:
            self._start_among(command, few)
        except Unstartable as error:
            if not few or not error.full:
                raise
            self._start_among(command, 0)
        finally:
            if shared:
                os.pwrite(self._score, b"0", 0)
        command.limit_processes(few)

    def _start_among(self, command: Command, few: int) -> None:
        """Starts a command with room for itself beside `few` other processes; 0 means as many as
        this process may have. Only the soft limit changes, as a lowered hard limit could not be
        raised again.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        if few:
            least = few + 1 if soft < 0 else min(few + 1, soft)
            resource.setrlimit(resource.RLIMIT_NPROC, (least, hard))
        try:
            command.start(self._home, self._grants, self._devnull)
        finally:
            if few:
                resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))

    def _refuse(self, run: RunAction, code: int, reason: str, told: Payload | None = None) -> None:
        """Ends an action that has not run. The end has a payload, because the worker's driver holds
        back a failure without one, which a signal of Slurm might have caused.
        """
        outcome = Outcome(ActionState.FAILED, exit_code=code, reason=reason,
                          isolation=self._isolation.name)
        self._send(Ended(run.lease, outcome, encode(told or ExecReturn()), run.keep))
        if not run.keep:
            self._freshen(run.lease)

    def _file(self, run: RunAction, call: FileCall) -> None:
        began = time.monotonic_ns()
        try:
            if call.data is not None and run.limits.disk_mib and (
                    over := self._meter.before_write(run.limits.disk_mib, len(call.data), began)):
                return self._refuse(run, 0, over[1], ErrorReturn("ENOSPC", over[1]))
            told = file_answers.answer(self._begin, call)
            if call.op == "remove":
                self._detachable.removed(call.path)
        except confine.PathRefused as error:
            return self._refuse(run, 0, str(error), ErrorReturn(error.code, str(error)))
        spent = time.monotonic_ns() - began
        outcome = Outcome(ActionState.COMPLETED, exec_ns=spent, isolation=self._isolation.name)
        self._send(Ended(run.lease, outcome, encode(told), True))

    def _kill(self, order: KillCommand) -> None:
        if self._command is not None and self._command.run.lease == order.lease:
            self._stop(self._command, order.state, order.reason, self._setup.kill_wait_ns)
        elif self._command is None:
            try:
                self._background.end(order)
            except Unstoppable as error:
                self._fall(str(error))

    def _give(self, command: Command, order: GiveInput) -> None:
        """Gives a running command a signal, or its terminal bytes or a size."""
        terminal = command.terminal
        if order.kind == input_flow.SIGNAL and order.number in input_flow.SIGNALS:
            if isinstance(command, ShellCommand):
                self._shells.interrupt(command, order.number)
            else:
                command.interrupt(order.number)
                if isinstance(command, DetachableCommand) and command.detached:
                    self._settle(alone=False)
        elif terminal is not None and order.kind == input_flow.RESIZE:
            if not input_flow.wrong_size((order.number, order.other)):
                terminal.resize(order.number, order.other)
        elif terminal is not None and order.kind == input_flow.HANGUP:
            terminal.hang_up()
        elif terminal is not None:
            self._credit(command, terminal.write(order.data[:input_flow.PIECE_MAX]))
        if terminal is not None and terminal.fd >= 0 and terminal.fd in command.pipes:
            # A terminal that its programs have closed is not watched; they may open it again.
            self._poll.register(terminal.fd, terminal.events)

    def _credit(self, command: Command, count: int) -> None:
        if count:
            self._send(CreditInput(command.run.lease, count))

    def _send(self, message: FromProcess) -> None:
        self._control.sendall(frame(message))

    # ---- the running command ----

    def _watch(self, command: Command) -> None:
        self._watch_at = 0
        for fd in command.pipes:
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        with suppress(KeyError, ValueError):  # not watched, or closed before
            self._poll.unregister(fd)

    def _read(self, fd: int) -> None:
        command = self._command
        if self._isolation.pause is not None and fd == self._isolation.pause.gone_fd:
            return self._fall()
        if command is None or fd not in command.pipes:
            return self._unwatch(fd)  # closed in this very turn
        if (terminal := command.terminal) is not None and terminal.waits_to_write:
            self._credit(command, terminal.write_more())
            self._poll.modify(fd, terminal.events)
        piece = command.read(fd)
        if piece is None:
            self._unwatch(fd)
        elif piece[1]:
            self._send_chunk(command, *piece)

    def _send_chunk(self, command: Command, stream: int, data: bytes) -> None:
        """Sends output of a running command, if somebody reads it now or it is kept."""
        streamed = command.call.stream
        if streamed or self._setup.keep_outputs:
            self._send(OutputChunk(command.run.lease, stream, data, not streamed))

    def _reap(self) -> None:
        """Waits for all processes that have ended; reports the command when it is among them."""
        command = self._command
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return self._settle(alone=True)  # without a pause process all there is are children
            if pid == 0:
                return self._settle(alone=False)
            if self._isolation.pause is not None and pid == self._isolation.pause.outer:
                return self._fall()
            if self._isolation.helper is not None and pid == self._isolation.helper.pid:
                return self._fall()
            shell = self._shells.reaped(pid, status) if self._shells else None
            if shell is not None and isinstance(command, ShellCommand) and command.shell is shell:
                shell.listen()  # what it said before its end
                command.look(self._grants)
                command.shell_ended(status, usage)
            elif shell is not None:
                self._shells.ended(shell)
            elif self._built and self._detachable.reaped(pid, status) and command is not None:
                command.usage.missed()  # its time during this command is unknown
            elif command is None:
                self._background.leased.reaped(usage)
            else:
                command.usage.reaped(pid, usage, pid == command.pid)
                if pid == command.pid:
                    command.status = status

    def _settle(self, alone: bool) -> None:
        """Acts after all ended processes have been waited for. `alone`: no process is left."""
        command = self._command
        if command is None or command.status is None:
            return
        left = not alone and not self._processes.alone()
        if left and self._stays(command):
            if command.terminal is None and not isinstance(command, ShellCommand):
                self._background.output.keep(command.pipes)
            self._background.begin(command.run.background, command.run.lease)
            command.usage.missed()
            left = False
        clean = not left and (command.run.keep or self._folders.are_empty())
        told = clean and not command.reported
        if not command.reported:
            if left:
                self._count_left(command)
            self._report(command, none_left=clean)
            command.act_at = 1  # at once: kill what is left
        if not left:
            self._command = None
            self._watch_at = 0
            self._meter.end()
            self._shells.forget_ended()
            self._shells.stop()
            if not clean:
                self._freshen(command.run.lease)
            elif not told:
                self._send(Gone(command.run.lease))

    def _count_left(self, command: Command) -> None:
        """Counts what the command's remaining processes have used, which will be killed. They are
        stopped first, so that none ends or uses more meanwhile.
        """
        with suppress(OSError):  # no room for the process that would stop the others
            self._processes.stop_latest()
        command.usage.left(self._processes.pids())

    def _stays(self, command: Command) -> bool:
        """Whether what is left behind stays as its session's background processes. A command that
        was stopped takes along what it started, and all if it broke a limit of the session.
        """
        return command.run.keep and command.run.background != "end" and (
            not command.reported if command.state is None
            else command.state in _ALONE and self._processes.latest_gone())

    def _fall(self, why: str = "the sandbox ended by itself") -> None:
        """Ends after the sandbox broke down."""
        self._send(Broken(why))
        self._ending = True

    def _report(self, command: Command, none_left: bool) -> None:
        command.reported = True
        if self._watch_at:
            self._watch_at = 0
        else:
            for fd in command.pipes:
                self._unwatch(fd)
        command.end()
        outcome = command.outcome()
        last = b""  # travels with the end, so that the worker wakes once
        for stream, data in command.drain():
            if command.call.stream and data:
                self._control.sendall(last)
                last = frame(OutputChunk(command.run.lease, stream, data))
        ended = Ended(command.run.lease, outcome, command.result(), none_left)
        self._control.sendall(last + frame(ended))

    def _tick(self, command: Command) -> None:
        now = time.monotonic_ns()
        if self._watch_at and now >= self._watch_at:
            self._watch(command)
        if command.output_at and now >= command.output_at:
            for stream, data in command.new_output():
                if data:
                    self._send_chunk(command, stream, data)
        if command.usage.look_at and now >= command.usage.look_at:
            command.usage.look(self._processes.pids(), now)
        if self._meter.due and now >= self._meter.due and (broken := self._meter.look(now)):
            self._stop(command, *broken, 0)  # no time between SIGTERM and SIGKILL: it would use it
            self._meter.end()
        if command.chase_at and now >= command.chase_at:
            command.chase(self._processes, now)
        if not command.act_at or now < command.act_at:
            return
        if command.state is None and not command.reported:
            reason = too_long(command.run.timeout_ns / 1e9)
            self._stop(command, ActionState.TIMEOUT, reason, self._setup.kill_wait_ns)
        else:
            self._kill_all(command)
            command.act_at = now + _AGAIN_NS
            self._reap()

    def _stop(self, command: Command, state: ActionState, reason: str, wait_ns: int) -> None:
        command.usage.stopping(self._processes.pids())
        command.mark_time()  # else the kill would be moved by the time since the last mark
        command.stop(state, reason, wait_ns)

    def _kill_all(self, command: Command) -> None:
        try:
            if command.state in _ALONE:
                self._processes.kill_latest()
            else:
                self._processes.kill()
            command.escalate(time.monotonic_ns())
        except OSError as error:  # no room for one more process: only our own end helps
            if not command.reported:
                command.status = signal.SIGKILL
                self._report(command, none_left=False)
            self._fall(f"the sandbox's processes could not be killed ({error.strerror})")

    # ---- between and after commands ----

    def _freshen(self, lease: int) -> None:
        """Empties the directories after an action without a session, and tells the worker that
        nothing is left of it. Until then no other action is sent here, since a sandbox that cannot
        be emptied ends.
        """
        try:
            self._folders.empty()
        except Unemptied as error:
            self._fall(str(error))
        else:
            self._send(Gone(lease))

    def _limit_files(self, disk_mib: int) -> None:
        """Limits the size of one file to the whole disk limit: the kernel stops such a write at
        once, before any check.
        """
        if disk_mib and disk_mib != self._file_mib:
            self._file_mib, size = disk_mib, disk_mib << 20
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            if hard == resource.RLIM_INFINITY or size < hard:  # no limit may be raised
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def _end(self) -> None:
        """Ends all processes of the sandbox.

        If there is a pause process, all others end with it, since it is the first process of their
        pid namespace. Then /proc shows that namespace and not ours, so no tree of processes is
        walked.
        """
        if self._built and self._isolation.pause is not None:
            if self._isolation.helper is not None:
                self._isolation.helper.end()
            self._isolation.pause.end()
            process_tree.wait_for_all(_END_S)
        else:
            process_tree.end_beneath(_END_S)
        if self._closing and self._built:  # else another init may take the files over
            with suppress(OSError):
                scratch.empty(self._home, self._isolation.tmp, keep=self._isolation.nodes)
