"""slime: a generate function whose commands run in a sandbox, and rewards that run as actions.

    --custom-generate-function-path tangram_hpc.hooks.slime_functions.generate
    --custom-rm-path tangram_hpc.hooks.slime_functions.episode_reward
    --custom-reward-post-process-path tangram_hpc.hooks.slime_functions.group_rewards

`generate` plays one episode for one sample: the policy's answers come from slime's router, its
commands run in a session, and observations are appended as tokens with loss mask 0. The session
stays open until `episode_reward` has judged it. `group_rewards` compares the samples of a prompt
without those whose sandbox was lost. `code_reward` judges answers that are programs, and
is used with slime's own generate function. The modules of slime are imported when they are first
needed.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

from .code_rewards import code_score
from .text_episodes import EpisodeTurn, SandboxEpisode, TaskSettings

# the episodes that were not judged yet, by the `id` of their sample
_episodes: dict[int, SandboxEpisode] = {}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Plays an episode; the signature is that of `--custom-generate-function-path`.

    Args:
        args: slime's arguments. `tangram`, a mapping from `--custom-config-path`, holds the
            settings of an episode by the names of `TaskSettings`, and the texts `before` and
            `after` that are put around an observation.
        sample: the sample; `prompt` is a text, and `label` is the task, as `SandboxEpisode` takes
            it.
        sampling_params: slime's sampling parameters; `max_new_tokens` bounds the whole response.

    Returns:
        The sample, with tokens, loss mask, log probabilities and status.
    """
    told = dict(getattr(args, "tangram", None) or {})
    marks = (str(told.pop("before", "\n<observation>\n")),
             str(told.pop("after", "\n</observation>\n")))
    _forget(sample)
    episode = SandboxEpisode(TaskSettings.of(told), sample.label, owner=sample)
    await episode.open_async()
    try:
        await _play(args, sample, dict(sampling_params), episode, marks)
    except BaseException:
        episode.close()
        raise
    if sample.status is type(sample).Status.ABORTED:
        episode.close()  # slime generates it again
    else:
        _episodes[id(sample)] = episode
        weakref.finalize(sample, _dropped, id(sample), episode)
    return sample


