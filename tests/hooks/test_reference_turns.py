"""The reference trainer's trajectories without torch: turns, masks, credit, routing and plan."""

from __future__ import annotations

import random
import subprocess
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.errors import TangramError
from tangram_hpc.hooks.reference import reference_task as task
from tangram_hpc.hooks.reference.reference_planning import Planned, figures
from tangram_hpc.hooks.reference.reference_rollouts import Batch, RolloutDriver
from tangram_hpc.hooks.reference.reference_routes import LeastLoaded, Routes, routes
from tangram_hpc.hooks.reference.reference_turns import FADE, TURNS, ArithmeticTrajectory, credits
from tangram_hpc.libra.planner.shapes import Request

LONGEST = 64  # what services and policy take, as `reference_model` has it (which needs torch)


def words(text: str, end: bool = True) -> list[int]:
    return [*map(task.token_of, text), *([task.END] if end else [])]


def play(prompt: str, *said: tuple[str, int, bytes]) -> ArithmeticTrajectory:
    """A trajectory whose programs end with the given exit codes and output."""
    one = ArithmeticTrajectory(prompt)
    for program, code, out in said:
        assert not one.over
        tokens = words(program)
        if one.said(tokens, [-1.0] * len(tokens), 5):
            one.returned(code, out)
    return one


@pytest.mark.parametrize(("said", "turns", "reward"), [
    ([("3+4", 0, b"7\n")], 1, 1.0),
    ([("3+3", 0, b"6\n"), ("3+4", 0, b"7\n")], 2, FADE),
    ([("3+3", 0, b"6\n"), ("4+4", 0, b"8\n")], 2, 0.45 * FADE),  # two wrong numbers: it is over
    ([("+", 4, b"")] * 4, 4, 0.0),  # a program that does not run is mended to the end
    ([("+", 4, b""), ("3+3", 0, b"6\n"), ("-", 4, b""), ("3+4", 0, b"7\n")], 4, FADE**3),
    ([("", 0, b"")], 1, 0.0)])  # says nothing: gives up
def test_tool_results_decide_how_a_trajectory_continues(
        said: list[tuple[str, int, bytes]], turns: int, reward: float) -> None:
    one = play("7=", *said)
    assert one.over and one.turns == turns and one.reward == pytest.approx(reward)


def test_tool_output_is_appended_to_the_context_and_masked() -> None:
    one = play("7=", ("3+5", 0, b"8\n"))
    first, returned = words("3+5"), [*words("=8", False), 1, *words("7=", False)]
    assert one.tokens == [1, *words("7=", False), *first, *returned]
    assert one.learnt == [False] * 3 + [True] * 4 + [False] * 5
    assert one.logprobs == [0.0] * 3 + [-1.0] * 4 + [0.0] * 5
    assert one.generated == 4 and one.version == 5


answers = st.one_of(st.tuples(st.just(0), st.integers(-10**6, 10**6).map(lambda n: b"%d" % n)),
                    st.tuples(st.integers(1, 255), st.just(b"")))
turn = st.tuples(st.lists(st.integers(0, 16), min_size=1, max_size=task.NEW_TOKENS), answers)


@given(st.integers(0, 9), st.lists(turn, min_size=TURNS, max_size=TURNS))
def test_any_trajectory_ends_and_its_mask_covers_exactly_the_models_tokens(
        digit: int, turns: list[tuple[list[int], tuple[int, bytes]]]) -> None:
    one, wrote = ArithmeticTrajectory(f"{digit}="), list[int]()
    for n, (tokens, (code, out)) in enumerate(turns):
        if one.over:
            break
        wrote += tokens
        if one.said(tokens, [-float(n + 1)] * len(tokens), n):
            one.returned(code, out)
    assert one.over and one.turns <= TURNS and len(one.tokens) <= LONGEST
    assert [t for t, mine in zip(one.tokens, one.learnt, strict=True) if mine] == wrote
    assert all((p < 0) == mine for p, mine in zip(one.logprobs, one.learnt, strict=True))
    assert 0 <= one.reward <= 1


