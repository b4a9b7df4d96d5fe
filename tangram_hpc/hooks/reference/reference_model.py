"""The policy of the reference trainer: a tiny causal language model, its parameters as one vector,
and the gradient of GRPO's clipped objective.

The training data are the answers of the service's method `sample`: tokens, and for each token its
log-probability under the weights that sampled it. A gradient is a sum over samples, so the
gradients of parts of a batch add up to the gradient of the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from .reference_task import LETTERS, SPECIAL

LONGEST = 64
CLIP = 0.2


def make_policy(folder: Path, seed: int, hidden: int = 64) -> Path:
    """Writes the untrained model and its tokenizer, for the service to load.

    Args:
        folder: the target folder; it is made if it is missing.
        seed: the seed of the random weights.
        hidden: the width of the model; a multiple of 4.

    Returns:
        The folder.
    """
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    letters = {letter: n for n, letter in enumerate((*SPECIAL, *LETTERS))}
    core = Tokenizer(models.BPE(letters, []))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>",
                            eos_token="</s>", model_max_length=LONGEST).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LONGEST, initializer_range=0.1, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


class Policy:
    """The model where it is trained: in the core trainer and in members of hybrid replicas."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._module: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            trust_remote_code=False).to(self._device).eval()
        self._params = dict(self._module.named_parameters())

    def vector(self) -> NDArray[Any]:
        """All parameters as one vector, in the model's order."""
        flat = torch.cat([p.detach().reshape(-1) for p in self._params.values()])
        return np.ascontiguousarray(flat.cpu().numpy())

    def named(self, vector: NDArray[Any]) -> dict[str, torch.Tensor]:
        """Returns the tensors that a vector of parameters consists of, by the model's names."""
        flat, at, told = torch.from_numpy(np.array(vector)), 0, {}
        for name, p in self._params.items():
            told[name] = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        return told

    def gradient(self, vector: NDArray[Any], samples: list[Any]) -> NDArray[Any]:
        """The sum over samples of the gradient of the loss.

        Args:
            vector: the parameters at which the gradient is computed.
            samples: one dict for each trajectory, with one entry for each token in `tokens`,
                `learnt` (whether the model wrote the token), `logprobs` (under the weights that
                sampled it) and `advantage`.
        """
        if not samples:
            return np.zeros_like(vector)
        with torch.no_grad():
            for name, tensor in self.named(vector).items():
                self._params[name].copy_(tensor)
        self._module.zero_grad(set_to_none=True)
        _loss(self._module, samples, self._device).backward()
        parts = [p.grad if p.grad is not None else torch.zeros_like(p)
                 for p in self._params.values()]
        flat = torch.cat([part.reshape(-1) for part in parts])
        return np.ascontiguousarray(flat.cpu().numpy())


def _loss(module: Any, samples: list[Any], device: torch.device) -> torch.Tensor:
    """Returns GRPO's clipped loss (arXiv 2402.03300), without its KL term.

    The loss is minus the sum over samples of a mean over the tokens that the model wrote. The mean
    is of min(r A, clip(r) A), where A is the token's advantage and r the ratio of its new to its
    old likelihood. Tokens that tools returned are context only.
    """
    width = max(len(sample["tokens"]) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    seen = torch.zeros(len(samples), width)
    old, learnt = torch.zeros(len(samples), width), torch.zeros(len(samples), width)
    advantage = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        size, mask = len(sample["tokens"]), torch.tensor(sample["learnt"], dtype=torch.float32)
        ids[row, :size] = torch.as_tensor(sample["tokens"])
        seen[row, :size] = 1
        learnt[row, :size] = mask / mask.sum()
        old[row, :size] = torch.as_tensor(sample["logprobs"])
        advantage[row, :size] = torch.as_tensor(sample["advantage"])
    ids, seen, old, learnt, advantage = (
        t.to(device) for t in (ids, seen, old, learnt, advantage[:, 1:]))
    logits = module(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits
    said = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio = (said - old[:, 1:]).exp()
    better = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(better * learnt[:, 1:]).sum()
