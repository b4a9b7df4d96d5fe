"""SkyRL's environment and tool group, against a real broker; skyrl-gym's base classes are
stand-ins where it is not installed. The long test makes environments by skyrl-gym itself."""

from __future__ import annotations

import gc
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import skyrl_stand_in
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    sessions_open,
)

skyrl_stand_in.install()

from tangram_hpc import LocalCluster  # noqa: E402
from tangram_hpc.errors import FileMissing, InvalidInput  # noqa: E402
from tangram_hpc.hooks.skyrl_gym import SandboxEnv, SandboxToolGroup  # noqa: E402

__all__ = ["adapters_cluster"]

LONG = "seq 300000; echo the end"  # prints 2 MB
PROMPT = [{"role": "user", "content": "a task"}]


def made(task: Any = None, turns: int = 9, **settings: Any) -> SandboxEnv:
    env = SandboxEnv({"timeout_s": LIMIT_S, **settings},
                     {"reward_spec": {"ground_truth": task}, "max_turns": turns})
    assert env.init(PROMPT) == (PROMPT, {})
    return env


def seen(env: SandboxEnv, action: str) -> str:
    return "".join(message["content"] for message in env.step(action)["observations"])


class TestSkyrl(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        return made(session=options)

    def call(self, trajectory: Any, line: str) -> str:
        return seen(trajectory, f"I try <bash>{line}</bash>")

    def end(self, trajectory: Any) -> None:
        trajectory.close()

    def lose(self, trajectory: Any) -> None:
        trajectory.episode._slot.session.close()


def test_an_answer_without_a_command_ends_the_episode_with_its_reward(cluster: LocalCluster
                                                                      ) -> None:
    task = {"command": "sh hidden.sh", "files": {"task": "6 * 7"},
            "tests": {"hidden.sh": "grep -qx 42 answer"}}
    env = made(task)
    assert seen(env, "<bash>cat task; ls</bash>") == "6 * 7task"
    first = env.step("<python>print(6 * 7, file=open('answer', 'w'))</python>")
    assert (first["done"], first["reward"]) == (False, 0.0)
    last = env.step("It is done.")
    assert (last["done"], last["reward"], last["observations"]) == (True, 1.0, [])
    env.close()


def test_a_command_without_output_is_answered_by_an_empty_message(cluster: LocalCluster) -> None:
    """Without a message, SkyRL would have the policy answer twice in a row."""
    env = made("true")
    assert env.step("<bash>echo 42 > answer</bash>")["observations"] == [
        {"role": "user", "content": ""}]
    env.close()


def test_the_last_turn_is_scored_with_its_command(cluster: LocalCluster) -> None:
    env = made("grep -q 2 count", turns=2)
    assert env.step("<bash>echo 1 > count</bash>")["done"] is False
    last = env.step("<bash>echo 2 > count</bash>")
    assert (last["done"], last["reward"], env.turns) == (True, 1.0, 2)
    env.close()


def test_a_lost_sandbox_ends_the_episode_and_is_told_apart(cluster: LocalCluster) -> None:
    env = made("true")
    env.episode._slot.session.close()
    last = env.step("<bash>echo</bash>")
    assert (last["done"], last["reward"]) == (True, 0.0)
    assert last["metadata"] == {"sandbox_lost": True}
    env.close()


@pytest.mark.parametrize(("action", "told"), [
    ('<tool_call>{"name": "bash", "arguments": {"command": "echo 1"}}</tool_call>', "1"),
    ('<tool_call>\n{"name": "python", "arguments": {"code": "print(2)"}}\n</tool_call>', "2"),
    ("<bash>echo no</bash> rather <bash>echo last</bash>", "last"),
    ("<tool_call>{nothing}</tool_call>", "cannot be read; known are bash(command), python(code)"),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "cannot be read"),
    ('<tool_call>["bash"]</tool_call>', "cannot be read"),
    ('<tool_call>{"name": "python", "arguments": {"code": null}}</tool_call>', "cannot be read"),
    ('<tool_call>{"name": "bash", "arguments": {"command": ["ls"]}}</tool_call>', "cannot be read"),
], ids=["bash", "python", "the last", "no JSON", "unknown", "no call", "null", "a list"])
def test_how_a_command_is_found(cluster: LocalCluster, action: str, told: str) -> None:
    env = made()
    assert told in seen(env, action)
    env.close()


@pytest.mark.parametrize(("line", "reward"), [
    ("mkdir -p tests/test_x.py/deep; echo 42 > answer", 1.0),
    ("mkdir -p tests/test_x.py/deep", 0.0),
    ("echo 42 > answer; echo > tests", 0.0)], ids=["right", "wrong", "parent"])
def test_what_stands_in_the_way_of_the_tests_gives_a_reward_and_no_error(
        cluster: LocalCluster, line: str, reward: float) -> None:
    env = made({"command": "sh tests/test_x.py", "tests": {"tests/test_x.py": "grep 42 answer"}})
    seen(env, f"<bash>{line}</bash>")
    last = env.step("It is done.")
    assert (last["done"], last["reward"]) == (True, reward)
    assert not last["metadata"].get("sandbox_lost")
    env.close()


@pytest.mark.parametrize("task", [
    {"command": "test ! -e b", "files": None, "tests": None},
    {"command": "grep 1 a && grep 2 c && test ! -e b -a ! -e d",
     "files": {"a": "1", "b": None}, "tests": {"c": "2", "d": None}}], ids=["all", "some"])
