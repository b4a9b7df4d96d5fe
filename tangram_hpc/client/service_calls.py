"""Calls of GPU services, as a part of the client.

The arguments and the answer of a call travel in the encoding of `protocol.value`; nothing here
pickles or unpickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.services import Service, service_spec
from ..domain.action import Kind
from ..errors import InvalidInput
from ..protocol import message as ms
from ..protocol import payload as pl
from ..protocol.value import encode_value
from .connection import Connection
from .future import Future
from .request import COUNT_MAX, Options, check_text, count_of, tool_of


class ServiceCalls:
    """Declares services and calls them; see `Client.register_service` and `Client.call`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._degrees: dict[str, tuple[int, ...]] = {}  # service -> numbers of GPUs it can run on

    def register(self, name: str, service: Service | Mapping[str, Any]) -> None:
        """Declares a service; see `Client.register_service`."""
        spec = service_spec(name, service)
        self._connection.request(lambda request: ms.DeclareService(request, spec))
        self._degrees[name] = spec.degrees

    def call(self, service: str, method: str, tokens: int, timeout: float | None,
             retries: int | None, name: str, component: str, once: str, trajectory: str | int,
             arguments: Mapping[str, Any]) -> Future:
        """Submits one call; see `Client.call`."""
        check_text(service, "service")
        call = service_call(service, method, tokens, arguments)
        options = Options(self._degrees_of(service), 0, 0, timeout, name or f"{service}.{method}",
                          retries, True, component, once=once,
                          trajectory=tool_of(trajectory))
        return self._connection.submit(Kind.CALL, options, None, service, call,
                                       key=f"service:{service}")

    def _degrees_of(self, service: str) -> list[int]:
        """The numbers of GPUs that a service can run on; [1] if nobody has declared it."""
        if service not in self._degrees:  # another client declared it, or the broker's config file
            declared = self._connection.ask("services")["services"]
            self._degrees.update({s["name"]: tuple(s["degrees"]) for s in declared})
        return list(self._degrees.get(service, (1,)))


def service_call(of: str, method: str, tokens: int, arguments: Mapping[str, Any]) -> pl.ServiceCall:
    """One call, checked.

    Args:
        of: the service or rollout pool, for errors.
        method: the method.
        tokens: how many tokens the call counts for in a batch; 0 for a guess.
        arguments: name -> value.

    Raises:
        InvalidInput: `tokens` is no such number, or a value is neither plain nor an array.
    """
    what = f"{of}.{method}"
    try:
        data = encode_value(dict(arguments))
    except TypeError as error:
        raise InvalidInput(f"arguments of {what}: {error} cannot be sent; give plain values or "
                           "arrays") from None
    return pl.ServiceCall(method, data, count_of(tokens, "tokens", COUNT_MAX) or len(data) // 4)
