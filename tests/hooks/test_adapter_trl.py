"""TRL's environments, rewards and prefetched tools, against a real broker. The trainer is a
stand-in with the order of TRL's own tool loop, because TRL needs torch."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    sessions_open,
)
from helpers.trl_stand_in import GRPOTrainer

from tangram_hpc import LocalCluster
from tangram_hpc.errors import FileMissing, InvalidInput, TangramError
from tangram_hpc.hooks.trl_tools import (
    SandboxEnvironment,
    ShellEnvironment,
    prefetching,
    release_environments,
    reward_function,
)

__all__ = ["adapters_cluster"]


class Shell(ShellEnvironment):
    timeout_s = LIMIT_S


class TestTrl(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        environment = type("Configured", (Shell,), {"options": options})()
        environment.reset(prompt="a task")
        return environment

    def call(self, trajectory: Any, line: str) -> str:
        try:
            return str(trajectory.bash(line))
        except TangramError as error:  # TRL answers with {"error": str(error)}
            return str(error)

    def end(self, trajectory: Any) -> None:
        release_environments([trajectory])

    def lose(self, trajectory: Any) -> None:
        trajectory.session.close()


def test_a_tool_may_stream_the_output_of_its_command(cluster: LocalCluster) -> None:
    """Of an output that is not streamed, both ends are kept for the answer."""
    class Streaming(SandboxEnvironment):
        def say(self, line: str) -> str:
            return self._run(line, on_output=lambda stream, data: seen.append(data))

        def both(self, line: str) -> str:
            return self._run(line, output_max=100)

    seen: list[bytes] = []
    environment = Streaming()
    environment.reset(prompt="a task")
    assert environment.say("echo streamed") == "", "its output went to on_output"
    assert b"".join(seen) == b"streamed\n"
    assert "999" in environment.both("seq 999")
    release_environments([environment])


def test_a_reset_and_the_end_of_an_environment_close_its_session(cluster: LocalCluster) -> None:
    environment = Shell()
    # TRL makes one more environment, of which it only reads the tools
    assert eventually(lambda: sessions_open(cluster) == 0)
    for _ in range(3):
        environment.reset()
        environment.bash("true")
    assert eventually(lambda: sessions_open(cluster) == 1)
    del environment
    gc.collect()
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_the_end_of_a_very_long_output_is_seen(cluster: LocalCluster) -> None:
    environment = Shell()
    environment.reset()
    assert environment.bash("seq 300000; echo the end").endswith("the end")
    release_environments([environment])


def test_an_option_that_no_session_has_is_named(cluster: LocalCluster) -> None:
    class Wrong(ShellEnvironment):
        options = {"memm": "1G"}

    with pytest.raises(InvalidInput, match=r"session: memm: .*; known are .* mem,"):
        Wrong().reset()


def test_the_base_class_has_no_tools(cluster: LocalCluster) -> None:
    trainer = GRPOTrainer(SandboxEnvironment, [])
    trainer.step([{}], [[]])
    assert (trainer._sync_tool_dicts, trainer._async_tool_dicts) == ([{}], [{}])
    release_environments(trainer.pool)


def script(rollouts: int) -> list[list[list[tuple[str, Any]]]]:
    """Returns turns of several rollouts: one call, several, none, wrong names, wrong arguments."""
    return [[[("write_file", {"path": "n", "content": str(i)}), ("bash", {"command": "cat n"})],
             [("bash", {"command": f"exit {i}"}), ("nothing", {}), ("bash", {"wrong": 1})],
             [("python", {"code": "print(open('n').read() * 2)"})]][:1 + i % 3]
            for i in range(rollouts)] + [[]]


def test_prefetched_calls_give_the_same_messages_and_rewards(cluster: LocalCluster) -> None:
    rows = [{"answer": i} for i in range(7)]
    told = []
    for kind in (GRPOTrainer, prefetching(GRPOTrainer)):
        trainer = kind(Shell, [reward_function(["grep", "-q", "[135]", "n"])])
        told.append(trainer.step(rows, script(6)))
        release_environments(trainer.pool)
    assert told[0] == told[1]
    assert told[0][1] == [[0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]]


class Meeting(SandboxEnvironment):
    """Tools that end only when the tools of all rollouts have begun."""

    barrier = threading.Barrier(4, timeout=30)

    def meet(self) -> str:
        """Waits for the others."""
        self.barrier.wait()
        return "met"


def test_all_rollouts_of_a_turn_begin_before_the_first_is_awaited(cluster: LocalCluster) -> None:
    trainer = prefetching(GRPOTrainer)(Meeting, [])
    messages, _ = trainer.step([{"n": i} for i in range(4)], [[[("meet", {})]] * 2] * 4)
    assert [[m["content"] for m in each if m["role"] == "tool"] for each in messages] == [
        ["met", "met"]] * 4


class Later(SandboxEnvironment):
    """A tool that is a coroutine."""

    async def add(self, one: int, other: int) -> int:
        """Adds."""
        if one < 0:
            raise ValueError("negative")
        return one + other


def test_asynchronous_tools_are_prefetched_as_well(cluster: LocalCluster) -> None:
    turns = [[[("add", {"one": i, "other": 1}), ("add", {"one": -i, "other": 2})]] * 2
             for i in range(3)]
    told = [kind(Later, []).step([{}, {}, {}], turns)[0]
            for kind in (GRPOTrainer, prefetching(GRPOTrainer))]
    assert told[0] == told[1]
    assert told[0][2][1]["content"] == "3" and "negative" in told[0][2][2]["content"]


def test_scored_rollouts_hold_no_session(cluster: LocalCluster) -> None:
    trainer = prefetching(GRPOTrainer)(Shell, [reward_function("true")])
    _, rewards = trainer.step([{}, {}], [[[("bash", {"command": "echo"})]], []])
    assert rewards == [[1.0, 1.0]]
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_an_interrupted_turn_does_not_wait_for_its_tools(cluster: LocalCluster) -> None:
    """^C reaches the trainer's thread, which waits for the first tool; a tool may take hours."""
    class Interrupted(Shell):
        timeout_s = 3600.0

        def interrupt(self) -> str:
            """Is interrupted when the tools of the other rollouts run."""
            assert eventually(lambda: sessions_open(cluster) == 3)
            raise KeyboardInterrupt

    trainer = prefetching(GRPOTrainer)(Interrupted, [])
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.step([{}] * 3, [[[("interrupt", {})]], *([[("bash", {"command": "sleep 100"})]]
                                                         for _ in range(2))])
    assert time.monotonic() - began < 90
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_trainer_without_the_tool_loop_is_refused() -> None:
    with pytest.raises(TypeError, match="no tool loop"):
        prefetching(dict)


