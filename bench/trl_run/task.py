"""The task of the training run: guess the expression from which a table of examples was computed.

There are eight hidden expressions in `a` and `b`. A prompt names one of them by its number only, so
the policy has to learn from rewards which number means which expression. A tool call names a
candidate; the verifier checks it against the examples inside of the rollout's sandbox, and the
answer says how many examples passed. The reward is the share of held-out examples that a candidate
passes, averaged over all candidates of the rollout, so each guess counts.

This module needs no TRL and runs nothing itself: it holds the data and the verifier's program, and
parses the verifier's output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

EXPRESSIONS = ("a + b", "a - b", "a * b", "a * 2", "b * 3", "a % b", "a // b", "max(a, b)")
VERIFIER = "verify.py"
_SHOWN = ((2, 2), (7, 3), (4, 9), (5, 1))
_HELD_OUT = ((9, 2), (3, 3), (8, 5), (1, 6))

# The verifier checks the candidates in a few ms. Then it waits for the time that a test suite would
# still need on the CPUs that the call has: `work` seconds on one CPU, of which the share `serial`
# cannot be spread over CPUs. The wait follows changes of the number of CPUs. So a machine with two
# cores can stand for a machine with sixteen.
VERIFIER_TEXT = r"""
import posix, sys, time
at = time.time()
candidates, examples = sys.argv[1].split("|"), sys.argv[2].split(";")
work, serial = map(float, sys.argv[3:5])
file, passed = posix.environ.get(b"TANGRAM_CPUS_FILE"), 0
for candidate in candidates:
    for a, b, wanted in [map(int, each.split(",")) for each in examples]:
        try:
            passed += eval(candidate, {"a": a, "b": b, "max": max}) == wanted
        except Exception:
            pass

def units():
    if not file:
        return int(posix.environ.get(b"TANGRAM_CPUS", b"1"))
    with open(file) as told:
        return int(told.readline() or 0)

resized = posix.environ.get(b"TANGRAM_CPUS_MAX", b"1") != b"1"
left = 1.0 if work > 0 else 0.0
while left > 0:
    cpus = units()
    length = work * (serial + (1 - serial) / cpus) if cpus else 1e9
    time.sleep(min(0.03, left * length) if resized else left * length)
    now = time.time()
    left, at = left - (now - at) / length, now
total = len(examples) * len(candidates)
print(f"{passed} of {total} tests passed")
sys.exit(passed < total)
"""


def cases(task: int, held_out: bool = False) -> list[tuple[int, int, int]]:
    """Returns the examples of a task: two arguments, and the value.

    Args:
        task: its number, below `len(EXPRESSIONS)`.
        held_out: whether to return the examples that decide the reward instead of those that the
            tool checks.
    """
    code = compile(EXPRESSIONS[task], "task", "eval")
    return [(a, b, int(eval(code, {"a": a, "b": b, "max": max})))
            for a, b in (_HELD_OUT if held_out else _SHOWN)]


def command(python: str, candidates: Sequence[str], examples: Sequence[tuple[int, int, int]],
            work_s: float, serial: float) -> list[str]:
    """Returns the command that verifies candidates in a sandbox which has the file VERIFIER.

    Args:
        python: the interpreter.
        candidates: the expressions; each is checked against all examples.
        examples: as `cases` returns them.
        work_s: how long the tests take on one CPU, in seconds.
        serial: the share of that time which more CPUs do not shorten.
    """
    told = ";".join(",".join(map(str, each)) for each in examples)
    return [python, "-I", "-S", VERIFIER, "|".join(candidates), told, repr(work_s), repr(serial)]


def judged(candidates: Sequence[str], examples: Sequence[tuple[int, int, int]]) -> str:
    """Returns what the verifier would print, judged in this process and without its wait."""
    right = 0
    for candidate in candidates:
        code = compile(candidate, "candidate", "eval")
        for a, b, wanted in examples:
            try:
                right += eval(code, {"a": a, "b": b, "max": max}) == wanted
            except ArithmeticError:
                pass
    return f"{right} of {len(examples) * len(candidates)} tests passed"


def call_text(expression: str) -> str:
    """Returns a whole tool call, as the policy writes it."""
    return ('<tool_call>\n{"name": "run_tests", "arguments": {"expression": "'
            f'{expression}"}}}}\n</tool_call>')


def verdict(output: str) -> str:
    """Returns the line of the verifier's output that the policy is shown."""
    found = re.search(r"^\d+ of \d+ tests passed$", output, re.MULTILINE)
    return found[0] if found else "the tests did not run"


def share(output: str) -> float:
    """Returns the share of tests that passed by the verifier's output; 0 without a verdict."""
    found = re.search(r"^(\d+) of (\d+) tests passed$", output, re.MULTILINE)
    return int(found[1]) / int(found[2]) if found else 0.0


def rows() -> list[dict[str, object]]:
    """Returns the data set: one row for each task, with its prompt and its number."""
    return [{"prompt": [{"role": "user", "content": f"task {number}"}], "task": number}
            for number in range(len(EXPRESSIONS))]
