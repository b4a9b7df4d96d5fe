"""Trains a tiny policy with TRL's GRPO, whose tools run in sandboxes, and measures the rollouts.

The machinery that runs the tools is one of five (`--mode`); policy, data, seed, durations and
verifier are the same in all of them, so that the rewards must be equal step by step:

    inside        TRL as it is; the trainer judges the candidates itself and nothing waits
    local         TRL as it is; tools are processes of the trainer, one after another
    pool          tools of all rollouts together on a thread pool with a slot for each CPU
    broker        TRL as it is; tools run in sandboxes of a broker, still one after another
    broker-all    tools of all rollouts together in sandboxes (`prefetching` of the TRL hook)

A run writes one JSON file. `summary.py` compares runs and `plots.py` draws them. Inside of a Slurm
job with a broker, `--broker job` uses that broker instead of one on this machine. With
`--checkpoints FOLDER` a run that was cut off goes on after its last whole step when it is started
again, as a requeued job does. With `--judge-steps N` the policy is first trained for N steps to
judge candidates (`judge.py`), and then, from these weights, to guess.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset, disable_progress_bars
from environments import FolderTask, InsideTask, SandboxTask, Setting, folder_reward, sandbox_score
from judge import RIGHT, SAMPLES, WRONG, balanced, labels, verdict_reward
from stopwatch import StepTimes, stopwatch
from task import rows
from tiny_model import Policy, make_policy, sampled, with_verdicts
from tool_times import ToolTimes
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from what_is_left import leftovers, usage

import tangram_hpc
from tangram_hpc import Client, LocalCluster
from tangram_hpc.hooks.process_client import use_client
from tangram_hpc.hooks.trl_tools import prefetching, release_environments, reward_function

RECORDS = "steps.json"  # in the folder of checkpoints: the records of all steps so far
# With few prompts a step, or with the learning rate of the other stage, the tiny judge soon gives
# the same verdict to all candidates of a task, and then gets no gradient any more.
JUDGE_PROMPTS, JUDGE_LR = 64, 1e-3
MODES = ("inside", "local", "pool", "broker", "broker-all")


ENVIRONMENTS: dict[str, Any] = {"inside": InsideTask, "local": FolderTask, "pool": FolderTask}


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mode", choices=MODES, default="broker-all")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--judge-steps", type=int, default=0,
                   help="steps of a first stage, in which the policy learns to judge candidates")
    p.add_argument("--generations", type=int, default=8, help="rollouts of each of the 8 tasks")
    p.add_argument("--turns", type=int, default=2, help="the most tool calls of a rollout")
    p.add_argument("--cpus", type=int, default=16, help="CPUs, virtual where the machine has less")
    p.add_argument("--tool-cpus", default="1", help="CPUs of a tool call: 2, or 1-8 in a sandbox")
    p.add_argument("--scale", type=float, default=1 / 40,
                   help="seconds here for one second of the trace of tool durations")
    p.add_argument("--serial", type=float, default=0.1,
                   help="share of a tool call that more CPUs do not shorten")
    p.add_argument("--minutes", type=float, default=0.0,
                   help="end after the first step that ends later than this; 0 for no limit")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--backend", default="", help="isolation of the sandboxes; empty for the best")
    p.add_argument("--broker", choices=("embedded", "job"), default="embedded")
    p.add_argument("--tensorboard", default="", help="a folder for TRL's own TensorBoard log")
    p.add_argument("--checkpoints", type=Path,
                   help="folder of a checkpoint for each step, from which a later start goes on")
    p.add_argument("--out", type=Path, required=True, help="the JSON file that is written")
    return p.parse_args()


def tool_cpus(text: str) -> int | tuple[int, int]:
    """Parses `--tool-cpus`: a number of CPUs such as `2`, or a range such as `1-8`."""
    least, _, most = text.partition("-")
    return (int(least), int(most)) if most else int(least)


@contextmanager
def broker(args: argparse.Namespace) -> Iterator[Client]:
    """Yields a client of the job's broker, or of an embedded broker with `--cpus` CPUs."""
    if args.broker == "job":
        with tangram_hpc.connect() as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="trl-run-home-") as home:
        os.environ["TANGRAM_HOME"] = home
        with LocalCluster(cpus=args.cpus, mem_mib=64 * 1024, home=home) as cluster:
            yield cluster


