"""Every command of README.md and of the documents is run as it is written, or its page says in its
source why not. Commands that need Slurm are in tests/house/test_documented_commands_slurm.py."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import documented
from helpers.documented import ALL, REPO, TO_RUN, Block, filled
from helpers.forked_start import Script

from tangram_hpc.cli import parser
from tangram_hpc.config.settings import load_config

# Blocks that take more than some 10 s of CPU.
LONG = {"README.md:tangram_size_coding-200_--cluster", "README.md:tangram_sim_rl_rl-48",
        "README.md:tangram_sim_coding-200_--cluster",
        "docs/SIZING.md:tangram_size_coding-200_--cluster"}
# What a Python example supposes: names that the text around it explains, and stand-ins for models.
RM = {'"backend": "torch", "model": "/models/rm", "task": "classifier"': '"backend": "fake"'}
FAKES = """
for name in {names}:
    client.register_service(name, {{"backend": "fake"}})
"""
CLIENT = "from tangram_hpc import LocalCluster\nclient = cluster = LocalCluster(cpus=8, {})\n" \
    "cluster.start()\n"
PRE: dict[str, str] = {
    "README.md:import_tangram_hpc_with_tangram_hpc.connect": """
import os
from tangram_hpc import LocalCluster
cluster = LocalCluster(cpus=8, devices="fake:1").start()
os.environ["TANGRAM_ACCESS"] = str(cluster.access)
code, score, batch, answers = "def test(): pass", abs, [-1, 2], ["a", "b"]
""",
    "README.md:client.register_rollouts_policy_buckets_services": CLIENT.format(
        'devices="fake:4"') + FAKES.format(names=("tp1", "tp4")).replace(
            '"fake"}', '"fake", "degrees": [1, 4]}') + "box = client.session().__enter__()\n",
    "docs/ENDPOINTS.md:search_client.register_endpoint_search_concurrency": CLIENT.format(""),
    "docs/ENDPOINTS.md:async_def_attempt_one": CLIENT.format("") + """
import tangram_hpc
class Reply:
    status_code, headers = 200, {}
    def json(self): return {"tokens": 7}
class http:
    async def get(url): return Reply()
class requests:
    def get(url): return Reply()
url, search = "http://localhost/", client.register_endpoint("search", concurrency=2)
""",
    "docs/GETTING_STARTED.md:with_client.session_as_s": CLIENT.format("") + "import tangram_hpc\n",
    "docs/GETTING_STARTED.md:with_client.session_mem_1G": CLIENT.format("") + """
import os, subprocess
code = "x = 1"
os.mkdir("fixtures")
open("fixtures/test_it.py", "w").write("def test(): assert 1")
""",
    "docs/LIBRA.md:client.register_rollouts_policy_tree_shared": CLIENT.format(
        'devices="fake:8"') + FAKES.format(names=("tp1-a", "tp1-b", "tp4", "tp8"))
        + 'prompt_id, text = "p-1", "a task"\n',
    "docs/LIBRA.md:queues_router_Cmlfq_CausalTree": """
from tangram_hpc.scheduler.routing import cmlfq, rollout_router
from tangram_hpc.scheduler.routing.cmlfq import *
from tangram_hpc.scheduler.routing.rollout_router import *
instances = [RolloutInstance(1, 0, 1, "n", 2, 1, 40_000, 20_000, 100, 100)]
request, prompt, context, remaining, characters, generated, total, epoch = 1, 2, 3, 4, 5, 6, 7, 8
limits = TreeLimits()
""",
    "docs/RESUMING.md:future_client.submit_grade_answer": CLIENT.format("")
        + "grade, answer, k, i, save_checkpoint = abs, -3, 1, 2, print\n",
}
TABLE = {"/shared/trees": "TREES", "/home/me/project": str(REPO)}


def shell(text: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """A block of commands, in a folder and home of its own; the first that fails ends it."""
    return run(["bash", "-euo", "pipefail", "-c", text], folder, timeout)


def run(words: list[str], folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """A command in a folder, which is its home too."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TANGRAM_", "SLURM_"))}
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=timeout, check=False,
        env={**environ, "HOME": str(folder), "COLUMNS": "200",
             "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"})


def here(language: str, long: bool) -> list[Any]:
    return [pytest.param(b, id=b.name) for b in TO_RUN if b.language == language
            and not b.needs_slurm and (b.name in LONG) == long]


# ---- what there is -----------------------------------------------------------------------------


def test_every_command_block_is_run_or_names_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """No fence lacks a language, no code lacks a fence, no mark lacks a reason; the counts are
    printed."""
    nameless = [b.name for b in ALL if b.language not in documented.RUN | documented.NO_COMMANDS]
    assert nameless == [], "a block says what it is: bash, console, python, toml, text or mermaid"
    assert [line for page in documented.PAGES for line in documented.unfenced(page)] == []
    marked = [b for b in ALL if b.why_not]
    assert [b.name for b in marked if b.language not in documented.RUN] == []
    names = Counter(b.name for b in TO_RUN)
    assert LONG | set(PRE) <= set(names), "a block named in this file is gone from its page"
    with capsys.disabled():
        count = Counter(b.language for b in TO_RUN)
        slurm = sum(b.needs_slurm for b in TO_RUN)
        print(f"\nblocks run: {len(TO_RUN)} ({dict(count)}, {slurm} of them on Slurm, {len(LONG)} "
              f"in the long suite); not run: {len(marked)}")
        for block in marked:
            print(f"  {block.page}:{block.line}: {block.why_not}")


