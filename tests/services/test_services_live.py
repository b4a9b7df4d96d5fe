"""Services through a real broker and worker: whatever process dies, no call is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from pathlib import Path
from typing import Any

import pytest
from helpers.backend_rig import NEEDS_TORCH, tiny
from helpers.executor_rig import alive
from helpers.forked_start import Script

from tangram_hpc import ActionFailed, LocalCluster
from tangram_hpc.resources import process_tree

BENCH = Path(__file__).resolve().parents[2] / "bench" / "bench_mopd_live.py"
SERVICES = ("a", "b", "c")


def torch_marks(test: Any) -> Any:
    """As `NEEDS_TORCH` marks a parameter."""
    for mark in NEEDS_TORCH:
        test = mark(test)
    return test


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    told = subprocess.run([sys.executable, Script(BENCH), "--tiny", *words], capture_output=True,
                          text=True, timeout=280, cwd=tmp_path, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    figures: dict[str, Any] = json.loads(told.stdout)["figures"]
    assert figures["calls"] == 27 and figures["lost"] == 0
    for side in ("pooled", "static"):
        assert figures[side]["restores_per_min"] > 0
        assert 0 < figures[side]["restore_share_of_act"] < 1
        assert figures[side]["largest_batch"] >= 1
    return figures


def test_the_live_bench_runs_with_fake_services_and_reports_them_as_fake(
        tmp_path: Path) -> None:
    assert bench(tmp_path, "--backend", "fake")["backend"] == "fake"


@torch_marks
def test_the_live_bench_gives_the_same_logprobs_on_both_sides(tmp_path: Path) -> None:
    figures = bench(tmp_path, "--backend", "torch")
    assert figures["backend"] == "torch on CPU" and 0 < figures["largest_difference"] < 1e-3


def test_crashing_service_copies_lose_no_call_of_others(tmp_path: Path) -> None:
    with LocalCluster(3, devices="cpu:3", mem_mib=4096, home=tmp_path) as cluster:
        for name in SERVICES:
            cluster.register_service(name, {"backend": "fake", "wake_s": 0.002, "call_s": 0.004,
                                            "batch": 4})
        good, bad = [], []
        for n in range(120):
            name = SERVICES[n % 3]
            good.append(cluster.call(name, f"method-{n}"))
            if n % 40 == 20:
                bad.append(cluster.call(name, "crash"))
        for future in bad:
            with pytest.raises(ActionFailed, match="its service copy died"):
                future.result(60)
        for n, future in enumerate(good):
            answer = future.result(60)
            assert answer["fake"] is True and answer["method"] == f"method-{n}"
        assert max(future.result()["batch"] for future in good) > 1


def test_an_action_with_a_gpu_waits_until_the_service_there_is_parked(tmp_path: Path) -> None:
    """The scheduler counts such a service as parked, so the memory of the GPU must be free."""
    with LocalCluster(2, devices="cpu:1", mem_mib=4096, home=tmp_path) as cluster:
        cluster.register_service("a", {"backend": "fake", "wake_s": 0.002, "park_s": 0.4})
        call = cluster.call("a", "score")
        call.result(60)
        assert call.details.restore_s > 0
        began = time.monotonic()
        action = cluster.submit(["true"], gpus=1, trusted=True)
        cluster.submit(["true"], trusted=True).result(60)  # others do not wait
        beside_s = time.monotonic() - began
        action.result(60)
        assert beside_s < time.monotonic() - began >= 0.4
        call = cluster.call("a", "score")
        call.result(60)
        assert call.details.restore_s > 0
        action = cluster.submit(["true"], gpus=1, trusted=True)
        time.sleep(0.1)
        assert action.cancel()
        with pytest.raises(CancelledError):
            action.result(60)
        cluster.call("a", "score").result(60)


def runners() -> list[int]:
    """The service processes of this test."""
    found = []
    for pid in process_tree.descendants(os.getpid()):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except FileNotFoundError:
            continue
        if name == "tangram-model":
            found.append(pid)
    return found


@torch_marks
def test_killed_service_processes_lose_no_call(tmp_path: Path) -> None:
    texts = [f"text {n} of many, and no two of them are alike" for n in range(60)]
    with LocalCluster(2, devices="cpu:2", mem_mib=8192, home=tmp_path / "home") as cluster:
        for name in SERVICES:
            cluster.register_service(name, {"backend": "torch", "batch": 4,
                                            "model": str(tiny(tmp_path, "causal"))})
            cluster.call(name, "logprobs", prompts=["a"], completions=["b"]).result(120)
        before = runners()
        assert len(before) >= len(SERVICES)
        calls = [cluster.call(SERVICES[n % 3], "logprobs", prompts=["so: "], completions=[text])
                 for n, text in enumerate(texts)]
        done, _ = wait(calls, 120, FIRST_COMPLETED)
        assert done and len(done) < len(calls)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        answers = [future.result(240)[0] for future in calls]
        assert not any(map(alive, before)) and runners()
        for n, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            again = cluster.call(SERVICES[n % 3], "logprobs", prompts=["so: "],
                                 completions=[text]).result(60)[0]
            assert len(again) == len(text) and abs(again - answer).max() < 1e-3
