"""Makes the small programs that judge a draft, and parses the examples of a prompt.

A program reads the draft from `solution.py` in its working directory, so its text does not depend
on the draft. Nothing is run here. Most of a short action's time is the start of the interpreter;
therefore a program imports only modules that `python -I -S -B` has loaded already. It exits with 0
if the draft passes, and with 1 and one line on stderr if the draft fails. Any other exit code has
a cause outside of the draft.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass

from .problems import Problem

SOLUTION = "solution.py"
EXAMPLES = "examples.py"
TESTS = "tests.py"
FLAGS = ("-I", "-S", "-B")  # isolated, without `site`, no bytecode files: the fastest start

_PREAMBLE = """\
import sys


def _attempt(what):
    try:
        what()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}"[:200])


def _load():
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), globals())


_attempt(_load)
"""

_EXPECT = """

def _expect(call, want):
    def compare():
        got = call()
        if isinstance(want, float) and isinstance(got, (int, float)):
            assert abs(got - want) <= 1e-6, got
        else:
            assert got == want, got

    _attempt(compare)


"""

_SEPARATOR = re.compile(r"\s*(?:==|=>|->|➞|=|should return|returns?\b)?\s*")


@dataclass(frozen=True, slots=True)
class Example:
    """One example of a prompt: the expression `call` should equal the literal `want`."""

    call: str
    want: str


def examples(problem: Problem) -> tuple[Example, ...]:
    """Returns the examples of a prompt that can be parsed; there may be none."""
    found: list[Example] = []
    lines = problem.prompt.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        example = _example(line, following, problem.entry_point)
        if example is not None and example not in found:
            found.append(example)
    return tuple(found)


def _example(line: str, following: str, entry_point: str) -> Example | None:
    start = line.find(entry_point + "(")
    if start < 0 or line.lstrip().startswith("def "):
        return None
    call = _shortest_call(line[start:], entry_point)
    if call is None:
        return None
    rest = line[start + len(call) :]
    if not rest.strip() and line.lstrip().startswith(">>>"):
        rest = following.strip()
        if rest.startswith((">>>", '"""', "'''")):  # the next example, or the end of the docstring
            return None
    want = _longest_literal(_SEPARATOR.sub("", rest, count=1))
    return None if want is None else Example(call, want)


def _shortest_call(text: str, entry_point: str) -> str | None:
    """Returns the first prefix of `text` that is a call of `entry_point` on literals."""
    for match in re.finditer(r"\)", text):
        prefix = text[: match.end()]
        try:
            tree = ast.parse(prefix, mode="eval").body
        except SyntaxError:
            continue
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return prefix if isinstance(tree, ast.Call) and names == {entry_point} else None
    return None


def _longest_literal(text: str) -> str | None:
    text = text.strip()
    for end in range(len(text), 0, -1):
        try:
            tree = ast.parse(text[:end], mode="eval")
            ast.literal_eval(tree)
        except (ValueError, SyntaxError, TypeError):
            continue
        # cuts off a comment after the expression
        return ast.get_source_segment(text[:end], tree.body)
    return None


def examples_program(problem: Problem, drop: Collection[int] = ()) -> str:
    """Returns the program that tries a draft on the prompt's examples.

    Without any example, the program only checks that the module loads and defines the entry point.

    Args:
        problem: The problem.
        drop: Numbers of the examples to leave out.
    """
    kept = [example for i, example in enumerate(examples(problem)) if i not in drop]
    if not kept:
        return _PREAMBLE + f"_attempt(lambda: {problem.entry_point}.__call__)\n"
    calls = "".join(f"_expect(lambda: {one.call}, {one.want})\n" for one in kept)
    return _PREAMBLE + _EXPECT + calls


def tests_program(problem: Problem) -> str:
    """Returns the program that judges a draft by the problem's own tests; its exit code is the
    reward.

    Tests that draw random inputs get a fixed seed, so that the outcome depends only on the draft.
    """
    pinned = "import random\n\nrandom.seed(0)\n" if re.search(r"\brandom\b", problem.test) else ""
    call = f"_attempt(lambda: check({problem.entry_point}))\n"
    return _PREAMBLE + pinned + problem.test + "\n" + call
