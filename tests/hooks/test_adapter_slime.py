"""slime's generate and reward functions, against a real broker. slime is not on PyPI: its router,
tokenizer and sample are stand-ins with the members that the functions use."""

from __future__ import annotations

import asyncio
import enum
import gc
import math
import sys
import types
from collections.abc import Iterator
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

from tangram_hpc import LocalCluster
from tangram_hpc.hooks import slime_functions
from tangram_hpc.hooks.slime_functions import (
    code_reward,
    episode_reward,
    generate,
    group_rewards,
)

__all__ = ["adapters_cluster"]

SAMPLING = {"temperature": 1.0, "max_new_tokens": 5000}


class Sample:
    """A sample whose tokens are the characters of its text."""

    class Status(enum.Enum):
        PENDING, COMPLETED, TRUNCATED, ABORTED = range(4)

    def __init__(self, answers: list[str], label: Any = "true", ends: str = "stop") -> None:
        self.prompt, self.label, self.answers, self.ends = "a task", label, answers, ends
        self.headers: list[Any] = []  # of the requests for this sample
        self.tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.rollout_log_probs: list[float] | None = None
        self.rollout_top_p_token_ids: list[int] | None = None
        self.rollout_top_p_token_offsets: list[int] | None = None
        self.response, self.response_length = "", 0
        self.status, self.metadata, self.remove_sample = self.Status.PENDING, {}, False
        self.session_id, self.non_generation_time = "one", 0.0
        self.weight_versions: list[str] = []
        self.rollout_routed_experts: list[int] | None = None

    def append_response_tokens(self, args: Any, *, tokens: list[int], trainable: bool,
                               log_probs: Any = None, meta_info: Any = None) -> None:
        assert (log_probs is not None) == trainable and (meta_info is not None) == trainable
        self.tokens += tokens
        self.weight_versions += [meta_info["weight_version"]] if meta_info else []
        if meta_info and "routed_experts" in meta_info:
            self.rollout_routed_experts = meta_info["routed_experts"]
        self.response_length += len(tokens)
        self.loss_mask += [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + (log_probs or [0.0] * len(tokens))
        kept, offsets = self.rollout_top_p_token_ids or [], self.rollout_top_p_token_offsets or [0]
        self.rollout_top_p_token_ids = kept + tokens * trainable
        self.rollout_top_p_token_offsets = [
            *offsets, *(offsets[-1] + n * trainable for n in range(1, len(tokens) + 1))]
        if len(self.rollout_top_p_token_offsets) != self.response_length + 1:
            raise ValueError("slime's own check: an offset for each token, and one more")


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert add_special_tokens is False
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class State:
    """The state that all samples of a rollout share."""

    tokenizer, aborted = Tokenizer(), False


@pytest.fixture(name="slime", autouse=True)
def slime_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Sample]]:
    """Puts stand-ins for slime's modules in place; the policy answers with the sample's own
    list."""
    playing: dict[str, Sample] = {}

    async def post(url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        assert url == "http://127.0.0.1:9/generate" and payload["return_logprob"]
        sample = next(each for each in playing.values() if each.tokens == payload["input_ids"])
        sample.headers.append(headers)
        ends = "stop" if sample.answers[1:] else sample.ends
        answer = sample.answers.pop(0)[:payload["sampling_params"]["max_new_tokens"]]
        told = {"finish_reason": {"type": ends}, "weight_version": "7"}
        if answer:  # the engine leaves the field out where it made no token
            told["output_token_logprobs"] = [(-0.5, ord(letter)) for letter in answer]
        if payload.get("return_routed_experts"):  # of all tokens that came before another one
            told["routed_experts"] = [1] * (len(sample.tokens) + len(answer) - 1)
        return {"meta_info": told}

    for name, content in (
            ("slime", {}), ("slime.utils", {}), ("slime.rollout", {}),
            ("slime.utils.http_utils", {"post": post}),
            ("slime.rollout.sglang_rollout", {
                "GenerateState": lambda args: State})):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    yield playing


def args(**settings: Any) -> Any:
    return types.SimpleNamespace(
        sglang_router_ip="127.0.0.1", sglang_router_port=9, rollout_max_response_len=5000,
        tangram={"timeout_s": LIMIT_S, **settings})


def play(playing: dict[str, Sample], sample: Sample, **options: Any) -> Sample:
    """Plays a sample; `options` are options of slime."""
    playing[str(id(sample))] = sample
    given = args()
    vars(given).update(options)
    asyncio.run(generate(given, sample, SAMPLING))
    playing.clear()
    return sample


class TestSlime(AdapterBehaviours):
    """A call of the tool is one answer of the policy in an episode that goes on."""

    @pytest.fixture(autouse=True)
    def with_slime(self, slime: dict[str, Sample]) -> None:
        self.playing = slime

    def begin(self, **options: Any) -> Any:
        sample = Sample(["Done."])
        asyncio.run(self.open(sample, options))
        return [sample]

    async def open(self, sample: Sample, options: dict[str, Any]) -> None:
        self.playing[str(id(sample))] = sample
        await generate(args(session=options), sample, SAMPLING)

    def call(self, trajectory: Any, line: str) -> str:
        episode = slime_functions._episodes[id(trajectory[0])]
        return episode.act(f"<bash>{line}</bash>").observation

    def end(self, trajectory: Any) -> None:
        asyncio.run(episode_reward(args(), trajectory[0]))

    def lose(self, trajectory: Any) -> None:
        slime_functions._episodes[id(trajectory[0])]._slot.session.close()


def test_observations_are_tokens_without_loss(cluster: LocalCluster, slime: Any) -> None:
    sample = play(slime, Sample(["<bash>echo 42 > n; cat n</bash>", "Done."], "grep -q 42 n"))
    shown = "\n<observation>\n42\n</observation>\n"
    assert sample.response == "<bash>echo 42 > n; cat n</bash>" + shown + "Done."
    assert "".join(map(chr, sample.tokens)) == "a task" + sample.response
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs or ())
    masked = [t for t, m in zip(sample.response, sample.loss_mask, strict=True) if not m]
    assert "".join(masked) == shown and sample.status is Sample.Status.COMPLETED
    assert asyncio.run(episode_reward(args(), sample)) == 1.0
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_the_response_never_exceeds_its_budget(cluster: LocalCluster, slime: Any,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLING, "max_new_tokens", 40)
    sample = play(slime, Sample(["<bash>seq 100</bash>", "never"]))
    assert sample.response == "<bash>seq 100</bash>" and sample.response_length == 20
    assert sample.answers == ["never"] and sample.status is Sample.Status.TRUNCATED
    assert asyncio.run(episode_reward(args(), sample)) == 1.0


