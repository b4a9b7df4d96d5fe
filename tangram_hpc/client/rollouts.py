"""What a client may do with rollout pools: declare one, ask for a trajectory's next turn, and tell
it what the broker cannot see.

Law: the broker chooses the service; a turn is an action like any other, and its arguments travel as
those of `call`. What is only told (`tool_returned`, `trajectory_ended`) is a belief: it is sent in
order with all else and not said again after a lost way.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any

from ..config.rollouts import Rollouts, rollouts_spec
from ..domain.action import Kind
from ..domain.outcome import TEXT_MAX
from ..domain.rollouts import CONTEXT_MAX, Turn
from ..errors import InvalidInput
from ..protocol import message as ms
from ..protocol import payload as pl
from .future import Future
from .request import Options, trajectory_name, utf8
from .service_calls import ServiceCalls, arguments_of

_STATUSES = {"success": 0, "failure": 1, "timeout": 2}


class RolloutCalls(ServiceCalls):
    """A part of `Client`."""

    def __init__(self) -> None:
        ServiceCalls.__init__(self)
        self._pools: set[str] = set()

    def register_rollouts(self, name: str, pool: Rollouts | Mapping[str, Any]) -> None:
        """Declares a rollout pool over services that are registered already: buckets of them, by
        how many tokens a trajectory has left. The same again is harmless.

        Raises:
            InvalidInput: a field is wrong, a service is not declared, or the name is in use with
                another pool.
        """
        spec = rollouts_spec(name, pool)
        self._asked(lambda request: ms.DeclareRollouts(request, spec), timeout_s=60.0)
        self._pools.add(name)

    def rollout(self, pool: str, method: str, *, trajectory: str | int, prompt: int | str,
                context: int, generated: int, tokens: int = 0, timeout: float | None = None,
                retries: int | None = None, name: str = "", once: str = "",
                **arguments: Any) -> Future:
        """One turn of a trajectory on whichever service of a pool is best; returns at once. A
        trajectory's turns run one after another.

        Args:
            method, arguments: as of `call`, for the service.
            trajectory: your name for it, this client's own; tools that are submitted with the same
                `trajectory` say by how they end what is left of it.
            prompt: which prompt it began with; samples of one prompt say the same.
            context: tokens that this turn begins with, prompt and tools' returns included.
            generated: tokens that the policy has generated in this trajectory so far.
            tokens, timeout, retries, name, once: as of `call`.

        Returns:
            A Future of what the service answers; its `route` says where it went and why. Besides
            what `call` raises: InfeasibleRequest when the context fits on no service of the pool,
            or none that takes it can stand on the nodes there are.

        Raises:
            InvalidInput: an argument is wrong; names it.
        """
        turn = Turn(pool, trajectory_name(trajectory), _prompt_number(prompt),
                    _count("context", context, CONTEXT_MAX),
                    _count("generated", generated, CONTEXT_MAX))
        data = arguments_of(f"{pool}.{method}", arguments)
        options = Options(1, 0, 0, timeout, name or f"{pool}.{method}", retries, True,
                          once=once, turn=turn)
        call = pl.ServiceCall(method, data, tokens or len(data) // 4)
        return self._send_action(Kind.CALL, options, None, pool, call, key=f"rollouts:{pool}")

    def tool_returned(self, pool: str, trajectory: str | int, tool: str, characters: int,
                      status: str = "success") -> None:
        """Tells of a tool that did not run through the broker. `status`: "success", "failure" or
        "timeout". Say it before the trajectory's next turn; returns at once.

        Raises:
            InvalidInput: an argument is wrong, or no such pool is declared.
        """
        if status not in _STATUSES:
            raise InvalidInput(f"status: {status!r} is not one of {', '.join(_STATUSES)}")
        self._known(pool)
        word = ms.ToolReturned(pool, trajectory_name(trajectory), str(tool)[:TEXT_MAX],
                               _count("characters", characters), _STATUSES[status])
        with self._lock:
            self._put(word)

    def trajectory_ended(self, pool: str, trajectory: str | int, tokens: int | None = None, *,
                         epoch: int | None = None) -> None:
        """A trajectory is over; returns at once. A turn of it that is still open goes on.

        Args:
            tokens: how many the policy generated in all, if it ended by itself: that is what the
                pool learns from. None: it was cut off, which teaches nothing.
            epoch: the trainer's step, or another number that grows with its time, so that old
                lengths are forgotten; without it that of the last trajectory that named one.

        Raises:
            InvalidInput: an argument is wrong, or no such pool is declared.
        """
        self._known(pool)
        word = ms.EndTrajectory(pool, trajectory_name(trajectory),
                                -1 if tokens is None else _count("tokens", tokens, CONTEXT_MAX),
                                -1 if epoch is None else _count("epoch", epoch))
        with self._lock:
            self._put(word)

    def _known(self, pool: str) -> None:
        if pool not in self._pools:  # somebody else declared it, or the broker's config
            self._pools.update(p["name"] for p in self.ask("rollouts")["rollouts"])
        if pool not in self._pools:
            raise InvalidInput(f"pool: no rollout pool {pool!r} is declared")


def _prompt_number(prompt: int | str) -> int:
    if isinstance(prompt, str):
        return int.from_bytes(hashlib.sha256(utf8(prompt, "prompt")).digest()[:7], "big")
    try:
        number = operator.index(prompt)
    except TypeError:
        number = 1 << 62
    if abs(number) < 1 << 62:
        return number
    raise InvalidInput(f"prompt: {prompt!r} is neither a whole number below 2**62 nor a text")


def _count(field: str, amount: int, most: int = (1 << 40) - 1) -> int:
    try:
        count = operator.index(amount)  # that of an array's element too
    except TypeError:
        count = -1
    if not 0 <= count <= most:
        raise InvalidInput(f"{field}: {amount!r} is not a whole number from 0 to {most}")
    return count
