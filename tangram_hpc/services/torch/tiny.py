"""Owns: making small random models, whole in every other way: config, safetensors, tokenizer. For
tests and the demo; what such a model says means nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

_SPECIAL = ("<pad>", "<s>", "</s>")


def make_tiny(folder: str | Path, task: Literal["causal", "classifier"] = "causal", *,
              seed: int = 0, kind: Literal["llama", "gpt2"] = "llama", hidden: int = 64,
              layers: int = 2, positions: int = 512, dtype: str = "float32") -> Path:
    """Writes a model into `folder` and returns it. Same arguments, same weights. Its tokens are
    bytes; a classifier has one label. Weights are drawn wide, so that answers differ clearly."""
    logging.disable_progress_bar()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(positions)
    config = _config(kind, hidden, layers, positions, len(tokenizer))
    config.num_labels = 1
    factory = (AutoModelForCausalLM if task == "causal" else AutoModelForSequenceClassification)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _config(kind: str, hidden: int, layers: int, positions: int, vocabulary: int) -> Any:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return GPT2Config(vocab_size=vocabulary, n_positions=positions, n_embd=hidden,
                          n_layer=layers, n_head=4, initializer_range=0.2, **tokens)
    return LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
                       num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                       max_position_embeddings=positions, initializer_range=0.2,
                       tie_word_embeddings=True, **tokens)


def _tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """A token for each byte; no merges."""
    letters = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_max_length=positions)
