"""The mixed demo's crew: a judge and three teachers, what each is asked and how its answer is held
against what is certain of it.

Law: the models are small and their weights random, made on the spot, so what they say means
nothing; all that is checked is what is true of any model of this shape.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MissingExtra, how_to_install

JUDGE = "judge"
TEACHERS = ("teacher-1", "teacher-2", "teacher-3")
CREW = (JUDGE, *TEACHERS)
VERDICT_TOKENS = 8
HIDDEN, LAYERS, LONGEST = 64, 1, 4096
BATCH = 8  # more at once gains a CPU nothing: rows are padded to the longest
THREADS = 1  # a slot is the same device whether there is one or four

_NEEDED = ("torch", "transformers", "safetensors", "tokenizers")


def need_torch() -> None:
    """Raises `MissingExtra` when what the crew runs on is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"--mixed: its models need {', '.join(missing)}; "
                           f"{how_to_install('torch')}")


def make_models(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Writes the crew's models; the declaration of each service by its name.

    Raises:
        MissingExtra: torch is not installed.
    """
    need_torch()
    from ..services.torch.tiny import make_tiny

    return {name: {"backend": "torch", "max_len": LONGEST, "threads": THREADS,
                   "batch": BATCH,
                   "model": str(make_tiny(folder / name, seed=seed * len(CREW) + number,
                                          hidden=HIDDEN, layers=LAYERS, positions=LONGEST))}
            for number, name in enumerate(CREW)}


def question(name: str, prompt: str, completion: str) -> tuple[str, dict[str, Any]]:
    """The method that this member is asked about a program, and its arguments."""
    tokens = len((prompt + completion).encode())  # a byte is a token to them
    if name == JUDGE:
        return "generate", {"prompts": [prompt + completion], "max_new_tokens": VERDICT_TOKENS,
                            "tokens": tokens + VERDICT_TOKENS}
    return "logprobs", {"prompts": [prompt], "completions": [completion], "tokens": tokens}


def opinion(name: str, completion: str, answer: Any) -> tuple[float, str]:
    """(a number that sums the answer up, what is wrong with it or an empty string)."""
    if not isinstance(answer, list) or len(answer) != 1:
        return 0.0, f"{name}: not one answer: {answer!r}"
    if name == JUDGE:
        right = isinstance(answer[0], str)
        return 0.0, "" if right else f"{name}: its verdict is a {type(answer[0]).__name__}"
    values = [float(value) for value in answer[0]]
    if len(values) != len(completion.encode()):
        return 0.0, (f"{name}: {len(values)} log-probabilities for "
                     f"{len(completion.encode())} tokens")
    if not all(math.isfinite(value) and value <= 0 for value in values):
        return 0.0, f"{name}: what it says are no log-probabilities"
    return sum(values), ""
