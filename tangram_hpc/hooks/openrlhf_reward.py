"""OpenRLHF: the reward of answers that are programs, in the trainer's process.

OpenRLHF loads this file by its path, so it has no relative imports:

    python -m openrlhf.cli.train_ppo_ray --reward.remote_url PATH ...

`python -m tangram_hpc.hooks.openrlhf_reward` prints PATH. The labels are test cases, in the form
that `tangram_hpc.hooks.code_rewards.cases_of` describes. For another reward write a file of your
own that defines `reward_func = rewarding(score)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tangram_hpc.hooks.code_rewards import code_score

Score = Callable[[str, str, Any], Awaitable[float]]


def rewarding(score: Score, end: str = "") -> Callable[..., dict[str, Any]]:
    """Makes a `reward_func` of OpenRLHF from a coroutine function that scores one answer.

    Args:
        score: called as `score(prompt, answer, label)`; the answers of one call are scored at once.
        end: the mark with which the model ends an answer, such as "<|im_end|>". OpenRLHF leaves it
            in the text; `score` gets the answer without it.

    Returns:
        The function. It raises errors of `score`, and OpenRLHF then logs that the reward is lost.
    """
    def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any],
                    **others: Any) -> dict[str, Any]:
        async def batch() -> list[float]:
            return list(await asyncio.gather(*(
                score(prompt, query.removeprefix(prompt).removesuffix(end), label)
                for query, prompt, label in zip(queries, prompts, labels, strict=True))))

        rewards = asyncio.run(batch())
        value = rewards[0] if len(rewards) == 1 else rewards
        return {"rewards": value, "scores": value, "extra_logs": {}}

    return reward_func


async def _program_score(prompt: str, answer: str, label: Any) -> float:
    return await code_score(answer, label)


reward_func = rewarding(_program_score)

if __name__ == "__main__":
    print(__file__)