async def _play(args: Any, sample: Any, sampling: dict[str, Any], episode: SandboxEpisode,
                marks: tuple[str, str]) -> None:
    """Plays the turns of an episode: generates an answer, carries it out, appends the observation.
    """
    post = importlib.import_module("slime.utils.http_utils").post
    state = importlib.import_module("slime.rollout.sglang_rollout").GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    status = type(sample).Status
    sample.tokens = list(state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
    budget = int(sampling.get("max_new_tokens", args.rollout_max_response_len))
    asked, headers = _asked(args, sample)
    while True:
        if state.aborted:  # slime has enough samples, and waits for the end of the others
            sample.status = status.ABORTED
            return
        sampling["max_new_tokens"] = budget - sample.response_length
        output = await post(url, {**asked, "input_ids": sample.tokens,
                                  "sampling_params": sampling}, headers=headers)
        ended = output["meta_info"]["finish_reason"]["type"]
        if ended == "abort":
            sample.status = status.ABORTED
            return
        pairs = output["meta_info"].get("output_token_logprobs", [])  # missing: no token
        tokens = [pair[1] for pair in pairs]
        text = state.tokenizer.decode(tokens)
        sample.append_response_tokens(args, tokens=tokens, log_probs=[p[0] for p in pairs],
                                      trainable=True, meta_info=output["meta_info"])
        sample.response += text
        began = time.monotonic()
        turn = EpisodeTurn("", True) if ended == "length" else await episode.act_async(text)
        sample.non_generation_time += time.monotonic() - began
        if turn.done:
            sample.status = status.TRUNCATED if ended == "length" else status.COMPLETED
            return
        shown = f"{marks[0]}{turn.observation}{marks[1]}"
        tokens = state.tokenizer(shown, add_special_tokens=False)["input_ids"]
        if sample.response_length + len(tokens) >= budget:
            # no answer could follow; and a response's last tokens must be the engine's, since only
            # for these it tells the experts that `--use-rollout-routing-replay` needs
            sample.status = status.TRUNCATED
            return
        sample.append_response_tokens(args, tokens=tokens, trainable=False)
        sample.response += shown


def _asked(args: Any, sample: Any) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Returns the fields and the headers of the requests of one episode, as slime's own generation
    sends them."""
    fields = {"return_logprob": True}
    if getattr(args, "use_rollout_routing_replay", False):
        fields["return_routed_experts"] = True
    hashed = getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id
    return fields, {"X-SMG-Routing-Key": sample.session_id} if hashed else None


def _forget(sample: Any) -> None:
    """Clears the state that an earlier attempt at the same sample has left."""
    former = _episodes.pop(id(sample), None)
    if former is not None:
        former.close()
    sample.response, sample.response_length, sample.loss_mask = "", 0, []
    sample.rollout_log_probs = sample.rollout_routed_experts = None
    sample.weight_versions, sample.non_generation_time = [], 0.0
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None


def _dropped(sample: int, episode: SandboxEpisode) -> None:
    """Forgets the episode of a sample that was garbage-collected before it was judged."""
    if _episodes.get(sample) is episode:
        del _episodes[sample]


async def episode_reward(args: Any, sample: Any, **others: Any) -> Any:
    """Judges the episodes that `generate` played, and closes their sessions; the signature is that
    of `--custom-rm-path`.

    Args:
        args: slime's arguments.
        sample: a sample; with `--group-rm` a list of samples.
        others: further arguments that slime passes; not used.

    Returns:
        1.0 or 0.0 for each sample. A sample that `generate` did not play gets 0.0. A sample whose
        sandbox was lost gets 0.0, is taken out of the training (`remove_sample`) and has
        `sandbox_lost` in its metadata, by which `group_rewards` leaves it out of its group's mean.

    Raises:
        InvalidInput: neither the label nor the settings have a command.
    """
    if isinstance(sample, Sequence):
        return list(await asyncio.gather(*(episode_reward(args, each) for each in sample)))
    episode = _episodes.pop(id(sample), None)
    if episode is None:
        return 0.0
    try:
        reward = await episode.score_async()
    finally:
        episode.close()
    if episode.lost:
        sample.metadata = {**(sample.metadata or {}), "sandbox_lost": True}
        sample.remove_sample = True
    return reward


def group_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Normalizes rewards as slime itself does, but over the samples that have a sandbox's verdict;
    the signature is that of `--custom-reward-post-process-path`.

    slime's own function counts the 0.0 of a lost sandbox in the mean of its group, which makes the
    other samples of that group look better than they are.

    Args:
        args: slime's arguments.
        samples: the samples of a rollout, those of one prompt side by side.

    Returns:
        The raw rewards, and the rewards to train on, both in the order of the samples. A sample
        whose sandbox was lost has 0.0 in both. A single sample that is left of a group has 0.0 to
        train on.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    grouped = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if args.advantage_estimator not in grouped or not args.rewards_normalization:
        return raw, raw
    whole = args.n_samples_per_prompt * args.rollout_batch_size
    size = args.n_samples_per_prompt if len(raw) == whole else len(raw)  # slime's rule
    scaled = args.grpo_std_normalization and args.advantage_estimator != grouped[-1]
    lost = [bool((sample.metadata or {}).get("sandbox_lost")) for sample in samples]
    trained = [0.0] * len(raw)
    for first in range(0, len(raw), size):
        verdicts = [at for at in range(first, first + size) if not lost[at]]
        normalized = _normalized([float(raw[at]) for at in verdicts], scaled)
        for at, reward in zip(verdicts, normalized, strict=True):
            trained[at] = reward
    return raw, trained


def _normalized(rewards: list[float], scaled: bool) -> list[float]:
    """Returns the rewards of a group less their mean, and divided by their deviation if `scaled`.
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    mean = sum(rewards) / count
    away = [reward - mean for reward in rewards]
    deviation = math.sqrt(sum(each * each for each in away) / (count - 1))  # of a sample
    return [each / (deviation + 1e-6) for each in away] if scaled else away  # slime's divisor


async def code_reward(args: Any, sample: Any, **others: Any) -> Any:
    """Returns the share of the test cases that the program in an answer passes; for
    `--custom-rm-path`.

    Args:
        args: slime's arguments.
        sample: a sample whose label is the test cases, see `code_rewards.cases_of`; with
            `--group-rm` a list of samples.
        others: further arguments that slime passes; not used.

    Raises:
        TangramError: the reward could not be computed, for the reasons that `code_score` lists.
    """
    if isinstance(sample, Sequence):
        return list(await asyncio.gather(*(code_reward(args, each) for each in sample)))
    return await code_score(sample.response, sample.label)
