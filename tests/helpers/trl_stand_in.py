"""The part of TRL's `GRPOTrainer` that concerns tools, without a model and without torch.

The tool loop, the pool of environments and the scoring have the order of TRL 1.16: rollouts one
after another, synchronous tools in line, asynchronous ones of a message together, and an error is
an answer. The policy's turns are a script. The long suite drives TRL itself.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any


class GRPOTrainer:
    """Plays rollouts by a script: `turns[rollout]` is a list of messages, and each message is a
    list of pairs (tool, arguments)."""

    def __init__(self, environment_factory: Any, reward_funcs: list[Any]) -> None:
        self.factory, self.reward_funcs = environment_factory, reward_funcs
        self.pool = [environment_factory()]
        self.environments: list[Any] | None = None
        self.async_loop = asyncio.new_event_loop()
        threading.Thread(target=self.async_loop.run_forever, daemon=True).start()

    def step(self, rows: list[dict[str, Any]], turns: list[list[list[tuple[str, Any]]]]
             ) -> tuple[list[list[Any]], list[list[float | None]]]:
        """Plays one batch; returns the messages of each rollout and the rewards of each
        function."""
        while len(self.pool) < len(rows):
            self.pool.append(self.factory())
        self.environments = self.pool[:len(rows)]
        self._sync_tool_dicts, self._async_tool_dicts = [], []
        for environment in self.environments:
            names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                     if not name.startswith("_") and name not in ("reset", "get_reward")]
            tools = {name: getattr(environment, name) for name in names}
            later = {n: t for n, t in tools.items() if inspect.iscoroutinefunction(t)}
            self._async_tool_dicts.append(later)
            self._sync_tool_dicts.append({n: t for n, t in tools.items() if n not in later})
        for environment, row in zip(self.environments, rows, strict=True):
            environment.reset(**row)
        self.script = [list(each) for each in turns]
        completions = [[self._message(i)] for i in range(len(rows))]
        self._tool_call_loop(rows, [], [], completions, None, None, None)
        return completions, self._calculate_rewards(rows, rows, completions, [])

    def _message(self, rollout: int) -> dict[str, Any]:
        calls = self.script[rollout].pop(0) if self.script[rollout] else []
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if calls:
            message["tool_calls"] = [{"type": "function", "function": {
                "name": name, "arguments": arguments}} for name, arguments in calls]
        return message

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any,
                        completions: Any, logprobs: Any, images: Any, multimodal_fields: Any
                        ) -> None:
        waiting = [i for i, each in enumerate(completions) if each[0].get("tool_calls")]
        while waiting:
            for i in waiting:
                self._answer(i, completions[i])
            for i in waiting:
                completions[i].append(self._message(i))
            waiting = [i for i in waiting if completions[i][-1].get("tool_calls")]

    def _answer(self, i: int, messages: list[Any]) -> None:
        results, later = [], []
        for call in messages[-1]["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                if name in self._sync_tool_dicts[i]:
                    results.append((name, self._sync_tool_dicts[i][name](**arguments)))
                elif name in self._async_tool_dicts[i]:
                    later.append((name, self._async_tool_dicts[i][name](**arguments)))
                else:
                    raise ValueError(f"Tool {name} not found.")
            except Exception as error:  # noqa: BLE001 - as TRL does
                results.append((name, {"error": str(error)}))

        async def together() -> list[Any]:
            return await asyncio.gather(*(each for _, each in later), return_exceptions=True)

        ended = asyncio.run_coroutine_threadsafe(together(), self.async_loop).result()
        for (name, _), result in zip(later, ended, strict=True):
            failed = isinstance(result, Exception)
            results.append((name, {"error": str(result)} if failed else result))
        messages += [{"role": "tool", "name": n, "content": str(r)} for n, r in results]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any
                           ) -> list[list[float | None]]:
        columns = {name: [row[name] for row in inputs] for name in inputs[0]}

        async def score(function: Any) -> Any:
            found = function(prompts=prompts, completions=completions, completion_ids=ids,
                             environments=self.environments, trainer_state=object(), **columns)
            return await found if inspect.isawaitable(found) else found

        return [asyncio.run_coroutine_threadsafe(score(f), self.async_loop).result()
                for f in self.reward_funcs]
