"""torch services on a real GPU: their answers beside those of plain torch; daemons of MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.backend_rig import on_gpu, request, tiny, value
from helpers.gpu_rig import DEVICES, NEEDS_GPU, needs_torch

from tangram_hpc.resources.gpu.mps import mps_serves
from tangram_hpc.services.processes.process import ProcessBackend

pytestmark = [*NEEDS_GPU, needs_torch]

PROMPTS = ["What is two and two?", "x", "A prompt that is a good deal longer than the others."]
COMPLETIONS = ["Four.", "yz, and then on and on for a while", "!"]
# gives the log-probabilities of the rows of a padded batch, by transformers and torch alone
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, dtype, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokens = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda().eval()
told = []
with torch.inference_mode():
    for prompt, completion in pairs:
        a, b = tokens(prompt)["input_ids"], tokens(completion)["input_ids"]
        logits = model(torch.tensor([a + b], device="cuda")).logits[0].double().log_softmax(1)
        told.append(logits[range(len(a) - 1, len(a) + len(b) - 1), b].tolist())
print(json.dumps(told))
"""


@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-4), ("bfloat16", 0.3)])
def test_logprobs_on_a_gpu_are_those_of_plain_torch(dtype: str, near: float, tmp_path: Path
                                                    ) -> None:
    folder = tiny(tmp_path, "causal", hidden=512)
    pairs = list(zip(PROMPTS, COMPLETIONS, strict=True))
    env = {**os.environ, **DEVICES.visible([DEVICES.devices[0].index])}
    told = subprocess.run([sys.executable, "-c", PLAIN, str(folder), dtype, json.dumps(pairs)],
                          env=env, capture_output=True, text=True, check=True)
    right = json.loads(told.stdout)
    assert np.ptp(np.concatenate(right)) > 5  # else anything would look right

    async def steps(copy: ProcessBackend) -> None:
        await copy.load()
        first = None
        for _ in range(3):
            await copy.wake((0,))
            [reply] = await copy.call([request("logprobs", prompts=PROMPTS,
                                               completions=COMPLETIONS)])
            for mine, true in zip(value(reply), right, strict=True):
                assert np.abs(mine - true).max() < near
            first = first or reply.value
            assert reply.value == first  # to the last bit after a park
            await copy.park()

    on_gpu(folder, tmp_path / "s", steps, dtype)


def test_texts_of_a_new_length_cost_no_more_than_others(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "causal", hidden=512, layers=8, positions=2048)
    asked = [request("logprobs", prompts=["x" * (length + 7), "y" * length],
                     completions=["z" * length] * 2) for length in range(300, 700, 17)]

    async def steps(copy: ProcessBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        await copy.call(asked[:1])  # the first call loads kernels that all of them need
        seconds: list[list[float]] = [[], []]
        for turn in seconds:
            for one in asked[1:]:
                began = time.perf_counter()
                [reply] = await copy.call([one])
                turn.append(time.perf_counter() - began)
                value(reply)
        first, again = (float(np.median(turn)) for turn in seconds)
        print(f"a new length {first * 1e3:.1f} ms, the same again {again * 1e3:.1f} ms")
        assert first < 5 * again
        await copy.park()

    on_gpu(folder, tmp_path / "s", steps, "bfloat16")


def test_a_daemon_of_mps_is_found(tmp_path: Path) -> None:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("nvidia-cuda-mps-control is not there")
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    assert not mps_serves(env)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **env}, check=True)
    try:
        assert mps_serves(env)
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True,
                       env={**os.environ, **env}, check=True)
    deadline = time.monotonic() + 10
    while mps_serves(env) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not mps_serves(env)
