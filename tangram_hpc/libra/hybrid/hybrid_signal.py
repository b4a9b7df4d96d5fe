"""Pure. How many replicas training should have, from what was last measured (Libra, arXiv
2606.03077, the elastic hybrid pool's signal).

Law: whole numbers only. A signal is believed for a number of steps and then counts for nothing; the
gap between the two thresholds keeps what is (hysteresis).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.hybrid import Signal
from ...errors import InvalidInput


@dataclass(frozen=True)
class PoolRules:
    """What a site may set of the pool; the defaults are those of Libra's released code, but the
    last four.

    Attributes:
        ttl_steps: train_steps for which a signal is believed.
        pressure_permille: rollout this full gets everything back.
        join_permille, leave_permille: T_train / T_rollout at which all spare replicas are lent, and
            at which none is.
        reserved_gpus: rollout GPUs that are never lent.
        stage_timeout_ns: how long a replica may take for one stage of a join, and for its return.
        boundary_timeout_ns: how long it may wait for the next step to begin or to end.
        cooldown_steps: steps between two changes of the number wanted, but for pressure and an
            expired signal.
        retry_steps: steps for which a replica whose join failed is not asked again.
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
        """Raises InvalidInput: a number that makes no sense; names it."""
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
    """How many replicas are wanted in training; O(1) a question."""

    __slots__ = ("_changed_at", "_rules", "_signal", "wanted")

    def __init__(self, rules: PoolRules) -> None:
        self._rules = rules
        self._signal: Signal | None = None
        self._changed_at = -(1 << 62)
        self.wanted = 0

    def update(self, signal: Signal) -> bool:
        """A signal came; False if it is not newer than the last, which then stands."""
        if self._signal is not None and signal.version <= self._signal.version:
            return False
        self._signal = signal
        return True

    def settle(self, step: int, spare: int) -> int:
        """How many are wanted at this step, where `spare` can be lent at most."""
        target, urgent = self._target(step, spare)
        rested = step - self._changed_at >= self._rules.cooldown_steps
        if target != self.wanted and (urgent or rested):
            self.wanted, self._changed_at = target, step
        return min(self.wanted, spare)

    def _target(self, step: int, spare: int) -> tuple[int, bool]:
        """The number, and whether it may not wait for the cooldown."""
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
