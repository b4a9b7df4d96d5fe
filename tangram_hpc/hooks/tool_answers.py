"""The text that tells a policy how its command ended.

All adapters whose framework takes a tool's answer as text use this text, so that a policy sees the
same environment in every trainer. The text contains nothing that differs between two runs of the
same command, such as ids, nodes or times, because a policy would learn such noise.
"""

from __future__ import annotations

from tangram_hpc import ActionState, ExecResult
from tangram_hpc.errors import FileFailed

TEXT_MAX = 8000  # characters of one answer; a longer one loses its middle


def answer_text(result: ExecResult, timeout_s: float | None = None, longest: int = TEXT_MAX) -> str:
    """Returns the output of a command, and how it ended if it did not succeed.

    Args:
        result: the result.
        timeout_s: the time limit of the command in seconds, which the text names after a time-out;
            None to leave it out.
        longest: the most characters; the middle of a longer text is left out. So that its end is
            the end of the output, run the command with `keep="both"`.
    """
    parts = [result.text.rstrip("\n"), result.stderr.decode(errors="replace").rstrip("\n")]
    if result.state is ActionState.TIMEOUT:
        after = "" if timeout_s is None else f" after {timeout_s:g} s"
        parts.append(f"[timed out{after}]")
    elif result.state is ActionState.OUT_OF_MEMORY:
        parts.append("[out of memory]")
    elif not result.ok:
        parts.append(f"[exit code {result.exit_code}]")
        if not any(parts[:2]) and result.reason:
            parts.insert(0, result.reason)
    return shortened("\n".join(part for part in parts if part), longest, sum(result.cut))


def file_error_text(error: FileFailed) -> str:
    """Returns the text of a failed file operation without the action's id, which no two runs
    share."""
    return str(getattr(error.result, "text", error))


def shortened(text: str, longest: int, cut: int = 0) -> str:
    """Leaves out the middle of a text that is longer than `longest` characters. `cut` is how many
    bytes of it the sandbox has dropped before; they are told as characters, with those that are
    left out here.
    """
    if len(text) <= longest:
        return f"{text}\n[{cut} characters left out]" if cut else text
    half = max(0, longest - 40) // 2
    left_out = len(text) - 2 * half + cut
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half:]}"
