"""The methods of a model: `score`, `logprobs`, `generate` and `sample`, each as one padded batch.

- `score(texts)`: for each text a classifier's one logit, as a float
- `logprobs(prompts, completions)`: for each completion an array of its tokens' log-probabilities
- `generate(prompts, max_new_tokens=256, temperature=0, seed=0)`: for each prompt a str
- `sample(prompts, max_new_tokens=256, temperature=1, seed=0, min_version=0)`: as `generate`

Log-probabilities are natural logarithms, each given all tokens before it. Prompt and completion are
tokenised apart. Rows are padded on the right, where a causal model's real tokens do not see the
padding; `generate` pads on the left, because all rows are continued at the same place. This module
knows neither where the weights come from nor which call a row belongs to.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .torch_request import InvalidRequest, Reader

_LOGITS = 1 << 26  # most numbers in one slice of logits: 256 MiB as float32
_MOST = 1 << 63  # the exclusive upper bound of every number in a call
_PROBE = 8  # tokens from all over the vocabulary; one alone could be padding, without weights


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch.

    Attributes:
        tokens: The row's token ids.
        begin: Where the completion begins in `tokens`.
        new: How many tokens to generate at most.
        temperature: 0 takes the most likely token; above 0 the token is drawn.
        seed: Seeds the draws of this row.
    """

    tokens: list[int]
    begin: int = 0
    new: int = 0
    temperature: float = 0.0
    seed: int = 0


