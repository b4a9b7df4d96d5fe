"""GPT-2's and Llama's forward pass in numpy and float64: what a served model's numbers are held
against. One sequence at a time, no padding, no cache, written from the models' definitions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reference:
    """The weights of a folder, and its config."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]

    def states(self, tokens: list[int]) -> np.ndarray:
        """The last layer's states, one row a token."""
        return (_gpt2 if self.config["model_type"] == "gpt2" else _llama)(self, tokens)

    def logprobs(self, prompt: list[int], completion: list[int]) -> np.ndarray:
        """Of each token of the completion, given all before it; the head is tied."""
        table = self.weights["transformer.wte.weight" if self.config["model_type"] == "gpt2"
                             else "model.embed_tokens.weight"]
        tokens = prompt + completion
        logits = self.states(tokens) @ table.T
        logits -= logits.max(1, keepdims=True)
        every = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return np.array([every[place - 1, tokens[place]]
                         for place in range(len(prompt), len(tokens))])

    def score(self, tokens: list[int]) -> float:
        """A classifier's one logit."""
        return float(self.states(tokens)[-1] @ self.weights["score.weight"][0])

    def greedy(self, prompt: list[int], new: int, end: int) -> list[int]:
        """The likeliest continuation, token by token."""
        table = self.weights["model.embed_tokens.weight"]
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(int((self.states(tokens)[-1] @ table.T).argmax()))
            if tokens[-1] == end:
                break
        return tokens[len(prompt):]


def reference(folder: Path) -> Reference:
    """Reads a folder without transformers."""
    from safetensors.numpy import load_file

    weights = {name: array.astype(np.float64)
               for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}
    return Reference(json.loads((folder / "config.json").read_text()), weights)


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One head; each place sees itself and what is before it."""
    chances = queries @ keys.T / np.sqrt(queries.shape[1])
    chances[np.triu_indices(len(chances), 1)] = -np.inf
    chances = np.exp(chances - chances.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True) @ values


def _gpt2(model: Reference, tokens: list[int]) -> np.ndarray:
    w = {name.removeprefix("transformer."): array for name, array in model.weights.items()}
    heads, tiny = model.config["n_head"], model.config["layer_norm_epsilon"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(1, keepdims=True)
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + tiny)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def line(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for layer in range(model.config["n_layer"]):
        of = f"h.{layer}"
        parts = line(norm(x, f"{of}.ln_1"), f"{of}.attn.c_attn")
        q, k, v = (np.split(part, heads, axis=1) for part in np.split(parts, 3, axis=1))
        x = x + line(np.hstack(list(map(_attend, q, k, v))), f"{of}.attn.c_proj")
        y = line(norm(x, f"{of}.ln_2"), f"{of}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + line(y, f"{of}.mlp.c_proj")
    return norm(x, "ln_f")


def _llama(model: Reference, tokens: list[int]) -> np.ndarray:
    w = {name.removeprefix("model."): array for name, array in model.weights.items()}
    config = model.config
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] // heads
    turns = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(len(tokens))[:, None] * turns

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] * x / np.sqrt(
            (x * x).mean(1, keepdims=True) + config["rms_norm_eps"])

    def turned(x: np.ndarray) -> np.ndarray:
        left, right = np.split(x, 2, axis=1)
        return np.hstack([left * np.cos(angles) - right * np.sin(angles),
                          right * np.cos(angles) + left * np.sin(angles)])

    x = w["embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        of = f"layers.{layer}"
        y = norm(x, f"{of}.input_layernorm")
        q, k, v = (np.split(y @ w[f"{of}.self_attn.{part}_proj.weight"].T, count, axis=1)
                   for part, count in (("q", heads), ("k", shared), ("v", shared)))
        told = [_attend(turned(q[head]), turned(k[head * shared // heads]),
                        v[head * shared // heads]) for head in range(heads)]
        x = x + np.hstack(told) @ w[f"{of}.self_attn.o_proj.weight"].T
        y = norm(x, f"{of}.post_attention_layernorm")
        gate = y @ w[f"{of}.mlp.gate_proj.weight"].T
        y = gate / (1 + np.exp(-gate)) * (y @ w[f"{of}.mlp.up_proj.weight"].T)
        x = x + y @ w[f"{of}.mlp.down_proj.weight"].T
    return norm(x, "norm")
