"""The part of `Client` that asks the broker something and waits for the answer.

Law: a question belongs to one conversation: it is not said again after a lost way, its caller is
told that no answer came.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from ..errors import BrokerUnreachable, ClientClosed, TangramError
from ..protocol import message as ms
from .request import packed


class Asking:
    """See `Client`."""

    job: str
    _lock: threading.Lock
    _closing: bool
    _failure: TangramError | None
    _answers: dict[int, concurrent.futures.Future[Any]]
    _mint: Callable[[], int]
    _put: Callable[..., None]

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"job {self.job}: this client was closed; call tangram_hpc.connect() "
                            "for another one")

    def _check_open(self) -> None:
        """Raises what ended this client, if anything has; lock held."""
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise self._closed()

    def ask(self, what: str, argument: str = "", timeout_s: float = 10.0) -> Any:
        """The broker's answer to a question (`info`, `nodes`, `pending`; `explain` with an
        action's id as its argument), as plain values."""
        return self._asked(lambda request: ms.Ask(request, what, argument), timeout_s)

    def forget(self, *names: str, prefix: str = "") -> int:
        """Lets the broker drop what came of actions submitted with these `once` names, and of all
        whose name begins with `prefix`; how many it kept. Say it when your checkpoint holds them:
        submitted again they would run again. What is not over yet stays."""
        told = self._asked(lambda request: ms.Forget(request, names, prefix))
        return int(told["forgotten"])

    def _asked(self, question: Callable[[int], ms.Message], timeout_s: float = 10.0) -> Any:
        """What Answer says to a question; what Rejected says is raised as InvalidInput."""
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._check_open()
            request = self._mint()
            asked = question(request)
            packed(asked, "the question")
            self._answers[request] = answer
            self._put(asked)
        try:
            return answer.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise BrokerUnreachable(f"job {self.job}: no answer within {timeout_s:.0f} s"
                                    ) from None