def test_files_that_a_row_of_the_data_does_not_have_are_not_written(
        cluster: LocalCluster, task: Any) -> None:
    env = made(task)
    assert env.step("It is done.")["reward"] == 1.0
    env.close()


def test_a_task_whose_files_cannot_be_written_is_an_error(cluster: LocalCluster) -> None:
    """The policy would otherwise work, and be judged, without files of its task."""
    bad = {"command": "true", "files": {"/proc/nothing/here": "6 * 7"}}
    for action in ("<bash>ls</bash>", "It is done."):
        env = made(bad)
        with pytest.raises(FileMissing, match="/proc/nothing/here"):
            env.step(action)
        assert eventually(lambda: sessions_open(cluster) == 0)
    group = SandboxToolGroup({"files": bad["files"]})
    with pytest.raises(FileMissing):
        group.bash("ls")
    group.close()


def test_a_text_that_no_command_can_have_is_told_to_the_policy(cluster: LocalCluster) -> None:
    env = made()
    call = {"name": "bash", "arguments": {"command": "echo \ud800"}}
    assert "cannot be run" in seen(env, f"<tool_call>{json.dumps(call)}</tool_call>")
    assert seen(env, "<bash>echo on</bash>") == "on"
    env.close()


def test_a_very_long_output_is_seen_with_its_end_and_its_length(cluster: LocalCluster) -> None:
    env = made()
    text = seen(env, f"<bash>{LONG}</bash>")
    assert text.startswith("1\n2\n") and text.endswith("the end") and len(text) <= 8000
    left_out = int(re.search(r"\n\[(\d+) characters left out\]\n", text)[1])
    assert left_out + len(re.sub(r"\n\[.*\]\n", "", text)) == 1988895 + len("the end")
    env.close()
    env = made(answer_max=1 << 21)
    assert re.search(r"the end\n\[\d+ characters left out\]$", seen(env, f"<bash>{LONG}</bash>"))
    env.close()


def test_environments_in_threads_keep_apart(cluster: LocalCluster) -> None:
    def episode(number: int) -> str:
        env = made()
        try:
            seen(env, f"<bash>echo {number} > n</bash>")
            return seen(env, "<bash>cat n</bash>")
        finally:
            env.close()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(episode, range(8))) == [str(n) for n in range(8)]
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_forgotten_environment_closes_its_session(cluster: LocalCluster) -> None:
    env = made()
    seen(env, "<bash>true</bash>")
    del env
    gc.collect()
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_tool_group_keeps_one_session(cluster: LocalCluster) -> None:
    env, group = made(), SandboxToolGroup({"name": "tools"}, timeout_s=LIMIT_S)
    env.init_tool_groups([group])

    def use(tool: str, text: str) -> Any:
        return env._execute_tool("TangramSandbox", tool, (text,))

    assert use("bash", "echo 5 > n") == ""
    assert use("python", "print(int(open('n').read()) * 2)") == "10"
    assert "this command cannot be run" in use("bash", "echo \ud800")
    assert use("bash", "echo on") == "on"
    assert use("bash", f"{LONG}; exit 3").endswith("the end\n[exit code 3]")
    assert "[timed out after 3 s]" in use("bash", "sleep 60")
    group._slot.session.close()
    assert "the session is gone" in use("bash", "true")
    group.close()
    env.close()


def test_a_setting_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidInput, match="timeout: not a setting of an episode; known are"):
        SandboxEnv({"timeout": 3})
    for refused in (lambda: SandboxEnv({"session": {"memm": 1}}),
                    lambda: SandboxToolGroup({"memm": 1})):
        with pytest.raises(InvalidInput, match=r"session: memm: .*; known are .* mem,"):
            refused()


@pytest.mark.parametrize(("settings", "named"), [
    ({"timeout_s": "30"}, "timeout_s: '30' is not a number of seconds > 0"),
    ({"command_timeout_s": 0}, "command_timeout_s: 0 is not"),
    ({"timeout_s": True}, "timeout_s: True is not"),
    ({"max_turns": "8"}, "max_turns: '8' is not a whole number > 0"),
    ({"max_turns": 0}, "max_turns: 0 is not"), ({"answer_max": 0.5}, "answer_max: 0.5 is not")])
def test_a_number_that_is_none_is_refused_before_an_episode_begins(
        settings: dict[str, Any], named: str) -> None:
    """The policy would otherwise be told at each command that it cannot be run."""
    with pytest.raises(InvalidInput, match=re.escape(named)):
        SandboxEnv(settings)
    if "timeout_s" in settings:
        with pytest.raises(InvalidInput, match=re.escape(named)):
            SandboxToolGroup(timeout_s=settings["timeout_s"])


def test_a_setting_without_a_value_has_its_default() -> None:
    """As a configuration file gives it: `timeout_s:` with nothing behind it."""
    env = SandboxEnv({"timeout_s": None, "max_turns": None, "session": None})
    assert (env.episode.settings.timeout_s, env.max_turns) == (30.0, 8)


@pytest.mark.long
def test_skyrl_goes_on_with_the_jobs_next_broker(tmp_path: Path) -> None:
    check_restart(TestSkyrl(), tmp_path)
