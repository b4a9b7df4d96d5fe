"""Rollout pools, as a part of the client: turns of trajectories, and reports about trajectories.

The broker chooses the service of each turn. A turn is an action like any other, and its arguments
travel like those of `call`. Reports (`tool_returned`, `trajectory_ended`) tell the broker what it
cannot see itself, and only improve its estimates. They keep their order among all messages.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any

from ..config.rollouts import RolloutPoolSettings, rollouts_spec
from ..domain.action import Kind
from ..domain.outcome import TEXT_MAX
from ..domain.rollouts import CONTEXT_MAX, Turn
from ..errors import InvalidInput
from ..protocol import message as ms
from .connection import Connection
from .future import Future
from .request import COUNT_MAX, Options, check_text, count_of, trajectory_name, utf8
from .service_calls import service_call

_STATUSES = {"success": 0, "failure": 1, "timeout": 2}


class RolloutCalls:
    """Declares rollout pools and submits turns to them; see the methods of `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pools: set[str] = set()  # names of pools that are known to be declared

    def register(self, name: str, pool: RolloutPoolSettings | Mapping[str, Any]) -> None:
        """Declares a pool; see `Client.register_rollouts`."""
        spec = rollouts_spec(name, pool)
        self._connection.request(lambda request: ms.DeclareRollouts(request, spec), timeout_s=60.0)
        self._pools.add(name)

    def submit(self, turn: Turn, method: str, tokens: int, options: Options,
               arguments: Mapping[str, Any]) -> Future:
        """Submits one turn; see `Client.rollout`."""
        call = service_call(turn.pool, method, tokens, arguments)
        return self._connection.submit(Kind.CALL, options, None, turn.pool, call,
                                       key=f"rollouts:{turn.pool}")

    def tool_returned(self, pool: str, trajectory: str | int, tool: str, characters: int,
                      status: str) -> None:
        """Reports a tool's return; see `Client.tool_returned`."""
        if not isinstance(status, str) or status not in _STATUSES:
            raise InvalidInput(f"status: {status!r} is not one of {', '.join(_STATUSES)}")
        name = str(tool)[:TEXT_MAX]
        utf8(name, "tool")
        self._check_declared(pool)
        self._connection.send(ms.ReportToolReturn(
            pool, trajectory_name(trajectory), name,
            count_of(characters, "characters", COUNT_MAX), _STATUSES[status]))

    def trajectory_ended(self, pool: str, trajectory: str | int, tokens: int | None,
                         epoch: int | None) -> None:
        """Reports a trajectory's end; see `Client.trajectory_ended`."""
        self._check_declared(pool)
        self._connection.send(ms.EndTrajectory(
            pool, trajectory_name(trajectory),
            -1 if tokens is None else count_of(tokens, "tokens", CONTEXT_MAX),
            -1 if epoch is None else count_of(epoch, "epoch", COUNT_MAX)))

    def _check_declared(self, pool: str) -> None:
        check_text(pool, "pool")
        if pool not in self._pools:  # another client declared it, or the broker's config file
            told = self._connection.ask("rollouts")["rollouts"]
            self._pools.update(declared["name"] for declared in told)
        if pool not in self._pools:
            raise InvalidInput(f"pool: no rollout pool {pool!r} is declared")


def make_turn(pool: str, trajectory: str | int, prompt: int | str, context: int, generated: int
              ) -> Turn:
    """One turn, checked; the arguments are those of `Client.rollout`.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    return Turn(pool, trajectory_name(trajectory), _prompt_number(prompt),
                count_of(context, "context", CONTEXT_MAX),
                count_of(generated, "generated", CONTEXT_MAX))


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
