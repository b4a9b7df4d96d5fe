"""A value in a batch script stays one word: no value can add another command, another directive or
the end of the quotes around it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tangram_hpc.cli.broker import _scripts
from tangram_hpc.cli.template import load, render
from tangram_hpc.config.allocations import elastic
from tangram_hpc.errors import InvalidInput

TEMPLATES = ("hetjob", "homogeneous", "replay", "satellite", "satellites", "single-node")
SHELL = {"setup", "trainer"}  # by their nature: what the user's own command line says
WORDS = {"broker_options", "more"}  # several words, each quoted
HOSTILE = ("x\n#SBATCH --uid=0", "x\ntouch pwned", "$(touch pwned)", "`touch pwned`",
           "x;touch pwned", "x&touch pwned", "x|touch pwned", "x>pwned", "a)b", "{a,b}", "a*", "~x",
           '"x', "'x", "x\\",
           "x\x00y", "x\x1b[2J", "${x:-$(touch pwned)}", "${x@P}", "${x[$(touch pwned)]}", "$((x))",
           "<(touch pwned)", "x\r\ntouch pwned",
           "${x:-`touch pwned`}", "${x:-'y'}", '${x:-"}', "${x:-\\y}")
# a stand-in for Slurm's and tangram's commands: it writes its words down and ends
STUB = '#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done >> "$WORDS"\nexit 3\n'


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_value_that_is_not_one_word_is_refused(name: str) -> None:
    """Each key of each template, with each hostile value."""
    taken = []
    for key in sorted(set(load(name).keys) - SHELL - WORDS):
        for value in HOSTILE:
            try:
                render(load(name), {key: value})
                taken.append((key, value))
            except InvalidInput as error:
                assert key in str(error) and "\n" not in str(error)
    # in double quotes these values are only characters
    quoted = {"scratch", "workload", "config", "container_image"}
    plain = {"x;touch pwned", "x&touch pwned", "x|touch pwned", "x>pwned", "a)b", "{a,b}", "a*",
             "~x", "<(touch pwned)"}
    assert [t for t in taken if t[0] not in quoted or t[1] not in plain] == []


def run(script: str, folder: Path) -> list[str]:
    """Runs a rendered script with fakes for Slurm; returns the words that the fakes got."""
    bin_ = folder / "bin"
    bin_.mkdir()
    for tool in ("tangram", "srun", "squeue", "scancel", "scontrol"):
        (bin_ / tool).write_text(STUB)
        (bin_ / tool).chmod(0o755)
    (folder / "job").write_text(script)
    environ = {"PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(folder), "SLURM_JOB_ID": "7",
               "SLURM_JOB_NAME": "t", "SLURM_JOB_END_TIME": "1", "WORDS": str(folder / "words"),
               "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "64"}
    subprocess.run(["bash", "job"], cwd=folder, env=environ, check=False, capture_output=True,
                   timeout=60)
    assert not (folder / "pwned").exists()
    return (folder / "words").read_text().splitlines()


@pytest.mark.parametrize(("name", "key"), [("single-node", "broker_options"), ("replay", "more")])
def test_additional_option_values_are_never_run_by_the_shell(
        name: str, key: str, tmp_path: Path) -> None:
    """The values reach the command as written, without their quotes, and start nothing."""
    value = "--one 'two words' $(touch pwned) `touch pwned` ; touch pwned & > pwned"
    given = {"trainer": "true"} if name == "single-node" else {"workload": "w"}
    text = render(load(name), {**given, key: value})
    words = run(text, tmp_path)
    at = words.index("--one")
    assert words[at:at + 6] == ["--one", "two words", "$(touch", "pwned)", "`touch", "pwned`"]
    with pytest.raises(InvalidInput, match=f"{key}=.*No closing quotation"):
        render(load(name), {**given, key: "it's"})


def test_a_path_may_hold_spaces_and_variables(tmp_path: Path) -> None:
    """`scratch` and `workload` are quoted; a variable in them is expanded on the node."""
    text = render(load("replay"), {"workload": "${NONE:-$HOME}/a b;c(d)"})
    assert f"{tmp_path}/a b;c(d)" in run(text, tmp_path)


def test_the_config_key_gives_the_whole_job_an_absolute_settings_path(tmp_path: Path) -> None:
    """The key `config` is relative to the folder in which the job was submitted."""
    show = '#!/bin/sh\nprintf "%s\\n" "$TANGRAM_CONFIG" >> "$WORDS"\nexit 3\n'
    text = render(load("single-node"), {"trainer": "true", "config": "my settings.toml"})
    text = text.replace("settings=", f"cat > bin/tangram <<'E'\n{show}E\nsettings=", 1)
    words = run(text, tmp_path)
    assert f"{tmp_path}/my settings.toml" in words


@pytest.mark.parametrize(("field", "value"), [
    ("partition", "cpu\n#SBATCH --uid=0"), ("qos", "$(touch pwned)"), ("account", "a b"),
    ("gres", "gpu:1)"), ("gres", "gpu:{1,2}"), ("scratch", "/tmp/$(touch pwned)"),
    ("scratch", "/tmp/`touch pwned`")])
def test_settings_cannot_bring_shell_into_a_satellites_script(field: str, value: str) -> None:
    """The broker renders [elastic] at its start and refuses values that are not one word."""
    satellite = {"name": "a", "cpus": 1}
    table: dict[str, object] = {"max_nodes": 1, "max_core_hours": 1, "satellites": [satellite]}
    (table if field == "scratch" else satellite)[field] = value  # type: ignore[index]
    with pytest.raises(InvalidInput, match=f"{field}="):
        _scripts(elastic(table), "7", {"TANGRAM_HOME": "/h"})
