"""The commands of docs/trainers/FIRST_STEP.md, read from the page and run as they are printed.

Each block begins with an empty virtual environment and ends with a reward that came through the
broker. What the page leaves to the reader is filled in: the checkout, a task, and a model, which is
mini-swe-agent's own deterministic one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.documented import REPO, Block, blocks, filled
from helpers.harbor_tasks import PROGRAMS, write_task
from helpers.hostile_rig import reason_to_skip
from helpers.other_python import copy_checkout, find_python
from helpers.repair_task import repair_task
from helpers.root_folder_rig import PROGRAMS as BASIC
from helpers.root_folder_rig import make_image

PAGE = REPO / "docs/trainers/FIRST_STEP.md"
LIMIT_S = 2400
# what mini-swe-agent's deterministic model says to repair the repository
REPAIR = ("sed -i 's/(len(numbers) - 1)/len(numbers)/' stats.py",
          "git diff -- stats.py >/tmp/patch.txt",
          "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat /tmp/patch.txt")
installs = [pytest.mark.long, pytest.mark.timeout(LIMIT_S + 300)]


def block_of(trainer: str) -> Block:
    """The block below the heading of a trainer."""
    lines = PAGE.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(f"## {trainer}:"))
    return next(block for block in blocks(PAGE) if block.line > at)


def commands(text: str) -> int:
    """How many commands a reader types: lines, without those that go on a line or an input."""
    count, end, goes_on = 0, "", False
    for line in text.splitlines():
        if end:
            end = "" if line == end else end
            continue
        count += not goes_on
        goes_on = line.endswith("\\")
        if begun := re.search(r"<<'(\w+)'", line):
            end = begun[1]
    return count


def test_each_heading_tells_how_many_commands_its_block_has() -> None:
    told = re.findall(r"^## (.+): (\d+) commands$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in told] == ["verl", "TRL", "Harbor", "mini-swe-agent"]
    assert {name: commands(block_of(name).text) for name, _ in told} == {
        name: int(count) for name, count in told}


def executable(at_least: tuple[int, int]) -> str:
    """The interpreter itself, and not a program that chooses one by the home folder."""
    told = subprocess.run(
        [find_python(at_least), "-c", "import os, sys; print(os.path.realpath(sys.executable))"],
        check=True, capture_output=True, text=True)
    return told.stdout.strip()


def run(trainer: str, folder: Path, **words: str) -> str:
    """Runs the block of a trainer in a folder that is also its home; returns what it printed."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(executable((3, 11)))
    if "python3.12" in block_of(trainer).text:
        (programs / "python3.12").symlink_to(executable((3, 12)))
    copy_checkout(folder / "checkout")
    text = filled(block_of(trainer).text, {"CHECKOUT": str(folder / "checkout"), **words})
    plain = {k: v for k, v in os.environ.items()
             if not k.startswith(("TANGRAM_", "SLURM_", "PYTHON", "VIRTUAL_ENV"))}
    with open(folder / "printed", "w+", encoding="utf-8") as printed:
        # a session of its own, because a block that fails leaves its broker and its worker running
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            env={**plain, "HOME": str(folder), "COLUMNS": "200", "TERM": "dumb",
                 "PIP_NO_COMPILE": "1",  # what is imported is compiled then
                 "PATH": f"{programs}:{plain['PATH']}"})
        try:
            status = shell.wait(LIMIT_S)
            left = not status and not ended(shell.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            for environment in folder.glob("first-*/"):  # some have gigabytes
                shutil.rmtree(environment)
        printed.seek(0)
        told = printed.read()
    assert status == 0 and not left, told[-6000:]
    return told


def ended(group: int) -> bool:
    """Waits until no process of a group is left; returns False if some stay."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def actions(folder: Path, job: str) -> list[str]:
    """The names and states of a job's actions, as its accounting tells them after its end."""
    told = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "acct", "-j", job, "-nP", "-o", "JobName,State"],
        env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, check=True)
    return told.stdout.split("\n")[:-1]


class TestEachBlock:
    """Each test installs a trainer; what follows its install takes less than a minute."""

    pytestmark = installs

    def test_verl(self, tmp_path: Path) -> None:
        assert "{'test_score/apps': np.float64(0.375)}" in run("verl", tmp_path)
        assert len(actions(tmp_path, "first-verl")) == 8  # two cases of each of four answers

    def test_trl(self, tmp_path: Path) -> None:
        told = run("TRL", tmp_path)
        done = json.loads((tmp_path / "first.json").read_text())
        assert len(done["steps_done"]) == 2 and not any(done["left"].values())
        assert all(step["tool_failures"] == 0 < step["calls"] for step in done["steps_done"])
        first, second = (step["reward"] for step in done["steps_done"])
        assert first > 0  # no candidate passes where the verifier cannot run
        assert f"reward {first:.3f} -> {second:.3f}, left {done['left']}\n" in told, told[-3000:]

    def test_harbor(self, tmp_path: Path) -> None:
        if why := reason_to_skip("bwrap"):
            pytest.skip(why)
        image = make_image(tmp_path / "root", (*BASIC, *PROGRAMS))
        task = write_task(tmp_path / "tasks", "dockerfile", str(image))
        told = run("Harbor", tmp_path, TASK=str(task))
        assert re.search(r"Mean\W+1\.0", told), told[-3000:]
        assert "dockerfile|COMPLETED" in actions(tmp_path, "first-harbor")

    def test_mini_swe_agent(self, tmp_path: Path) -> None:
        if why := reason_to_skip("bwrap"):
            pytest.skip(why)
        instance = repair_task(tmp_path)
        (tmp_path / "data").mkdir()
        (tmp_path / "data/test.jsonl").write_text(json.dumps(instance) + "\n")
        (tmp_path / "model.yaml").write_text(json.dumps({"model": {"outputs": [
            {"role": "assistant", "content": line,
             "extra": {"actions": [{"command": line}], "cost": 0.0, "timestamp": 0}}
            for line in REPAIR]}}))
        told = run("mini-swe-agent", tmp_path, DATA=str(tmp_path / "data"),
                   MODEL="deterministic --model-class deterministic -c swebench.yaml "
                         f"-c {tmp_path / 'model.yaml'}")
        assert f"{instance['instance_id']} 1.0" in told, told[-3000:]
        assert len(actions(tmp_path, "first-agent")) > len(REPAIR)