async def files_of(environment: Any, completion: Any, prompt: Any, factor: int) -> float:
    await environment.session.write("made", "x" * factor)
    return float((await environment.session.stat("made")).size)


def test_rewards_of_functions_and_of_lost_sessions(cluster: LocalCluster) -> None:
    def length_of(completion: Any, prompt: Any, factor: int) -> float:  # travels by value
        return float(len(completion) * factor)

    trainer = GRPOTrainer(Shell, [reward_function(length_of), reward_function(files_of),
                                  reward_function("sleep 60", timeout=LIMIT_S)])
    rows = [{"factor": 2}, {"factor": 5}]
    assert trainer.step(rows, [[], []])[1] == [[2.0, 5.0], [2.0, 5.0], [0.0, 0.0]]
    trainer.pool[0].session.close()
    assert trainer._calculate_rewards(rows, rows, [[], []], []) == [
        [0.0, 0.0], [None, 5.0], [None, 0.0]]
    release_environments(trainer.pool)


def test_no_function_scores_a_rollout_whose_session_was_lost(cluster: LocalCluster) -> None:
    """TRL adds a None to the rewards of other functions as 0, like a failed test."""
    async def one(environment: Any, **row: Any) -> float:
        return 1.0

    def outside(**row: Any) -> float:
        return 1.0

    environment = type("Short", (Shell,), {"options": {"idle_s": 0.2}})()
    environment.reset()
    assert environment.session.closed.result(60) == "idle for 0.2 s"
    rewards = [asyncio.run(reward_function(score)(["p"], ["c"], environments=[environment]))
               for score in (["true"], one, outside)]
    assert rewards == [[None], [None], [None]]
    release_environments([environment])


def test_a_file_that_cannot_be_written_is_told_equally_in_each_run(cluster: LocalCluster) -> None:
    """A policy would learn the number of an action as noise."""
    told = []
    for _ in range(2):
        environment = Shell()
        environment.reset()
        with pytest.raises(FileMissing) as error:
            environment.write_file("/proc/nothing/here", "x")
        told.append(str(error.value))
        assert error.value.code == "ENOENT", "a subclass may tell errors apart"
        release_environments([environment])
    assert told == ["no such file: /proc/nothing/here"] * 2


def test_a_rollout_without_files_of_its_task_has_no_reward(cluster: LocalCluster) -> None:
    class Task(Shell):
        options = {"files": {"/proc/nothing/here": "6 * 7"}}

    async def one(environment: Any, **row: Any) -> float:
        return 1.0

    def outside(**row: Any) -> float:
        return 1.0

    for score in (["true"], one, outside):
        environment = Task()
        environment.reset()
        with pytest.raises(FileMissing, match="/proc/nothing/here"):
            asyncio.run(reward_function(score)(["p"], ["c"], environments=[environment]))
        release_environments([environment])


def test_a_column_that_names_the_environment_does_not_hide_it(cluster: LocalCluster) -> None:
    trainer = GRPOTrainer(Shell, [reward_function(files_of)])
    assert trainer.step([{"environment": "shell", "factor": 3}], [[]])[1] == [[3.0]]
    release_environments(trainer.pool)


@pytest.mark.long
def test_trl_goes_on_with_the_jobs_next_broker(tmp_path: Path) -> None:
    check_restart(TestTrl(), tmp_path)
