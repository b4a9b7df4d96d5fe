"""Owns: what all engines behind HTTP share as adapters of `ServiceBackend`: one thing at a time,
its end by `kill`, and what an answer with an error means. Must not know any engine's paths.

Law: the engine's process is its owner's: `kill` and `close` end our conversation with it, never the
process. A wrong call is a reply of its own; an engine has died when it no longer answers, says that
it is not well, or can be neither woken nor parked; `load`, `wake` and `park` either did what they
say or raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from ...ports import (
    OutOfDeviceMemory,
    ServiceDied,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
)
from ...protocol.value import encode_value
from .asked import (
    EngineRequest,
    GenerateRequest,
    LogprobsRequest,
    ScoreRequest,
    Text,
    WrongCall,
    alike,
    answer_count,
    joined,
    read,
)
from .web import HttpResponse, Web

T = TypeVar("T")
EngineWork = Coroutine[Any, Any, T]


class HttpEngine:
    """One server as one copy of a service (fills `ports.ServiceBackend`).

    Args:
        name: the service's, for what a person reads.
        web: the way to it.
        weights_mib: host memory that it takes parked, MiB.
    """

    health_path = "/health"

    def __init__(self, name: str, web: Web, weights_mib: int) -> None:
        self._name, self._web, self._weights_mib = name, web, weights_mib
        self._task: asyncio.Task[Any] | None = None
        self._killed = False
        self._awake = False

    async def load(self) -> int:
        """See `ServiceBackend.load`: the server must answer, be what its options say, and be able
        to park; it is parked when it was not."""
        await self._guarded(self._load())
        return self._weights_mib

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """See `ServiceBackend.wake`. It comes back to where it was: its server does not move."""
        if not self._awake:
            await self._guarded(self._wake())
            self._awake = True

    async def park(self) -> None:
        """See `ServiceBackend.park`."""
        if self._awake:
            await self._guarded(self._park())
            self._awake = False

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """See `ServiceBackend.call`."""
        assert self._awake, "a call of an engine that is parked"  # it would kill some of them
        return await self._guarded(self._call(requests))

    def kill(self) -> None:
        """Ends our conversation: what is awaited is dropped and raises ServiceDied, and whatever
        comes after does. The server lives; it stops what it computes for us when it sees that
        nobody waits for it, and the next `load` parks it."""
        self._killed = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Ends our conversation and leaves no connection; the server stays as it is."""
        self._killed = True
        await self._web.close()

    # ---- what an engine fills in -------------------------------------------------------------

    async def _load(self) -> None:
        raise NotImplementedError

    async def _wake(self) -> None:
        raise NotImplementedError

    async def _park(self) -> None:
        raise NotImplementedError

    async def _call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        raise NotImplementedError

    # ---- what they share ---------------------------------------------------------------------

    async def _guarded(self, work: EngineWork[T]) -> T:
        """Does it unless killed. A cancellation of our caller goes on as one."""
        if self._killed:
            work.close()
            raise ServiceDied(f"service {self._name} was given up")
        task = self._task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})  # its connection is closed when this returns
            self._task = None
            if not task.cancelled():
                task.exception()  # looked at, should our caller have been cancelled
        if task.cancelled():
            raise ServiceDied(f"service {self._name} was given up while it worked")
        return task.result()

    async def _alive(self) -> None:
        """Raises ServiceDied unless the server says that it is well."""
        if not self.health_path:
            return
        answer = await self._web.get(self.health_path)
        if answer.status >= 500:
            raise ServiceDied(f"{self._web.where}{self.health_path} answered {answer.line()}")
        if not answer.ok:
            self._refuse(self.health_path, answer)

    async def _known(self, path: str) -> Any:
        """What a GET of it says, as JSON, while loading."""
        answer = await self._web.get(path)
        if answer.status >= 500:
            raise ServiceDied(f"{self._web.where}{path} answered {answer.line()}")
        said = answer.json() if answer.ok else None
        if said is None:
            self._refuse(path, answer)
        return said

    def _refuse(self, path: str, answer: HttpResponse) -> None:
        where = f"{self._web.where}{path} answered {answer.line()}"
        if answer.unwelcome:
            raise ServiceRefused(f"service {self._name}: token_env: {where}; name the environment "
                                 "variable that holds its API key")
        raise ServiceRefused(f"service {self._name}: url: {where}; this is not the server that "
                             "the service says it is")

    async def _order(self, path: str, body: Any = None) -> None:
        """Posts what parks or wakes it."""
        await self._done(path, await self._web.post(path, body))

    async def _done(self, path: str, answer: HttpResponse) -> None:
        """Raises OutOfDeviceMemory or ServiceDied unless the answer says that it was done."""
        if answer.ok:
            return
        if answer.out_of_memory:
            await self._alive()
            raise OutOfDeviceMemory(f"{self._web.where}{path} answered {answer.line()}")
        raise ServiceDied(f"{self._web.where}{path} answered {answer.line()}")

    async def _answered(self, path: str, body: Any) -> Any:
        """What a POST that computes something gives, as JSON.

        Raises:
            WrongCall: the server did not like it, and lives.
            OutOfDeviceMemory: it did not fit, and the server lives.
            ServiceDied: it does not.
        """
        answer = await self._web.post(path, body)
        if answer.ok:
            return answer.json()
        # a 4xx may quote the call's own text: it says nothing of memory
        if answer.status >= 500:
            await self._alive()
            if answer.out_of_memory:
                raise OutOfDeviceMemory(f"{self._web.where}{path} answered {answer.line()}")
        raise WrongCall(f"{self._web.where}{path} answered {answer.line()}")


