"""`tangram template`: what is rendered, what is refused, and that a wheel brings the templates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.cli.template import left_open, load, render
from tangram_hpc.errors import InvalidInput

FULL = {"partition_cpu": "c", "partition_gpu": "g", "partition_trainer": "t",
        "trainer": "python train.py --lr 1"}


def test_every_placeholder_has_a_key_and_every_key_is_used() -> None:
    template = load("hetjob")
    used = {p[1:-1].lower() for p in left_open(template.text)} - {"tasks_trainer"}
    assert used == set(template.keys) - {"ranks"}
    assert template.about and all(about for _, about in template.keys.values())


def test_render_fills_removes_and_keeps(tmp_path: Path) -> None:
    text = render(load("hetjob"), {**FULL, "account": "mine", "ranks": "8", "gres_gpu": ""})
    assert left_open(text) == []
    assert "#SBATCH --account=mine\n" in text and "--qos" not in text
    assert "#SBATCH --ntasks=9\n" in text and "TANGRAM_WORLD_SIZE=9" in text
    assert "#SBATCH --gres" not in text
    assert "exec python train.py --lr 1'" in text
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert left_open(render(load("hetjob"), {})) == [
        "<PARTITION_CPU>", "<PARTITION_GPU>", "<PARTITION_TRAINER>", "<TRAINER>"]


@pytest.mark.parametrize(("given", "told"), [
    ({"partition_cpus": "x"}, "did you mean 'partition_cpu'"), ({"ranks": "0"}, "ranks='0'")])
def test_wrong_keys_are_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        render(load("hetjob"), given)


def test_the_command(tmp_path: Path) -> None:
    def tangram(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "tangram_hpc", "template", *words],
                              capture_output=True, text=True, check=False, timeout=60)

    assert tangram("list").stdout.startswith("hetjob ")
    assert tangram("show", "hetjob").stdout.startswith("#!/bin/bash\n")
    for words, said in ((("show", "nope"), "there is hetjob"),
                        (("render", "hetjob", "--strict"), "<TRAINER>"),
                        (("render", "hetjob", "-o", "ranks"), "KEY=VALUE"),
                        (("check", str(tmp_path / "none")), "No such file")):
        told = tangram(*words)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1) and said in told.stderr


@pytest.mark.timeout(300)
def test_a_wheel_brings_the_templates(tmp_path: Path) -> None:
    import zipfile

    from slurm_site import REPO

    subprocess.run(["git", "-C", str(REPO), "checkout-index", "-a", "-f",
                    f"--prefix={tmp_path}/tree/"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path),
                    str(tmp_path / "tree")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(n.endswith("share/tangram_hpc/sbatch_templates/hetjob.sbatch") for n in names)
    assert any(n.endswith("demo/data/mutants.json") for n in names)
    assert not any(n.startswith("tests/") for n in names)