def test_each_turn_is_credited_with_its_own_program() -> None:
    mended = play("7=", ("+", 4, b""), ("3+4", 0, b"7\n"))
    failed = play("7=", *[("+", 4, b"")] * 4)
    rows = credits([mended, failed])
    for one, row in zip((mended, failed), rows, strict=True):
        assert len(row) == len(one.tokens)
        assert all(worth == 0 for worth, mine in zip(row, one.learnt, strict=True) if not mine)
    first, second = rows[0][3], rows[0][-1]
    assert first < 0 < second  # it was right in the end, and owes nothing of it to its first turn
    assert {round(worth, 9) for worth in rows[1] if worth} == {round(first, 9)}
    # the sum over turns is that of normalised numbers
    assert first * 5 + second == pytest.approx(0, abs=1e-5)
    assert not any(any(row) for row in credits([failed, failed]))  # all alike: nothing is learnt


def test_the_shell_tool_distinguishes_right_wrong_and_broken_programs() -> None:
    """The real shell gives each of the three kinds of result."""
    for program, kind in (("3+4", "right"), ("9*9", "wrong"), ("3+", "broken")):
        ran = subprocess.run(task.check(program), capture_output=True, check=False)
        one = play("7=", (program, ran.returncode, ran.stdout))
        assert (one.over, one.wrongs) == {"right": (True, 0), "wrong": (False, 1),
                                          "broken": (False, 0)}[kind]


def soon(result: Any) -> Any:
    """A future that another thread completes."""
    answer: Any = Future()
    threading.Timer(0.01, answer.set_result, (result,)).start()
    return answer


