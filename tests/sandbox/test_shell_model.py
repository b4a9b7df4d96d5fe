"""A shell against a model of it: long sequences of commands, each checked with all of the state."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import input_flow
from tangram_hpc.protocol.payload import ShellCall
from tests.helpers.shell_rig import SHELL, ShellRig, make_session, shell_rig

__all__ = ["make_session", "shell_rig"]  # fixtures

_STATE = ('printf "%s\\n" "$?" "${PWD##*/}" "$V0" "$V1" "$V2" "$(f)" "${-//[^fC]/}" '
          '"$(kill -0 $J0 2>/dev/null && echo up)" "$(kill -0 $J1 2>/dev/null && echo up)"')


class Model:
    """What the shell is expected to remember, and commands that change it."""

    def __init__(self, rig: ShellRig, seed: int) -> None:
        self.rig, self.random = rig, random.Random(seed)
        self.status, self.folder = 0, "top"
        self.variables = ["", "", ""]
        self.function, self.flags = "", ""
        self.jobs = [False, False]
        self.commands = 0

    def begin(self) -> None:
        """Brings the shell into the model's first state."""
        self.rig.start()
        assert self.run("mkdir -p top/a top/b; cd top; f() { :; }")[0] == 0

    def run(self, text: str, **fields: Any) -> tuple[int, bytes]:
        """Runs a command; returns its exit status and its output."""
        self.commands += 1
        outcome, back = self.rig.run(text, **fields)
        assert outcome.state in (ActionState.COMPLETED, ActionState.FAILED), (text, outcome)
        return outcome.exit_code, back.stdout

    def step(self) -> None:
        """Runs one command and checks what it did and what the shell remembers."""
        step = self.random.choice((self.change_folder, self.set_variable, self.define, self.fail,
                                   self.write_bytes, self.read_bytes, self.misspell, self.set_flag,
                                   self.interrupt, self.start_job, self.end_job, self.subshell))
        step()
        expected = [str(self.status), self.folder, *self.variables, self.function, self.flags,
                    *("up" if job else "" for job in self.jobs)]
        status, out = self.run(_STATE)
        assert (status, out.decode("latin-1").split("\n")[:-1]) == (0, expected), step
        self.status = 0

    def expect(self, text: str, status: int, out: bytes = b"", **fields: Any) -> None:
        """Runs a command that must end so."""
        assert self.run(text, **fields) == (status, out), text
        self.status = status

    def change_folder(self) -> None:
        self.folder, where = self.random.choice((("a", "a"), ("b", "b"), ("top", ".")))
        self.expect(f'while [ "${{PWD##*/}}" != top ]; do cd ..; done; cd {where}', 0)

    def set_variable(self) -> None:
        number = self.random.randrange(3)
        value = "".join(self.random.choices("ab '\"\\$`!*;&|<>(){}#~é", k=8))
        self.variables[number] = value.encode().decode("latin-1")
        quoted = value.replace("'", "'\\''")
        self.expect(f"export V{number}='{quoted}'", 0)

    def define(self) -> None:
        self.function = str(self.random.randrange(1000))
        self.expect(f"f() {{\n  echo {self.function}\n}}", 0)

    def fail(self) -> None:
        status = self.random.choice((0, 1, 2, 77, 126, 255))
        self.expect(f"(exit {status})", status)

    def write_bytes(self) -> None:
        data = self.random.randbytes(self.random.choice((1, 50, 3000)))
        octal = "".join(f"\\{byte:03o}" for byte in data)
        self.expect(f"printf '{octal}'", 0, data)

    def read_bytes(self) -> None:
        data = self.random.randbytes(self.random.choice((1, 1000, 200_000)))
        self.expect("cat", 0, data, stdin=data)

    def misspell(self) -> None:
        text = self.random.choice(("echo 'open", "if )", 'echo "x', "f( {", "case x in"))
        status, out = self.run(text)
        assert (status, out) in ((2, b""), (1, b"")), text
        self.status = status

    def set_flag(self) -> None:
        flag = self.random.choice("fC")
        on = flag not in self.flags
        self.flags = "".join(sorted((set(self.flags) | {flag}) if on
                                    else set(self.flags) - {flag}, key="fC".index))
        self.expect(f"set {'-' if on else '+'}{flag}", 0)

    def interrupt(self) -> None:
        # no subshell: one that is just starting may take the signal for itself, as with ^C, and the
        # shell then goes on behind it
        text = self.random.choice(("sleep 60", "while :; do :; done", "sleep 59; sleep 60"))
        pause = self.random.choice((0.0, 0.001, 0.004, 0.02))
        lease = self.rig.begin_run(f"{text}; echo not reached")
        began = time.monotonic()
        self.rig.until(lambda: time.monotonic() - began >= pause)
        self.rig.give(lease, input_flow.SIGNAL, number=2)
        outcome, back, _ = self.rig.end(lease)
        self.commands += 1
        assert (outcome.exit_code, back.stdout) == (130, b""), text
        self.status = 130

    def start_job(self) -> None:
        number = self.random.randrange(2)
        if not self.jobs[number]:
            self.jobs[number] = True
            self.expect(f"sleep 1000 & J{number}=$!", 0)

    def end_job(self) -> None:
        number = self.random.randrange(2)
        if self.jobs[number]:
            self.jobs[number] = False
            self.expect(f"kill $J{number}; wait $J{number}", 143)

    def subshell(self) -> None:
        self.expect("(cd /; V0=other; f() { :; }; set -u; exec >/dev/null; echo $V0)", 0)


def _play(rig: ShellRig, seed: int, commands: int) -> None:
    model = Model(rig, seed)
    model.begin()
    while model.commands < commands:
        model.step()
    for number in range(2):
        if model.jobs[number]:
            model.expect(f"kill $J{number}; wait $J{number}", 143)


@pytest.mark.parametrize("backend", ["bwrap", "process"])
def test_a_shell_behaves_as_its_model_for_three_hundred_commands(make: Any, backend: str) -> None:
    _play(make(backend), 1, 300)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["bwrap", "process"])
def test_a_shell_behaves_as_its_model_for_ten_thousand_commands(make: Any, backend: str) -> None:
    _play(make(backend), 2, 10_000)


@pytest.mark.parametrize("backend", ["bwrap", "process"])
def test_several_shells_share_no_state(make: Any, backend: str) -> None:
    rig = make(backend)
    shells = range(SHELL, SHELL + 5)
    leases = {shell: rig.begin(ShellCall("run", shell, f"X={shell}; cd /; cd - >&2", start=True),
                               Kind.EXEC, session=rig.session) for shell in shells}
    for lease in leases.values():
        rig.end(lease)
    for shell in shells:
        assert rig.told("echo $X", shell) == f"{shell}\n".encode()
    rig.run("exit 1", SHELL)
    assert rig.told("echo $X", SHELL + 1) == f"{SHELL + 1}\n".encode()
