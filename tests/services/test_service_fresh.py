"""Newer weights of a served model: every copy takes them up between batches, resident or parked,
and rollouts say which weights generated them."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from helpers.backend_rig import NEEDS_TORCH, request, tiny, value

from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServiceBackend, ServicePlace
from tangram_hpc.services.backend_registry import make_backend

pytestmark = NEEDS_TORCH
if all(find_spec(name) for name in ("torch", "safetensors")):
    from tangram_hpc.services.torch import torch_fresh


def backend(home: Path, fresh: Path) -> ServiceBackend:
    spec = service_spec("it", {"backend": "torch", "model": str(tiny(home, "causal")),
                               "fresh": str(fresh), "threads": 1})
    assert spec.shares == ""  # its weights are its own
    return make_backend(spec, ServicePlace((0,), "cpu", str(home / "scratch")))


def sample(**more: Any) -> Any:
    fields = {"prompts": ["a", "bc"], "max_new_tokens": 6, "seed": 3}
    return request("sample", **fields | more)


def weights(home: Path, scale: float) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(tiny(home, "causal").glob("*.safetensors"))
    return {name: scale * t for file in files for name, t in load_file(file).items()}


def test_each_batch_runs_on_the_newest_weights(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"

    async def life() -> None:
        copy = backend(tmp_path, fresh)
        await copy.load()
        await copy.wake((0,))
        first = value((await copy.call([sample()]))[0])
        again = value((await copy.call([sample()]))[0])
        assert [row["version"] for row in first] == [0, 0]
        for one, other in zip(first, again, strict=True):
            assert (one["tokens"] == other["tokens"]).all() and len(one["tokens"]) <= 6
            assert (one["logprobs"] == other["logprobs"]).all() and (one["logprobs"] <= 0).all()
        asked = request("logprobs", prompts=["a"], completions=["bcd"])
        before = value((await copy.call([asked]))[0])[0]

        torch_fresh.publish(fresh, 7, weights(tmp_path, 0.5))
        after = value((await copy.call([sample(min_version=7)]))[0])
        assert [row["version"] for row in after] == [7, 7]
        changed = value((await copy.call([asked]))[0])[0]
        assert np.abs(changed - before).max() > 1e-3

        await copy.park()  # what was taken up stays, and what comes meanwhile is taken up too
        await copy.wake((0,))
        assert (value((await copy.call([asked]))[0])[0] == changed).all()
        await copy.park()
        torch_fresh.publish(fresh, 8, weights(tmp_path, 1.0))
        await copy.wake((0,))
        assert (value((await copy.call([asked]))[0])[0] == before).all()  # the first weights again
        refused = (await copy.call([sample(min_version=9), asked]))
        assert refused[0].error == "min_version: 9, and the newest weights are of version 8"
        assert not refused[1].error
        await copy.close()

        late = backend(tmp_path, fresh)  # a copy that is loaded later comes up to date by itself
        await late.load()
        await late.wake((0,))
        assert value((await late.call([sample(min_version=8)]))[0])[0]["version"] == 8
        torch_fresh.publish(fresh, 9, {"no.such": weights(tmp_path, 1.0)["model.norm.weight"]})
        wrong = (await late.call([asked]))[0].error
        assert "version 9" in wrong and "no.such" in wrong
        await late.close()

    asyncio.run(life())


def test_sampled_logprobs_equal_those_of_a_logprobs_call(tmp_path: Path) -> None:
    async def life() -> None:
        copy = backend(tmp_path, tmp_path / "none")
        await copy.load()
        await copy.wake((0,))
        rows = value((await copy.call([sample(prompts=[[5, 6, 7]] * 4)]))[0])
        told = value((await copy.call([request(
            "logprobs", prompts=[[5, 6, 7]] * 4,
            completions=[[int(t) for t in row["tokens"]] for row in rows])]))[0])
        for row, right in zip(rows, told, strict=True):
            assert np.abs(row["logprobs"] - right).max() < 1e-3
        assert len({tuple(row["tokens"].tolist()) for row in rows}) > 1  # each by its own dice
        await copy.close()

    asyncio.run(life())


def test_published_weights_are_complete_or_absent(tmp_path: Path) -> None:
    some = weights(tmp_path, 1.0)
    assert torch_fresh.newest(tmp_path / "fresh", -1) is None
    for version in range(1, 8):
        torch_fresh.publish(tmp_path / "fresh", version, some)
    found = torch_fresh.newest(tmp_path / "fresh", 6)
    assert found is not None and found[0] == 7 and set(found[1]) == set(some)
    assert torch_fresh.newest(tmp_path / "fresh", 7) is None
    left = sorted(path.name for path in (tmp_path / "fresh").iterdir())
    assert left == ["CURRENT", *(f"weights-{n}.safetensors" for n in (5, 6, 7))]


def test_two_earlier_versions_stay_whatever_their_numbers(tmp_path: Path) -> None:
    """A trainer numbers them by its steps. Where storage is shared, a reader may see an earlier
    number for some seconds."""
    import torch

    for step in (10, 20, 30, 40, 45):
        torch_fresh.publish(tmp_path, step, {"w": torch.full((2,), float(step))})
    assert {path.name for path in tmp_path.iterdir()} == {
        torch_fresh.CURRENT, *(f"weights-{n}.safetensors" for n in (30, 40, 45))}
    (tmp_path / torch_fresh.CURRENT).write_text("40")
    found = torch_fresh.newest(tmp_path, 30)
    assert found is not None and found[0] == 40


def test_a_trainer_that_went_back_to_a_checkpoint_publishes_below_the_versions_it_left(
        tmp_path: Path) -> None:
    """They were taken for newer ones, and the version was removed as soon as it was published."""
    import torch

    for step in (40, 50, 60, 10, 20):
        torch_fresh.publish(tmp_path, step, {"w": torch.full((2,), float(step))})
        found = torch_fresh.newest(tmp_path, -1)  # as a copy that is loaded now
        assert found is not None and found[0] == step and float(found[1]["w"][0]) == step
