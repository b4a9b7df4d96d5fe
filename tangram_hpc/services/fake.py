"""A backend that computes nothing, so that everything around a service can be tested without a
model.

Each call takes as long as the service's options say, and fails on demand. Each answer says that it
is fake, so that it is never mistaken for a model's.

Four method names make it fail: `crash` ends the copy, `hang` never returns, `oom` finds no device
memory for the batch, and `wrong` is refused as an invalid request. The attribute `trouble` does the
first three to `load`, `wake` and `park` as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ..config.services import FakeService
from ..ports import OutOfDeviceMemory, ServiceDied, ServiceReply, ServiceRequest
from ..protocol.value import decode_value, encode_value

TROUBLES = ("crash", "hang", "oom")


class FakeBackend:
    """One copy of a fake service (serves `ports.ServiceBackend`).

    Attributes:
        shares_gpu: See `ports.ServiceBackend`; there is no memory in which anything could stay.
        loads_here: See `ports.ServiceBackend`; it stands in for a copy that does.
        trouble: For an order ("load", "wake", "call" or "park"), the entry of `TROUBLES` that the
            next such order meets.
    """

    shares_gpu = False
    loads_here = True

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._killed = asyncio.Event()
        self._ended = ""
        self.trouble: dict[str, str] = {}

    async def load(self) -> int:
        """Returns at once; see `ports.ServiceBackend.load`."""
        await self._take("load", 0.0)
        return self._service.weights_mib

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """Waits for `wake_s` seconds; see `ports.ServiceBackend.wake`."""
        await self._take("wake", self._service.wake_s)

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """Waits for `call_s` seconds plus `token_s` for each token; see
        `ports.ServiceBackend.call`.

        The number of tokens of a request is the field `length` of its arguments, 0 if it is absent.
        """
        replies, tokens = [], 0
        for request in requests:
            reply, own = self._reply(request, len(requests))
            replies.append(reply)
            tokens += own
        asked = [r.method for r in requests if r.method in TROUBLES]
        if asked:
            self.trouble.setdefault("call", asked[0])
        await self._take("call", self._service.call_s + tokens * self._service.token_s)
        return replies

    async def stand_by(self) -> None:
        """Does nothing; see `ports.ServiceBackend.stand_by`."""

    async def park(self) -> None:
        """Waits for `park_s` seconds; see `ports.ServiceBackend.park`."""
        await self._take("park", self._service.park_s)

    def kill(self) -> None:
        """Ends the order in progress; see `ports.ServiceBackend.kill`."""
        self._ended = self._ended or "the fake service was killed"
        self._killed.set()

    async def close(self) -> None:
        """Ends the order in progress; see `ports.ServiceBackend.close`."""
        self._ended = self._ended or "the fake service was closed"
        self._killed.set()

    async def _take(self, order: str, seconds: float) -> None:
        trouble = self.trouble.pop(order, "")
        if trouble == "crash":
            self._ended = self._ended or "the fake service crashed on request"
        if not self._ended and (seconds or trouble == "hang"):
            try:
                await asyncio.wait_for(self._killed.wait(), None if trouble == "hang" else seconds)
            except asyncio.TimeoutError:
                pass  # the time that the order takes is over
        if self._ended:
            raise ServiceDied(self._ended)
        if trouble == "oom":
            raise OutOfDeviceMemory("the fake device is full on request")

    def _reply(self, request: ServiceRequest, batch: int) -> tuple[ServiceReply, int]:
        try:
            fields: Any = decode_value(request.arguments) if request.arguments else {}
        except msgspec.DecodeError as error:
            return ServiceReply(error=f"arguments: not a value ({error})"), 0
        if not isinstance(fields, dict):
            return ServiceReply(error=f"arguments: a {type(fields).__name__}, not a dict"), 0
        tokens = fields.get("length", 0)
        if type(tokens) is not int or not 0 <= tokens < 1 << 31:
            return ServiceReply(error="length: must be a whole number from 0 to 2**31 - 1"), 0
        if request.method == "wrong":
            return ServiceReply(error="method: the fake refuses `wrong`"), 0
        value = {"fake": True, "method": request.method, "batch": batch}
        return ServiceReply(encode_value(value)), tokens
