"""The answers of the service process are right: compared with numpy in float64, alone and in
batches, before and after parking."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.backend_rig import NEEDS_TORCH, nothing_left, request, tiny, value
from helpers.reference_models import reference

from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServicePlace, ServiceRequest
from tangram_hpc.services.backend_registry import make_backend

pytestmark = NEEDS_TORCH
END = 2  # the tiny models' last token

PROMPTS = ["What is two and two?", "x", "A prompt that is a good deal longer than the others are."]
COMPLETIONS = ["Four.", "yz, and then on and on for a while", "!"]


class Served:
    """A copy that is awake."""

    def __init__(self, folder: Path, scratch: Path, task: str, dtype: str) -> None:
        spec = service_spec("it", {"backend": "torch", "model": str(folder), "task": task,
                                   "dtype": dtype})
        self.loop = asyncio.new_event_loop()
        self.copy = make_backend(spec, ServicePlace((0,), "cpu", str(scratch)))
        self.run(self.copy.load())
        self.run(self.copy.wake((0,)))

    def run(self, thing: Any) -> Any:
        return self.loop.run_until_complete(thing)

    def batch(self, *requests: ServiceRequest) -> list[Any]:
        return [value(reply) for reply in self.run(self.copy.call(requests))]

    def ask(self, method: str, **fields: Any) -> Any:
        return self.batch(request(method, **fields))[0]

    def park_and_wake(self, times: int) -> None:
        for _ in range(times):
            self.run(self.copy.park())
            self.run(self.copy.wake((0,)))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextmanager
def served(folder: Path, scratch: Path, task: str = "causal", dtype: str = "float32"
           ) -> Iterator[Served]:
    with nothing_left(scratch):
        it = Served(folder, scratch, task, dtype)
        try:
            yield it
        finally:
            it.run(it.copy.close())
            it.loop.close()


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logprobs_match_a_float64_reference(kind: str, home: Path, tmp_path: Path) -> None:
    folder = tiny(home, "causal", kind=kind)
    truth, tokens = reference(folder), tokenizer(folder)
    ids = [[tokens(text)["input_ids"] for text in texts] for texts in (PROMPTS, COMPLETIONS)]
    right = [truth.logprobs(p, c) for p, c in zip(*ids, strict=True)]
    assert np.ptp(np.concatenate(right)) > 5  # else anything would look right
    with served(folder, tmp_path / "s") as it:
        for _ in range(2):
            together = it.ask("logprobs", prompts=PROMPTS, completions=COMPLETIONS)
            by_number = it.ask("logprobs", prompts=ids[0], completions=ids[1])
            alone = [it.ask("logprobs", prompts=[p], completions=[c])[0]
                     for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
            calls = it.batch(*(request("logprobs", prompts=[p], completions=[c])
                               for p, c in zip(PROMPTS, COMPLETIONS, strict=True)))
            for i, true in enumerate(right):
                assert np.abs(together[i] - true).max() < 1e-3
                assert np.abs(together[i] - alone[i]).max() < 1e-4
                assert (by_number[i] == together[i]).all()
                assert (calls[i][0] == together[i]).all()
            it.park_and_wake(10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_scores_match_a_float64_reference(kind: str, home: Path, tmp_path: Path) -> None:
    folder = tiny(home, "classifier", kind=kind)
    truth, tokens = reference(folder), tokenizer(folder)
    ids = [tokens(text)["input_ids"] for text in PROMPTS]
    ids += [[9, 8, 7], [9, 8, 7, 0], [9, 8, 7, 0, 0]]  # 0 pads; here it is a token like others
    right = [truth.score(row) for row in ids]
    assert len({round(score, 2) for score in right}) == len(right)
    with served(folder, tmp_path / "s", "classifier") as it:
        first = it.ask("score", texts=ids)
        assert np.abs(np.array(first) - right).max() < 1e-3
        assert it.ask("score", texts=PROMPTS) == it.ask("score", texts=ids[:3])
        for row, score in zip(ids, first, strict=True):
            assert abs(it.ask("score", texts=[row])[0] - score) < 1e-4
        it.park_and_wake(10)
        assert it.ask("score", texts=ids) == first  # to the last bit


def test_greedy_generation_matches_a_float64_reference(home: Path, tmp_path: Path) -> None:
    """In float64, rounding does not change which token is likeliest."""
    folder = tiny(home, "causal", kind="llama")
    truth, tokens = reference(folder), tokenizer(folder)
    right = [tokens.decode(truth.greedy(tokens(text)["input_ids"], 12, END),
                           skip_special_tokens=True) for text in PROMPTS]
    with served(folder, tmp_path / "s", dtype="float64") as it:
        assert it.ask("generate", prompts=PROMPTS, max_new_tokens=12) == right
        short, drawn, whole = it.batch(
            request("generate", prompts=PROMPTS[:1], max_new_tokens=3),
            request("generate", prompts=PROMPTS[1:], max_new_tokens=9, temperature=2.0, seed=5),
            request("generate", prompts=PROMPTS[2:], max_new_tokens=12))
        assert whole == right[2:] and right[0].startswith(short[0].rstrip("\ufffd"))
        assert drawn == it.ask("generate", prompts=PROMPTS[1:], max_new_tokens=9, temperature=2.0,
                               seed=5)
        others = {it.ask("generate", prompts=["x"], max_new_tokens=9, temperature=2.0, seed=s)[0]
                  for s in range(5)}
        assert len(others) == 5


def test_sampled_tokens_follow_the_probabilities_of_the_model(home: Path, tmp_path: Path) -> None:
    """A token is drawn as often as the model's probability says."""
    folder = tiny(home, "causal", kind="llama")
    truth, tokens = reference(folder), tokenizer(folder)
    prompt, many = tokens("x")["input_ids"], 2000
    chances: Counter[str] = Counter()  # many a byte is no text by itself
    for token in range(len(tokens)):
        text = tokens.decode([token], skip_special_tokens=True)
        chances[text] += np.exp(truth.logprobs(prompt, [token])[0])
    with served(folder, tmp_path / "s") as it:
        told = it.ask("generate", prompts=[prompt] * many, max_new_tokens=1, temperature=1, seed=1)
    for text, chance in chances.most_common(4):
        spread = np.sqrt(chance * (1 - chance) / many)
        assert abs(told.count(text) / many - chance) < 5 * spread


