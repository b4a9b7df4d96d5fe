"""The reference trainer's task: "d=" asks for a sum, difference or product that makes the digit d.

Law: a completion is a program, and what it is worth is what it does: a shell in a sandbox works it
out. The reward is 1 if it makes d, less the further away it is, 0 if it is no such expression.
"""

from __future__ import annotations

import random

# leading zeros would be octal to the shell, and `--` a decrement: such words fail, as they should
_CHECK = """case "$1" in [0-9]*[-+*][0-9]*) ;; *) exit 4;; esac
echo $(( $1 ))"""


def prompts(step: int, count: int, seed: int) -> list[str]:
    """What is asked in a step, the same whoever asks."""
    dice = random.Random(seed * 1_000_003 + step)
    return [f"{dice.randrange(10)}=" for _ in range(count)]


def check(completion: str) -> list[str]:
    """The command that works a completion out."""
    return ["/bin/sh", "-c", _CHECK, "sh", completion]


def reward(prompt: str, exit_code: int, said: bytes) -> float:
    """What a completion is worth, by how its command ended."""
    if exit_code != 0:
        return 0.0
    try:
        gap = abs(int(said) - int(prompt[0]))
    except ValueError:
        return 0.0
    return 1.0 if gap == 0 else max(0.0, 0.5 - gap / 20)
