"""The part of `Client` that declares endpoints and asks for grants of them.

Law: as the client's: what is open is kept until its result is here, and said again after a loss.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from ...config.endpoints import endpoint_spec
from ...domain.action import Action, Kind
from ...protocol import message as ms
from ..asking import Asking
from ..future import Future
from ..request import sendable, trajectory_name
from ..results import Pending
from .endpoint import Endpoint
from .pace import Pace
from .turn import Turn


class Quotas(Asking):
    """See `Client`."""

    _paces: dict[str, Pace]
    _pending: dict[int, Pending]
    _cancel: Callable[[int], None]

    def register_endpoint(self, name: str, *, concurrency: int = 64, rate: float = 0.0,
                          burst: float | None = None, jitter_ms: float = 50.0,
                          **options: Any) -> Endpoint:
        """Declares somebody else's API and its quota, for all clients of this job; returns when the
        broker has taken it. The same again is harmless.

        Args:
            concurrency: calls at once.
            rate: calls a second; 0 for no limit.
            burst: calls at once after a pause; a second's worth without.
            jitter_ms: how much later one call may arrive there than another. The bucket held here
                is smaller by what comes in that time, so that the endpoint never sees too many.
            options: of the Endpoint that is returned, see `endpoint`.

        Raises:
            InvalidInput: a field is wrong, or the name is in use with another quota.
        """
        spec = endpoint_spec(name, {
            "concurrency": concurrency, "rate": rate, "burst": burst, "jitter_ms": jitter_ms})
        self._asked(lambda request: ms.DeclareEndpoint(request, spec))
        return self.endpoint(name, **options)

    def endpoint(self, name: str, *, cache: int = 0, cache_s: float = 300.0,
                 single_flight: bool = False, rng: random.Random | None = None) -> Endpoint:
        """An endpoint that was declared, by any client or in the broker's config file.

        Args:
            cache: keep so many answers of `request(key=...)` in this process and give them again.
                It changes what a policy trains on, as all who ask the same see the same answer
                where the endpoint might have given several; off unless you say so.
            cache_s: for so long.
            single_flight: requests of one key at the same time share one call, its answer or its
                failure. It changes the data likewise. The call goes on when who asks goes away.
            rng: what pauses between attempts are drawn from.
        """
        return Endpoint(self, name, cache=cache, cache_s=cache_s, single_flight=single_flight,
                        rng=rng)

    def _take_turn(self, endpoint: str, name: str, trajectory: str | int = "") -> Turn:
        action = sendable(Action(
            self._mint(), name or endpoint, Kind.GRANT, key=f"endpoint:{endpoint}",
            trajectory=trajectory_name(trajectory) if trajectory != "" else ""))
        future = Future(action.id, self._cancel)
        turn = Turn(future, self._say_done, lambda grant: self._pause_s(endpoint, grant))
        with self._lock:
            self._check_open()
            self._pending[action.id] = Pending(action, b"", future, False, time.monotonic_ns(),
                                               turn=turn)
            self._put(ms.Submit(action), b"")
        return turn

    def _pause_s(self, endpoint: str, grant: ms.Granted) -> float | None:
        with self._lock:
            now = time.monotonic_ns()
            pace = self._paces.setdefault(endpoint, Pace())
            start = pace.start_at(now, grant.rate_micro, grant.burst_micro)
        return None if start < 0 else (start - now) / 1e9

    def _say_done(self, done: ms.Message) -> None:
        with self._lock:
            self._put(done)