class Recorder(TrainerCallback):
    """Keeps a record of each step: reward, times, and the broker's metrics.

    Args:
        times: where the times of a step's parts are measured.
        minutes: see `--minutes`.
        file: keeps the records of a run that may be cut off; None for none.
        stage: the name of the stage of training; each stage draws other random numbers.
    """

    def __init__(self, times: StepTimes, minutes: float = 0.0, file: Path | None = None,
                 stage: str = "") -> None:
        self.steps: list[dict[str, Any]] = []
        self.began_with = ""  # the digest of the weights before the first step
        self._file, self._stage = file, stage
        self.metrics: dict[str, float] = {}
        self._times, self._began = times, 0.0
        self._until = time.monotonic() + 60 * minutes if minutes else float("inf")

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Reads the records of the steps that an earlier start has done."""
        self.began_with = weights_digest(others["model"])
        if self._file is not None and state.global_step:
            self.steps = json.loads(self._file.read_text())[:state.global_step]

    def on_save(self, *args: Any, **others: Any) -> None:
        """Writes the records; an end in the middle leaves the last ones whole."""
        if self._file is not None:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(self.steps))
            new.replace(self._file)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begins a step. Its random numbers depend on its number alone, so a run that was cut off
        draws the same ones as a run that was not."""
        # a hash, because torch uses 32 bits of a seed, and seeds in a row give similar numbers
        text = f"{args.seed}:{self._stage}{state.global_step}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ends a step; `on_log` adds its reward."""
        control.should_training_stop |= time.monotonic() > self._until
        self.steps.append({"step_s": time.perf_counter() - self._began, **self._times.take(),
                           "metrics": self.metrics})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None,
               **others: Any) -> None:
        """Adds the values that TRL logs for the last step."""
        if logs and "reward" in logs and self.steps:
            self.steps[-1] |= {"reward": logs["reward"], "calls": logs.get("tools/call_frequency"),
                               "tool_failures": logs.get("tools/failure_frequency")}


def with_metrics(score: Callable[..., Any], client: Client, recorder: Recorder
                 ) -> Callable[..., Any]:
    """Makes a reward function that also hands the broker's metrics to TRL's log.

    Args:
        score: the reward function for sandboxes.
        client: the client whose metrics are logged.
        recorder: keeps the metrics of the step.
    """
    async def reward(*args: Any, log_metric: Callable[[str, float], None], **columns: Any
                     ) -> list[float | None]:
        rewards = await score(*args, **columns)
        recorder.metrics = await asyncio.to_thread(client.metrics)
        for name, value in recorder.metrics.items():
            log_metric(name, value)
        return rewards

    return reward


def weights_digest(model: Any) -> str:
    """Returns a digest of a model's weights, by which two stages tell that they share them."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode() + values.detach().float().numpy().tobytes())
    return digest.hexdigest()


def last_whole(folder: Path | None) -> str | None:
    """Returns the last checkpoint in the folder that is whole and whose records are whole too; None
    if there is none. The end of a run may have come in the middle of either."""
    if folder is None or not (folder / RECORDS).exists():
        return None
    steps = len(json.loads((folder / RECORDS).read_text()))
    whole = [path for number in range(1, steps + 1)
             if (path := folder / f"checkpoint-{number}").joinpath("trainer_state.json").exists()]
    return str(whole[-1]) if whole else None


def settings(args: argparse.Namespace, policy: Policy, *, steps: int, prompts: int, lr: float,
             checkpoints: Path | None = None) -> GRPOConfig:
    """Returns TRL's settings; a step has `--generations` rollouts of each of its prompts."""
    return GRPOConfig(
        output_dir=str(checkpoints or tempfile.gettempdir()), save_steps=1, save_total_limit=2,
        save_strategy="steps" if checkpoints else "no", seed=args.seed, max_steps=steps,
        per_device_train_batch_size=prompts * args.generations, shuffle_dataset=False,
        num_generations=args.generations, max_completion_length=96,
        max_tool_calling_iterations=args.turns, learning_rate=lr,
        lr_scheduler_type="constant", beta=0.0, temperature=1.0,
        generation_kwargs=policy.generation_options(), logging_steps=1,
        disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to=["tensorboard"] if args.tensorboard else [])


@dataclass
class Trained:
    """What a training leaves: the records of its steps, and of its judging stage if it had one.

    Attributes:
        steps: a record for each step of the stage that generates.
        setting: the setting of the environments.
        judge: `steps` of the stage that judges, and how many candidates it had; empty without one.
        weights: the digests of the weights at the beginning of each stage and after judging.
    """

    steps: list[dict[str, Any]]
    setting: Setting
    judge: dict[str, Any]
    weights: dict[str, str]