class ModelEngine(HttpEngine):
    """An engine that holds a model. The calls of a batch that are alike go as one request, which
    costs least here and is batched best there; when that is refused, each goes by itself, so that a
    wrong call harms no other."""

    async def _call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        replies: dict[int, ServiceReply] = {}
        groups: dict[tuple[object, ...], dict[int, EngineRequest]] = {}
        for at, request in enumerate(requests):
            try:
                asked = read(request)
            except WrongCall as error:
                replies[at] = ServiceReply(error=str(error))
            else:
                groups.setdefault(alike(asked), {})[at] = asked
        for found in await together(self._group(group) for group in groups.values()):
            replies.update(found)
        return [replies[at] for at in range(len(requests))]

    async def _group(self, group: dict[int, EngineRequest]) -> dict[int, ServiceReply]:
        """Replies to calls that are alike, by their places in the batch."""
        try:
            values = iter(await self._values(joined(list(group.values()))))
        except WrongCall as error:
            if len(group) == 1:
                return {at: ServiceReply(error=str(error)) for at in group}
            alone = await together(self._group({at: asked}) for at, asked in group.items())
            return {at: reply for found in alone for at, reply in found.items()}
        return {at: ServiceReply(value=encode_value(list(islice(values, answer_count(asked)))))
                for at, asked in group.items()}

    async def _values(self, asked: EngineRequest) -> list[Any]:
        if not answer_count(asked):
            return []
        if isinstance(asked, ScoreRequest):
            return await self._score(asked)
        if isinstance(asked, GenerateRequest):
            return await self._generate(asked)
        return await self._logprobs(asked)

    async def _score(self, asked: ScoreRequest) -> list[Any]:
        raise NotImplementedError

    async def _generate(self, asked: GenerateRequest) -> list[str]:
        raise NotImplementedError

    async def _following(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float | None]]:
        """Log-probabilities of completions of at least one token each."""
        raise NotImplementedError

    async def _logprobs(self, asked: LogprobsRequest) -> list[list[float | None]]:
        """A prompt gets the tokenizer's special tokens and a completion none; both are tokenised by
        themselves, so that a completion's tokens never depend on its prompt. Where a trainer has
        sampled other tokens than its text gives, it sends ids. A first token that nothing precedes
        has None."""
        texts = list(dict.fromkeys(
            [(t, True) for t in asked.prompts if isinstance(t, str)]
            + [(t, False) for t in asked.completions if isinstance(t, str)]))
        found = dict(zip(texts, await together(
            self._tokens(text, special) for text, special in texts), strict=True))

        def ids(text: Text, special: bool) -> list[int]:
            return found[(text, special)] if isinstance(text, str) else text

        pairs = [(ids(p, True), ids(c, False))
                 for p, c in zip(asked.prompts, asked.completions, strict=True)]
        full = [(p, c) for p, c in pairs if c]
        if not full:
            return [[] for _ in pairs]
        known = iter(await self._following([p for p, _ in full], [c for _, c in full]))
        return [next(known) if c else [] for _, c in pairs]

    async def _tokens(self, text: str, special: bool) -> list[int]:
        """The ids of a text's tokens; both engines answer this path alike."""
        said = await self._answered("/tokenize", self._named(
            {"prompt": text, "add_special_tokens": special}))
        tokens = said.get("tokens") if isinstance(said, dict) else None
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise self._odd("/tokenize", "tokens")
        return tokens

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the model's name, where the engine wants one."""
        return body

    def _odd(self, path: str, lacks: str) -> WrongCall:
        return WrongCall(f"{self._web.where}{path}: its answer has no fitting {lacks!r}")


async def together(works: Iterable[EngineWork[T]]) -> list[T]:
    """All at once; when one raises, the others are dropped first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
