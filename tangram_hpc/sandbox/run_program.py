"""Runs a program of the node to its end.

What the fork server imports must not import `threading`, and `subprocess` does. Python has
`threading` look at all threads after each fork, which took a child 0.5 to 0.8 of the 1.6 ms until
it began, and every init is such a child. So `subprocess` is imported here, when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import CompletedProcess


def run_program(argv: Sequence[str], *, cwd: str | None = None, pass_fds: Sequence[int] = ()
                ) -> CompletedProcess[bytes]:
    """Runs a program with an empty standard input and waits for its end, whatever its status.

    Args:
        argv: the program, found in PATH, and its arguments.
        cwd: where it begins; None for the directory of this process.
        pass_fds: descriptors of this process that it gets, by the same numbers.

    Returns:
        Its exit status and all that it wrote.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess

    return subprocess.run(argv, cwd=cwd, pass_fds=pass_fds, stdin=subprocess.DEVNULL,
                          capture_output=True, check=False)
