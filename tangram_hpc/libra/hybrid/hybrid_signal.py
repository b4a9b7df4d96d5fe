"""Pure. Decides from the last measured signal how many replicas training should have.

If training is the longer stage, spare replicas are lent to it; if rollout is, they go back. Between
the two thresholds the number stays as it is (hysteresis), so replicas do not come and go each step.
The rule is that of Libra (arXiv 2606.03077, the elastic hybrid pool's signal).

Invariants: whole numbers only. A signal counts for `ttl_steps` steps; after that no replica is
wanted in training until a newer signal arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.hybrid import PipelineSignal
from ...errors import InvalidInput


@dataclass(frozen=True)
class PoolRules:
    """The settings of the pool. Defaults are those of Libra's released code, except the last four.

    Attributes:
        ttl_steps: For how many train_steps a signal counts.
        pressure_permille: At this queue pressure all replicas go back to rollout.
        join_permille: T_train / T_rollout at or above which all spare replicas are lent to
            training.
        leave_permille: T_train / T_rollout at or below which no replica is lent.
        reserved_gpus: Rollout GPUs that are never lent.
        stage_timeout_ns: How long a replica may take for one stage of a join, and for its return.
        boundary_timeout_ns: How long a replica may wait for the next step to begin or to end.
        cooldown_steps: Least number of steps between two changes of the wanted number. High
            pressure and an expired signal change the number at once.
        retry_steps: For how many steps a replica does not join again after its join failed.
    """

    ttl_steps: int = 20
    pressure_permille: int = 800
    join_permille: int = 1150
    leave_permille: int = 900
    reserved_gpus: int = 0
    stage_timeout_ns: int = 180 * 10**9
    boundary_timeout_ns: int = 3600 * 10**9
    cooldown_steps: int = 1
    retry_steps: int = 5

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            InvalidInput: A number is out of its range; the message names it.
        """
        for name in ("ttl_steps", "pressure_permille", "leave_permille", "stage_timeout_ns",
                     "boundary_timeout_ns"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("reserved_gpus", "cooldown_steps", "retry_steps"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name}: {getattr(self, name)} must not be negative")
        if self.join_permille <= self.leave_permille:
            raise InvalidInput(f"join_permille: {self.join_permille} must be above leave_permille "
                               f"({self.leave_permille}), or replicas would come and go each step")


class ReplicaTarget:
    """How many replicas are wanted in training. Each call is O(1)."""

    __slots__ = ("_changed_at", "_rules", "_signal", "wanted")

    def __init__(self, rules: PoolRules) -> None:
        self._rules = rules
        self._signal: PipelineSignal | None = None
        self._changed_at = -(1 << 62)
        self.wanted = 0

    def update(self, signal: PipelineSignal) -> bool:
        """Takes over a signal; returns False, and ignores it, if it is not newer than the last one.
        """
        if self._signal is not None and signal.version <= self._signal.version:
            return False
        self._signal = signal
        return True

    def settle(self, step: int, spare: int) -> int:
        """The number of replicas wanted at this step; `spare` is the most that can be lent."""
        target, urgent = self._target(step, spare)
        rested = step - self._changed_at >= self._rules.cooldown_steps
        if target != self.wanted and (urgent or rested):
            self.wanted, self._changed_at = target, step
        return min(self.wanted, spare)

    def _target(self, step: int, spare: int) -> tuple[int, bool]:
        """The wanted number, and whether the change is made in spite of the cooldown."""
        signal, rules = self._signal, self._rules
        if signal is None or step - signal.step > rules.ttl_steps:
            return 0, True
        if signal.pressure_permille >= rules.pressure_permille:
            return 0, True
        if signal.planned > 0:
            return min(signal.planned, spare), False
        train, rollout = signal.train_ns * 1000, signal.rollout_ns
        if train <= 0 and rollout <= 0:
            return self.wanted, False  # nothing was measured
        if train >= rules.join_permille * rollout:
            return spare, False
        return (0 if train <= rules.leave_permille * rollout else self.wanted), False
