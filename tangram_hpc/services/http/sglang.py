"""SGLang's HTTP protocol: its memory saver, and which of its paths answers which of our methods.

Experimental: tested against a fake of the protocol, never run against a real SGLang server.

SGLang dies when it is told to release memory that is already released, to resume memory that is
not released, or to release while a request runs. It cannot be asked for its state. So `park` first
repeats the order to flush the cache until the server accepts it, which it does only when it is
idle. And a parked server carries a mark in its own `weight_version`: if the server restarts, mark
and parked state are lost together.

With `--enable-memory-saver` alone the weights are dropped, and a resumed server answers with
whatever the memory happens to hold. Only with `--enable-weights-cpu-backup` (0.5.3) as well are the
weights restored. The mark needs one tokenizer process (`--tokenizer-worker-num 1`, the default).
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...config.services import SglangService
from ...ports import ServiceDied, ServiceRefused
from .engine import ModelEngine
from .engine_request import GenerateRequest, InvalidCall, ScoreRequest, Text
from .web import Web

MARK = "parked by tangram_hpc; "
NEEDED = {"enable_memory_saver": "--enable-memory-saver",
          "enable_weights_cpu_backup": "--enable-weights-cpu-backup"}


class SglangEngine(ModelEngine):
    """One SGLang server; see `HttpEngine`. Our methods use these paths:

    - `load`: `/health`, `/server_info`, `/model_info`
    - `park`: `POST /flush_cache`, then `POST /release_memory_occupation` (weights, cache, graphs)
    - `wake`: `POST /resume_memory_occupation`
    - `score`: `POST /classify`; `embedding` is a reward model's number, or one for each class
    - `logprobs`: `POST /tokenize`, then `POST /generate` with `return_logprob`
    - `generate`: `POST /generate`; no chat template is applied
    """

    def __init__(self, name: str, web: Web, weights_mib: int, options: SglangService) -> None:
        super().__init__(name, web, weights_mib, options.model)
        self._version = ""  # the server's own weight_version, kept while it is parked
        self._seeds = False  # the server honours sampling seeds

    async def _load(self) -> None:
        await self._check_health()
        info = await self._either("/server_info", "/get_server_info")
        missing = [flag for field, flag in NEEDED.items() if info.get(field) is not True]
        if missing:
            raise ServiceRefused(f"service {self._name}: url: {self._web.where} cannot be parked; "
                                 f"start SGLang (0.5.3 or later) with {' and '.join(missing)}")
        if info.get("served_model_name", self._model) != self._model:
            raise ServiceRefused(f"service {self._name}: model: {self._web.where} serves "
                                 f"{info['served_model_name']}, not {self._model}")
        self._seeds = info.get("enable_deterministic_inference") is True
        version = await self._weight_version()
        if version.startswith(MARK):
            self._version = version.removeprefix(MARK)
        else:
            await self._park()

    async def _park(self) -> None:
        await self._flushed()
        self._version = await self._weight_version()
        await self._order_marked("/release_memory_occupation", MARK + self._version, self._version)

    async def _wake(self) -> None:
        await self._order_marked("/resume_memory_occupation", self._version, MARK + self._version)

    async def _order_marked(self, path: str, after: str, before: str) -> None:
        """Sets the mark, then sends the order.

        The mark comes first, because an order that we stop waiting for is carried out all the same.
        """
        await self._mark(after)
        answer = await self._web.post(path, {})
        if not answer.ok:
            await self._mark(before)
        await self._require_success(path, answer)

    async def _flushed(self) -> None:
        """Waits until the server is idle: it refuses to flush while a request is in progress.
        """
        delay, remaining = 0.01, self._web.timeout_s
        while not (answer := await self._web.post("/flush_cache")).ok:
            if answer.status != 400 or remaining <= 0:
                raise ServiceDied(f"{self._web.where}/flush_cache answered {answer.line()}")
            await asyncio.sleep(delay)
            delay, remaining = min(2 * delay, 0.25), remaining - delay

    async def _weight_version(self) -> str:
        info = await self._either("/model_info", "/get_model_info")
        version = info.get("weight_version")
        if not isinstance(version, str):
            raise ServiceRefused(f"service {self._name}: url: {self._web.where} has no "
                                 "weight_version; it must be SGLang 0.5.3 or later")
        return version

    async def _mark(self, version: str) -> None:
        await self._order("/update_weight_version",
                          {"new_version": version, "abort_all_requests": False})

    async def _either(self, path: str, older: str) -> dict[str, Any]:
        if (await self._web.get(path)).status == 404:
            path = older
        reply = await self._get_json(path)
        return reply if isinstance(reply, dict) else {}

    # ---- calls -------------------------------------------------------------------------------

    async def _score(self, call: ScoreRequest) -> list[Any]:
        rows = self._rows("/classify", await self._post_json("/classify", _input(call.texts)),
                          len(call.texts))
        return self._scores("/classify", rows, "embedding")

    async def _generate(self, call: GenerateRequest) -> list[str]:
        sampling: dict[str, Any] = {"max_new_tokens": call.max_new_tokens,
                                    "temperature": call.temperature}
        if call.seed is not None and call.temperature:
            if not self._seeds:
                raise InvalidCall("generate: seed: this server ignores it; start SGLang with "
                                  "--enable-deterministic-inference, or leave it out")
            sampling["sampling_seed"] = call.seed
        reply = await self._post_json("/generate",
                                      {**_input(call.prompts), "sampling_params": sampling})
        return self._texts("/generate", self._rows("/generate", reply, len(call.prompts)))

    async def _completion_logprobs(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float | None]]:
        # The first position in the answer has no log-probability, so the answer begins one token
        # before the completion. The tokens before that may come from the cache.
        reply = await self._post_json("/generate", {
            "input_ids": [p + c for p, c in zip(prompts, completions, strict=True)],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True,
            "logprob_start_len": [max(0, len(p) - 1) for p in prompts]})
        rows = self._rows("/generate", reply, len(prompts))
        return [self._last_logprobs(row.get("meta_info"), c)
                for row, c in zip(rows, completions, strict=True)]

    def _last_logprobs(self, info: Any, completion: list[int]) -> list[float | None]:
        """Returns the log-probabilities of the completion's tokens.

        Each position of the answer is [log-probability, token id, text].
        """
        try:
            found = info["input_token_logprobs"]
            last = found[len(found) - len(completion):]
            if [at[1] for at in last] != completion:
                raise ValueError
            return [None if at[0] is None else float(at[0]) for at in last]
        except (TypeError, KeyError, ValueError, IndexError, OverflowError):
            raise self._malformed("/generate", "input_token_logprobs") from None

    def _rows(self, path: str, reply: Any, wanted: int) -> list[dict[str, Any]]:
        if not isinstance(reply, list) or len(reply) != wanted or not all(
                isinstance(row, dict) for row in reply):
            raise self._malformed(path, "list")
        return reply


def _input(texts: list[Text]) -> dict[str, Any]:
    return {"text" if isinstance(texts[0], str) else "input_ids": texts}
