"""The plain protocol that any service can speak: one POST for a batch, and POSTs that park and
wake.

The messages are described at `config.services.HttpService`. Methods and arguments are passed
through without being understood. Only what JSON can hold travels; a call with anything else is
invalid, and the other calls of its batch go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...config.services import HttpService
from ...ports import ServiceRefused, ServiceReply, ServiceRequest
from ...protocol.value import decode_value, encode_value
from .engine import HttpEngine, run_together
from .engine_request import InvalidCall
from .web import Web


class PlainEngine(HttpEngine):
    """One server that speaks the protocol of `HttpService`; see `HttpEngine`."""

    def __init__(self, name: str, web: Web, weights_mib: int, options: HttpService) -> None:
        super().__init__(name, web, weights_mib)
        self._options, self.health_path = options, options.health_path

    async def _load(self) -> None:
        await self._check_health()
        path = self._options.park_path
        if not path:
            return
        answer = await self._web.post(path)
        if answer.status in (404, 405):
            raise ServiceRefused(f"service {self._name}: park_path: {self._web.where}{path} "
                                 f"answered {answer.line()}")
        if answer.unauthorized:
            self._refuse(path, answer)
        await self._require_success(path, answer)

    async def _wake(self) -> None:
        if self._options.wake_path:
            await self._order(self._options.wake_path)

    async def _park(self) -> None:
        if self._options.park_path:
            await self._order(self._options.park_path)

    async def _call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        replies: list[ServiceReply | None] = [None] * len(requests)
        bodies: list[tuple[int, dict[str, Any]]] = []
        for at, request in enumerate(requests):
            try:
                bodies.append((at, _body(request)))
            except (TypeError, ValueError, RecursionError) as error:
                replies[at] = ServiceReply(error=f"{request.method}: arguments: a service behind "
                                                 f"plain HTTP takes what JSON holds ({error})")
        for (at, _), reply in zip(bodies, await self._batch([b for _, b in bodies]), strict=True):
            replies[at] = reply
        return [reply for reply in replies if reply is not None]

    async def _batch(self, bodies: list[dict[str, Any]]) -> list[ServiceReply]:
        """Sends a batch; one that is refused as a whole is sent again call by call, to find the
        invalid one.
        """
        if not bodies:
            return []
        path = self._options.call_path
        try:
            answer = await self._post_call(path, {"requests": bodies})
        except InvalidCall as error:
            if len(bodies) == 1:
                return [ServiceReply(error=str(error))]
            return [reply for alone in await run_together(self._batch([b]) for b in bodies)
                    for reply in alone]
        reply = answer.json()
        found = reply.get("replies") if isinstance(reply, dict) else None
        if not isinstance(found, list) or len(found) != len(bodies):
            odd = (f"{self._web.where}{path} answered {answer.line()}; an answer must have "
                   f"'replies', a list of {len(bodies)}")
            return [ServiceReply(error=odd)] * len(bodies)
        return [self._reply(item) for item in found]

    def _reply(self, item: Any) -> ServiceReply:
        if isinstance(item, dict) and "value" in item and "error" not in item:
            try:
                return ServiceReply(value=encode_value(item["value"]))
            except TypeError as odd:
                return ServiceReply(error=f"{self._options.call_path}: its value is a {odd}")
        error = item.get("error") if isinstance(item, dict) and "value" not in item else None
        if not isinstance(error, str) or not error.strip():
            error = (f"{self._web.where}{self._options.call_path}: a reply must be "
                     "{'value': ...} or {'error': text}")
        return ServiceReply(error=" ".join(error.split()))


def _body(request: ServiceRequest) -> dict[str, Any]:
    """Returns a call as JSON; raises TypeError, ValueError or RecursionError where JSON cannot hold
    it.
    """
    arguments = decode_value(request.arguments)
    json.dumps(arguments, allow_nan=False)
    return {"method": request.method, "arguments": arguments}
