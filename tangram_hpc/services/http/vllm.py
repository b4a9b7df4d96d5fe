"""vLLM's HTTP protocol: its sleep mode, and which of its paths answers which of our methods.

Experimental: `docs/ENGINES.md` says what was run against a real server.

Invariants: after `park` the server itself says that it sleeps. A request to a sleeping vLLM can end
it, so none is ever sent to one.

`/sleep`, `/wake_up`, `/is_sleeping`, `/server_info` and `/collective_rpc` exist only where the
server's environment has `VLLM_SERVER_DEV_MODE=1`. Without `--enable-sleep-mode` some versions
answer `/sleep` with 200 and free nothing, so `load` checks that option.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ...config.services import VllmService
from ...ports import OutOfDeviceMemory, ServiceDied, ServiceRefused
from .engine import ModelEngine, parking
from .engine_request import GenerateRequest, ScoreRequest
from .web import Web

REMEDY = "start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"


class VllmEngine(ModelEngine):
    """One vLLM server; see `HttpEngine`. Our methods use these paths:

    - `load`: `/health`, `/v1/models`, `/is_sleeping`, `/server_info`
    - `park`: `POST /sleep?level=1` (weights go to host memory) or `2` (weights are dropped)
    - `wake`: `POST /wake_up`; at level 2 the weights are read again from disk in between
    - `score`: `POST /classify` without activation: a reward model's number, or all classes' logits
    - `logprobs`: `POST /tokenize`, then `POST /v1/completions` with `prompt_logprobs`
    - `generate`: `POST /v1/completions`; no chat template is applied
    """

    def __init__(self, name: str, web: Web, weights_mib: int, options: VllmService) -> None:
        super().__init__(name, web, weights_mib if options.sleep_level == 1 else 0, options.model)
        self._level = options.sleep_level

    async def _load(self) -> None:
        await self._check_health()
        reply = await self._get_json("/v1/models")
        models = reply.get("data") if isinstance(reply, dict) else None
        served = [m.get("id") for m in models if isinstance(m, dict)] if isinstance(
            models, list) else []
        if self._model not in served:
            raise ServiceRefused(f"service {self._name}: model: {self._web.where} serves "
                                 f"{', '.join(map(str, served)) or 'none'}, not {self._model}")
        await self._check_sleep_mode()
        if not await self._sleeping():
            await self._park()

    async def _check_sleep_mode(self) -> None:
        if (await self._web.get("/is_sleeping")).status == 404:
            raise ServiceRefused(f"service {self._name}: url: {self._web.where} cannot be parked; "
                                 f"{REMEDY}")
        answer = await self._web.get("/server_info?config_format=json")
        config: Any = answer.json() if answer.ok else None
        for key in ("vllm_config", "model_config", "enable_sleep_mode"):
            config = config.get(key) if isinstance(config, dict) else None
        if config is False:  # an older version does not say, and gives None
            raise ServiceRefused(f"service {self._name}: url: {self._web.where} runs without sleep "
                                 f"mode and would free nothing; {REMEDY}")

    async def _park(self) -> None:
        await self._order(f"/sleep?level={self._level}")
        await self._until(sleeping=True)

    async def _wake(self) -> None:
        try:
            if self._level == 1:
                await self._order("/wake_up")
            else:
                await self._order("/wake_up?tags=weights")
                await self._order("/collective_rpc", {"method": "reload_weights"})
                await self._order("/wake_up?tags=kv_cache")
        except OutOfDeviceMemory:
            if not await self._sleeping():  # the part of the model that did fit is awake
                await parking(self._park)
            raise
        await self._until(sleeping=False)

    async def _sleeping(self) -> bool:
        reply = await self._get_json("/is_sleeping")
        found = reply.get("is_sleeping") if isinstance(reply, dict) else None
        if not isinstance(found, bool):
            raise ServiceDied(f"{self._web.where}/is_sleeping does not say whether it sleeps")
        return found

    async def _until(self, sleeping: bool) -> None:
        """Waits until the server says that it sleeps (`sleeping`) or is awake (not `sleeping`).

        Some versions answer an order before they have carried it out.
        """
        delay, remaining = 0.01, self._web.timeout_s
        while await self._sleeping() is not sleeping:
            if remaining <= 0:
                raise ServiceDied(f"{self._web.where} was told to {'sleep' if sleeping else 'wake'}"
                                  f" and did not within {self._web.timeout_s:g} s")
            await asyncio.sleep(delay)
            delay, remaining = min(2 * delay, 0.25), remaining - delay

    # ---- calls -------------------------------------------------------------------------------

    async def _score(self, call: ScoreRequest) -> list[Any]:
        # older versions call `use_activation` just `activation`
        reply = await self._post_json("/classify", self._with_model(
            {"input": call.texts, "use_activation": False, "activation": False}))
        rows = self._rows("/classify", reply, "data", len(call.texts))
        return self._scores("/classify", rows, "probs")

    async def _generate(self, call: GenerateRequest) -> list[str]:
        body = {"prompt": call.prompts, "max_tokens": call.max_new_tokens,
                "temperature": call.temperature, "n": 1}
        if call.seed is not None:
            body["seed"] = call.seed
        reply = await self._post_json("/v1/completions", self._with_model(body))
        rows = self._rows("/v1/completions", reply, "choices", len(call.prompts))
        return self._texts("/v1/completions", rows)

    async def _completion_logprobs(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> list[list[float | None]]:
        # one token is generated and thrown away: vLLM refuses to generate none
        reply = await self._post_json("/v1/completions", self._with_model(
            {"prompt": [p + c for p, c in zip(prompts, completions, strict=True)],
             "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}))
        rows = self._rows("/v1/completions", reply, "choices", len(prompts))
        return [self._last_logprobs(row.get("prompt_logprobs"), c)
                for row, c in zip(rows, completions, strict=True)]

    def _last_logprobs(self, found: Any, completion: list[int]) -> list[float | None]:
        """Returns the log-probabilities of the completion's tokens.

        Each position of the answer lists candidates by token id; the token of that position is
        always among them. The very first position lists no candidates.
        """
        try:
            last = found[len(found) - len(completion):]
            return [None if at is None else float(at[str(token)]["logprob"])
                    for at, token in zip(last, completion, strict=True)]
        except (TypeError, KeyError, ValueError, OverflowError):
            raise self._malformed("/v1/completions", "prompt_logprobs") from None

    def _rows(self, path: str, reply: Any, field: str, wanted: int) -> list[dict[str, Any]]:
        rows = reply.get(field) if isinstance(reply, dict) else None
        if not isinstance(rows, list) or len(rows) != wanted or not all(
                isinstance(row, dict) and isinstance(row.get("index"), int) for row in rows):
            raise self._malformed(path, field)
        return sorted(rows, key=lambda row: row["index"])
