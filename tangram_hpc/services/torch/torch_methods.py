"""Owns: what a model is asked - score, logprobs, generate - each as one padded batch. Must not know
where its weights come from, nor which call a row belongs to.

    score(texts)                   a classifier's one logit of each text: a list of float
    logprobs(prompts,              of each completion the log-probability of its tokens, each given
        completions)               all before it (natural logarithm): a list of float arrays
    generate(prompts,              each prompt's continuation: a list of str. Temperature 0 takes
        max_new_tokens=256,        the likeliest token, else it is drawn; a row's dice depend on the
        temperature=0, seed=0)     seed and its place in its request alone, not on its company
    sample(prompts,                as `generate`, to be trained on: of each prompt a dict of its new
        max_new_tokens=256,        `tokens`, their `logprobs` as they were drawn, and the `version`
        temperature=1, seed=0,     of the weights, which is at least `min_version` or the request
        min_version=0)             is refused

Prompt and completion are tokenised each by itself. Rows are padded on the right, where a causal
model's real tokens do not see it; `generate` pads on the left, as all rows go on at the same place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .torch_request import Reader, Wrong

_LOGITS = 1 << 26  # numbers that a slice of logits has at most: 256 MiB as float32
_MOST = 1 << 63  # below it lies every number of a call; larger ones cannot even be told
_PROBE = 8  # tokens, from all over the vocabulary: one alone may have no weights, as padding


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch: its tokens, and what of them is asked."""

    tokens: list[int]
    begin: int = 0  # of the completion
    new: int = 0  # tokens to generate
    temperature: float = 0.0
    seed: int = 0


