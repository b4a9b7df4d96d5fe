"""Makes models of many GB within seconds, for the benchmarks that move them.

Drawing billions of random numbers takes minutes. Here each model has one block of random numbers,
drawn by its seed, which is repeated until all tensors are full. The models are complete in every
other way and compute as much as trained ones, and two seeds give different answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARD = 2 << 30  # bytes of tensors in a file, at least (but in the last)
BLOCK = 1 << 24  # random numbers of a model
STD = 0.03
LAYERS = 24


def hidden_for(gigabytes: float, layers: int = LAYERS) -> int:
    """The width of a model of so many GB in bfloat16: 9 x hidden^2 parameters a layer."""
    return max(256, round((gigabytes * 1e9 / 18 / layers) ** 0.5 / 256) * 256)


def make_large(folder: Path, hidden: int, layers: int = LAYERS, seed: int = 0,
               positions: int = 8192) -> Path:
    """Writes a model in bfloat16 into a folder and returns the folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from tangram_hpc.services.torch.tiny import byte_tokenizer, model_config

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(positions)
    config = model_config("llama", hidden, layers, positions, len(tokenizer))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    module.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)).mul(STD).bfloat16()
    places: dict[str, str] = {}
    parameters = list(module.named_parameters())  # a tied head is not named a second time
    for number, shard in enumerate(_shards(parameters)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: _filled(key, shape, block) for key, shape in shard}, folder / name,
                  metadata={"format": "pt"})
        places.update({key: name for key, _ in shard})
    size = sum(parameter.numel() * 2 for _, parameter in parameters)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _shards(parameters: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    shard, size = [], 0
    for key, parameter in parameters:
        shard.append((key, parameter.shape))
        size += parameter.numel() * 2
        if size >= SHARD:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _filled(key: str, shape: Any, block: Any) -> Any:
    """Returns a tensor: ones for a norm, otherwise the block again and again, from another place of
    it for each tensor."""
    import torch

    if key.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    flat = tensor.view(-1)
    rolled = block.roll(sum(key.encode()) * 7919)
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(rolled[: len(part)])
    return tensor