class _FakeClient:
    """A fake: no nodes; services and a router that write the programs they were given, sandboxes
    that answer with the last digit of what they were told to work out. Keeps what was asked."""

    def __init__(self, *programs: str, version: int = 1) -> None:
        self.programs, self.version = programs, version
        self.asked: list[tuple[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.ends: list[tuple[str, int, int]] = []
        self.pools: list[str] = []
        self.held: list[Future[Any]] | None = None
        self.failure: TangramError | None = None

    def ask(self, what: str) -> dict[str, list[Any]]:
        return {what: []}

    def register_rollouts(self, name: str, pool: Any) -> None:
        assert rollouts_spec(name, pool).edges  # as the real client reads it
        self.pools.append(name)

    def _answer(self, service: str, prompts: list[list[int]]) -> Any:
        self.asked.append((service, Future() if self.held is not None else None))
        if self.held is not None:
            return self.asked[-1][1]
        if self.failure is not None:
            failed: Any = Future()
            failed.set_exception(self.failure)
            return failed
        turn = prompts[0].count(task.BEGIN) - 1
        tokens = words(self.programs[min(turn, len(self.programs) - 1)])
        return soon([{"tokens": tokens, "logprobs": [-1.0] * len(tokens),
                      "version": self.version}])

    def call(self, service: str, method: str, *, prompts: list[list[int]], **_: Any) -> Any:
        return self._answer(service, prompts)

    def rollout(self, pool: str, method: str, *, prompts: list[list[int]], context: int,
                generated: int, prompt: str, **_: Any) -> Any:
        assert context == len(prompts[0]) and 0 <= generated < context and prompt.endswith("=")
        answer = self._answer(pool, prompts)
        wanted = int(generated > 0)
        answer.route = SimpleNamespace(service=("rollout-1", "rollout-2")[wanted], wanted=wanted)
        return answer

    def trajectory_ended(self, pool: str, trajectory: str, tokens: int, *, epoch: int) -> None:
        self.ends.append((trajectory, tokens, epoch))

    def session(self, **_options: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def exec(self, command: list[str], **options: Any) -> Any:
        self.tools.append(options)
        program, answer = command[-1], Future[Any]()
        answer.set_result(SimpleNamespace(exit_code=0 if "+" in program else 4, signal=0,
                                          stdout=program[-1:].encode()))
        return answer


def test_a_request_goes_to_the_least_loaded_service() -> None:
    client = _FakeClient()
    client.held = []
    routes = LeastLoaded(client, {"small": 1, "large": 4})
    for n in range(5):
        routes.ask(f"{n}", "7=", [1], 0)
    assert sorted(name for name, _ in client.asked) == ["large"] * 4 + ["small"]
    next(answer for name, answer in client.asked if name == "small").set_result([])
    routes.ask("5", "7=", [1], 0)
    assert client.asked[-1][0] == "small" and routes.tally() == {"small": 2, "large": 4}


def step_of(client: _FakeClient, router: bool) -> tuple[Batch, Routes]:
    """A step of 5 prompts of 2 trajectories each."""
    ways = routes(client, router, "policy")
    rollouts = RolloutDriver(client, ways, sandboxes=2, group=2, seed=7)
    batch = rollouts.begin(2, [(n, "1=") for n in range(5)], 0)
    rollouts.half(batch)
    try:
        return rollouts.finish(batch), ways
    finally:
        rollouts.close()


@pytest.mark.parametrize("router", [False, True])
def test_a_batch_is_complete_when_its_last_trajectory_has_ended(router: bool) -> None:
    client = _FakeClient("1", "5+2", "0+1")  # does not run; is wrong; is right
    batch, ways = step_of(client, router)
    assert len(batch.lives) == 10 and batch.left == 0 and batch.oldest == 1
    assert batch.rollout_s > 0
    for live in batch.lives:
        one = live.trajectory
        assert one.over and one.worths == [0.0, pytest.approx(0.45), 1.0] and live.tool_s > 0
    assert len(client.asked) == len(client.tools) == 30
    if not router:
        assert sum(ways.tally().values()) == 30 and client.tools[0].get("trajectory") is None
        return
    assert client.pools == ["policy"] and len(set(client.ends)) == 10
    assert {tool["trajectory"] for tool in client.tools} == {name for name, _, _ in client.ends}
    assert {(tokens, epoch) for _, tokens, epoch in client.ends} == {(2 + 4 + 4, 2)}
    # after the first return 8 tokens were left (the long bucket, as the fake had it), then 4
    assert ways.tally() == {"rollout-1": 10, "rollout-2": 20, "judged": 20, "right": 10, "long": 10}


def test_the_error_of_a_failing_service_ends_the_training_step() -> None:
    client = _FakeClient("0+1")
    client.failure = TangramError("min_version: 1, and the newest weights are of version 0")
    with pytest.raises(TangramError, match="min_version"):
        step_of(client, False)


def drive(train_s: float, rollout_s: float, steps: int = 24) -> Planned:
    """A planner beside stages that take these seconds without a replica, and scale with their share
    of the GPUs."""
    planned, dice = Planned(2, 3, 1, 96, 64), random.Random(7)
    for step in range(steps):
        helped = planned.lent
        requests = [Request(3 + 8 * turns, 4 + 4 * turns, 10**7 * (turns + 1))
                    for turns in (dice.randrange(4) for _ in range(96))]
        planned.step(step, helped, train_s * 2 / (2 + helped) * dice.uniform(0.95, 1.05),
                     rollout_s * 3 / (3 - helped) * dice.uniform(0.95, 1.05), requests)
    return planned


@pytest.mark.parametrize(("train_s", "rollout_s", "lent"), [
    (0.05, 1.2, 0), (2.0, 0.6, 1), (1.0, 1.1, 0)])
def test_the_planner_lends_when_training_is_the_longer_stage(
        train_s: float, rollout_s: float, lent: int) -> None:
    planned = drive(train_s, rollout_s)
    assert planned.lent == lent
    told = figures(planned.log)
    assert told["plans"] >= 4 and told["switches"] == lent and told["lent_at_end"] == lent
    # a model of another machine; what was measured mends it
    first = planned.log[0]["rollout_s"]
    assert first["foretold"] < 0.3 * first["measured"]
    for stage in ("train_s", "rollout_s"):
        assert told["off_last"][stage] < 1.2 and told["off_first"][stage] > 1.5, told


def test_a_step_during_a_plan_change_is_not_learned() -> None:
    planned = drive(2.0, 0.6)
    before = planned.log[-1]["factors"]
    planned.step(24, 0, 9.0, 9.0, [Request(3, 4)] * 96)  # the replica is not there yet
    assert planned.log[-1]["factors"] == before
    assert planned.log[0]["factors"] == {"train": 1.0, "rollout": 1.0}  # services were loaded