VERBS: dict[str, argparse.ArgumentParser] = next(
    a.choices for a in parser()._actions if isinstance(a, argparse._SubParsersAction))  # type: ignore[misc]


@pytest.mark.parametrize("page", documented.PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_verbs_and_options_named_in_documents_exist(page: Path) -> None:
    """For `tangram VERB --option` in backquotes: the verb exists and knows the options."""
    wrong = []
    verbs = re.findall(r"(?<!`)`(?:srun [^`]*?)?tangram ([a-z][^`]*)`", page.read_text())
    for code in verbs:
        verb, *rest = code.replace("sim rl", "sim-rl", 1).split(" -- ")[0].split()
        if verb not in VERBS:
            wrong.append(f"tangram {code}")
            continue
        known = set(VERBS[verb]._option_string_actions)
        for action in VERBS[verb]._actions:
            if isinstance(action, argparse._SubParsersAction):
                known |= {o for p in action.choices.values() for o in p._option_string_actions}
        given = {w.split("=")[0] for w in re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(rest))}
        wrong += [f"tangram {verb} {option}" for option in sorted(given - known)]
    assert wrong == []


# ---- running ------------------------------------------------------------------------------------


def run_bash(block: Block, tmp_path: Path, timeout: float) -> None:
    told = shell(block.text, tmp_path, timeout)
    assert told.returncode == 0, f"{block.page}:{block.line}\n{told.stdout}\n{told.stderr}"
    promised = re.findall(r"^# (?=\w+: \d)(.*)$", block.text, re.MULTILINE)
    assert all(line in told.stdout for line in promised), told.stdout


def run_console(block: Block, tmp_path: Path, timeout: float) -> None:
    command, _, printed = block.text.removeprefix("$ ").partition("\n")
    told = shell(command, tmp_path, timeout)
    said = re.sub(r"^tangram: .+: \d+(/\d+)?, \d+ s(, .*)?\n", "", told.stderr, flags=re.MULTILINE)
    assert (told.returncode, said) == (0, "")  # how far long work is depends on the machine
    assert [line.rstrip() for line in told.stdout.splitlines()] == [
        line.rstrip() for line in printed.splitlines()]


@pytest.mark.parametrize("block", here("bash", False))
def test_documented_commands_run(block: Block, tmp_path: Path) -> None:
    """Each block runs in a shell that ends at the first failing command."""
    run_bash(block, tmp_path, 120)


@pytest.mark.parametrize("block", here("console", False))
def test_documented_commands_print_the_documented_output(block: Block, tmp_path: Path) -> None:
    """The output of each command is compared line by line."""
    run_console(block, tmp_path, 120)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [*here("bash", True), *here("console", True)])
def test_long_documented_commands_run(block: Block, tmp_path: Path) -> None:
    """Blocks of both kinds that take minutes."""
    (run_bash if block.language == "bash" else run_console)(block, tmp_path, 800)


@pytest.mark.parametrize("block", here("toml", False))
def test_documented_settings_are_accepted(block: Block, tmp_path: Path) -> None:
    """A settings file with just these lines is accepted; tables are checked by their readers."""
    from tangram_hpc.config.allocations import elastic
    from tangram_hpc.config.endpoints import endpoint_spec
    from tangram_hpc.config.rollouts import rollouts_spec
    from tangram_hpc.config.services import service_spec
    from tangram_hpc.config.tenants import tenant_spec

    (tmp_path / "t.toml").write_text(block.text)
    config = load_config({"TANGRAM_CONFIG": str(tmp_path / "t.toml"), "HOME": str(tmp_path)})
    told = [elastic(config.elastic)] if config.elastic else []
    told += [endpoint_spec(name, table) for name, table in config.endpoints.items()]
    told += [service_spec(name, table) for name, table in config.services.items()]
    told += [rollouts_spec(name, table) for name, table in config.rollouts.items()]
    told += [tenant_spec(name, table) for name, table in config.tenants.items()]
    assert told


@pytest.mark.parametrize("block", here("python", False))
def test_documented_python_examples_run(block: Block, tmp_path: Path) -> None:
    """Python with the names that the text assumes; top-level `await` works as in a notebook."""
    text = filled(block.text, {**TABLE, "/shared/trees": str(tmp_path / "trees")})
    for real, fake in RM.items():
        text = text.replace(real, fake)
    text = text.replace("\n...\n", "\n")
    (tmp_path / "example.py").write_text(
        "import ast, asyncio, sys\n"
        f"names = {{}}\nexec({PRE.get(block.name, '')!r}, names)\n"
        f"code = compile({text!r}, {block.page!r}, 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\n"
        "done = eval(code, names)\n"
        "if asyncio.iscoroutine(done): asyncio.run(done)\n"
        "if 'cluster' in names: names['cluster'].close()\n")
    told = run([sys.executable, Script(tmp_path / "example.py")], tmp_path, 120)
    assert told.returncode == 0, f"{block.page}:{block.line}\n{told.stdout}\n{told.stderr}"