def test_logprobs_are_right_for_models_that_soft_cap_their_logits(tmp_path: Path) -> None:
    """Gemma 2 soft-caps its logits, so its head cannot be used by itself."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tiny(tmp_path, "causal", hidden=32)
    config = Gemma2Config(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        final_logit_softcapping=2.0, initializer_range=0.5, pad_token_id=0)
    torch.manual_seed(3)
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    model = model.double()
    ids = [[5, 9, 80, 4], [7, 7]]
    with torch.inference_mode():
        right = [model(torch.tensor([row])).logits[0].log_softmax(1)[
            range(len(row) - 1), row[1:]].numpy() for row in ids]
    with served(folder, tmp_path / "s") as it:
        told = it.ask("logprobs", prompts=[row[:1] for row in ids],
                      completions=[row[1:] for row in ids])
    for mine, true in zip(told, right, strict=True):
        assert np.abs(mine - true).max() < 1e-3


def test_padding_is_masked_only_where_a_model_sees_what_follows(
        home: Path, tmp_path: Path) -> None:
    """BERT as a language model, not as a decoder, sees all of its row."""
    import torch
    from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel

    from tangram_hpc.services.torch.torch_methods import ForwardPass

    both_ways = tiny(tmp_path, "causal", hidden=32)
    torch.manual_seed(3)
    BertLMHeadModel(BertConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.5,
        is_decoder=False)).save_pretrained(both_ways)
    rows = [[5, 9, 80, 4, 77, 31], [7, 8]]
    for folder, causal in ((tiny(home, "causal", kind="llama"), True), (both_ways, False)):
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        engine = ForwardPass(module, tokenizer(folder), torch.device("cpu"))
        with torch.inference_mode():
            ids, mask = engine.rows(rows)
            assert engine.is_causal() is causal and (engine.needed(mask) is None) is causal
            states = engine.hidden(ids, mask)
            for i, row in enumerate(rows):
                alone = module.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
                assert (states[i, :len(row)] - alone).abs().max() < 1e-9


def test_an_encoder_classifier_gives_scores(tmp_path: Path) -> None:
    """BERT has another kind of head than decoders."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder = tiny(tmp_path, "classifier", hidden=32)
    config = BertConfig(vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.5,
                        num_labels=1)
    torch.manual_seed(3)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    ids = [[5, 9, 80, 4], [7, 7]]
    with torch.inference_mode():
        right = [model.double()(torch.tensor([row])).logits.item() for row in ids]
    with served(folder, tmp_path / "s", "classifier") as it:
        assert np.abs(np.array(it.ask("score", texts=ids)) - right).max() < 1e-3
        [reply] = it.run(it.copy.call([request("score", texts=[[5] * 65])]))
        assert "65 tokens" in reply.error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_right_and_survive_parking(
        dtype: str, home: Path, tmp_path: Path) -> None:
    """Converted weights can be parked and woken like those of the files."""
    folder = tiny(home, "causal", kind="llama")
    truth = reference(folder)
    prompt, completion = [60, 70, 80], [90, 91, 92]
    with served(folder, tmp_path / "s", dtype=dtype) as it:
        first = it.ask("logprobs", prompts=[prompt], completions=[completion])[0]
        assert np.abs(first - truth.logprobs(prompt, completion)).max() < 0.5
        it.park_and_wake(3)
        again = it.ask("logprobs", prompts=[prompt], completions=[completion])[0]
        assert (again == first).all()
