"""What all engines behind HTTP have in common as adapters of `ServiceBackend`.

`HttpEngine` runs one order at a time, lets `kill` interrupt it, and interprets error answers.
`ModelEngine` adds the calls of language models. The paths and message formats of an engine are in
its own module, such as `vllm.py`.

Invariants: the engine's process belongs to its owner. `kill` and `close` end our connections and
never the process. An invalid call is answered with an error of its own. An engine counts as dead
when it no longer answers, says that it is not well, or can neither be woken nor parked. `load`,
`wake` and `park` either do what they say or raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from time import monotonic
from typing import Any, TypeVar

from ...ports import (
    OutOfDeviceMemory,
    ServiceDied,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
)
from ...protocol.value import encode_value
from .engine_request import (
    EngineRequest,
    GenerateRequest,
    InvalidCall,
    LogprobsRequest,
    ScoreRequest,
    Text,
    answer_count,
    batch_key,
    merge_requests,
    read_request,
)
from .web import HttpResponse, UnreadableAnswer, Web

# seconds for a health check, whose answer takes no computation: while a server is loaded, calls of
# others wait for the GPU
HEALTH_S = 30.0
BUSY_S = 60.0  # for how long a server that has too much to do is asked again
PAUSE_S, PAUSE_MAX_S = 1.0, 10.0  # seconds before it is asked again: by default, and at most

T = TypeVar("T")
EngineWork = Coroutine[Any, Any, T]


class HttpEngine:
    """One server as one copy of a service (serves `ports.ServiceBackend`).

    Args:
        name: The service's name, for messages.
        web: The connection to the server.
        weights_mib: Host memory that the server takes while it is parked, MiB.

    Attributes:
        health_path: The path whose GET says whether the server is well; empty if it has none.
        shares_gpu: See `ports.ServiceBackend`; an awake server takes as much of a GPU as it was
            told to.
        loads_here: See `ports.ServiceBackend`; the server's owner has loaded it.
    """

    health_path = "/health"
    shares_gpu = False
    loads_here = False

    def __init__(self, name: str, web: Web, weights_mib: int) -> None:
        self._name, self._web, self._weights_mib = name, web, weights_mib
        self._task: asyncio.Task[Any] | None = None
        self._killed = False
        self._awake = False

    async def load(self) -> int:
        """Checks the server and parks it if it was not; see `ServiceBackend.load`.

        The server must answer, be what the options say, and be able to park.
        """
        await self._until_killed(parking(self._load))
        return self._weights_mib

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """Wakes the server on its own GPUs; see `ServiceBackend.wake`.

        `gpus` is ignored, since a server does not move.
        """
        if not self._awake:
            await self._until_killed(self._wake())
            self._awake = True

    async def stand_by(self) -> None:
        """Does nothing; see `ServiceBackend.stand_by`."""

    async def park(self) -> None:
        """Parks the server if it is awake; see `ServiceBackend.park`."""
        if self._awake:
            await self._until_killed(parking(self._park))
            self._awake = False

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """Sends a batch to the awake server; see `ServiceBackend.call`."""
        # such a call could kill the engine
        assert self._awake, "a call of an engine that is parked"
        return await self._until_killed(self._call(requests))

    def kill(self) -> None:
        """Interrupts the order in progress, which raises ServiceDied, as do all later ones.

        The server lives on. It stops computing for us when it sees that nobody waits for the
        answer, and the next `load` parks it.
        """
        self._killed = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Closes our connections and leaves the server as it is."""
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

    async def _until_killed(self, work: EngineWork[T]) -> T:
        """Awaits `work`, and raises ServiceDied once the copy was killed.

        When the caller is cancelled, the work is cancelled as well.
        """
        if self._killed:
            work.close()
            raise ServiceDied(f"service {self._name} was given up")
        task = self._task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            await asyncio.wait({task})  # when this returns, the connection is closed
            self._task = None
            if not task.cancelled():
                task.exception()  # marks the exception as seen if our caller was cancelled
        if task.cancelled():
            raise ServiceDied(f"service {self._name} was given up while it worked")
        result: T = task.result()
        return result

    async def _check_health(self) -> None:
        """Raises ServiceDied unless the server says that it is well."""
        if not self.health_path:
            return
        answer = await self._web.get(self.health_path, HEALTH_S)
        if answer.status >= 500:
            raise ServiceDied(f"{self._web.where}{self.health_path} answered {answer.line()}")
        if not answer.ok:
            self._refuse(self.health_path, answer)

    async def _get_json(self, path: str) -> Any:
        """Returns the JSON answer to a GET.

        It is used while loading: a path that is missing then means that this is the wrong server.
        """
        answer = await self._web.get(path)
        if answer.status >= 500:
            raise ServiceDied(f"{self._web.where}{path} answered {answer.line()}")
        reply = answer.json() if answer.ok else None
        if reply is None:
            self._refuse(path, answer)
        return reply

    def _refuse(self, path: str, answer: HttpResponse) -> None:
        where = f"{self._web.where}{path} answered {answer.line()}"
        if answer.unauthorized:
            raise ServiceRefused(f"service {self._name}: token_env: {where}; name the environment "
                                 "variable that holds its API key")
        raise ServiceRefused(f"service {self._name}: url: {where}; this is not the server that "
                             "the service says it is")

    async def _order(self, path: str, body: Any = None) -> None:
        """Sends an order that parks or wakes the server."""
        await self._require_success(path, await self._web.post(path, body))

    async def _require_success(self, path: str, answer: HttpResponse) -> None:
        """Raises OutOfDeviceMemory or ServiceDied unless the answer reports success."""
        if answer.ok:
            return
        if answer.out_of_memory:
            await self._check_health()
            raise OutOfDeviceMemory(f"{self._web.where}{path} answered {answer.line()}")
        raise ServiceDied(f"{self._web.where}{path} answered {answer.line()}")

    async def _post_json(self, path: str, body: Any) -> Any:
        """Returns the JSON answer to a POST that computes something; raises as `_post_call`."""
        return (await self._post_call(path, body)).json()

    async def _post_call(self, path: str, body: Any) -> HttpResponse:
        """Returns the answer to a POST that computes something; its status reports success.

        Raises:
            InvalidCall: The server refused the request, and is well; or its answer cannot be read.
            OutOfDeviceMemory: The request did not fit into device memory, and the server is well.
            ServiceDied: The server is not well.
        """
        try:
            answer = await self._post_when_free(path, body)
        except UnreadableAnswer as error:
            raise InvalidCall(str(error)) from None
        if answer.ok:
            return answer
        # a 4xx may quote the call's own text, so "out of memory" in it means nothing
        if answer.status >= 500:
            await self._check_health()
            if answer.out_of_memory:
                raise OutOfDeviceMemory(f"{self._web.where}{path} answered {answer.line()}")
        raise InvalidCall(f"{self._web.where}{path} answered {answer.line()}")

    async def _post_when_free(self, path: str, body: Any) -> HttpResponse:
        """Returns the answer to a POST, which is sent again while the server says that it has too
        much to do and is well, until `BUSY_S` seconds after the first time. An answer may be slow.
        """
        until = monotonic() + BUSY_S
        while True:
            answer = await self._web.post(path, body)
            pause_s = min(answer.retry_after_s or PAUSE_S, PAUSE_MAX_S)
            if not answer.busy or monotonic() + pause_s > until:
                return answer
            if answer.status >= 500:
                await self._check_health()
            await asyncio.sleep(pause_s)


