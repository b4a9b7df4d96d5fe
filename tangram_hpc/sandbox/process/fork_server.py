"""The fork server of a worker: it forks execution processes, waits for them, and ends what they
leave.

The worker is large and has threads, so it does not fork itself. This process stays small: it runs
no user's code, holds no thread, and imports only what execution processes need, since each of them
is a fork of it. Here it also answers changes of file modes (`mode_keeper.py`).

It is a subreaper, so it adopts all descendants of an execution process that dies. A child that is
no execution process is therefore an orphan and is killed. An execution process that was stopped is
continued. When the worker ends, which the socket and the parent's death tell, everything beneath is
killed and the scratch directory removed.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from array import array
from contextlib import suppress
from types import FrameType

from ...protocol.process_frames import (
    INIT,
    OUTPUT,
    PACKET_MAX,
    TAIL,
    DescendantsEnded,
    Died,
    Fork,
    Forked,
    KillProcess,
    RemoveDirectory,
    Unforked,
    decode_to_fork_server,
    packet,
)
from ...resources import process_tree
from ..files import scratch
from ..isolation import seccomp
from .bootstrap import become, guard
from .init import Init
from .mode_keeper import ModeKeeper

_AGAIN_MS = 5
_STOPS_MAX = 10  # of one process within `_STOPS_S`
_STOPS_S = 10.0
_SUSPENDED_S = 0.2  # Slurm stops all processes of a suspended job within this time
_END_S = 8.0


class ForkServer:
    """The parent of all execution processes of a worker.

    Attributes:
        _processes: number by process id; `_pids` is the reverse.
        _homes: directory name by number.
        _brooms: children that remove a large directory.
        _lingering: numbers of dead processes whose descendants may still live.
        _stops: by process id, a time and how often the process was stopped since.
        _stopped: by process id, when a stopped process goes on (monotonic s); the earliest first.
    """

    def __init__(self, worker: socket.socket, root: str) -> None:
        self._worker = worker
        self._root = root
        self._processes: dict[int, int] = {}
        self._homes: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._brooms: set[int] = set()
        self._lingering: list[int] = []
        self._stops: dict[int, tuple[float, int]] = {}
        self._stopped: dict[int, float] = {}
        self._ending = False
        self._modes = ModeKeeper(self._home_of)
        self._wake, self._into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._signals()

    def _signals(self) -> None:
        signal.set_wakeup_fd(self._into, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, where: None)
        # `scancel --signal=INT` sends it to all processes of a step; the worker then ends this one
        signal.signal(signal.SIGINT, lambda number, where: None)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, where: FrameType | None) -> None:
        self._ending = True

    def serve(self) -> None:
        """Serves until the worker goes away; then ends everything."""
        poll = select.poll()
        poll.register(self._worker.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.register(self._modes.fileno(), select.POLLIN)
        try:
            while not self._ending:
                for fd, _ in poll.poll(self._wait_ms()):
                    if fd == self._wake:
                        os.read(self._wake, 512)
                    elif fd == self._modes.fileno():
                        self._modes.turn()
                    else:
                        self._receive()
                self._reap()
                self._continue()
                if self._lingering:
                    self._sweep()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone
        finally:
            self._end()

    def _wait_ms(self) -> float | None:
        """How long to wait without an event, ms; None for no limit."""
        if self._lingering:
            return _AGAIN_MS
        if not self._stopped:
            return None
        return max(0.0, next(iter(self._stopped.values())) - time.monotonic()) * 1e3

    def _receive(self) -> None:
        data = self._worker.recv(PACKET_MAX)
        if not data:
            self._ending = True
            return
        order = decode_to_fork_server(data)
        if isinstance(order, Fork):
            try:
                self._fork(order)
            except OSError as error:
                text = f"cannot start an execution process ({scratch.why_not(error)})"
                self._worker.sendall(packet(Unforked(order.number, text)))
        elif isinstance(order, KillProcess):
            if order.number in self._pids:
                os.kill(self._pids[order.number], signal.SIGKILL)
        elif isinstance(order, RemoveDirectory):
            self._remove_directory(order.home)

    def _home(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _home_of(self, pid: int) -> str:
        number = self._processes.get(pid, -1)
        return self._home(self._homes[number]) if number >= 0 else ""

    def _fork(self, order: Fork) -> None:
        home, fresh = self._home(order.home), order.fresh
        if fresh:
            scratch.make(home)
        here, there = socket.socketpair()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            if fresh:
                scratch.remove(home)
            here.close()
            there.close()
            raise
        if pid == 0:
            highest = max(self._modes.highest, here.fileno(), there.fileno())
            _live(there, self._modes.door.fileno(), highest, home, order.kind, parent)
        there.close()
        self._processes[pid] = order.number
        self._pids[order.number] = pid
        self._homes[order.number] = order.home
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [here.fileno()]))]
        self._worker.sendmsg([packet(Forked(order.number, pid))], rights)
        here.close()

    # ---- what ends ----

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._note_stop(pid)
                continue
            self._brooms.discard(pid)
            self._stops.pop(pid, None)
            self._stopped.pop(pid, None)
            number = self._processes.pop(pid, -1)
            if number >= 0:
                del self._pids[number]
                self._died(number, status)

    def _note_stop(self, pid: int) -> None:
        """Notes that an execution process was stopped, which goes on soon: see `_continue`."""
        if pid in self._processes:
            now = time.monotonic()
            since, often = self._stops.get(pid, (now, 0))
            self._stops[pid] = (since, often + 1) if now - since < _STOPS_S else (now, 1)
            self._stopped.setdefault(pid, now + _SUSPENDED_S)  # further stops postpone nothing

    def _continue(self) -> None:
        """Continues execution processes that were stopped, because a program may have stopped them
        to escape its limits. If Slurm suspends the job, this process is stopped too, but perhaps a
        moment later: so each is continued `_SUSPENDED_S` after its stop, or the clock of an init
        would run on beside a command that stands still. A process that is stopped more than
        `_STOPS_MAX` times within `_STOPS_S` is killed.
        """
        now = time.monotonic()
        for pid in [pid for pid, at in self._stopped.items() if at <= now]:
            del self._stopped[pid]
            often = self._stops[pid][1]
            os.kill(pid, signal.SIGCONT if often <= _STOPS_MAX else signal.SIGKILL)

    def _died(self, number: int, status: int) -> None:
        none_left = not self._kill_orphans()
        tail = self._tail(self._homes.pop(number))
        self._worker.sendall(packet(Died(number, status, none_left, tail)))
        if not none_left:
            self._lingering.append(number)

    def _tail(self, home: str) -> str:
        try:
            with open(os.path.join(self._home(home), OUTPUT), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - TAIL))
                return file.read(TAIL).decode(errors="replace")
        except OSError:
            return ""

    def _kill_orphans(self) -> bool:
        return process_tree.kill_beneath(os.getpid(), frozenset(self._processes) | self._brooms)

    def _sweep(self) -> None:
        if self._kill_orphans():
            return
        numbers, self._lingering = self._lingering, []
        for number in numbers:
            self._worker.sendall(packet(DescendantsEnded(number)))

    def _remove_directory(self, name: str) -> None:
        """Removes the directory of a dead process. A child removes a large one, so that others do
        not wait.
        """
        home = self._home(name)
        if not scratch.remove_small(home):
            try:
                pid = os.fork()
            except OSError:
                pid = -1
            if pid < 0:
                scratch.remove(home)
            elif pid == 0:
                try:  # whatever happens, this child must not go on as the fork server
                    with suppress(OSError):
                        scratch.remove_and_end(home)
                finally:
                    os._exit(0)
            else:
                self._brooms.add(pid)

    def _end(self) -> None:
        process_tree.end_beneath(_END_S)
        if not scratch.remove(self._root):
            shutil.rmtree(self._root, ignore_errors=True)
        with suppress(OSError):  # a worker that was killed cannot remove it
            os.rmdir(os.path.dirname(self._root))


def _directory() -> list[str]:
    """Where users' functions find modules first: in the worker's directory, as after `python -m`.
    """
    with suppress(OSError):  # it may have been removed
        return [] if getattr(sys.flags, "safe_path", False) else [os.getcwd()]
    return []


def _live(control: socket.socket, modes: int, highest: int, home: str, kind: str, parent: int
          ) -> None:
    """The whole life of an execution process; never returns."""
    status = 70
    try:
        beside = _directory()
        control = become(control, modes, highest, home, kind, parent)
        if kind == INIT:
            status = Init(control, home).serve()
        else:
            from . import runner  # cloudpickle is for runners only

            sys.path[:0] = beside
            runner.serve(control, home)
            status = 0
    except SystemExit:
        status = 1
    except BaseException:  # noqa: BLE001 - the outermost loop: tell, and end
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """The fork server's whole life; its argument is the number of its socket. The worker first
    sends the root directory: code in a sandbox could read an argument.
    """
    guard("tangram-forksrv", signal.SIGTERM)
    worker = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(worker.fileno(), False)
    seccomp.prepare()
    gc.collect()
    gc.freeze()  # else each process's first collection would copy all shared pages
    if root := worker.recv(PACKET_MAX):
        ForkServer(worker, os.fsdecode(root)).serve()


if __name__ == "__main__":
    main()
