"""A policy small enough for a CPU, and its tokenizer; both are made here, so nothing is downloaded.

The model is a Qwen3 of two layers with random weights. In the tokenizer each whole tool call is one
token, and so is the final answer: the policy's choice of a candidate is one draw, and a policy that
knows nothing still makes valid calls. A completion of one turn is one such token, after which
generation ends.

The chat template must give the same tokens for a conversation and for its beginning, and must not
show the tools to the policy (their description is 600 tokens that a tiny model cannot read).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from task import EXPRESSIONS, call_text, rows
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import (
    add_response_schema,
    qwen3_chat_template,
    qwen3_training_chat_template,
)

END, PAD = "<|im_end|>", "<|pad|>"
DONE = "I am done."
_FRAME = ("<|im_start|>", "<tool_response>", "</tool_response>", "<think>\n\n</think>\n\n",
          "user\n", "assistant\n")
_ANSWERS = ("the tests did not run", *(f"{k} of 4 tests passed" for k in range(5)))


@dataclass(frozen=True)
class Policy:
    """A model with random weights and what belongs to it.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        choices: the tokens that the policy may write; each of them ends a turn.
    """

    model: Any
    tokenizer: Any
    choices: tuple[int, ...]

    def generation_options(self) -> dict[str, Any]:
        """Returns TRL's `generation_kwargs`, which allow no token but the choices."""
        forbidden = sorted(set(range(len(self.tokenizer))) - set(self.choices))
        return {"suppress_tokens": forbidden, "eos_token_id": list(self.choices)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single bytes with one token for each phrase that the run uses."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END, PAD])
    phrases = (*_FRAME, *_ANSWERS, DONE, *(f"task {n}" for n in range(len(EXPRESSIONS))),
               *map(call_text, EXPRESSIONS))
    raw.add_tokens([AddedToken(text, normalized=False) for text in phrases])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = qwen3_chat_template
    add_response_schema(tokenizer)  # this function knows only TRL's own templates
    tokenizer.chat_template = qwen3_training_chat_template.replace("{%- if tools %}",
                                                                   "{%- if false %}")
    return tokenizer


def make_policy(seed: int) -> Policy:
    """Returns a policy with random weights, the same for the same seed."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
    choices = [tokenizer.convert_tokens_to_ids(text)
               for text in (DONE, *map(call_text, EXPRESSIONS))]
    return Policy(model, tokenizer, tuple(choices))


def with_verdicts(policy: Policy, verdicts: Sequence[str]) -> Policy:
    """Adds a token for each verdict to a policy, in place; all other weights stay as they are.

    Returns:
        The policy whose only choices are the verdicts. It has the same model and tokenizer.
    """
    policy.tokenizer.add_tokens(list(verdicts))
    policy.model.resize_token_embeddings(len(policy.tokenizer), mean_resizing=False)
    return replace(policy, choices=tuple(policy.tokenizer.convert_tokens_to_ids([*verdicts])))


def sampled(policy: Policy, seed: int, samples: int) -> list[tuple[int, str]]:
    """Samples candidates of every task from the policy.

    Returns:
        Numbers of tasks, and expressions; `samples` of them for each task.
    """
    tokens = policy.tokenizer.convert_tokens_to_ids([*map(call_text, EXPRESSIONS)])
    options = replace(policy, choices=tuple(tokens)).generation_options()
    torch.manual_seed(seed)
    found = []
    for number, row in enumerate(rows()):
        prompt = policy.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = policy.model.generate(**prompt, do_sample=True, max_new_tokens=1,
                                        num_return_sequences=samples, **options)
        found += [(number, EXPRESSIONS[tokens.index(token)]) for token in written[:, -1].tolist()]
    return found
