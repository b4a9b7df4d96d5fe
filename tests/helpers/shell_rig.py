"""A rig that talks to shells of sessions, and the fixtures that make its sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ShellCall
from tests.helpers.executor_rig import Rig

SHELL = 7


class ShellRig(Rig):
    """A rig that talks to the shells of its session `session`."""

    session = 0

    def run(self, text: str, shell: int = SHELL, **fields: Any) -> tuple[Outcome, Any]:
        """Runs a text in a shell to its end."""
        return self.end(self.begin_run(text, shell, **fields))[:2]

    def begin_run(self, text: str, shell: int = SHELL, **fields: Any) -> int:
        call = ShellCall("run", shell, text, **{k: fields.pop(k) for k in list(fields)
                                                if k in ShellCall.__struct_fields__})
        return self.begin(call, Kind.EXEC, session=self.session, **fields)

    def start(self, shell: int = SHELL, **fields: Any) -> Outcome:
        """Opens a shell."""
        call = ShellCall("open", shell, start=True, **fields)
        return self.end(self.begin(call, Kind.EXEC, session=self.session))[0]

    def told(self, text: str, shell: int = SHELL, **fields: Any) -> bytes:
        """The output of a text that must succeed."""
        outcome, back = self.run(text, shell, **fields)
        assert outcome.state is ActionState.COMPLETED, (text, outcome, back)
        return back.stdout

    def give(self, lease: int, kind: int, data: bytes = b"", number: int = 0,
             other: int = 0) -> None:
        """Gives input to the command of a lease."""
        self.loop.call_soon(self.executor.give_input, lease, kind, data, number, other)


@pytest.fixture(scope="module", name="rig")
def shell_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShellRig]:
    one = ShellRig(tmp_path_factory.mktemp("shells"), trusted=False)
    yield one
    one.close()


@pytest.fixture(name="make")
def make_session(rig: ShellRig) -> Iterator[Any]:
    opened: list[int] = []

    def one(backend: str, **spec: Any) -> ShellRig:
        rig.session += 1
        opened.append(rig.session)
        rig.open(rig.session, backend=backend, **spec)
        return rig

    yield one
    for session in opened:
        rig.loop.call_soon(rig.executor.close_session, session)
        rig.until(lambda session=session: session in rig.down)
