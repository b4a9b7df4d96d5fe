"""Conversions that the adapters for agent harnesses share: from a task's cores and paths to those
of a command, and from a command's result to the text that a harness expects.

Harnesses expect of a session what a container gives: the whole output, an exit status, and relative
paths below a working directory. This module imports no harness and opens no session; adapters get
their client from `process_client`.
"""

from __future__ import annotations

import math

import tangram_hpc
from tangram_hpc.errors import InvalidInput

_OUTPUT_MAX = 10 << 20  # the most bytes of stdout, and of stderr, that a harness gets of a command


def cpus_of(asked: float | None, exact: bool = False) -> int | tuple[int, int]:
    """Returns the `cpus` of a command for the number of cores that a task names.

    Args:
        asked: the number of cores, which is rounded up; None or 0 for 1.
        exact: whether a command waits for all of them. Otherwise the number is a limit: the broker
            gives the command from one to that many cores, depending on the load.

    Raises:
        InvalidInput: `asked` is not a number of cores.
    """
    try:
        most = math.ceil(asked or 1)
    except (TypeError, ValueError, OverflowError):
        most = 0
    if most < 1:
        raise InvalidInput(f"cpus: {asked!r} is not a number of cores > 0")
    return most if exact or most == 1 else (1, most)


def most_output(session: tangram_hpc.Session) -> int:
    """Returns the `output_max` of a harness's command: less where the site allows less."""
    bound: int = session.output_bound
    return min(_OUTPUT_MAX, bound)


def stderr_of(result: tangram_hpc.ExecResult) -> str:
    """Returns the command's stderr as text, with added last lines for what the exit code does not
    tell: that the command could not be started, took too much memory or time, or wrote more output
    than is kept."""
    lines = []
    state = result.state
    if state in (tangram_hpc.ActionState.OUT_OF_MEMORY, tangram_hpc.ActionState.TIMEOUT):
        lines.append(f"{state.value}: {result.reason}" if result.reason else state.value)
    elif result.exit_code in (126, 127) and result.reason:
        lines.append(result.reason)
    if any(result.cut):
        lines.append(f"{result.cut[0]} bytes of stdout and {result.cut[1]} bytes of stderr were "
                     "left out")
    text: str = result.stderr.decode(errors="replace")
    if lines and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"[tangram: {line}]\n" for line in lines)


def why_unsendable(*texts: str | bytes | None) -> str:
    """Returns why a text that a policy wrote, such as a command line, cannot be sent to a session;
    empty if all of them can be. A policy's tool calls are JSON, which can hold half of a surrogate
    pair. That is a mistake of the policy, and no error of the trial."""
    for text in texts:
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            return (f"character {error.start} of it is half of a surrogate pair, which UTF-8 "
                    "cannot hold")
    return ""


def whole_path(path: str, workdir: str) -> str:
    """Returns a path of the sandbox: a relative one is below the environment's working directory.
    """
    return path if path.startswith("/") or not workdir else f"{workdir.rstrip('/')}/{path}"
