"""`tangram rank --launcher` and the templates' keys `launcher` and `container`, without a Slurm:
which command each node runs, and what contradicts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_parts import until

from tangram_hpc.app import ray_node
from tangram_hpc.app.ray_node import RayFailed, RayNode, run_node, start_words
from tangram_hpc.app.trainer_launchers import (
    check_launcher,
    contained,
    ray_folder,
    torchrun_words,
    without_place,
)
from tangram_hpc.cli.template import left_open, load, render
from tangram_hpc.errors import InvalidInput, WrongWorld

NODE = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4711", "SLURM_CPUS_PER_TASK": "16", "HOME": "/home/me"}
WORDS = ["bash", "-c", "python train.py"]
TRAINERS = ("hetjob", "homogeneous", "satellites", "single-node")


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Gives this process its handlers of signals back, which `run_node` replaces for good."""
    kept = {number: signal.getsignal(number) for number in ray_node._SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_torchrun_gets_its_place_among_the_nodes() -> None:
    assert torchrun_words(WORDS, NODE) == [
        "torchrun", "--nnodes=3", "--node-rank=1", "--nproc-per-node=1",
        "--master-addr=10.0.0.7", "--master-port=4711", "--no-python", *WORDS]
    assert "--nproc-per-node=gpu" in torchrun_words(WORDS, NODE | {"CUDA_VISIBLE_DEVICES": "0,1"})
    eight = NODE | {"TANGRAM_RANKS_PER_NODE": "8"}
    assert "--nproc-per-node=8" in torchrun_words(WORDS, eight)


def test_ray_gets_the_cpus_of_the_task_and_only_its_head_an_address_of_its_own() -> None:
    node = RayNode(1, 3, "10.0.0.7:4711", Path("/jobs/7/ray.7.3.0"))
    words = start_words(node, NODE)
    assert words[:3] == ["ray", "start", "--block"] and "--num-cpus=16" in words
    assert "--address=10.0.0.7:4711" in words and "--head" not in words
    head = start_words(replace(node, rank=0), NODE)
    assert {"--head", "--node-ip-address=10.0.0.7", "--port=4711"} <= set(head)
    assert not any(word.startswith("--address") for word in head)


def test_a_node_without_ray_says_so_and_tells_the_others(tmp_path: Path) -> None:
    """The other nodes end, because the head says that it is over."""
    node = RayNode(0, 2, "10.0.0.7:4711", tmp_path / "ray.7")
    with pytest.raises(InvalidInput, match="'ray' cannot be started: No such file or directory"):
        run_node(node, WORDS, {"PATH": str(tmp_path), "TANGRAM_RAY_DIR": str(tmp_path / "r")})
    assert node.has("over") and not node.has("up")


def test_a_ray_that_does_not_start_is_an_error_with_the_end_of_its_output(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\necho the port is taken\nexit 1\n")
    ray.chmod(0o755)
    node = RayNode(0, 2, "127.0.0.1:1", tmp_path / "ray.7")
    with pytest.raises(RayFailed, match="--launcher ray: Ray"):
        run_node(node, WORDS, {"PATH": f"{tmp_path}:{os.environ['PATH']}",
                               "TANGRAM_RAY_DIR": str(tmp_path / "r")})
    assert node.has("over")
    assert "the port is taken" in capfd.readouterr().err


def test_rays_folder_is_removed_unless_somebody_has_named_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\necho $RAY_TMPDIR\nexit 1\n")
    ray.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    node = RayNode(1, 2, "127.0.0.1:1", tmp_path / "ray.7")
    (tmp_path / "ray.7.up").touch()
    for named in ("", str(tmp_path / "r")):
        with pytest.raises(RayFailed, match="Ray ended before the command"):
            run_node(node, WORDS, {"PATH": f"{tmp_path}:{os.environ['PATH']}",
                                   "TANGRAM_RAY_DIR": named})
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (tmp_path / "r" / "ray-start.log").exists()


def test_a_signal_while_ray_starts_waits_until_it_can_be_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Ray would be left behind, as nobody had noted that it runs."""
    ray, pid = tmp_path / "ray", tmp_path / "r" / "pid"
    ray.write_text("#!/bin/sh\necho $$ > $RAY_TMPDIR/pid\nexec sleep 1000\n")
    ray.chmod(0o755)
    popen = subprocess.Popen

    def signalled(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen(words, **options)
        until(lambda: pid.exists() and pid.read_text().strip() != "", "Ray to start")
        signal.raise_signal(signal.SIGUSR1)
        return process

    monkeypatch.setattr(subprocess, "Popen", signalled)
    with pytest.raises(SystemExit) as ended:
        run_node(RayNode(0, 2, "localhost:1", tmp_path / "ray.7"), WORDS,
                 {"PATH": f"{tmp_path}:{os.environ['PATH']}",
                  "TANGRAM_RAY_DIR": str(tmp_path / "r")})
    assert ended.value.code == 128 + signal.SIGUSR1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_before_the_command_begins_leaves_no_ray_behind(
        tmp_path: Path, rank: int) -> None:
    """The head ends its Ray and tells the others; another node goes on until the head is over."""
    ray = tmp_path / "ray"
    ray.write_text(f"#!{sys.executable}\nimport os, signal, sys; from pathlib import Path\n"
                   "here = Path(os.environ['RAY_TMPDIR'])\n"
                   "def end(*_): (here / 'asked').touch(); sys.exit()\n"
                   "if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # not inherited as "
                   "ignored\n    signal.signal(signal.SIGTERM, end)\n"
                   "(here / 'pid').write_text(str(os.getpid()))\nsignal.pause()\n")
    ray.chmod(0o755)
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "python").chmod(0o755)
    program = ("import os, sys; from pathlib import Path\n"
               "from tangram_hpc.app.ray_node import RayNode, run_node\n"
               "sys.exit(run_node(RayNode(int(sys.argv[1]), 2, 'localhost:1', Path(sys.argv[2])), "
               "['true'], os.environ))")
    meeting = tmp_path / "ray.7"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}",
                            "TANGRAM_RAY_DIR": str(tmp_path / "r")}
    if rank:
        (tmp_path / "ray.7.up").touch()
    process = subprocess.Popen([sys.executable, "-c", program, str(rank), str(meeting)],
                               env=environ)
    pid = tmp_path / "r" / "pid"
    until(lambda: pid.exists() and pid.read_text().strip(), "Ray to start")
    process.send_signal(signal.SIGUSR1)
    if rank:
        assert process.poll() is None
        (tmp_path / "ray.7.over").touch()
    assert process.wait(60) == (0 if rank else 128 + signal.SIGUSR1)
    assert (tmp_path / "ray.7.over").exists()
    assert (tmp_path / "r" / "asked").exists()  # Ray ended by itself, it was not killed
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_folder_for_ray_that_exists_already_is_refused(tmp_path: Path) -> None:
    ours = {"TANGRAM_RAY_DIR": str(tmp_path / "ray")}
    assert ray_folder(ours) == tmp_path / "ray"
    assert (tmp_path / "ray").stat().st_mode & 0o777 == 0o700
    with pytest.raises(InvalidInput, match=f"TANGRAM_RAY_DIR={tmp_path}/ray: File exists; name"):
        ray_folder(ours)


def test_a_launched_trainer_does_not_inherit_variables_that_count_nodes() -> None:
    assert set(without_place(NODE)) == {"SLURM_CPUS_PER_TASK", "HOME"}


def test_apptainer_runs_the_launcher_inside_the_image() -> None:
    words = contained("a.sif", torchrun_words(WORDS, NODE), NODE)
    assert words[:6] == ["apptainer", "exec", "--bind", "/home/me/.tangram", "a.sif", "torchrun"]
    with_gpus = NODE | {"CUDA_VISIBLE_DEVICES": "0", "TANGRAM_HOME": "/lustre/t"}
    assert contained("a.sif", WORDS, with_gpus)[2:5] == ["--nv", "--bind", "/lustre/t"]
    assert contained("", WORDS, with_gpus) == WORDS


def test_a_launcher_outside_a_job_step_names_what_is_missing() -> None:
    with pytest.raises(InvalidInput, match="torchrun: MASTER_ADDR is not set; start it in a job"):
        torchrun_words(WORDS, {"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(("gateway", "tasks", "told"), [
    ("on", "1(x2)", "--gateway on: --launcher ray starts one task a node"),
    ("off", "2(x2),1", r"wants one task a node, but the step has 2\(x2\),1"),
    ("auto", "1,4", "srun --ntasks-per-node=1")])
def test_a_step_that_does_not_suit_a_launcher_is_refused(
        gateway: str, tasks: str, told: str) -> None:
    with pytest.raises((InvalidInput, WrongWorld), match=told):
        check_launcher("ray", gateway, {"SLURM_STEP_TASKS_PER_NODE": tasks})
    check_launcher("none", gateway, {"SLURM_STEP_TASKS_PER_NODE": tasks})
    check_launcher("ray", "auto", {"SLURM_STEP_TASKS_PER_NODE": "1(x3),1"})


@pytest.mark.parametrize("name", TRAINERS)
def test_a_template_with_a_launcher_has_one_task_a_trainer_node(
        name: str, tmp_path: Path) -> None:
    nodes = {"hetjob": "nodes_trainer", "satellites": "nodes_trainer", "homogeneous": "nodes"}
    given = {"trainer": "python train.py", "launcher": "ray",
             "container": "pyxis", "container_image": "nvcr.io#nvidia/verl:1"}
    given |= {k: "p" for k in load(name).keys if k.startswith("partition")}
    given |= {nodes[name]: "3"} if name in nodes else {}
    text = render(load(name), given)
    tasks = 3 if name in nodes else 1
    assert left_open(text) == []
    assert f"--ntasks={tasks} " in text and "--mpi=none" in text and "--gateway=off" in text
    assert "launcher=ray\n" in text and 'image="nvcr.io#nvidia/verl:1"' in text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(("given", "told"), [
    ({"launcher": "mpirun"}, "launcher='mpirun' must be none or torchrun or ray"),
    ({"launcher": "ray", "ranks": "8"}, "ranks='8': with launcher=ray it is 1"),
    ({"launcher": "torchrun", "gateway": "on"}, "gateway='on': with launcher=torchrun it is off"),
    ({"container": "docker"}, "container='docker' must be apptainer or pyxis"),
    ({"container_image": "a'b"}, 'must not contain "\'"')])
def test_template_values_that_contradict_a_launcher_are_refused(
        given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        render(load("hetjob"), given)


def test_tangram_rank_refuses_a_launcher_with_a_gateway_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tangram_hpc", "rank", "--launcher", "ray", "--gateway", "on", "--",
         "true"], text=True, capture_output=True, check=False,
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--gateway on: --launcher ray starts one task a node" in done.stderr
