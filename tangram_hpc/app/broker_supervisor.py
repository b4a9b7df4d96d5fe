"""`tangram broker --restarts N`: a small parent that starts the broker again when it has crashed.

The broker keeps its journal, and workers and clients wait for it for `grace_s`. So a broker that is
killed, for example by the kernel because memory ran out, need cost no more than a pause. The parent
loads little and does little, so that it is unlikely to be killed or to fail itself.

It starts the broker again only after a crash (`restarts.py`), and only while the access file is one
that a broker of this parent wrote: a broker that never served would probably crash again, and one
that has marked the file as ended has finished its work.

The broker ends in order when its parent is killed, since the kernel then sends it SIGTERM. The
parent passes on SIGTERM, SIGINT and SIGUSR1. A signal that comes while a broker is being started
again waits until that broker serves, because before that the signal would kill it. A broker that is
started after SIGUSR1 had come gets that signal too: the job is still about to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .restarts import RestartLimit, crashed, how_it_ended, mark_crashed, writer

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOOK_S = 0.1  # pause between two looks whether the broker serves, while a signal waits for that
_WAIT_S = 30.0  # how long a signal waits for a broker to serve
_PR_SET_PDEATHSIG = 1


def supervise(command: Sequence[str], access: Path, restarts: int) -> int:
    """Runs a broker until it ends for good.

    Args:
        command: starts the broker.
        access: the access file that the broker writes when it begins to serve.
        restarts: how often it is started again within 10 minutes.

    Returns:
        The exit status of the broker; 128 + N if signal N killed it and it is not started again; 1
        if it crashed too often, or could not be started.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    try:
        return _Supervisor(command, access, restarts, mask).run()
    except OSError as error:
        print(f"tangram: broker: error: it cannot be started: {error}", file=sys.stderr)
        return 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Supervisor:
    """The parent of one job's broker.

    Attributes:
        _pids: the process ids of the brokers that it has started.
        _waiting: signals that came and were not passed on yet, each with the time when it came, in
            seconds of the monotonic clock.
        _told_to_end: whether SIGTERM or SIGINT has come.
        _draining: whether SIGUSR1 has come.
    """

    def __init__(self, command: Sequence[str], access: Path, restarts: int,
                 mask: set[int | signal.Signals]) -> None:
        self._command, self._access, self._mask = list(command), access, mask
        self._limit = RestartLimit(restarts)
        self._pids: set[int] = set()
        self._waiting: dict[int, float] = {}
        self._told_to_end = self._draining = False

    def run(self) -> int:
        """Starts the broker, and starts it again as long as it crashes; returns the status."""
        while True:
            begun, child = time.monotonic(), self._start()
            self._attend(child)
            status, now = child.returncode, time.monotonic()
            if not crashed(status) or self._told_to_end or writer(self._access) not in self._pids:
                mark_crashed(self._access, self._pids)
                return status if status >= 0 else 128 - status
            told = f"tangram: broker: it {how_it_ended(status)} after {now - begun:.0f} s"
            if not (taken := self._limit.take(now)):
                print(f"{told}; it is not started again, since it was started again "
                      f"{self._limit.count} times within 10 minutes (--restarts)",
                      file=sys.stderr, flush=True)
                mark_crashed(self._access, self._pids)
                return 1
            print(f"{told}; it is started again ({taken} of {self._limit.count} times within 10 "
                  "minutes)", file=sys.stderr, flush=True)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._draining:
            self._waiting[signal.SIGUSR1] = time.monotonic()
        parent, mask, libc = os.getpid(), self._mask, ctypes.CDLL(None)

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # the parent was killed before `prctl` took effect
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        child = subprocess.Popen(self._command, preexec_fn=prepare)
        self._pids.add(child.pid)
        return child

    def _attend(self, child: subprocess.Popen[bytes]) -> None:
        """Passes signals on to the broker until it has ended."""
        while child.poll() is None:
            got = signal.sigtimedwait((*_PASSED_ON, signal.SIGCHLD),
                                      _LOOK_S if self._waiting else 60.0)
            if got is not None and got.si_signo in _PASSED_ON:
                self._waiting[got.si_signo] = time.monotonic()
                self._draining |= got.si_signo == signal.SIGUSR1
                self._told_to_end |= got.si_signo != signal.SIGUSR1
            if self._waiting:
                self._pass_on(child)

    def _pass_on(self, child: subprocess.Popen[bytes]) -> None:
        """Passes on the signals that need not wait any longer."""
        pid = writer(self._access)
        serves, first = pid == child.pid, pid not in self._pids
        for number, since in [*self._waiting.items()]:
            # the very first start may be broken off at any time, as it could be without a parent
            at_once = first and number != signal.SIGUSR1
            if serves or at_once or time.monotonic() - since > _WAIT_S:
                del self._waiting[number]
                child.send_signal(number)
