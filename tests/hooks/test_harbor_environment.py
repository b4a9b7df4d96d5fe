"""Harbor's own command line and its `oracle` on ten tasks, against sessions of a real broker."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.harbor_tasks import PROGRAMS, TASKS, write_task
from helpers.hostile_rig import reason_to_skip
from helpers.other_python import client_env, find_python, make_venv
from helpers.root_folder_rig import PROGRAMS as BASIC
from helpers.root_folder_rig import make_image

from tangram_hpc import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CLASS = "tangram_hpc.hooks.harbor_environment:TangramEnvironment"
VERSION = "0.24.0"
LATER = "0.25.0"  # runs with the packages of VERSION; it asks for newer ones than indexes may have


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Makes a virtual environment with Harbor; returns the path of its program."""
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("harbor")
    programs = make_venv(folder / "venv", find_python((3, 12)), [f"harbor=={VERSION}"])
    return str(programs / "harbor")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    made = make_image(folder / "root", (*BASIC, *PROGRAMS))
    folder.chmod(0o755)
    return made


@pytest.fixture
def later(harbor: str, tmp_path: Path) -> str:
    """Returns a folder with a later version of Harbor alone, for the front of the import path."""
    pip = [str(Path(harbor).parent / "python"), "-m", "pip", "install", "-q", "--no-deps"]
    made = subprocess.run([*pip, "--target", str(tmp_path / "later"), f"harbor=={LATER}"],
                          capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"harbor {LATER} cannot be had here: {made.stderr.strip()[-300:]}")
    return str(tmp_path / "later")


def run(harbor: str, cluster: LocalCluster, *words: str, before: str = ""
        ) -> subprocess.CompletedProcess[str]:
    env = client_env(cluster.access, HARBOR_TELEMETRY="0", TERM="dumb")
    if before:
        env["PYTHONPATH"] += os.pathsep + before
    return subprocess.run([harbor, *words, "--agent", "oracle", "--env", CLASS], env=env, text=True,
                          capture_output=True, timeout=900, check=False)


def result_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return loaded


def test_harbors_oracle_gets_the_reward_of_each_of_ten_tasks(
        harbor: str, image: Path, tmp_path: Path) -> None:
    for name in TASKS:
        write_task(tmp_path / "tasks", name, str(image))
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        done = run(harbor, cluster, "run", "-p", str(tmp_path / "tasks"), "-n", "4",
                   "--jobs-dir", str(tmp_path / "jobs"))
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert cluster.ask("info")["sessions"] == 0  # each trial has closed its session
    seen, places = {}, {}
    for path in (tmp_path / "jobs").glob("*/*/result.json"):
        told = result_of(path.parent)
        error = (told["exception_info"] or {}).get("exception_type", "")
        verdict = told["verifier_result"] or {}
        seen[told["task_name"]] = verdict.get("rewards"), error
        places[told["task_name"]] = path.parent
    assert seen == {name: (task.reward, task.error) for name, task in TASKS.items()}
    numbers = next((places["artifacts"] / "artifacts").rglob("numbers"))
    assert numbers.read_text().split()[-1] == "5000"
    assert (places["wrong-solution"] / "agent/exit-code.txt").read_text() == "3"


def test_a_trial_of_an_image_that_is_not_there_says_so(
        harbor: str, image: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", "variables", str(image))
    with LocalCluster(cpus=1, home=tmp_path / "home") as cluster:
        run(harbor, cluster, "trial", "start", "-p", str(task), "--trials-dir",
            str(tmp_path / "trials"), "--environment-kwarg", f"image={tmp_path}/none")
    told = result_of(next((tmp_path / "trials").glob("*")))
    assert told["exception_info"]["exception_type"] == "InfeasibleRequest"
    assert f"{tmp_path}/none" in told["exception_info"]["exception_message"]


def test_a_later_version_of_harbor_runs_a_task_too(
        harbor: str, later: str, image: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks", "dockerfile", str(image))
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        done = run(harbor, cluster, "trial", "start", "-p", str(task), "--trials-dir",
                   str(tmp_path / "trials"), before=later)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = result_of(next((tmp_path / "trials").glob("*")))
    assert told["verifier_result"]["rewards"] == {"reward": 1.0}
