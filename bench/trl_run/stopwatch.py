"""Measures where the time of a rollout phase goes in a TRL trainer, without a change of TRL.

The rollout phase is TRL's `_generate_and_score_completions`: resets, generation, tools and rewards.
The tools' part of it is the tool loop without the generation of further turns inside it, and the
scoring of the rollouts.
"""

from __future__ import annotations

import time
from typing import Any


class StepTimes:
    """Adds up the seconds of each part of a step."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Adds to a part."""
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def get(self, part: str) -> float:
        """Returns the sum of a part so far."""
        return self._parts.get(part, 0.0)

    def take(self) -> dict[str, float]:
        """Returns `rollout_s`, `tool_loop_s`, `reward_s` and `generate_s` of the step, and begins
        the next step."""
        parts, self._parts = self._parts, {}
        return {f"{name}_s": parts.get(name, 0.0)
                for name in ("rollout", "tool_loop", "reward", "generate")}


def stopwatch(trainer_class: type, times: StepTimes) -> type:
    """Returns a subclass of a TRL trainer that measures each step.

    Args:
        trainer_class: TRL's GRPOTrainer, or a subclass.
        times: where the seconds are added.
    """
    class Timed(trainer_class):  # type: ignore[misc]
        def _generate_and_score_completions(self, *args: Any, **others: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._generate_and_score_completions(*args, **others)
            finally:
                times.add("rollout", time.perf_counter() - began)

        def _tool_call_loop(self, *args: Any, **others: Any) -> Any:
            began, generated = time.perf_counter(), times.get("generate")
            try:
                return super()._tool_call_loop(*args, **others)
            finally:
                inside = times.get("generate") - generated
                times.add("tool_loop", time.perf_counter() - began - inside)

        def _generate_single_turn(self, *args: Any, **others: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._generate_single_turn(*args, **others)
            finally:
                times.add("generate", time.perf_counter() - began)

        def _calculate_rewards(self, *args: Any, **others: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._calculate_rewards(*args, **others)
            finally:
                times.add("reward", time.perf_counter() - began)

    Timed.__name__ = Timed.__qualname__ = f"Timed{trainer_class.__name__}"
    return Timed