class ForwardPass:
    """The forward pass of a model for padded rows of tokens.

    Attributes:
        module: The Hugging Face model.
        tokenizer: The model's tokenizer.
        device: Where the batch is put.
        pad: The token id that fills rows up; no real token sees it, so any token would do.
        version: The version of the weights; 0 until newer ones are taken up.
    """

    def __init__(self, module: Any, tokenizer: Any, device: torch.device) -> None:
        self.module, self.tokenizer, self.device = module, tokenizer, device
        self.pad = tokenizer.pad_token_id or 0
        self.version = 0
        self._takes = set(inspect.signature(module.forward).parameters)
        self._apart: bool | None = None  # the result of `head_is_separable`; None: not tried yet
        self._causal: bool | None = None  # the result of `is_causal`; None: not tried yet

    def rows(self, rows: Sequence[list[int]], left: bool = False
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens and the mask of a batch, on the device; `left` pads on the left."""
        width = max(map(len, rows))
        blank = [width - len(row) for row in rows]
        ids = [[self.pad] * n + row if left else row + [self.pad] * n
               for row, n in zip(rows, blank, strict=True)]
        mask = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n
                for row, n in zip(rows, blank, strict=True)]
        return (torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device))

    def accepted(self, **arguments: Any) -> dict[str, Any]:
        """Returns those of the arguments that this model's `forward` accepts."""
        return {name: value for name, value in arguments.items() if name in self._takes}

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the last layer's states, without the head; rows are padded on the right."""
        return self._states(ids, self.needed(mask))

    def _states(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        states: torch.Tensor = self.module.base_model(
            input_ids=ids, attention_mask=mask, **self.accepted(use_cache=False)).last_hidden_state
        return states

    def needed(self, mask: torch.Tensor) -> torch.Tensor | None:
        """Returns the mask of rows that are padded on the right, or None where the model's results
        do not depend on it.

        Without a mask torch uses its fused causal attention where all tokens before may be seen,
        which is faster and stores no number for each pair of tokens.
        """
        return None if self.is_causal() else mask

    def is_causal(self) -> bool:
        """Returns whether no token sees those after it.

        It is tried out once, on one row: other tokens at its end must leave the states before them
        as they were, to the bit: a model that is wrongly found causal would answer wrongly, one
        that is not (as may happen with experts, whose batches change) is only slower. False where
        the states cannot be had apart from the results.
        """
        module = self.module
        if self._causal is None and (module.base_model is module or (
                module.get_output_embeddings() is None and not hasattr(module, "score"))):
            self._causal = False
        elif self._causal is None:
            words = module.get_input_embeddings().num_embeddings
            row = [words * i // _PROBE for i in range(_PROBE)]
            half = _PROBE // 2
            one, other = (self._states(self.rows([row[:half] + end])[0], None)[:, :half]
                          for end in (row[half:], row[:half]))
            self._causal = torch.equal(one, other)
        return self._causal

    def head_is_separable(self) -> bool:
        """Returns whether the head, applied to chosen states, gives the same as the whole model.

        The logits of all places of a long batch are large, and few of them are wanted. But some
        models change their logits after the head. The answer is tried out once, on a few tokens.
        """
        if self._apart is None:
            head = self.module.get_output_embeddings()
            base = self.module.base_model
            if head is None or base is self.module:
                self._apart = False
                return False
            words = self.module.get_input_embeddings().num_embeddings
            ids, mask = self.rows([[words * i // _PROBE for i in range(_PROBE)]])
            whole = self.module(input_ids=ids, attention_mask=self.needed(mask),
                                **self.accepted(use_cache=False)).logits
            self._apart = torch.equal(head(self.hidden(ids, mask)), whole)
        return self._apart


class Method(Protocol):
    """One method of a model. `read` and `run` are separate so that requests can share a batch."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None: ...

    def read(self, arguments: bytes) -> list[BatchRow]:
        """Returns the rows of one request; raises InvalidRequest if it is invalid."""
        ...

    def run(self, batch: Sequence[BatchRow]) -> list[Any]:
        """Returns the answer to each row, in the order of the rows."""
        ...


class ScoreMethod:
    """The method `score`, for reward models: classifiers with one label."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader

    def read(self, arguments: bytes) -> list[BatchRow]:
        """Reads the field `texts`; see `Method.read`."""
        rows = self._reader.sequences(self._reader.fields(arguments, ("texts",)), "texts")
        for i, row in enumerate(rows):
            self._reader.fits(f"texts[{i}]", len(row))
        return [BatchRow(row) for row in rows]

    def run(self, batch: Sequence[BatchRow]) -> list[float]:
        """Returns one logit for each row; see `Method.run`.

        The score of a decoder is taken at the place of each row's last token. The model's own code
        finds that place by a search for padding, which fails for texts that end in the padding
        token.
        """
        engine = self._engine
        ids, mask = engine.rows([each.tokens for each in batch])
        head = getattr(engine.module, "score", None)
        if isinstance(head, torch.nn.Linear):
            states = engine.hidden(ids, mask)
            last = mask.sum(1) - 1
            logits = head(states[torch.arange(len(batch), device=last.device), last])
        else:
            logits = engine.module(input_ids=ids, attention_mask=mask).logits
        scores: list[float] = logits[:, 0].double().tolist()
        return scores


class LogprobsMethod:
    """The method `logprobs`, for teachers: how likely each given token is."""

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader

    def read(self, arguments: bytes) -> list[BatchRow]:
        """Reads pairs of prompt and completion; see `Method.read`."""
        fields = self._reader.fields(arguments, ("prompts", "completions"))
        prompts = self._reader.sequences(fields, "prompts")
        completions = self._reader.sequences(fields, "completions", special=False)
        if len(prompts) != len(completions):
            raise InvalidRequest(f"completions: {len(completions)} for {len(prompts)} prompts")
        pairs = list(zip(prompts, completions, strict=True))
        for i, (prompt, completion) in enumerate(pairs):
            self._reader.fits(f"completions[{i}] with its prompt", len(prompt) + len(completion))
        return [BatchRow(prompt + completion, len(prompt)) for prompt, completion in pairs]

    def run(self, batch: Sequence[BatchRow]) -> list[Any]:
        """Returns an array of log-probabilities for each row; see `Method.run`."""
        ids, mask = self._engine.rows([each.tokens for each in batch])
        at = [(i, place) for i, each in enumerate(batch)
              for place in range(each.begin, len(each.tokens))]
        rows, places = torch.tensor(at, device=ids.device).unbind(1)
        wanted = ids[rows, places]
        found = torch.cat([_logprobs_of(logits, wanted[start : start + len(logits)])
                           for start, logits in self._logits(ids, mask, rows, places - 1)])
        counts = [len(each.tokens) - each.begin for each in batch]
        return [part.numpy() for part in found.cpu().split(counts)]

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor,
                places: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the logits at these places of these rows in slices, each with the index of its
        first place.
        """
        engine = self._engine
        if not engine.head_is_separable():
            whole = engine.module(input_ids=ids, attention_mask=engine.needed(mask),
                                  **engine.accepted(use_cache=False)).logits
            yield 0, whole[rows, places]
            return
        states = engine.hidden(ids, mask)[rows, places]
        head = engine.module.get_output_embeddings()
        step = max(1, _LOGITS // head.weight.shape[0])
        for start in range(0, len(states), step):
            yield start, head(states[start : start + step])


class GenerateMethod:
    """The method `generate`, for short answers such as a judge's.

    It takes the most likely token at temperature 0 and draws it otherwise. The draws of a row
    depend on the seed and on the row's place in its request alone, not on the other requests of the
    batch.

    Attributes:
        extra: Names of further fields that a subclass takes.
        default_temperature: The temperature of a request that names none.
    """

    extra: tuple[str, ...] = ()
    default_temperature = 0.0

    def __init__(self, engine: ForwardPass, reader: Reader) -> None:
        self._engine, self._reader = engine, reader
        own = engine.module.generation_config
        ends = own.eos_token_id if own is not None else None
        if ends is None:
            ends = engine.tokenizer.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def read(self, arguments: bytes) -> list[BatchRow]:
        """Reads prompts and sampling parameters; see `Method.read`."""
        fields = self._reader.fields(arguments, ("prompts",),
                                     ("max_new_tokens", "temperature", "seed", *self.extra))
        new, seed = fields.get("max_new_tokens", 256), fields.get("seed", 0)
        temperature = fields.get("temperature", self.default_temperature)
        if type(new) is not int or not 1 <= new < _MOST:
            raise InvalidRequest("max_new_tokens: must be a whole number from 1 to 2**63 - 1")
        seed = 0 if seed is None else seed
        if type(seed) is not int or not 0 <= seed < _MOST:
            raise InvalidRequest("seed: must be a whole number from 0 to 2**63 - 1")
        if type(temperature) not in (int, float) or not 0 <= temperature < _MOST:
            raise InvalidRequest("temperature: must be a number, at least 0 and below 2**63")
        self.read_extra(fields)
        prompts = self._reader.sequences(fields, "prompts")
        for i, prompt in enumerate(prompts):
            self._reader.fits(f"prompts[{i}] with max_new_tokens", len(prompt) + new)
        return [BatchRow(prompt, 0, new, float(temperature), (seed + i) % _MOST)
                for i, prompt in enumerate(prompts)]

    def read_extra(self, fields: dict[str, Any]) -> None:
        """Checks the fields named in `extra`; raises InvalidRequest if one is invalid."""

    def run(self, batch: Sequence[BatchRow]) -> list[Any]:
        """Returns a text for each row; see `Method.run`."""
        generated = [[token for token, _ in row] for row in self._generate(batch, False)]
        texts: list[str] = self._engine.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return texts

    def _generate(self, batch: Sequence[BatchRow], logprobs: bool) -> list[list[tuple[int, float]]]:
        """Returns the new tokens of each row, with their log-probabilities if `logprobs`, else with
        0.

        All rows take part in each step until the last of them has ended.
        """
        engine = self._engine
        ids, mask = engine.rows([each.tokens for each in batch], left=True)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        generators = [torch.Generator().manual_seed(each.seed) for each in batch]
        generated: list[list[tuple[int, float]]] = [[] for _ in batch]
        cache = None
        going = set(range(len(batch)))
        while going:
            step = engine.module(input_ids=ids, attention_mask=mask, use_cache=True,
                                 past_key_values=cache,
                                 **engine.accepted(position_ids=places, logits_to_keep=1))
            cache = step.past_key_values
            logits = step.logits[:, -1]
            likeliest = logits.argmax(-1).tolist()
            for i in sorted(going):
                temperature = batch[i].temperature
                token = likeliest[i]
                if temperature:
                    token = _draw(logits[i], temperature, generators[i])
                logprob = _log_probability(logits[i], temperature, token) if logprobs else 0.0
                generated[i].append((token, logprob))
                if token in self._ends or len(generated[i]) == batch[i].new:
                    going.discard(i)
            ids = torch.tensor([[row[-1][0]] for row in generated], device=ids.device)
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)
            places = places[:, -1:] + 1
        return generated


class Sample(GenerateMethod):
    """The method `sample`, for rollouts to be trained on.

    It returns for each prompt a dict of the new `tokens`, their `logprobs` as they were drawn, and
    the `version` of the weights. A request is refused when that version is below its `min_version`.
    """

    extra = ("min_version",)
    default_temperature = 1.0

    def read_extra(self, fields: dict[str, Any]) -> None:
        """Refuses the request when the weights are older than its `min_version`."""
        least = fields.get("min_version", 0)
        if type(least) is not int or not 0 <= least < _MOST:
            raise InvalidRequest("min_version: must be a whole number from 0 to 2**63 - 1")
        if self._engine.version < least:
            raise InvalidRequest(f"min_version: {least}, and the newest weights are of version "
                                 f"{self._engine.version}")

    def run(self, batch: Sequence[BatchRow]) -> list[Any]:
        """Returns a dict for each row; see `Method.run`."""
        return [{"tokens": np.array([token for token, _ in row], np.int64),
                 "logprobs": np.array([logprob for _, logprob in row]),
                 "version": self._engine.version} for row in self._generate(batch, True)]


METHODS: dict[str, dict[str, type[Method]]] = {
    "causal": {"logprobs": LogprobsMethod, "generate": GenerateMethod, "sample": Sample},
    "classifier": {"score": ScoreMethod},
}


def _logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each of these tokens, in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return chosen - logits.logsumexp(1)


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draws a token on the host, where a generator draws the same for every device."""
    chances = (logits.double().cpu() / temperature).softmax(0)
    return int(torch.multinomial(chances, 1, generator=generator))


def _log_probability(logits: torch.Tensor, temperature: float, token: int) -> float:
    """Returns the log-probability with which `_draw` draws a token; temperature 0 counts as 1."""
    return float((logits.double().cpu() / (temperature or 1.0)).log_softmax(0)[token])
