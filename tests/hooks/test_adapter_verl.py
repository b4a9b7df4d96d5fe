"""verl's tool, rewards and reward manager, against a real broker; verl's classes are stand-ins
where it is not installed. The long test drives verl's own agent loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import verl_stand_in
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    check_restart,
    eventually,
    sessions_open,
)
from helpers.verl_stand_in import Trajectory, call_tool

verl_stand_in.install()

from tangram_hpc import LocalCluster, SessionHandle, SessionLost, connect  # noqa: E402
from tangram_hpc.errors import InvalidInput  # noqa: E402
from tangram_hpc.hooks.verl import reward_functions  # noqa: E402
from tangram_hpc.hooks.verl.reward_functions import (  # noqa: E402
    SESSION_FIELD,
    compute_score,
    compute_score_sync,
    scoring_session,
    session_score,
)
from tangram_hpc.hooks.verl.reward_manager import ClosingRewardManager  # noqa: E402
from tangram_hpc.hooks.verl.sandbox_tool import SandboxTool, _sessions  # noqa: E402

__all__ = ["adapters_cluster"]

numbers = itertools.count()


def tool(**config: Any) -> SandboxTool:
    return SandboxTool({"type": "native", "timeout_s": LIMIT_S, **config})


def say(one: SandboxTool, trajectory: Trajectory, **arguments: Any) -> str:
    return asyncio.run(call_tool(one, arguments, trajectory))


class TestVerl(AdapterBehaviours):
    def begin(self, **options: Any) -> Any:
        return [tool(session=options), Trajectory(f"request-{next(numbers)}")]

    def call(self, trajectory: Any, line: str) -> str:
        return say(*trajectory, command=line)

    def end(self, trajectory: Any) -> None:
        trajectory.clear()  # verl tells nobody, but drops the object
        gc.collect()

    def lose(self, trajectory: Any) -> None:
        _sessions.get(trajectory[1].request_id, {}, trajectory[1]).close()


def test_the_session_ends_with_verls_object_for_the_trajectory(cluster: LocalCluster) -> None:
    one, trajectory = tool(), Trajectory("goes")
    say(one, trajectory, command="true")
    assert eventually(lambda: sessions_open(cluster) == 1)
    del trajectory
    gc.collect()
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_the_end_of_a_very_long_output_is_seen(cluster: LocalCluster) -> None:
    assert say(tool(), Trajectory("talks"), command="seq 300000; echo the end").endswith("the end")


def test_several_tools_of_a_trajectory_share_its_session(cluster: LocalCluster) -> None:
    shell, trajectory = tool(), Trajectory("shared")
    python = tool(argv=["python3", "-"], stdin="{code}")
    say(shell, trajectory, command="echo from the shell > file")
    assert say(python, trajectory, code="print(open('file').read())").strip() == "from the shell"
    assert say(python, trajectory, wrong="x") == "missing parameter 'code'"
    assert say(python, trajectory, code=None) == "missing parameter 'code'"
    no_object: Any = ["print(1)"]
    told = asyncio.run(python.execute("an id", no_object, agent_data=trajectory))
    assert told[0].text == "missing parameter 'code'"
    assert eventually(lambda: sessions_open(cluster) == 1)


def test_an_empty_stdin_of_the_settings_is_an_empty_input(cluster: LocalCluster) -> None:
    """In `stdin:` of a YAML file nothing follows the colon."""
    assert say(tool(argv=["cat"], stdin=None), Trajectory("empty")) == ""


def test_files_of_the_settings_that_cannot_be_written_are_named(cluster: LocalCluster) -> None:
    one = tool(session={"files": {"/proc/nothing/here": "x"}})
    trajectory = Trajectory("lacks files")
    assert "/proc/nothing/here" in say(one, trajectory, command="ls")
    assert "the sandbox is gone" in say(one, trajectory, command="ls")
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_an_id_that_comes_again_is_another_trajectory(cluster: LocalCluster) -> None:
    one, first, second = tool(), Trajectory("det-0"), Trajectory("det-0")
    say(one, first, command="echo old > file")
    assert "old" not in say(one, second, command="cat file")


def test_without_a_trajectory_the_instance_is_the_trajectory(cluster: LocalCluster) -> None:
    async def older_loop() -> list[str]:
        one = tool()
        instance, _ = await one.create("a trajectory")
        answers = [(await one.execute(instance, {"command": line}))[0].text
                   for line in ("echo kept > file", "cat file")]
        await one.release(instance)
        return answers

    assert asyncio.run(older_loop()) == ["", "kept"]
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_setting_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'timeout' is not known; known are answer_max"):
        SandboxTool({"type": "native", "timeout": 3})
    with pytest.raises(InvalidInput, match=r"session: memm: .*; known are .* mem,"):
        tool(session={"memm": "1G"})


# ---- the scorer ---------------------------------------------------------------------------------


@pytest.fixture(name="other_actor")
def reward_actor(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reward functions have a client of their own, as in verl, where they run in another
    process than the tools."""
    with connect() as client:
        monkeypatch.setattr(reward_functions, "process_client", lambda: client)
        yield client


