"""Pure. The reference trainer's task: "d=" asks for a sum, difference or product that makes the
digit d; and the letters that it is written in.

Law: a completion is a program, and what it is worth is what it does: a shell in a sandbox works it
out, and says in what it returns what went wrong. The reward is 1 if it makes d, less the further
away it is, 0 if it is no such expression.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

LETTERS = "0123456789+-*="
SPECIAL = ("<pad>", "<s>", "</s>")
BEGIN, END = 1, 2  # tokens
NEW_TOKENS = 4  # of a completion, its end among them
_SHOWN = 4  # letters of a wrong value
RAN = 0.1  # what a program that runs is worth at least

# leading zeros would be octal to the shell, and `--` a decrement: such words fail, as they should
_CHECK = """case "$1" in [0-9]*[-+*][0-9]*) ;; *) exit 4;; esac
echo $(( $1 ))"""


def token_of(letter: str) -> int:
    """The number of a letter."""
    return len(SPECIAL) + LETTERS.index(letter)


def text_of(tokens: Sequence[int]) -> str:
    """What these tokens say, up to their end; `?` for a special one in between."""
    said = tokens[: tokens.index(END)] if END in tokens else tokens
    return "".join(LETTERS[t - len(SPECIAL)] if t >= len(SPECIAL) else "?" for t in said)


def prompts(step: int, count: int, seed: int) -> list[str]:
    """What is asked in a step, the same whoever asks."""
    dice = random.Random(seed * 1_000_003 + step)
    return [f"{dice.randrange(10)}=" for _ in range(count)]


def question(prompt: str) -> list[int]:
    """The tokens that ask it."""
    return [BEGIN, *map(token_of, prompt)]


def check(completion: str) -> list[str]:
    """The command that works a completion out."""
    return ["/bin/sh", "-c", _CHECK, "sh", completion]


def value(exit_code: int, said: bytes) -> int | None:
    """What a completion made, by how its command ended; None: it is no such expression."""
    if exit_code != 0:
        return None
    try:
        return int(said)
    except ValueError:
        return None


def reward(prompt: str, made: int | None) -> float:
    """What a completion is worth that made this."""
    if made is None:
        return 0.0
    gap = abs(made - int(prompt[0]))
    return 1.0 if gap == 0 else max(RAN, 0.5 - gap / 20)


def reply(prompt: str, made: int | None) -> list[int]:
    """What the model reads after a completion that was wrong: what it made, if anything, and the
    question once more."""
    told = "" if made is None else str(made)[:_SHOWN]
    return [token_of("="), *map(token_of, told), *question(prompt)]
