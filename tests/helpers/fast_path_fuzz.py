"""Feeds `_fast_path.c` orders, whole and broken: `fast_path_fuzz.py LIBRARY SEED COUNT PERCENT`,
run by test_fast_path.py as a process of its own, since the library waits for every child there is.
PERCENT of the orders are whole.

Law: an order is served only if Python reads the very same one in it; what is not served comes back
byte for byte. Prints how many of each there were.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import sys
import threading

import msgspec

from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import ProtocolError
from tangram_hpc.protocol.payload import KEEPS, ExecCall, decode, encode
from tangram_hpc.protocol.process_frames import (
    RECEIVE,
    Ended,
    FreezeBackground,
    ProcessInbox,
    RunAction,
    SandboxLimits,
    WorkerInbox,
    frame,
)
from tangram_hpc.sandbox.files import scratch
from tangram_hpc.sandbox.process import fast_path
from tangram_hpc.sandbox.process.command import changed_signals
from tangram_hpc.sandbox.process.isolation_setup import SandboxIsolation
from tangram_hpc.sandbox.process.sandbox_processes import DescendantProcesses

ENV = {"PATH": "/usr/bin:/bin", "MARK": "42"}
WORDS = ("", "a", "ü", "x" * 40, "y" * 300, "%", "\n")
STANDS = "so"
PATIENCE_NS = 900_000_000  # a busy machine is no reason to be served otherwise


def order(call: ExecCall, lease: int = 1, keep: bool = True) -> RunAction:
    return RunAction(lease, encode(call), "", 1, 1, 0, keep, "stop", SandboxLimits(0, 64, 100))


KNOWN = [msgspec.structs.astuple(order(ExecCall(), keep=keep))[2:] for keep in (True, False)]


def is_plain(data: bytes) -> RunAction | None:
    """What Python reads in it, if that is one order that the library may serve."""
    try:
        orders = list(ProcessInbox().feed(data))
        call = (decode(orders[0].payload) if len(orders) == 1 and isinstance(orders[0], RunAction)
                else 0)
    except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(call, ExecCall) or msgspec.structs.astuple(orders[0])[2:] not in KNOWN:
        return None
    return orders[0] if call == ExecCall(call.argv, call.shell, keep=call.keep) else None


def program(draw: random.Random) -> ExecCall:
    words = [draw.choice(WORDS) for _ in range(draw.choice((0, 1, 2, 20)))]
    keep = draw.choice(KEEPS)
    if draw.random() < 0.2:
        return ExecCall(shell="echo out; echo err >&2; exit 3", keep=keep)
    return ExecCall(argv=("/bin/echo", *words), keep=keep)


def broken(draw: random.Random, data: bytes) -> bytes:
    """What a few accidents make of it; sizes at its head stay right half of the time."""
    body = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(4, len(body))
        what = draw.randrange(4)
        if what == 0:
            body[at] = draw.randrange(256)
        elif what == 1:
            del body[at:at + draw.randint(1, 9)]
        elif what == 2:
            body[at:at] = draw.randbytes(draw.randint(1, 9))
        else:
            body[at] ^= 1 << draw.randrange(8)
        body = body if len(body) > 5 else bytearray(data)
    if draw.random() < 0.5:
        body[:4] = (len(body) - 4).to_bytes(4, "little")
    return bytes(body)


class Bench:
    """The library with both ends of its socket."""

    def __init__(self, library: str) -> None:
        fast_path._library = ctypes.CDLL(library)
        assert fast_path._library.fast_path_size() == ctypes.sizeof(fast_path._Struct)
        assert fast_path._library.fast_path_version() == fast_path._VERSION
        self.ours, theirs = socket.socketpair()
        self.returned = os.eventfd(0, os.EFD_CLOEXEC)
        self.theirs = theirs
        self.wake, self.into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.into, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, where: None)
        doors = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in ("cpus", os.devnull)]
        self.folders = [os.path.abspath(name) for name in ("home", "tmp")]
        for folder in self.folders:
            os.mkdir(folder)
        self.served = fast_path.FastPath((theirs.fileno(), self.wake, doors[0], -1, doors[1], -1),
                                  changed_signals(),
                                  SandboxIsolation("process", DescendantProcesses(), ".", ".",
                                                   "cpus"), 1000, False, folders=self.folders)
        for keep in (True, False):
            self.served.learn(order(ExecCall(), keep=keep), ENV, False, 0, STANDS)
        self.served.command.patience_ns = PATIENCE_NS
        self.inbox = WorkerInbox()

    def play(self, data: bytes) -> tuple[fast_path.ReturnCode, list[Ended]]:
        """What becomes of these bytes: they are told ended, or come back."""
        ends: list[Ended] = []

        def peer() -> None:
            self.ours.sendall(data)
            told, _, _ = select.select([self.ours, self.returned], [], [])
            if self.ours in told:
                ends.extend(self.inbox.feed(self.ours.recv(1 << 16)))
                self.ours.sendall(frame(FreezeBackground()))  # else it waits for ever

        other = threading.Thread(target=peer)
        # SIGCHLD is for the thread that serves: the other one would take it away
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        other.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        while (what := self.served.serve()) is fast_path.ReturnCode.LOOK:
            try:
                os.read(self.wake, 64)
            except BlockingIOError:
                pass
        os.eventfd_write(self.returned, 1)
        other.join()
        os.eventfd_read(self.returned)
        return what, ends

    def freshen(self) -> None:
        """Empties the folders, and takes the next order, which the library has not read."""
        scratch.empty(*self.folders)
        self.theirs.recv(RECEIVE)

    def take_over(self) -> None:
        """As Python would."""
        known = self.served.command
        if not known.ended:
            os.waitpid(known.pid, 0)
        os.close(known.out)
        os.close(known.err)


def main() -> None:
    library, (seed, count, percent) = sys.argv[1], map(int, sys.argv[2:])
    draw, bench = random.Random(seed), Bench(library)
    seen = {"served": 0, "taken over": 0, "sent back": 0}
    for number in range(count):
        call = program(draw)
        lease = draw.choice((1, 127, 128, 65536, 1 << 31, (1 << 63) + number))
        whole = draw.random() < percent / 100
        data = frame(order(call, lease, keep=draw.random() < 0.5))
        data = data if whole else broken(draw, data)
        read = is_plain(data)
        what, ends = bench.play(data)
        if ends:
            assert read is not None and [end.lease for end in ends] == [read.lease], data
            if whole:
                failed = bool(call.shell)
                state = ActionState.FAILED if failed else ActionState.COMPLETED
                assert (ends[0].outcome.state, ends[0].outcome.exit_code) == (state, 3 * failed)
                back = decode(ends[0].payload or b"")
                want = (b"out\n", b"err\n") if failed else (
                    (" ".join(call.argv[1:]) + "\n").encode(), b"")
                assert (back.stdout, back.stderr) == want, back  # type: ignore[union-attr]
            if what is fast_path.ReturnCode.FRESHEN:  # such as of `echo out> echo err`
                assert not read.keep and bench.served.data == data
                bench.freshen()
            else:
                assert (what, bench.served.data) == (fast_path.ReturnCode.READ,
                                                     frame(FreezeBackground()))
            assert ends[0].none_left == (what is fast_path.ReturnCode.READ)
            seen["served"] += 1
        elif what is fast_path.ReturnCode.RUNNING:
            assert read is not None and bench.served.data == data
            bench.take_over()
            seen["taken over"] += 1
        else:
            assert what is fast_path.ReturnCode.READ and bench.served.data == data, (what, data)
            seen["sent back"] += 1
    print(msgspec.json.encode(seen).decode())


if __name__ == "__main__":
    main()
