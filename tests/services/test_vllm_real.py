"""A real vLLM server as a service: its answers, its sleep, its death. It is started by the tests,
from small models that they make, and needs a GPU that nothing else uses meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.backend_rig import on_gpu, request, tiny, value
from helpers.engine_rig import PLACE, one_line
from helpers.gpu_rig import NEEDS_GPU, needs_torch, used_mib
from helpers.vllm_server import LENGTH, VllmServer, end, needs_vllm, vllm_servers

from tangram_hpc import LocalCluster
from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServiceBackend, ServiceDied, ServiceReply
from tangram_hpc.services.http.engines import make_engine
from tangram_hpc.services.processes.process import ProcessBackend

pytestmark = [*NEEDS_GPU, needs_torch, needs_vllm]

PROMPTS = ["What is two and two?", "x", "A prompt that is a good deal longer than the others."]
COMPLETIONS = ["Four.", "yz, and then on and on for a while", "!"]
NEAR = 0.05  # of log-probabilities in float32: kernels of vLLM multiply in TF32
WITHIN_S = 120.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A language model and a reward model."""
    home = tmp_path_factory.mktemp("models")
    return (tiny(home, "causal", hidden=1024, layers=8, positions=LENGTH),
            tiny(home, "classifier", hidden=256, positions=LENGTH))


@pytest.fixture(scope="module")
def servers(models: tuple[Path, Path]) -> Iterator[list[VllmServer]]:
    """Servers of both models."""
    causal, reward = models
    with vllm_servers((causal, ()), (reward, ("--runner", "pooling"))) as found:
        yield found


def engine(server: VllmServer, **more: Any) -> ServiceBackend:
    return make_engine(service_spec("judge", {
        "backend": "vllm", "url": server.url, "model": server.model, "timeout_s": 60, **more}),
        PLACE)


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), WITHIN_S)

    return asyncio.run(bounded())


def logprobs_of(model: Path, scratch: Path) -> list[Any]:
    """The answers of our own runner, in float32."""
    found: list[Any] = []

    async def steps(copy: ProcessBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        [reply] = await copy.call([request("logprobs", prompts=PROMPTS, completions=COMPLETIONS)])
        found.extend(value(reply))
        await copy.park()

    on_gpu(model, scratch, steps, "float32")
    return found


def scores_of(model: Path, texts: list[str]) -> list[float]:
    """The logits of plain torch, on the CPU."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)
    module = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [float(module(torch.tensor([tokens(text)["input_ids"]])).logits[0, 0])
                for text in texts]


def near(reply: ServiceReply, right: list[Any]) -> bool:
    return all(np.abs(np.array(mine) - true).max() < NEAR
               for mine, true in zip(value(reply), right, strict=True))


@pytest.mark.parametrize("level", [1, 2])
def test_answers_of_vllm_are_right_after_every_sleep(
        level: int, models: tuple[Path, Path], servers: list[VllmServer], tmp_path: Path) -> None:
    right = logprobs_of(models[0], tmp_path)
    assert np.ptp(np.concatenate(right)) > 5  # else anything would look right
    copy = engine(servers[0], sleep_level=level)
    ask = request("logprobs", prompts=PROMPTS, completions=COMPLETIONS)
    say = request("generate", prompts=PROMPTS, max_new_tokens=12)
    draw = request("generate", prompts=PROMPTS, max_new_tokens=12, temperature=1.0, seed=7)
    seconds: dict[str, list[float]] = {"wake": [], "park": []}
    memory: dict[str, list[int]] = {"wake": [], "park": []}

    async def life() -> None:
        await copy.load()
        said: list[Any] = []
        for _ in range(3):
            for name, order in (("wake", copy.wake((0,))), ("park", copy.park())):
                began = time.perf_counter()
                await order
                seconds[name].append(round(time.perf_counter() - began, 4))
                memory[name].append(used_mib())
                if name == "wake":
                    asked, told = await copy.call([ask, say])
                    [drawn] = await copy.call([draw])
                    assert near(asked, right)
                    said.append([value(told), value(drawn)])
        assert said[0] == said[1] == said[2] and len(said[0][0]) == len(PROMPTS)
        await copy.close()

    run(life)
    print(json.dumps({"vllm_sleep_level": level, "seconds": seconds, "memory_mib": memory}))
    assert min(memory["wake"]) - max(memory["park"]) > 1024  # weights and KV cache


def test_a_reward_model_of_vllm_gives_its_logits(
        models: tuple[Path, Path], servers: list[VllmServer]) -> None:
    copy = engine(servers[1])

    async def life() -> list[Any]:
        await copy.load()
        await copy.wake((0,))
        [reply] = await copy.call([request("score", texts=PROMPTS)])
        await copy.park()
        await copy.close()
        found: list[Any] = value(reply)
        return found

    right = scores_of(models[1], PROMPTS)
    assert np.ptp(right) > 0.1
    assert np.abs(np.array(run(life)) - right).max() < NEAR * max(1.0, np.abs(right).max())


def test_a_wrong_call_of_vllm_fails_alone_and_says_why(servers: list[VllmServer]) -> None:
    copy = engine(servers[0])

    async def life() -> None:
        await copy.load()
        await copy.wake((0,))
        good = request("logprobs", prompts=["a"], completions=["b"])
        long = request("logprobs", prompts=["a" * 2 * LENGTH], completions=["b"])
        one, wrong, other = await copy.call([good, long, good])
        assert value(one) == value(other)
        assert one_line(wrong.error) and str(LENGTH) in wrong.error
        await copy.park()
        await copy.close()

    run(life)


def test_vllm_and_a_torch_service_take_turns_on_a_gpu(
        models: tuple[Path, Path], servers: list[VllmServer], tmp_path: Path) -> None:
    texts = [f"text {n} of many, and no two of them are alike" for n in range(24)]
    with LocalCluster(2, mem_mib=16384, home=tmp_path / "home") as cluster:
        cluster.register_service("engine", {"backend": "vllm", "url": servers[0].url,
                                            "model": servers[0].model, "batch": 4})
        cluster.register_service("runner", {"backend": "torch", "model": str(models[0]),
                                            "batch": 4})
        calls = [(text, [cluster.call(name, "logprobs", prompts=["so: "], completions=[text])
                         for name in ("engine", "runner")]) for text in texts]
        restores = 0
        for text, both in calls:
            one, other = (np.array(call.result(WITHIN_S)[0]) for call in both)
            assert len(one) == len(text) and np.abs(one - other).max() < NEAR
            restores += both[0].details.restore_s > 0
        assert restores >= 1


def test_a_vllm_that_is_killed_in_a_call_is_dead(servers: list[VllmServer]) -> None:
    copy = engine(servers[0], timeout_s=10)

    async def life() -> None:
        await copy.load()
        await copy.wake((0,))
        ask = request("generate", prompts=["x"] * 64, max_new_tokens=LENGTH - 16)
        task = asyncio.ensure_future(copy.call([ask]))
        await asyncio.sleep(0.5)
        end(servers[0])
        with pytest.raises(ServiceDied) as died:
            await task
        assert one_line(str(died.value))
        await copy.close()

    run(life)
