"""The interpreter of `run_code`, as its server starts it: one program for each call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.http_api.interpreter import python_kernel
from tangram_hpc.http_api.interpreter.code_routes import PROGRAM
from tangram_hpc.http_api.interpreter.python_kernel import DEFAULT, REFUSED, UNKNOWN


class Contexts:
    """The contexts of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {**os.environ, "TMPDIR": str(folder)}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=self._env,
                                cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ask(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.decode(), err.decode()

    def begin(self, code: str, context: str = DEFAULT, **envs: str) -> subprocess.Popen[bytes]:
        text = json.dumps({"code": code, "envs": envs})
        return self.start("run", context, text[:5], text[5:])

    def run(self, code: str, context: str = DEFAULT, **envs: str) -> Told:
        process = self.begin(code, context, **envs)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")
        return Told([json.loads(line) for line in out.splitlines()])

    def pid(self, context: str = DEFAULT) -> int:
        return int((self.folder / ".run-code" / context / "alive").read_text())


class Told:
    """What one call has told."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def text(self, kind: str) -> str:
        return "".join(event["text"] for event in self.of(kind))

    @property
    def error(self) -> tuple[str, str] | None:
        errors = self.of("error")
        assert len(errors) < 2
        return (errors[0]["name"], errors[0]["value"]) if errors else None


@pytest.fixture
def contexts(tmp_path: Path) -> Iterator[Contexts]:
    made = Contexts(tmp_path)
    yield made
    for alive in tmp_path.glob(".run-code/*/alive"):
        python_kernel.stop(str(alive.parent))


def until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_begun(caller: subprocess.Popen[bytes]) -> None:
    """Returns when the code of a call has printed `begun`."""
    while b"begun" not in (line := caller.stdout.readline()):  # type: ignore[union-attr]
        assert line, "the call has ended"


def end(caller: subprocess.Popen[bytes]) -> None:
    caller.kill()
    caller.communicate()


def test_variables_stay_and_the_last_expression_is_the_result(contexts: Contexts) -> None:
    first = contexts.run("x = 3\nprint('hi')\nx * 2")
    assert [event["type"] for event in first.events] == [
        "started", "number_of_executions", "stdout", "result", "end_of_execution"]
    assert first.text("stdout") == "hi\n" and first.text("result") == "6"
    second = contexts.run("x += 1\nx")
    assert second.text("result") == "4"
    assert second.of("number_of_executions") == [
        {"type": "number_of_executions", "execution_count": 2}]
    assert contexts.run("y = x").of("result") == []


def test_an_error_is_told_without_the_lines_of_the_kernel(contexts: Contexts) -> None:
    told = contexts.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert told.text("stdout") == "before\n" and told.error == ("ZeroDivisionError",
                                                                 "division by zero")
    trace = told.of("error")[0]["traceback"]
    assert "return 1 / 0" in trace and "_cell" not in trace and "string" not in trace
    assert contexts.run("x = (").error[0] == "SyntaxError"  # type: ignore[index]
    assert contexts.run("exit(3)").error == ("SystemExit", "3")
    assert contexts.run("input()").error[0] == "EOFError"  # type: ignore[index]


def test_what_programs_and_processes_write_is_told_too(contexts: Contexts) -> None:
    told = contexts.run("import os, sys\nos.system('echo out; echo err >&2')\n"
                        "sys.stdout.buffer.write(b'\\xff\\xc3'); sys.stdout.flush()\n"
                        "print('\u00e9')")
    assert told.text("stdout") == "out\n\ufffd\ufffd\u00e9\n" and told.text("stderr") == "err\n"
    assert contexts.run("from multiprocessing import Pool\ndef f(n): return n * n\n"
                        "with Pool(2) as pool: found = pool.map(f, [1, 2, 3])\nfound"
                        ).text("result") == "[1, 4, 9]"
    assert len(contexts.run("print('x' * 300000)").text("stdout")) == 300001


def test_lines_of_the_shell_run(contexts: Contexts) -> None:
    told = contexts.run("x = '!'\n!echo \"a b\" >&2; exit 3\nif x:\n    !echo in\nx")
    assert (told.text("stderr"), told.text("stdout"), told.text("result")) == (
        "a b\n", "in\n", "'!'")
    assert told.error is None and contexts.run("%pip --version").text("stdout")[:4] == "pip "
    assert contexts.run("x = (\n!ls").error[0] == "SyntaxError"  # type: ignore[index]
    assert contexts.run("s = \"\"\"\n!x\n\"\"\"\ns").text("result") == repr("\n!x\n")


def test_variables_of_one_call_are_of_this_call_alone(contexts: Contexts) -> None:
    assert contexts.run("import os; os.environ['A']", A="b").text("result") == "'b'"
    assert contexts.run("'A' in os.environ").text("result") == "False"


def test_values_are_shown_as_in_a_notebook(contexts: Contexts) -> None:
    told = contexts.run("class A:\n    def _repr_html_(self): return '<b>'\n"
                        "    def _repr_png_(self): return b'x'\n"
                        "    def _repr_svg_(self): return None\n"
                        "display(1, 'a')\nA()")
    one, two, three = told.of("result")
    assert (one["text"], two["text"], one["is_main_result"]) == ("1", "'a'", False)
    assert (three["html"], three["png"], three["is_main_result"]) == ("<b>", "eA==", True)
    assert "svg" not in three
    assert contexts.run("import asyncio\nawait asyncio.sleep(0, 8)").text("result") == "8"


@pytest.mark.parametrize("code", ["import sys; sys.stdout.close()", "import os; os.close(1)",
                                  "import os; os.close(0); os.close(2)",
                                  "import sys; sys.stdin.close()"])
def test_code_that_closes_its_streams_finds_them_again(contexts: Contexts, code: str) -> None:
    contexts.run(code)
    told = contexts.run("import os, sys\nprint(1)\nos.system('echo 2; echo 3 >&2')\n"
                        "sys.stdin.read()")
    assert told.text("stdout") == "1\n2\n" and told.text("stderr") == "3\n"
    assert told.text("result") == "''"


def test_contexts_are_apart(contexts: Contexts, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    code, out, _ = contexts.ask("make", "other", "there")
    assert code == 0 and json.loads(out) == {
        "id": "other", "language": "python", "cwd": str(tmp_path / "there")}
    contexts.run("x = 1")
    assert contexts.run("x = 2\nimport os\nos.getcwd()", "other").text("result") == repr(
        str(tmp_path / "there"))
    assert contexts.run("x").text("result") == "1"
    assert [each["id"] for each in json.loads(contexts.ask("list")[1])] == [DEFAULT, "other"]
    assert contexts.ask("restart", "other")[0] == 0
    assert contexts.run("x", "other").error == ("NameError", "name 'x' is not defined")
    pid = contexts.pid("other")
    assert contexts.ask("drop", "other")[0] == 0
    until(lambda: not os.path.exists(f"/proc/{pid}/exe"))
    assert contexts.ask("run", "other", "{}")[0] == UNKNOWN
    assert contexts.ask("drop", "none")[0] == UNKNOWN
    assert contexts.ask("make", "x", "nowhere")[::2] == (
        REFUSED, "cwd: nowhere (No such file or directory)\n")


def test_a_kernel_that_dies_is_told_and_the_next_call_has_a_new_one(contexts: Contexts) -> None:
    contexts.run("x = 1")
    told = contexts.run("import os; print('last'); os._exit(1)")
    assert told.error[0] == "KernelDied"  # type: ignore[index]
    assert contexts.run("x").error == ("NameError", "name 'x' is not defined")
    os.kill(contexts.pid(), signal.SIGKILL)
    assert contexts.run("1").text("result") == "1"


def test_a_process_that_outlives_its_call_or_its_kernel_holds_up_nobody(contexts: Contexts
                                                                        ) -> None:
    told = contexts.run("import os, time\nleft = os.fork()\nif left == 0:\n    time.sleep(1000)\n"
                        "    os._exit(0)\nleft")
    contexts.run("os._exit(1)")
    assert contexts.run("2").text("result") == "2"
    os.kill(int(told.text("result")), signal.SIGKILL)  # it is still there


def test_code_whose_caller_is_gone_is_interrupted(contexts: Contexts) -> None:
    contexts.run("x = 1")
    caller = contexts.begin("import time\ntry:\n    print('begun')\n    time.sleep(100)\n"
                            "except KeyboardInterrupt:\n    x = 2")
    await_begun(caller)
    end(caller)
    assert contexts.run("x").text("result") == "2"


def test_code_that_ignores_its_interrupt_ends_with_its_kernel(contexts: Contexts) -> None:
    caller = contexts.begin("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                            "print('begun')\nwhile True: pass")
    await_begun(caller)
    end(caller)
    assert contexts.run("1").of("number_of_executions")[0]["execution_count"] == 1


def test_calls_at_one_time_run_one_after_the_other(contexts: Contexts) -> None:
    callers = [contexts.begin(f"import time; time.sleep(0.05); n = {n}; n") for n in range(8)]
    told = [json.loads(line) for caller in callers
            for line in caller.communicate(timeout=60)[0].splitlines()]
    assert {event["text"] for event in told if event["type"] == "result"} == set("01234567")
    assert sorted(event["execution_count"] for event in told
                  if event["type"] == "number_of_executions") == list(range(1, 9))
    left = {path.name for path in contexts.folder.glob(f".run-code/{DEFAULT}/*")}
    assert left == {"alive", "calls", "cwd"}


def test_code_does_not_have_the_future_features_of_the_program(contexts: Contexts) -> None:
    told = contexts.run("def f(x: int): pass\nf.__annotations__")
    assert told.text("result") == "{'x': <class 'int'>}"


def test_an_error_without_a_message_and_a_wrong_variable_end_no_kernel(contexts: Contexts) -> None:
    contexts.run("x = 1")
    told = contexts.run("class Bad(Exception):\n    def __str__(self): return 1 / 0\nraise Bad")
    assert told.error == ("Bad", "<the message of this error cannot be made>")
    assert contexts.run("1", **{"A=B": ""}).error[0] == "ValueError"  # type: ignore[index]
    assert contexts.run("1", A="\ud800").error[0] == "UnicodeEncodeError"  # type: ignore[index]
    assert contexts.run("import os\nx, 'A' in os.environ").text("result") == "(1, False)"


def test_a_process_of_a_process_of_the_code_keeps_its_files(contexts: Contexts) -> None:
    told = contexts.run("import os\npid = os.fork()\nif pid == 0:\n"
                        "    files = [open('f', 'w') for _ in range(4)]\n    if os.fork() == 0:\n"
                        "        for file in files: print(os.fstat(file.fileno()).st_size)\n"
                        "    else:\n        os.wait()\n    os._exit(0)\n_ = os.waitpid(pid, 0)")
    assert told.text("stdout") == 4 * "0\n" and told.text("stderr") == ""


def test_calls_that_wait_while_the_kernel_dies_are_carried_out(contexts: Contexts) -> None:
    """The first of them started a new kernel, and the others waited for ever."""
    contexts.run("import os, time")
    first = contexts.begin("print('begun')\ntime.sleep(2)\nos._exit(1)")
    await_begun(first)
    waiting = [contexts.begin(f"{n}") for n in range(4)]
    assert b"KernelDied" in first.communicate(timeout=60)[0]
    told = [caller.communicate(timeout=60)[0] for caller in waiting]
    assert all(b'"text": "%d"' % n in each for n, each in enumerate(told)), told


def test_code_that_awaits_ends_with_its_interrupt(contexts: Contexts) -> None:
    """It went on as soon as a later call awaited something."""
    caller = contexts.begin("import asyncio\ntry:\n    print('begun')\n    await asyncio.sleep(1)\n"
                            "finally:\n    x = 1\nx = 2")
    await_begun(caller)
    end(caller)
    assert contexts.run("await asyncio.sleep(1.5)\nx").text("result") == "1"


def test_an_object_that_has_every_attribute_is_shown_by_its_text(contexts: Contexts) -> None:
    told = contexts.run("from unittest.mock import MagicMock\nMagicMock(name='m')")
    assert told.error is None and told.text("result").startswith("<MagicMock name='m'")


def test_a_forked_process_that_comes_to_the_end_of_the_code_ends(contexts: Contexts) -> None:
    """It ended after seconds, with status 1 whatever it said."""
    contexts.run("import os, sys, time")
    for end, status in (("sys.exit(3)", 3), ("pass", 0), ("sys.exit()", 0), ("1 / 0", 1)):
        told = contexts.run(f"began = time.monotonic()\nif os.fork() == 0:\n    print('child')\n"
                            f"    {end}\nelse:\n"
                            "    print(os.wait()[1] >> 8, time.monotonic() - began < 2)")
        assert told.text("stdout") == f"child\n{status} True\n" and told.error is None
    assert "1 / 0" in told.text("stderr")


def test_a_restart_while_the_kernel_starts_waits_for_it(contexts: Contexts) -> None:
    """It failed, as the file did not have the kernel's number yet, or had that of one before."""
    assert contexts.ask("make", "c", ".")[0] == 0
    starting = python_kernel.locked(str(contexts.folder / ".run-code" / "c"))
    assert starting is not None
    restart = contexts.start("restart", "c")
    time.sleep(1)
    os.close(starting)
    assert (restart.communicate(timeout=60), restart.returncode) == ((b"", b""), 0)


def test_calls_of_a_context_that_is_dropped_are_told_that_it_has_ended(contexts: Contexts) -> None:
    """One that waited was told a traceback, or started a kernel that stayed without a folder."""
    assert contexts.ask("make", "c", ".")[0] == 0
    running = contexts.begin("import time\nprint('begun')\ntime.sleep(60)", "c")
    assert running.stdout is not None
    until(lambda: b"begun" in running.stdout.readline())  # type: ignore[union-attr]
    waiting = [contexts.begin("1", "c") for _ in range(3)]
    for caller in waiting:
        assert caller.stdout is not None and b"started" in caller.stdout.readline()
    time.sleep(0.1)
    assert contexts.ask("drop", "c") == (0, "", "")
    for caller in (running, *waiting):
        out, err = caller.communicate(timeout=60)
        assert b"KernelDied" in out and (caller.returncode, err) == (0, b"")
    assert not (contexts.folder / ".run-code" / "c").exists()


def test_two_first_calls_at_one_time_have_one_context(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The second failed where the first had just made the folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".run-code" / DEFAULT
    first, second = (python_kernel.make(str(folder), ".") for _ in range(2))
    assert first == second == {"id": DEFAULT, "language": "python", "cwd": str(tmp_path)}
    assert {path.name for path in folder.iterdir()} == {"calls", "cwd"}
    assert [path.name for path in tmp_path.iterdir()] == [".run-code"]
