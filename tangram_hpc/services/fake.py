"""Owns: the fake service - it computes nothing, takes as long as it says and fails on demand, so
that all around a service is tested without one. Must not be taken for a service: each answer says
that it is fake.

These methods are its own: `crash` ends the copy, `hang` never returns, `oom` finds no device memory
for the batch, `wrong` is a request that is wrong. `trouble` does the first three to other orders.
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
    """A copy of a fake service (fills `ports.ServiceBackend`).

    Attributes:
        trouble: order ("load", "wake", "call", "park") -> what its next one meets, of `TROUBLES`.
    """

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._killed = asyncio.Event()
        self._ended = ""
        self.trouble: dict[str, str] = {}

    async def load(self) -> int:
        """See `ports.ServiceBackend.load`; at once."""
        await self._take("load", 0.0)
        return self._service.weights_mib

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """See `ports.ServiceBackend.wake`."""
        await self._take("wake", self._service.wake_s)

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """See `ports.ServiceBackend.call`. How many tokens one is
        says the field `length` of its arguments."""
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

    async def park(self) -> None:
        """See `ports.ServiceBackend.park`."""
        await self._take("park", self._service.park_s)

    def kill(self) -> None:
        """See `ports.ServiceBackend.kill`."""
        self._ended = self._ended or "the fake service was killed"
        self._killed.set()

    async def close(self) -> None:
        """See `ports.ServiceBackend.close`."""
        self._ended = self._ended or "the fake service was closed"
        self._killed.set()

    async def _take(self, order: str, seconds: float) -> None:
        trouble = self.trouble.pop(order, "")
        if trouble == "crash":
            self._ended = self._ended or "the fake service crashed, as it was told"
        if not self._ended and (seconds or trouble == "hang"):
            try:
                await asyncio.wait_for(self._killed.wait(), None if trouble == "hang" else seconds)
            except asyncio.TimeoutError:
                pass  # it has taken as long as it says
        if self._ended:
            raise ServiceDied(self._ended)
        if trouble == "oom":
            raise OutOfDeviceMemory("the fake device is full, as it was told")

    def _reply(self, request: ServiceRequest, batch: int) -> tuple[ServiceReply, int]:
        try:
            fields: Any = decode_value(request.arguments) if request.arguments else {}
        except msgspec.DecodeError as error:
            return ServiceReply(error=f"arguments: not a value ({error})"), 0
        if not isinstance(fields, dict):
            return ServiceReply(error=f"arguments: a {type(fields).__name__}, not a dict"), 0
        tokens = fields.get("length", 0)
        if type(tokens) is not int or not 0 <= tokens < 1 << 31:
            return ServiceReply(error="length: must be a whole number from 0 on, of 31 bits"), 0
        if request.method == "wrong":
            return ServiceReply(error="method: wrong, as it was told"), 0
        value = {"fake": True, "method": request.method, "batch": batch}
        return ServiceReply(encode_value(value)), tokens
