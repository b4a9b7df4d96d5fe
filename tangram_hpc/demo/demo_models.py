"""The models of the mixed demo: a judge and three teachers, their calls and the checks of the
answers.

The models are small and are made with random weights at the start of the demo, so their answers
mean nothing. The checks cover only what holds for every model of this shape: the number of
log-probabilities and their range, and the type of a generated text.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MissingExtra, how_to_install

JUDGE = "judge"
TEACHERS = ("teacher-1", "teacher-2", "teacher-3")
DEMO_MODELS = (JUDGE, *TEACHERS)
VERDICT_TOKENS = 8
HIDDEN, LAYERS, LONGEST = 64, 1, 4096
BATCH = 8  # a larger batch gains nothing on a CPU, because rows are padded to the longest one
# one thread, so that a device slot has the same speed whether there is one slot or four
THREADS = 1

_NEEDED = ("torch", "transformers", "safetensors", "tokenizers")


def need_torch() -> None:
    """Checks that the packages which the models run on are installed.

    Raises:
        MissingExtra: A package of the extra `torch` is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"--mixed: the demo's models need {', '.join(missing)}; "
                           f"{how_to_install('torch')}")


def make_models(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Writes the models into `folder` and returns each service's declaration by its name.

    Raises:
        MissingExtra: A package of the extra `torch` is missing.
    """
    need_torch()
    from ..services.torch.tiny import make_tiny

    return {name: {"backend": "torch", "max_len": LONGEST, "threads": THREADS,
                   "batch": BATCH,
                   "model": str(make_tiny(folder / name, seed=seed * len(DEMO_MODELS) + number,
                                          hidden=HIDDEN, layers=LAYERS, positions=LONGEST))}
            for number, name in enumerate(DEMO_MODELS)}


def question(name: str, prompt: str, completion: str) -> tuple[str, dict[str, Any]]:
    """Returns the method and the arguments of the call that asks this model about a program."""
    # the tokenizer of these models makes one token of each byte
    tokens = len((prompt + completion).encode())
    if name == JUDGE:
        return "generate", {"prompts": [prompt + completion], "max_new_tokens": VERDICT_TOKENS,
                            "tokens": tokens + VERDICT_TOKENS}
    return "logprobs", {"prompts": [prompt], "completions": [completion], "tokens": tokens}


def opinion(name: str, completion: str, answer: Any) -> tuple[float, str]:
    """Checks a model's answer.

    Returns:
        The sum of a teacher's log-probabilities, which is 0 for the judge; and what is wrong with
        the answer, which is empty for a correct one.
    """
    if not isinstance(answer, list) or len(answer) != 1:
        return 0.0, f"{name}: it must answer with a list of one entry, got {answer!r}"
    if name == JUDGE:
        right = isinstance(answer[0], str)
        return 0.0, ("" if right else
                     f"{name}: its verdict must be text, got {type(answer[0]).__name__}")
    values = [float(value) for value in answer[0]]
    if len(values) != len(completion.encode()):
        return 0.0, (f"{name}: {len(values)} log-probabilities for "
                     f"{len(completion.encode())} tokens")
    if not all(math.isfinite(value) and value <= 0 for value in values):
        return 0.0, f"{name}: its log-probabilities must be finite and at most 0, got {values}"
    return sum(values), ""
