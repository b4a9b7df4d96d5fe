"""The environments of the training run: the same task in a local folder and in a broker's sandbox.

Both give the policy one tool, `run_tests`, with the same answers, and draw the same durations. A
local environment is what a trainer's author would write without tangram_hpc: a temporary folder and
`subprocess`, without isolation. The environment with a sandbox is a subclass of the TRL hook's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import task
from task import VERIFIER, VERIFIER_TEXT
from tool_times import ToolTimes

from tangram_hpc.hooks.trl_tools import SandboxEnvironment

TIMEOUT_S = 120.0


@dataclass
class Setting:
    """What all environments of a run share.

    Attributes:
        times: draws the duration of each tool call.
        python: the interpreter of the verifier.
        serial: the share of a test run that more CPUs do not shorten.
        cpus: the CPUs of a tool call: a number, or (least, most) in a sandbox.
        backend: the isolation backend of sandboxes; empty for the best that a node has. With
            "process" the sandboxes are trusted, because this backend may not be able to keep them
            from the trainer's files.
        slots: how many local tool calls may run at once; None for no limit.
        numbers: yields the number of the next environment.
        open_folders: the folders of local rollouts that are not closed.
    """

    times: ToolTimes
    python: str
    serial: float = 0.1
    cpus: int | tuple[int, int] = 1
    backend: str = ""
    slots: threading.Semaphore | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    open_folders: set[str] = field(default_factory=set)


class Attempts:
    """The candidates of one environment: which task they are for, and the commands that check them.

    Attributes:
        candidates: the candidates of this rollout, in their order.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._number = setting, next(setting.numbers)
        self._resets, self._task = 0, 0
        self.candidates: list[str] = []

    def begin(self, task_number: int) -> None:
        """Begins a rollout."""
        self._resets += 1
        self._task, self.candidates = task_number, []

    def check(self, expression: str) -> list[str]:
        """Returns the command that checks a candidate for the policy."""
        self.candidates.append(expression)
        work_s = self._setting.times.draw(self._number, self._resets, len(self.candidates))
        return task.command(self._setting.python, [expression], task.cases(self._task), work_s,
                            self._setting.serial)

    def final(self) -> list[str]:
        """Returns the command that decides the reward; it does not wait for a duration of the
        trace."""
        return task.command(self._setting.python, self.candidates,
                            task.cases(self._task, held_out=True), 0.0, self._setting.serial)


# ---- in a folder of this machine -----------------------------------------------------------------


class FolderTask:
    """A rollout in a temporary folder, whose tools are processes of the trainer.

    Attributes:
        attempts: its candidates.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self.attempts, self._folder = setting, Attempts(setting), ""

    def reset(self, task: int, **row: Any) -> None:
        """Begins a rollout in a fresh folder."""
        self._close()
        self.attempts.begin(task)
        self._folder = tempfile.mkdtemp(prefix="trl-run-")
        self._setting.open_folders.add(self._folder)
        Path(self._folder, VERIFIER).write_text(VERIFIER_TEXT)

    def run_tests(self, expression: str) -> str:
        """Runs the tests of the task on a candidate.

        Args:
            expression: The candidate, an expression in a and b.

        Returns:
            How many tests passed.
        """
        return task.verdict(self._command(self.attempts.check(expression)))

    def _score(self) -> float:
        """Returns the reward, and ends the rollout."""
        output = self._command(self.attempts.final()) if self.attempts.candidates else ""
        self._close()
        return task.share(output)

    def _command(self, command: list[str]) -> str:
        cpus = self._setting.cpus
        with ExitStack() as held:
            if self._setting.slots is not None:
                held.enter_context(self._setting.slots)
            return subprocess.run(
                command, cwd=self._folder, capture_output=True, text=True, timeout=TIMEOUT_S,
                check=False, env={**os.environ, "TANGRAM_CPUS": str(cpus)}).stdout

    def _close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder)
            self._setting.open_folders.discard(self._folder)
            self._folder = ""


class InsideTask(FolderTask):
    """A rollout whose candidates are judged in the trainer's process, without any wait. Its rewards
    are the reference for the other modes. Only for trusted candidates, such as this run's."""

    def _command(self, command: list[str]) -> str:
        candidates, told = command[4].split("|"), command[5].split(";")
        examples = [tuple(map(int, each.split(","))) for each in told]
        return task.judged(candidates, [(a, b, wanted) for a, b, wanted in examples])


def folder_reward(threads: ThreadPoolExecutor | None) -> Callable[..., list[float]]:
    """Makes the reward function of local environments.

    Args:
        threads: the pool on which rollouts are scored; None to score them one after the other.
    """
    def reward(completions: Sequence[Any], environments: Sequence[FolderTask], **columns: Any
               ) -> list[float]:
        score = FolderTask._score
        return [*(map if threads is None else threads.map)(score, environments)]

    return reward


# ---- in a sandbox of the broker ------------------------------------------------------------------


class SandboxTask(SandboxEnvironment):
    """A rollout in a session of the broker.

    Attributes:
        attempts: its candidates.
    """

    options = {"files": {task.VERIFIER: task.VERIFIER_TEXT}, "name": "guess"}
    timeout_s = TIMEOUT_S

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting, self.attempts = setting, Attempts(setting)

    def _session_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        backend = self._setting.backend
        return {**self.options, "backend": backend, "trusted": backend == "process"}

    def reset(self, **row: Any) -> None:
        """Begins a rollout in a fresh sandbox."""
        super().reset(**row)
        self.attempts.begin(row["task"])

    def run_tests(self, expression: str) -> str:
        """Runs the tests of the task on a candidate.

        Args:
            expression: The candidate, an expression in a and b.

        Returns:
            How many tests passed.
        """
        return task.verdict(self._run(self.attempts.check(expression), name="run_tests",
                                      cpus=self._setting.cpus))


async def sandbox_score(environment: SandboxTask, **row: Any) -> float:
    """Returns the reward of a rollout: the share of the held-out examples that pass."""
    if not environment.attempts.candidates:
        return 0.0
    result = await environment.session.exec(environment.attempts.final(), timeout=TIMEOUT_S,
                                            name="final_tests")
    return task.share(result.text)
