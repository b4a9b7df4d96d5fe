"""What a detachable command of a session says of itself, and how a command is named. Pure.

A client of this wire may start a command while another command still runs, and does not say which
commands are meant to run in the background. A session runs one action at a time. So each command is
a detachable action (`Session.exec_detachable`): when another request needs the session, the action
gets the signal `LET_GO`, and the command goes on as a background process that writes to files. A
command that ends before another request comes is one action and nothing more.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LET_GO = signal.SIGUSR2
KILLED = 137  # the exit code of a command that was killed

_BEFORE = r"[A-Za-z_]\w*=\S*\s+|cd\s+\S+\s*(?:&&|;)\s*|sudo\s+|exec\s+"
_WORD = re.compile(rf"(?:{_BEFORE})*([\w./+-]{{1,64}})")


@dataclass(frozen=True)
class Started:
    """The content of the first line that a detachable command's action prints.

    Attributes:
        pid: the command's process id in its sandbox, which is also its process group.
        path: the beginning of the paths of its files.
    """

    pid: int
    path: str

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The beginning of the names of its files."""
        return self.path.rpartition("/")[2]


def read_first_line(line: bytes) -> Started | None:
    """Parses the first line of a detachable command; returns None if it is none."""
    pid, _, path = line.decode(errors="replace").partition(" ")
    return Started(int(pid), path) if pid.isascii() and pid.isdigit() and "/" in path else None


def read_exit_code(data: bytes) -> int | None:
    """Returns the exit code in a command's file; None if it has not been written yet."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) <= 3 and data.endswith(b"\n") else None


def name_of(command: Sequence[str]) -> str:
    """Returns the name of a command's first program, which is its class in accounting and in run
    time estimates."""
    line = command[-1] if len(command) > 2 and command[-2] == "-c" else command[0]
    found = _WORD.match(line.lstrip())
    return (found.group(1).rpartition("/")[2] if found else "") or "bash"
