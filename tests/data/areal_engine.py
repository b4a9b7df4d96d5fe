"""An inference engine for AReaL's real proxy whose policy is a script, and its tokenizer of bytes.

AReaL's proxy makes the engine by its name, and asks it for tokens. So everything but the weights of
the policy is AReaL's own: the server, the client, the workflow, and the record of a trajectory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from areal.api.io_struct import ModelRequest, ModelResponse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer, from which AReaL's proxy reads it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


class ScriptedEngine:
    """Answers the n-th turn of a conversation with the n-th text in `AREAL_SCRIPT`, a JSON list."""

    def __init__(self) -> None:
        self._script: list[str] = json.loads(os.environ["AREAL_SCRIPT"])
        self.config = SimpleNamespace(
            tokenizer_path=os.environ["AREAL_TOKENIZER"], lora_name="",
            agent=SimpleNamespace(
                tool_call_parser="qwen25", reasoning_parser="qwen3", engine_max_tokens=None,
                chat_template_type="hf", session_timeout_seconds=60,
                admin_api_key=os.environ["AREAL_KEY"]))

    def initialize(self) -> None:
        """Does nothing, as there are no weights."""

    def destroy(self) -> None:
        """Does nothing."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Returns the tokens of the next answer."""
        tokenizer: Any = request.tokenizer
        seen = tokenizer.decode(request.input_ids)
        answer = self._script[seen.count("[assistant]") - 1]
        tokens = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        return ModelResponse(input_tokens=request.input_ids, output_tokens=tokens,
                             output_logprobs=[0.0] * len(tokens),
                             output_versions=[0] * len(tokens), tokenizer=tokenizer)
