"""What a client may do with services: declare one, call one.

Law: what a service is told and answers is `protocol.value`; nothing here pickles or unpickles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..config.services import Service, service_spec
from ..domain.action import Kind
from ..errors import InvalidInput
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.value import encode_value
from .asking import Asking
from .functions import Shipped
from .future import Future
from .request import Options, trajectory_name

if TYPE_CHECKING:
    from .session import Session


class ServiceCalls(Asking):
    """A part of `Client`."""

    def __init__(self) -> None:
        self._degrees: dict[str, tuple[int, ...]] = {}  # of services

    # what the rest of the client gives
    def _send_action(self, kind: Kind, options: Options, session: Session | None, what: str,
                     call: pl.Payload, trusted: bool = False,
                     on_output: Callable[[int, bytes], None] | None = None,
                     shipped: Shipped | None = None, key: str = "cpu") -> Future:
        raise NotImplementedError

    def register_service(self, name: str, service: Service | Mapping[str, Any]) -> None:
        """Declares a GPU service (reward model, judge, teacher): loaded once and parked in host
        memory, brought to GPUs when `call` wants it. The same again is harmless.

        Raises:
            InvalidInput: a field is wrong; names it.
            InfeasibleRequest: no node can serve it, or there are too many.
        """
        spec = service_spec(name, service)
        self._asked(lambda request: ms.DeclareService(request, spec))
        self._degrees[name] = spec.degrees

    def call(self, service: str, method: str, *, tokens: int = 0, timeout: float | None = None,
             retries: int | None = None, name: str = "", component: str = "", once: str = "",
             trajectory: str | int = "", **arguments: Any) -> Future:
        """Calls a service; returns at once.

        Args:
            method: what it offers: `score(texts=...)`, `logprobs(prompts=..., completions=...)`,
                `generate(prompts=..., max_new_tokens=...)`, or what its engine does.
            tokens: how many tokens that is, for the budget of a batch; guessed without.
            timeout: seconds of run time; waiting and bringing it in never count.
            retries: how often to start again when nodes fail (2).
            once, trajectory: as for `submit`.

        Returns:
            A Future of what the service answers. It raises RemoteError when the service refused
            this call, ActionFailed when it could not be served.
        """
        data = arguments_of(f"{service}.{method}", arguments)
        options = Options(list(self._degrees_of(service)), 0, 0, timeout,
                          name or f"{service}.{method}",
                          retries, True, component, once=once,
                          trajectory=trajectory_name(trajectory) if trajectory != "" else "")
        call = pl.ServiceCall(method, data, tokens or len(data) // 4)
        return self._send_action(Kind.CALL, options, None, service, call,
                                 key=f"service:{service}")

    def _degrees_of(self, service: str) -> tuple[int, ...]:
        if service not in self._degrees:  # somebody else declared it, or the broker's config
            told = self.ask("services")["services"]
            self._degrees.update({s["name"]: tuple(s["degrees"]) for s in told})
        return self._degrees.get(service, (1,))


def arguments_of(what: str, arguments: Mapping[str, Any]) -> bytes:
    """A call's arguments as they travel.

    Raises:
        InvalidInput: one of them cannot.
    """
    try:
        return encode_value(dict(arguments))
    except TypeError as error:
        raise InvalidInput(f"arguments of {what}: {error} cannot be sent; give plain values or "
                           "arrays") from None