def make_setting(args: argparse.Namespace) -> tuple[Setting, ThreadPoolExecutor | None]:
    """Returns the setting of the environments, and the threads of the mode `pool`."""
    cpus = tool_cpus(args.tool_cpus)
    python = os.path.abspath(sys.executable)  # a sandbox may lack what stands before its `..`
    setting = Setting(ToolTimes(args.seed, args.scale), python, args.serial, cpus,
                      backend=args.backend)
    if args.mode != "pool":
        return setting, None
    assert isinstance(cpus, int), "--tool-cpus: a local pool cannot change a tool's size"
    slots = max(1, args.cpus // cpus)
    setting.slots = threading.Semaphore(slots)
    return setting, ThreadPoolExecutor(slots)


def judge_first(args: argparse.Namespace, policy: Policy, score: Callable[..., Any]
                ) -> tuple[dict[str, Any], dict[str, str]]:
    """Trains the policy in place to judge candidates; returns `judge` and `weights` of `Trained`.

    Args:
        args: the command line.
        policy: the policy.
        score: the reward function of the environments, which labels the candidates.
    """
    setting, _ = make_setting(args)  # of its own, so that the other stage draws its own durations
    environments: list[Any] = []

    def make_environment() -> Any:
        environments.append(ENVIRONMENTS.get(args.mode, SandboxTask)(setting))
        return environments[-1]

    candidates = sampled(policy, args.seed, SAMPLES)
    right = labels(candidates, make_environment, score)
    release_environments(environments)
    rows_of_judge = balanced(candidates, right, args.seed)
    judge = with_verdicts(policy, (RIGHT, WRONG))
    trainer = GRPOTrainer(
        model=judge.model, processing_class=judge.tokenizer, reward_funcs=verdict_reward,
        train_dataset=Dataset.from_list(rows_of_judge),
        callbacks=[recorder := Recorder(StepTimes(), stage="judge")],
        args=settings(args, judge, steps=args.judge_steps, lr=JUDGE_LR,
                      prompts=min(JUDGE_PROMPTS, len(rows_of_judge))))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return ({"steps": recorder.steps, "candidates": len(candidates), "verified": len(right),
             "right": sum(right.values()), "rows": len(rows_of_judge)},
            {"judge_began": recorder.began_with, "judge_ended": weights_digest(judge.model)})


def train(args: argparse.Namespace, client: Client | None) -> Trained:
    """Trains in all stages of the command line."""
    setting, threads = make_setting(args)
    score = folder_reward(threads) if client is None else reward_function(sandbox_score)
    policy, folder = make_policy(args.seed), args.checkpoints
    judge, weights = judge_first(args, policy, score) if args.judge_steps else ({}, {})
    recorder = Recorder(times := StepTimes(), args.minutes, folder and folder / RECORDS)
    together = args.mode in ("pool", "broker-all")
    trainer = stopwatch(prefetching(GRPOTrainer) if together else GRPOTrainer, times)(
        model=policy.model, processing_class=policy.tokenizer,
        train_dataset=Dataset.from_list(rows()), callbacks=[recorder],
        environment_factory=lambda: ENVIRONMENTS.get(args.mode, SandboxTask)(setting),
        reward_funcs=score if client is None else with_metrics(score, client, recorder),
        args=settings(args, policy, steps=args.steps, prompts=len(rows()), lr=args.lr,
                      checkpoints=folder))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_whole(folder))
    release_environments(trainer.environments or [])  # None where all steps were done before
    return Trained(recorder.steps, setting, judge, {**weights, "began": recorder.began_with})


def main() -> None:
    """Runs one mode with one seed, and writes the file."""
    args = arguments()
    disable_progress_bars()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other
    if args.checkpoints:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
    if args.tensorboard:
        os.environ["TENSORBOARD_LOGGING_DIR"] = args.tensorboard
    began = time.perf_counter()
    if args.mode.startswith("broker"):
        with broker(args) as client:
            use_client(client)
            trained = train(args, client)
            left, held = leftovers(client), usage(client.job)
            use_client(None)
    else:
        trained = train(args, None)
        left, held = {"sandboxes": len(trained.setting.open_folders)}, {}
    steps = trained.steps
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "format": "trl-run/1",
        **{k: v for k, v in vars(args).items() if k not in ("out", "checkpoints")},
        "wall_s": time.perf_counter() - began, "steps_done": steps, "left": left, "usage": held,
        "judge": trained.judge, "weights": trained.weights,
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "versions": {p: version(p) for p in ("trl", "transformers", "torch", "tangram-hpc")},
        "torch_threads": torch.get_num_threads()}))
    if judged := trained.judge.get("steps"):
        print(f"judge seed {args.seed}: share of right verdicts {judged[0]['reward']:.3f} -> "
              f"{judged[-1]['reward']:.3f}, {trained.judge['verified']} candidates verified")
    print(f"{args.mode} seed {args.seed}: reward {steps[0]['reward']:.3f} -> "
          f"{steps[-1]['reward']:.3f}, left {left}", flush=True)


if __name__ == "__main__":
    main()
