"""Makes small models with random weights, complete in every other way: config, safetensors,
tokenizer.

They are for tests and for the demo. What such a model says means nothing.
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
    """Writes a small random model into a folder and returns the folder.

    The same arguments give the same weights. Tokens are bytes, and a classifier has one label.
    Weights are drawn wide, so that answers differ clearly.

    Args:
        folder: Where to write; it is made if need be.
        task: "causal" for a language model, "classifier" for a reward model.
        seed: Seeds the weights.
        kind: The architecture.
        hidden: Width of the hidden states; a multiple of 8.
        layers: Number of layers.
        positions: Longest sequence, tokens.
        dtype: The weights' type, by torch's name.
    """
    logging.disable_progress_bar()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(positions)
    config = model_config(kind, hidden, layers, positions, len(tokenizer))
    config.num_labels = 1
    factory = (AutoModelForCausalLM if task == "causal" else AutoModelForSequenceClassification)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_config(kind: str, hidden: int, layers: int, positions: int, vocabulary: int) -> Any:
    """Returns the configuration of a model; the arguments are those of `make_tiny`."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return GPT2Config(vocab_size=vocabulary, n_positions=positions, n_embd=hidden,
                          n_layer=layers, n_head=4, initializer_range=0.2, **tokens)
    return LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
                       num_hidden_layers=layers, num_attention_heads=max(4, hidden // 128),
                       num_key_value_heads=2,
                       max_position_embeddings=positions, initializer_range=0.2,
                       tie_word_embeddings=True, **tokens)


def byte_tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte and no merges."""
    letters = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_max_length=positions)