def finished(cluster: LocalCluster, line: str) -> dict[str, Any]:
    """Returns the extra fields of a trajectory that has ended and whose sandbox waits for a
    scorer."""
    one, trajectory = tool(for_scorer=True), Trajectory(f"scored-{next(numbers)}")
    say(one, trajectory, command=line)
    fields = dict(trajectory.extra_fields)
    del trajectory
    gc.collect()
    assert eventually(lambda: sessions_open(cluster) == 1)
    return fields


@pytest.mark.parametrize(("line", "score"), [("echo 42 > answer", 1.0), ("echo 41 > answer", 0.0)])
def test_the_scorer_judges_the_trajectorys_own_sandbox(
        cluster: LocalCluster, other_actor: Any, line: str, score: float) -> None:
    fields = finished(cluster, line)
    truth = json.dumps({"command": "sh tests.sh", "files": {"tests.sh": "grep -q 42 answer",
                                                            "of_other_rows": None}})
    assert asyncio.run(session_score("", "", truth, fields)) == {
        "score": score, "acc": score, "sandbox_lost": 0.0}
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_sandbox_that_is_gone_is_told_apart_from_a_wrong_answer(
        cluster: LocalCluster, other_actor: Any) -> None:
    fields = finished(cluster, "true")
    other_actor.attach(fields[SESSION_FIELD]).close()
    for extra in (fields, {}, None):
        told = asyncio.run(session_score("", "", {"command": "true"}, extra))
        assert told == {"score": 0.0, "acc": 0.0, "sandbox_lost": 1.0}


def test_a_sandbox_whose_token_is_forgotten_is_lost(
        cluster: LocalCluster, other_actor: Any) -> None:
    fields = {SESSION_FIELD: SessionHandle("session", "forgotten", cluster.job).text}

    async def attach() -> None:
        async with scoring_session(fields):
            pass

    with pytest.raises(SessionLost, match="not known any more: attach: this job has no shared"):
        asyncio.run(attach())
    told = asyncio.run(session_score("", "", {"command": "true"}, fields))
    assert told == {"score": 0.0, "acc": 0.0, "sandbox_lost": 1.0}


@pytest.mark.parametrize(("line", "score"), [
    ("mkdir -p t/tests.sh; echo 42 > answer", 1.0), ("echo 42 > answer; echo > t", 0.0)])
def test_what_stands_in_the_way_of_the_tests_is_no_error(
        cluster: LocalCluster, other_actor: Any, line: str, score: float) -> None:
    fields = finished(cluster, line)
    truth = {"command": "sh t/tests.sh", "files": {"t/tests.sh": "grep -q 42 answer"}}
    assert asyncio.run(session_score("", "", truth, fields)) == {
        "score": score, "acc": score, "sandbox_lost": 0.0}


def test_a_score_needs_a_command() -> None:
    with pytest.raises(InvalidInput, match="command: neither"):
        asyncio.run(session_score("", "", "no JSON", {}))


def test_the_reward_manager_closes_the_sandbox_after_any_scorer(
        cluster: LocalCluster, other_actor: Any) -> None:
    async def score(extra_info: Any, **_: Any) -> float:
        async with scoring_session(extra_info, close=False) as session:
            return float((await session.exec("cat answer")).text)

    ones = np.ones(3, dtype=int)
    item = types.SimpleNamespace(
        batch={"responses": ones, "attention_mask": ones},
        non_tensor_batch={"data_source": "x", "reward_model": {"ground_truth": ""},
                          "extra_info": {},
                          "tool_extra_fields": finished(cluster, "echo 7 > answer")})
    tokenizer = types.SimpleNamespace(decode=lambda ids, skip_special_tokens: "an answer")

    async def scored() -> Any:
        return await ClosingRewardManager({}, tokenizer, score).run_single([item])

    assert asyncio.run(scored())["reward_score"] == 7.0
    assert eventually(lambda: sessions_open(cluster) == 0)
    with pytest.raises(SessionLost):
        asyncio.run(scored())