class ForwardPass:
    """The model's forward pass for padded rows of tokens."""

    def __init__(self, module: Any, tokenizer: Any, device: torch.device) -> None:
        self.module, self.tokenizer, self.device = module, tokenizer, device
        self.pad = tokenizer.pad_token_id or 0  # masked: any token does
        self.version = 0  # of the weights, where newer ones are published
        self._takes = set(inspect.signature(module.forward).parameters)
        self._apart: bool | None = None  # the head can be used by itself

    def rows(self, rows: Sequence[list[int]], left: bool = False
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask of a batch, on the device."""
        width = max(map(len, rows))
        blank = [width - len(row) for row in rows]
        ids = [[self.pad] * n + row if left else row + [self.pad] * n
               for row, n in zip(rows, blank, strict=True)]
        mask = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n
                for row, n in zip(rows, blank, strict=True)]
        return (torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device))

    def known(self, **arguments: Any) -> dict[str, Any]:
        """Those that this model's forward takes."""
        return {name: value for name, value in arguments.items() if name in self._takes}

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The last layer's states, without the head."""
        states: torch.Tensor = self.module.base_model(
            input_ids=ids, attention_mask=mask, **self.known(use_cache=False)).last_hidden_state
        return states

    def heads_apart(self) -> bool:
        """Whether the head on chosen states gives what the whole model does: logits of all places
        of a long batch are large, and few are asked for. Some models change logits after it."""
        if self._apart is None:
            head = self.module.get_output_embeddings()
            base = self.module.base_model
            if head is None or base is self.module:
                self._apart = False
                return False
            words = self.module.get_input_embeddings().num_embeddings
            ids, mask = self.rows([[words * i // _PROBE for i in range(_PROBE)]])
            whole = self.module(input_ids=ids, attention_mask=mask,
                                **self.known(use_cache=False)).logits
            self._apart = torch.equal(head(self.hidden(ids, mask)), whole)
        return self._apart


class Method(Protocol):
    """One thing that a model is asked."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None: ...

    def read(self, arguments: bytes) -> list[BatchRow]:
        """The rows of one request. Raises Wrong."""
        ...

    def run(self, asked: Sequence[BatchRow]) -> list[Any]:
        """The answer to each row, in their order."""
        ...


class ScoreMethod:
    """A reward model's scores."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader

    def read(self, arguments: bytes) -> list[BatchRow]:
        """See `Method.read`."""
        rows = self._reader.sequences(self._reader.fields(arguments, ("texts",)), "texts")
        for i, row in enumerate(rows):
            self._reader.fits(f"texts[{i}]", len(row))
        return [BatchRow(row) for row in rows]

    def run(self, asked: Sequence[BatchRow]) -> list[float]:
        """See `Method.run`. A decoder's score is read at each row's last token by its place: its
        own way, to look for padding, is misled by texts that end in the padding token."""
        engine = self._engine
        ids, mask = engine.rows([each.tokens for each in asked])
        head = getattr(engine.module, "score", None)
        if isinstance(head, torch.nn.Linear):
            states = engine.hidden(ids, mask)
            last = mask.sum(1) - 1
            logits = head(states[torch.arange(len(asked), device=last.device), last])
        else:
            logits = engine.module(input_ids=ids, attention_mask=mask).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores


class LogprobsMethod:
    """A teacher's opinion of each token."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader

    def read(self, arguments: bytes) -> list[BatchRow]:
        """See `Method.read`."""
        fields = self._reader.fields(arguments, ("prompts", "completions"))
        prompts = self._reader.sequences(fields, "prompts")
        completions = self._reader.sequences(fields, "completions", special=False)
        if len(prompts) != len(completions):
            raise Wrong(f"completions: {len(completions)} for {len(prompts)} prompts")
        pairs = list(zip(prompts, completions, strict=True))
        for i, (prompt, completion) in enumerate(pairs):
            self._reader.fits(f"completions[{i}] with its prompt", len(prompt) + len(completion))
        return [BatchRow(prompt + completion, len(prompt)) for prompt, completion in pairs]

    def run(self, asked: Sequence[BatchRow]) -> list[Any]:
        """See `Method.run`."""
        ids, mask = self._engine.rows([each.tokens for each in asked])
        at = [(i, place) for i, each in enumerate(asked)
              for place in range(each.begin, len(each.tokens))]
        rows, places = torch.tensor(at, device=ids.device).unbind(1)
        wanted = ids[rows, places]
        told = torch.cat([_of(logits, wanted[start : start + len(logits)])
                          for start, logits in self._logits(ids, mask, rows, places - 1)])
        counts = [len(each.tokens) - each.begin for each in asked]
        return [part.numpy() for part in told.cpu().split(counts)]

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor,
                places: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits at these places of these rows, slice by slice, each with where it begins."""
        engine = self._engine
        if not engine.heads_apart():
            whole = engine.module(input_ids=ids, attention_mask=mask,
                                  **engine.known(use_cache=False)).logits
            yield 0, whole[rows, places]
            return
        states = engine.hidden(ids, mask)[rows, places]
        head = engine.module.get_output_embeddings()
        step = max(1, _LOGITS // head.weight.shape[0])
        for start in range(0, len(states), step):
            yield start, head(states[start : start + step])


class GenerateMethod:
    """Short answers, as of a judge."""

    extra: tuple[str, ...] = ()  # fields beside its own
    warmth = 0.0

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader
        own = engine.module.generation_config
        ends = own.eos_token_id if own is not None else None
        if ends is None:
            ends = engine.tokenizer.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def read(self, arguments: bytes) -> list[BatchRow]:
        """See `Method.read`."""
        fields = self._reader.fields(arguments, ("prompts",),
                                     ("max_new_tokens", "temperature", "seed", *self.extra))
        new, seed = fields.get("max_new_tokens", 256), fields.get("seed", 0)
        warmth = fields.get("temperature", self.warmth)
        if type(new) is not int or not 1 <= new < _MOST:
            raise Wrong("max_new_tokens: must be a whole number, at least 1, of 63 bits")
        seed = 0 if seed is None else seed
        if type(seed) is not int or not 0 <= seed < _MOST:
            raise Wrong("seed: must be a whole number from 0 to 2**63 - 1")
        if type(warmth) not in (int, float) or not 0 <= warmth < _MOST:
            raise Wrong("temperature: must be a number from 0 on, below 2**63")
        self.also(fields)
        prompts = self._reader.sequences(fields, "prompts")
        for i, prompt in enumerate(prompts):
            self._reader.fits(f"prompts[{i}] with max_new_tokens", len(prompt) + new)
        return [BatchRow(prompt, 0, new, float(warmth), (seed + i) % _MOST)
                for i, prompt in enumerate(prompts)]

    def also(self, fields: dict[str, Any]) -> None:
        """Reads the fields beside its own. Raises Wrong."""

    def run(self, asked: Sequence[BatchRow]) -> list[Any]:
        """See `Method.run`."""
        told = [[token for token, _ in row] for row in self._go(asked, False)]
        texts: list[str] = self._engine.tokenizer.batch_decode(told, skip_special_tokens=True)
        return texts

    def _go(self, asked: Sequence[BatchRow], opinions: bool) -> list[list[tuple[int, float]]]:
        """New tokens, each with its log-probability where those are wanted. All rows go on until
        the last has ended."""
        engine = self._engine
        ids, mask = engine.rows([each.tokens for each in asked], left=True)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        dice = [torch.Generator().manual_seed(each.seed) for each in asked]
        told: list[list[tuple[int, float]]] = [[] for _ in asked]
        cache = None
        going = set(range(len(asked)))
        while going:
            step = engine.module(input_ids=ids, attention_mask=mask, use_cache=True,
                                 past_key_values=cache,
                                 **engine.known(position_ids=places, logits_to_keep=1))
            cache = step.past_key_values
            logits = step.logits[:, -1]
            likeliest = logits.argmax(-1).tolist()
            for i in sorted(going):
                warmth = asked[i].temperature
                token = _draw(logits[i], warmth, dice[i]) if warmth else likeliest[i]
                told[i].append((token, _opinion(logits[i], warmth, token) if opinions else 0.0))
                if token in self._ends or len(told[i]) == asked[i].new:
                    going.discard(i)
            ids = torch.tensor([[row[-1][0]] for row in told], device=ids.device)
            mask = torch.cat([mask, mask.new_ones(len(asked), 1)], 1)
            places = places[:, -1:] + 1
        return told


class Sample(GenerateMethod):
    """Rollouts to be trained on: tokens, how likely each was, and which weights drew them."""

    extra = ("min_version",)
    warmth = 1.0

    def also(self, fields: dict[str, Any]) -> None:
        """See `GenerateMethod.also`."""
        least = fields.get("min_version", 0)
        if type(least) is not int or not 0 <= least < _MOST:
            raise Wrong("min_version: must be a whole number, at least 0, of 63 bits")
        if self._engine.version < least:
            raise Wrong(f"min_version: {least}, and the newest weights are of version "
                        f"{self._engine.version}")

    def run(self, asked: Sequence[BatchRow]) -> list[Any]:
        """See `Method.run`."""
        return [{"tokens": np.array([token for token, _ in row], np.int64),
                 "logprobs": np.array([opinion for _, opinion in row]),
                 "version": self._engine.version} for row in self._go(asked, True)]


METHODS: dict[str, dict[str, type[Method]]] = {
    "causal": {"logprobs": LogprobsMethod, "generate": GenerateMethod, "sample": Sample},
    "classifier": {"score": ScoreMethod},
}


def _of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each of these tokens, in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return chosen - logits.logsumexp(1)


def _draw(logits: torch.Tensor, temperature: float, dice: torch.Generator) -> int:
    """A token drawn on the host, where a generator draws alike for every device."""
    chances = (logits.double().cpu() / temperature).softmax(0)
    return int(torch.multinomial(chances, 1, generator=dice))


def _opinion(logits: torch.Tensor, temperature: float, token: int) -> float:
    """The log-probability with which `_draw` draws this token; as it is without a temperature."""
    return float((logits.double().cpu() / (temperature or 1.0)).log_softmax(0)[token])