@pytest.mark.parametrize(("ends", "status"), [("length", "TRUNCATED"), ("abort", "ABORTED")])
def test_how_the_router_ended_an_answer(cluster: LocalCluster, slime: Any, ends: str, status: str
                                        ) -> None:
    sample = play(slime, Sample(["<bash>true</bash>", "cut of"], ends=ends))
    assert sample.status is Sample.Status[status]
    assert asyncio.run(episode_reward(args(), sample)) == float(ends == "length")
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_an_answer_without_a_token_ends_the_episode(cluster: LocalCluster, slime: Any) -> None:
    sample = play(slime, Sample(["<bash>true</bash>", ""]))
    assert sample.status is Sample.Status.COMPLETED
    assert asyncio.run(episode_reward(args(), sample)) == 1.0


@pytest.mark.parametrize("budget", [30, 5000])
def test_the_experts_of_all_tokens_are_known_for_routing_replay(
        cluster: LocalCluster, slime: Any, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setitem(SAMPLING, "max_new_tokens", budget)
    sample = play(slime, Sample(["<bash>seq 9</bash>", "Done."]), use_rollout_routing_replay=True)
    assert len(sample.rollout_routed_experts or ()) == len(sample.tokens) - 1
    assert sample.answers == (["Done."] if budget == 30 else [])
    sample.answers = ["Done."]
    assert play(slime, sample).rollout_routed_experts is None


def test_all_turns_of_an_episode_go_to_the_engine_that_has_its_cache(
        cluster: LocalCluster, slime: Any) -> None:
    hashed = play(slime, Sample(["<bash>true</bash>", "Done."]), router_policy="consistent_hashing")
    assert hashed.headers == [{"X-SMG-Routing-Key": "one"}] * 2
    assert play(slime, Sample(["Done."]), router_policy="cache_aware").headers == [None]


def test_the_time_of_commands_is_no_generation(cluster: LocalCluster, slime: Any) -> None:
    sample = play(slime, Sample(["<bash>sleep 0.3</bash>", "Done."]))
    assert sample.non_generation_time >= 0.3 and sample.weight_versions == ["7", "7"]
    sample.answers = ["Done."]
    assert play(slime, sample).non_generation_time < 0.3 and sample.weight_versions == ["7"]


def test_an_episode_ends_at_its_next_turn_when_slime_has_enough_samples(
        cluster: LocalCluster, slime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = slime["it"] = Sample(["<bash>sleep 0.5</bash>", "Done."])

    async def aborted_during_the_command() -> None:
        playing = asyncio.ensure_future(generate(args(), sample, SAMPLING))
        while not sample.response:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(State, "aborted", True)
        await playing

    asyncio.run(aborted_during_the_command())
    assert (sample.status, sample.answers) == (Sample.Status.ABORTED, ["Done."])
    assert eventually(lambda: sessions_open(cluster) == 0)


def test_a_sample_that_is_generated_again_begins_anew(cluster: LocalCluster, slime: Any) -> None:
    sample = play(slime, Sample(["<bash>echo old > n</bash>", "Done."], "test ! -e n"))
    sample.answers = ["Done."]
    play(slime, sample)
    assert sample.response == "Done."
    assert eventually(lambda: sessions_open(cluster) == 1)
    assert asyncio.run(episode_reward(args(), sample)) == 1.0


def test_a_dropped_sample_closes_its_session(cluster: LocalCluster, slime: Any) -> None:
    sample = play(slime, Sample(["Done."]))
    assert eventually(lambda: sessions_open(cluster) == 1)
    del sample
    gc.collect()
    assert eventually(lambda: sessions_open(cluster) == 0)
    assert slime_functions._episodes == {}


def test_a_sample_whose_sandbox_was_lost_is_not_trained_on(cluster: LocalCluster, slime: Any
                                                           ) -> None:
    lost, fine = (play(slime, Sample(["Done."])) for _ in range(2))
    slime_functions._episodes[id(lost)]._slot.session.close()
    assert asyncio.run(episode_reward(args(), [lost, fine])) == [0.0, 1.0]
    assert (lost.remove_sample, lost.metadata) == (True, {"sandbox_lost": True})
    assert fine.remove_sample is False


def judged(reward: float, lost: bool = False) -> Any:
    return types.SimpleNamespace(
        get_reward_value=lambda args: reward, metadata={"sandbox_lost": True} if lost else None)


def settings(estimator: str = "grpo", groups: int = 2, **others: bool) -> Any:
    return types.SimpleNamespace(**{
        "advantage_estimator": estimator, "n_samples_per_prompt": 4, "rollout_batch_size": groups,
        "rewards_normalization": True, "grpo_std_normalization": False, **others})


def test_a_lost_sample_does_not_count_in_its_group() -> None:
    group = [judged(1.0), judged(0.0, lost=True), judged(1.0), judged(0.5)]
    other = [judged(1.0), *(judged(0.0) for _ in range(3))]
    raw, trained = group_rewards(settings(), group + other)
    assert raw == [1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0]
    assert trained == pytest.approx([1 / 6, 0, 1 / 6, -1 / 3, 0.75, -0.25, -0.25, -0.25])
    _, scaled = group_rewards(settings(grpo_std_normalization=True), group + other)
    assert scaled[:4] == pytest.approx([0.57735, 0, 0.57735, -1.1547], rel=1e-4)
    assert scaled[4:] == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)
    alone = [judged(1.0), *(judged(0.0, lost=True) for _ in range(3))]
    assert group_rewards(settings(groups=1, grpo_std_normalization=True), alone)[1] == [0.0] * 4


def test_rewards_are_normalized_where_slime_itself_does() -> None:
    samples = [judged(1.0), judged(0.0), judged(0.0, lost=True)]
    assert group_rewards(settings("ppo"), samples) == ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert group_rewards(settings(rewards_normalization=False), samples)[1] == [1.0, 0.0, 0.0]
    # groups of other sizes than the told one are one group
    assert group_rewards(settings(), samples)[1] == [0.5, -0.5, 0.0]
    with pytest.raises(TypeError):  # as slime itself does
        group_rewards(settings(), [judged(1.0), judged(None)])  # type: ignore[arg-type]
    broken = group_rewards(settings(grpo_std_normalization=True), [judged(1.0), judged(math.nan)])
    assert all(map(math.isnan, broken[1]))
    plus = settings("reinforce_plus_plus_baseline", grpo_std_normalization=True)
    assert group_rewards(plus, samples)[1] == [0.5, -0.5, 0.0]


def test_programs_are_rewarded_one_by_one_and_by_group(cluster: LocalCluster) -> None:
    label = {"inputs": ["2"], "outputs": ["4"]}
    samples = [Sample([], label) for _ in range(2)]
    samples[0].response = "```python\nprint(int(input()) * 2)\n```"
    samples[1].response = "```python\nprint(5)\n```"
    assert asyncio.run(code_reward(args(), samples[0])) == 1.0
    assert asyncio.run(code_reward(args(), samples)) == [1.0, 0.0]


@pytest.mark.long
def test_slime_goes_on_with_the_jobs_next_broker(tmp_path: Path, slime: Any) -> None:
    adapter = TestSlime()
    adapter.playing = slime
    check_restart(adapter, tmp_path)