# ---- rewards of programs -------------------------------------------------------------------------

ADD = "```python\nprint(sum(map(int, input().split())))\n```"
CALL = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
SUMS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8\n"]}
# answer, tests, the reward that verl's SandboxFusion path gives
VERDICTS = [
    ("right and wrong", ADD, SUMS, 0.5),
    ("as JSON", ADD, json.dumps(SUMS), 0.5),
    ("no block", "print(3)", SUMS, 0.0),
    ("a plain block", ADD.replace("```python", "```"), SUMS, 0.5),
    ("another language's block", ADD.replace("```python", "```py"), SUMS, 0.5),
    ("the last Python block", f"```python\n1/0\n```\n{ADD}", SUMS, 0.5),
    ("wrong syntax", "```python\nprint(\n```", SUMS, 0.0),
    ("an error", "```python\nprint(3)\n1/0\n```", SUMS, 0.0),
    ("too slow", "```python\nwhile True: pass\n```", SUMS, 0.0),
    ("newlines at the end", "```python\nprint('3\\n\\n')\n```", SUMS, 0.5),
    ("only the first ten", ADD, {"inputs": ["1 1"] * 12, "outputs": ["2"] * 10 + ["3"] * 2}, 1.0),
    ("a method", CALL, {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"],
                        "outputs": ["3", "[1, 2]"]}, 1.0),
    ("a function with the usual names", "```python\ndef f(s):\n    return Counter(s)['a']\n```",
     {"fn_name": "f", "inputs": ['"banana"'], "outputs": ["3"]}, 1.0),
    ("no such function", CALL, {"fn_name": "sub", "inputs": ["1"], "outputs": ["1"]}, 0.0),
    ("a wrong line", CALL, {"fn_name": "add", "inputs": ["1\n2\n"], "outputs": ["3"]}, 0.0),
    ("a result that is no JSON", "```python\ndef f():\n    return [{1}]\n```",
     {"fn_name": "f", "inputs": [""], "outputs": [""]}, 0.0),
    ("asserts", "```python\nx = 3\n```", {"assert_case": ["assert x == 3", "assert x == 4"]}, 0.5),
    ("no tests", ADD, "{}", 0.0),
    ("no JSON", ADD, "nothing", 0.0),
    ("half of a surrogate pair", ADD.replace("print", "'\ud800'; print"), SUMS, 0.0),
    ("half of a pair in a test", ADD, {"inputs": ["1 2", "\ud800"], "outputs": ["3", "\ud800"]},
     0.5),
    ("unequal lengths", ADD, {"inputs": ["1"], "outputs": []}, 0.0),
    ("as pandas reads a table", ADD, {key: np.array(of, object) for key, of in SUMS.items()} | {
        "assert_case": None, "fn_name": None}, 0.5),
    ("asserts as pandas reads a table", "```python\nx = 3\n```", {
        "assert_case": np.array(["assert x == 3"], object), "inputs": None, "outputs": None}, 1.0),
    ("asserts that are no list", ADD, {"inputs": [], "outputs": [], "assert_case": 5}, 0.0),
]


@pytest.mark.parametrize(("answer", "tests", "reward"), [v[1:] for v in VERDICTS],
                         ids=[v[0] for v in VERDICTS])
def test_a_programs_reward(cluster: LocalCluster, answer: str, tests: Any, reward: float) -> None:
    assert compute_score_sync("apps", answer, tests, {}, timeout=2, memory_limit_mb=64) == reward


def test_rewards_of_a_batch_run_side_by_side_and_leave_nothing(cluster: LocalCluster) -> None:
    async def batch() -> list[float]:
        return await asyncio.gather(*(
            compute_score("apps", ADD, {"inputs": [f"{i} 1"], "outputs": ["5"]}, {})
            for i in range(8)))

    assert asyncio.run(batch()) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert eventually(lambda: sessions_open(cluster) == 0)


@pytest.mark.long
def test_verl_goes_on_with_the_jobs_next_broker(tmp_path: Path) -> None:
    check_restart(TestVerl(), tmp_path)
