"""Starts a program as the leader of a process session, as any user of its sandbox.

posix_spawn cannot change users. With a Python that was built against a C library of before 2017 it
makes no process session either. In both cases the init forks. The child reports an error to its
parent through a pipe. Before it executes the program, the child closes the init's descriptors,
restores signals, and changes its user; a process that leaves user 0 loses all capabilities.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .users import Identity


def spawn(identity: Identity | None, path: str, argv: Sequence[str], env: Mapping[str, str],
          fds: Mapping[int, int], terminal: str = "", restored: Sequence[int] = ()) -> int:
    """Starts a program as the leader of a process session; returns its process id.

    Args:
        identity: the numbers of the user as which it runs; None for the init's.
        path: the path of the program.
        argv: its arguments, the first one its name.
        env: its environment.
        fds: the descriptors of this process that it gets, by their numbers in the program.
        terminal: the path of the terminal that controls it; empty for none.
        restored: signals whose default action is restored.

    Raises:
        OSError: it cannot be started.
        ValueError: an argument or a variable has a null byte.
    """
    if identity is None:
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in fds.items()]
        if terminal:  # the first terminal that the leader of a process session opens controls it
            actions.insert(0, (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0))
        with suppress(NotImplementedError):
            return os.posix_spawn(path, list(argv), env, file_actions=actions, setsid=True,
                                  setsigmask=(), setsigdef=restored)
    return _forked(identity, path, argv, env, fds, terminal, restored)


def _forked(identity: Identity | None, path: str, argv: Sequence[str], env: Mapping[str, str],
            fds: Mapping[int, int], terminal: str, restored: Sequence[int]) -> int:
    words, variables = [os.fsencode(word) for word in argv], {
        os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    if any(b"\0" in word for word in (os.fsencode(path), *words, *variables, *variables.values())):
        raise ValueError("embedded null byte")
    told, tells = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            # move the pipe out of the way: the program's descriptors will be put on these numbers
            above = max(fds, default=2) + 1
            tells = fcntl.fcntl(tells, fcntl.F_DUPFD_CLOEXEC, above)
            _become(identity, fds, above, terminal, restored)
            os.execve(path, words, variables)
        except OSError as error:
            os.write(tells, (error.errno or 1).to_bytes(2, "big"))
        finally:
            os._exit(127)
    os.close(tells)
    with open(told, "rb") as file:
        answer = file.read()
    if answer:
        os.waitpid(pid, 0)
        number = int.from_bytes(answer, "big")
        raise OSError(number, os.strerror(number))
    return pid


def _become(identity: Identity | None, fds: Mapping[int, int], above: int, terminal: str,
            restored: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (*restored, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sources = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in fds.items()}
    os.setsid()
    if terminal:
        os.close(os.open(terminal, os.O_RDWR))
    for number, fd in sources.items():
        os.dup2(fd, number, inheritable=True)
    if identity is not None:
        os.setgroups(identity.groups)
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
