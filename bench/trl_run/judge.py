"""The data of the judging stage of JudgeRLVR, whose policy learns to judge before it generates.

JudgeRLVR (Duo et al., "Judge First, Generate Second for Efficient Reasoning", arXiv:2601.08468)
trains one model in two stages. In the first stage the model is given a task and a candidate, and
answers whether the candidate is right; its reward is 1 if the verdict equals the label that a
verifier gave. In the second stage the same weights are trained to generate, as in any other run.

As in the paper, candidates are sampled from the policy, tasks whose candidates are all right or
all wrong are left out, and each task has as many right candidates as wrong ones. The labels are
those of the run's own reward function, so they come from where the run's tools run. A verdict is
one token, as a tiny policy cannot write the commentary that the paper's judge writes before it.
This module needs no TRL.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from task import call_text

RIGHT, WRONG = "It is right.", "It is wrong."
SAMPLES = 64  # candidates of each task
Candidate = tuple[int, str]  # the number of a task, and an expression


def labels(candidates: Iterable[Candidate], make_environment: Callable[[], Any],
           reward: Callable[..., Any]) -> dict[Candidate, bool]:
    """Has each distinct candidate verified.

    Args:
        candidates: the candidates.
        make_environment: makes an environment of the run, in which a candidate is verified.
        reward: the run's reward function.

    Returns:
        Whether each candidate passes all held-out tests.

    Raises:
        RuntimeError: the sandbox of a candidate was lost, so it has no label.
    """
    wanted, environments = sorted(set(candidates)), []
    for number, expression in wanted:
        environment = make_environment()
        environment.reset(task=number, prompt=[])
        environment.attempts.candidates.append(expression)
        environments.append(environment)
    nothing: list[Any] = [None] * len(wanted)
    scores = reward(prompts=nothing, completions=nothing, environments=environments)
    if inspect.isawaitable(scores):
        scores = asyncio.run(_awaited(scores))
    if None in scores:
        raise RuntimeError(f"{scores.count(None)} of {len(wanted)} candidates have no label, "
                           "because their sandboxes were lost; start the run again")
    return {each: score == 1.0 for each, score in zip(wanted, scores, strict=True)}


async def _awaited(scores: Any) -> Any:
    return await scores


def balanced(candidates: Sequence[Candidate], right: Mapping[Candidate, bool], seed: int
             ) -> list[dict[str, Any]]:
    """Returns the data set of the judging stage, shuffled.

    Args:
        candidates: all sampled candidates; the same one may occur several times.
        right: the label of each candidate.
        seed: decides which candidates are kept, and their order.
    """
    chance, kept = random.Random(seed), []
    for number in sorted({number for number, _ in candidates}):
        own = [each for each in candidates if each[0] == number]
        classes = [[each for each in own if right[each] is label] for label in (True, False)]
        size = min(map(len, classes))
        kept += [each for group in classes for each in chance.sample(group, size)]
    chance.shuffle(kept)
    return [{"prompt": [{"role": "user", "content": f"task {each[0]}{call_text(each[1])}"}],
             "right": right[each]} for each in kept]


def verdict_reward(completions: Sequence[Any], right: Sequence[bool], **columns: Any
                   ) -> list[float]:
    """Returns 1.0 for each verdict that equals its label, else 0.0; a reward function of TRL."""
    verdicts = [messages[-1]["content"].strip() for messages in completions]
    return [float(verdict == (RIGHT if label else WRONG))
            for verdict, label in zip(verdicts, right, strict=True)]
