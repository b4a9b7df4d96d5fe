"""Rewards of code answers: how many of its test cases a program passes, each run as an action.

The verdicts are the same as those of verl's own reward, which asks a SandboxFusion server over
HTTP. Two things differ because no HTTP is involved. First, an action waits for its cores for as
long as it must, whereas a server has to answer before its client gives up. Second, an action is
submitted again when its broker is lost for good, whereas verl takes a refused connection for a
wrong answer. So a reward does not depend on the load of the machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tangram_hpc import Client, ExecResult, Future

from .process_client import lasting

CONTINUOUS_CASES = 10  # for a continuous score only this many first cases count
_RETRIES = 10  # how often one case is started again after a node failure
_SOURCE = "sandbox_main.py"
# modules that answers to call-based tasks may use without importing them
_STARS = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
          "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins",
          "typing")
_CALLING = '''
def _call_by_name(name):
    import json, sys
    lines = sys.stdin.read()
    values = [json.loads(line) for line in lines.split("\\n")] if lines.strip() else []
    if name in globals():
        function = globals()[name]
    else:
        function = getattr(globals()["Solution"](), name)
    return function(*values)


def _call_and_print(name):
    import json, sys, traceback
    try:
        result = _call_by_name(name)
    except Exception:  # prints nothing, which is a wrong answer
        sys.stderr.write(traceback.format_exc())
        return
    plain = isinstance(result, (dict, list, tuple, bool)) or result is None
    print(json.dumps(result) if plain else str(result))


if __name__ == "__main__":
    _call_and_print({name!r})
'''


@dataclass(frozen=True)
class Case:
    """One run of a program.

    Attributes:
        program: the source.
        stdin: the input of the program.
        expected: the output that it must print, apart from newlines at the end; None if it only has
            to succeed.
    """

    program: str
    stdin: str
    expected: str | None

    @property
    def output_max(self) -> int:
        """How many bytes of output are kept for the verdict; a longer output is a wrong answer."""
        return (1 << 20) + len((self.expected or "").encode(errors="surrogatepass"))

    @property
    def can_run(self) -> bool:
        """Whether program and input are UTF-8; half of a surrogate pair, as JSON can hold it, is
        not. Python could not read such a program either.
        """
        try:
            (self.program + self.stdin).encode()
        except UnicodeEncodeError:
            return False
        return True

    def passed(self, result: ExecResult) -> bool:
        """Returns whether the run passed the case."""
        return result.ok and (self.expected is None
                              or result.text.rstrip("\n") == self.expected.rstrip("\n"))


def program_of(answer: str) -> str | None:
    """Returns the program in an answer: the last fenced block that is marked as Python, else the
    first fenced block; None if the answer has no fenced block."""
    if "```python" in answer:
        return answer.split("```python")[-1].split("```")[0]
    if "```" not in answer:
        return None
    block = answer.split("```")[1]
    language, newline, rest = block.partition("\n")
    return rest if newline and language.strip().isalpha() else block


def cases_of(program: str, tests: Any) -> list[Case]:
    """Returns the test cases of a program.

    Args:
        program: the source.
        tests: a mapping or its JSON text: `inputs` and `outputs` of equal length, and optionally
            `fn_name`, a function or a method of `Solution` that is called with the JSON values of
            the input's lines; or `assert_case`, texts that are appended to the program. Lists may
            be tuples or arrays, and a field that is None counts as missing.

    Returns:
        The cases; an empty list if `tests` does not have this form, so that the reward is 0.
    """
    try:
        told = tests if isinstance(tests, Mapping) else json.loads(tests)
    except (TypeError, ValueError):
        return []
    if not isinstance(told, Mapping):
        return []
    try:
        asserts, inputs, outputs = (_column(told.get(name))
                                    for name in ("assert_case", "inputs", "outputs"))
    except TypeError:
        return []
    if asserts is not None:
        inputs = [""] * len(asserts) if inputs is None else inputs
        outputs = [None] * len(asserts) if outputs is None else outputs
    if inputs is None or outputs is None:
        return []
    asserts = [""] * len(inputs) if asserts is None else asserts
    if len(inputs) != len(outputs) or len(asserts) != len(inputs):
        return []
    name = told.get("fn_name")
    return [Case(_called(f"{program}\n\n{check}", name) if name else f"{program}\n\n{check}",
                 "" if given is None else str(given), None if wanted is None else str(wanted))
            for given, wanted, check in zip(inputs, outputs, asserts, strict=True)]


def _column(value: Any) -> list[Any] | None:
    """Returns the values of one field of the tests; None if the field is missing.

    A table that pandas has read, as by verl's `main_eval`, has arrays of numpy for lists, and None
    for a field that only other rows have.

    Raises:
        TypeError: the field is no list.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is not None and not isinstance(value, list | tuple):
        raise TypeError
    return None if value is None else list(value)


def _called(program: str, name: str) -> str:
    """Returns a program that calls one of its functions with the values on stdin, and prints the
    result.
    """
    imports = "".join(f"from {module} import *\n" for module in _STARS)
    imports += "".join(f"import {module}\n" for module in _STARS if module != "builtins")
    return imports + program + _CALLING.format(name=str(name))


async def code_score(answer: str, tests: Any, *, timeout: float = 10.0, mem: int | str = 1024,
                     continuous: bool = False, name: str = "code_reward",
                     patience_s: float = 600.0) -> float:
    """Returns the share of the test cases that the program in an answer passes.

    Args:
        answer: the policy's answer, with the program in a fenced block.
        tests: as for `cases_of`.
        timeout: the time limit of each case, in seconds; waiting for cores does not count.
        mem: memory of each case, in MiB or as "2G".
        continuous: whether only the first ten cases count; then only these are run.
        name: the actions' name in accounting.
        patience_s: how long to look for the job's next broker, in seconds.

    Returns:
        From 0.0 to 1.0; 0.0 for an answer without a program or with tests that cannot be used.

    Raises:
        InfeasibleRequest: no node has so much memory.
        ActionFailed: the nodes on which a case ran failed more often than it may be started again.
        BrokerUnreachable, AccessError: no broker was reached within `patience_s`.
    """
    program = program_of(answer)
    cases = [] if program is None else cases_of(program, tests)
    cases = cases[:CONTINUOUS_CASES] if continuous else cases
    if not cases:
        return 0.0

    async def verdict(case: Case) -> bool:
        def submit(client: Client) -> Future:
            return client.submit(["python3", _SOURCE], files={_SOURCE: case.program}, mem=mem,
                                 stdin=case.stdin, timeout=timeout, name=name, retries=_RETRIES,
                                 output_max=min(client.output_bound, case.output_max))
        return case.can_run and case.passed(await lasting(submit, patience_s))

    passed = await asyncio.gather(*(verdict(case) for case in cases))
    return sum(passed) / len(cases)