class ModelEngine(HttpEngine):
    """An engine that serves a language model.

    Calls of a batch with the same `batch_key` go as one request, which costs us least and lets the
    engine batch best. When such a request is refused, each of its calls is sent by itself, so that
    an invalid call harms no other.

    Args:
        model: the name of the model on the server; the other arguments are those of `HttpEngine`.
    """

    def __init__(self, name: str, web: Web, weights_mib: int, model: str) -> None:
        super().__init__(name, web, weights_mib)
        self._model = model

    async def _call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        replies: dict[int, ServiceReply] = {}
        groups: dict[tuple[object, ...], dict[int, EngineRequest]] = {}
        for at, request in enumerate(requests):
            try:
                call = read_request(request)
            except InvalidCall as error:
                replies[at] = ServiceReply(error=str(error))
            else:
                groups.setdefault(batch_key(call), {})[at] = call
        for found in await run_together(self._reply_to_group(group) for group in groups.values()):
            replies.update(found)
        return [replies[at] for at in range(len(requests))]

    async def _reply_to_group(self, group: dict[int, EngineRequest]) -> dict[int, ServiceReply]:
        """Returns the replies to calls with the same `batch_key`, by their places in the batch."""
        try:
            values = iter(await self._results(merge_requests(list(group.values()))))
        except InvalidCall as error:
            if len(group) == 1:
                return {at: ServiceReply(error=str(error)) for at in group}
            alone = await run_together(
                self._reply_to_group({at: call}) for at, call in group.items())
            return {at: reply for found in alone for at, reply in found.items()}
        return {at: ServiceReply(value=encode_value(list(islice(values, answer_count(call)))))
                for at, call in group.items()}

    async def _results(self, call: EngineRequest) -> list[Any]:
        if not answer_count(call):
            return []
        if isinstance(call, ScoreRequest):
            return await self._score(call)
        if isinstance(call, GenerateRequest):
            return await self._generate(call)
        return await self._logprobs(call)

    async def _score(self, call: ScoreRequest) -> list[Any]:
        raise NotImplementedError

    async def _generate(self, call: GenerateRequest) -> list[str]:
        raise NotImplementedError

    async def _completion_logprobs(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float | None]]:
        """Returns log-probabilities for completions that have at least one token each."""
        raise NotImplementedError

    async def _logprobs(self, call: LogprobsRequest) -> list[list[float | None]]:
        """Returns the log-probabilities of each completion's tokens.

        The tokenizer's special tokens are added to a prompt and not to a completion. Prompt and
        completion are tokenised apart, so that a completion's tokens never depend on its prompt. A
        trainer whose policy sampled tokens that differ from the tokenizer's must send token ids. If
        nothing precedes a first token, its log-probability is None.
        """
        texts = list(dict.fromkeys(
            [(t, True) for t in call.prompts if isinstance(t, str)]
            + [(t, False) for t in call.completions if isinstance(t, str)]))
        found = dict(zip(texts, await run_together(
            self._tokens(text, special) for text, special in texts), strict=True))

        def ids(text: Text, special: bool) -> list[int]:
            return found[(text, special)] if isinstance(text, str) else text

        pairs = [(ids(p, True), ids(c, False))
                 for p, c in zip(call.prompts, call.completions, strict=True)]
        full = [(p, c) for p, c in pairs if c]
        if not full:
            return [[] for _ in pairs]
        known = iter(await self._completion_logprobs([p for p, _ in full], [c for _, c in full]))
        return [next(known) if c else [] for _, c in pairs]

    async def _tokens(self, text: str, special: bool) -> list[int]:
        """Returns the token ids of a text. Both engines serve this path in the same way."""
        reply = await self._post_json("/tokenize", self._with_model(
            {"prompt": text, "add_special_tokens": special}))
        tokens = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise self._malformed("/tokenize", "tokens")
        return tokens

    def _with_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with the model's name added."""
        return {"model": self._model, **body}

    def _scores(self, path: str, rows: list[dict[str, Any]], field: str) -> list[Any]:
        """Returns the scores of each row, or its only score."""
        found = self._column(path, rows, field, _are_scores)
        return [scores[0] if len(scores) == 1 else scores for scores in found]

    def _texts(self, path: str, rows: list[dict[str, Any]]) -> list[str]:
        return self._column(path, rows, "text", lambda text: isinstance(text, str))

    def _column(self, path: str, rows: list[dict[str, Any]], field: str,
                fits: Callable[[Any], bool]) -> list[Any]:
        """Returns one field of each row of an answer; a value that does not fit is an error."""
        values = [row.get(field) for row in rows]
        if not all(map(fits, values)):
            raise self._malformed(path, field)
        return values

    def _malformed(self, path: str, lacks: str) -> InvalidCall:
        return InvalidCall(f"{self._web.where}{path}: its answer has no fitting {lacks!r}")


def _are_scores(found: Any) -> bool:
    """Returns whether this part of an answer is a list of numbers that is not empty."""
    return isinstance(found, list) and bool(found) and all(
        isinstance(score, int | float) for score in found)


async def parking(work: Callable[[], EngineWork[T]]) -> T:
    """Does work that parks the server. A server that answers that it is out of memory counts as
    dead, as does any other that cannot be parked: no room that others make would help it.
    """
    try:
        return await work()
    except OutOfDeviceMemory as error:
        raise ServiceDied(str(error)) from None


async def run_together(works: Iterable[EngineWork[T]]) -> list[T]:
    """Awaits all works at once; when one raises, the others are cancelled before this raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
