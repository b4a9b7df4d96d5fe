"""The task of the reference trainer: the prompt "d=" asks for a sum, difference or product whose
value is the digit d. The module also defines the alphabet of the model. It does no I/O.

A completion is a program: a shell in a sandbox computes it, and its exit code says whether it was
an expression at all. The reward is 1 if the value is d, and smaller the further the value is from
d; it is 0 if the completion is no such expression.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

LETTERS = "0123456789+-*="
SPECIAL = ("<pad>", "<s>", "</s>")
BEGIN, END = 1, 2  # the tokens `<s>` and `</s>`
NEW_TOKENS = 4  # the most tokens of a completion, its end included
_SHOWN = 4  # characters of a wrong value that the model is shown
RAN = 0.1  # the smallest reward of a program that runs

# A leading zero means octal to the shell, and `--` a decrement; such completions fail, as intended.
_CHECK = """case "$1" in [0-9]*[-+*][0-9]*) ;; *) exit 4;; esac
echo $(( $1 ))"""


def token_of(letter: str) -> int:
    """The token of a letter."""
    return len(SPECIAL) + LETTERS.index(letter)


def text_of(tokens: Sequence[int]) -> str:
    """The text of these tokens, up to the end token; `?` for a special token before it."""
    said = tokens[: tokens.index(END)] if END in tokens else tokens
    return "".join(LETTERS[t - len(SPECIAL)] if t >= len(SPECIAL) else "?" for t in said)


def prompts(step: int, count: int, seed: int) -> list[str]:
    """The prompts of a step; every rank computes the same."""
    dice = random.Random(seed * 1_000_003 + step)
    return [f"{dice.randrange(10)}=" for _ in range(count)]


def question(prompt: str) -> list[int]:
    """The tokens of a prompt."""
    return [BEGIN, *map(token_of, prompt)]


def check(completion: str) -> list[str]:
    """The command that computes a completion."""
    return ["/bin/sh", "-c", _CHECK, "sh", completion]


def value(exit_code: int, said: bytes) -> int | None:
    """The value of a completion, from the end of its command; None if it is no such expression."""
    if exit_code != 0:
        return None
    try:
        return int(said)
    except ValueError:
        return None


def reward(prompt: str, made: int | None) -> float:
    """The reward of a completion with this value; None is for no value."""
    if made is None:
        return 0.0
    gap = abs(made - int(prompt[0]))
    return 1.0 if gap == 0 else max(RAN, 0.5 - gap / 20)


def reply(prompt: str, made: int | None) -> list[int]:
    """The tokens that the model reads after a wrong completion: its value, if there is one, and the
    prompt once more."""
    told = "" if made is None else str(made)[:_SHOWN]
    return [token_of("="), *map(token_of, told), *question(prompt)]
