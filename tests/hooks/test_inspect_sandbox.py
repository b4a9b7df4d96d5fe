"""Inspect AI's own conformance checks, and a sample that is cancelled, against a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.adapter_behaviours import eventually, sessions_open
from helpers.debian_image import debian_image
from helpers.harness_stand_ins import inspect_stood_in
from helpers.hostile_rig import reason_to_skip

from tangram_hpc import LocalCluster
from tangram_hpc.errors import InvalidInput

CHECKOUT = Path(__file__).resolve().parents[2]
NEEDS = ("inspect-ai", "pytest", "pytest-asyncio", "msgspec", "numpy", "pydantic", "cloudpickle")
CHECKS = 44  # of inspect-ai 0.3.285; a later version may have more
CANNOT = {
    # it has one user, and no file of users that it could write
    "no image": {"test_exec_as_user"},
    # its user is root, to whom no file's mode denies anything
    "an image with users": {
        "test_read_file_not_allowed", "test_write_text_file_without_permissions",
        "test_write_binary_file_without_permissions"}}
SUITE = '''
import pytest
from inspect_ai.util._sandbox.self_check import *
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

CANNOT = %r

@pytest.fixture
async def sandbox_env(request):
    if request.node.originalname in CANNOT:
        request.node.add_marker(pytest.mark.xfail(strict=True))
    kind = registry_find_sandboxenv("tangram")
    made = await kind.sample_init("checks", %r, {})
    yield made["default"]
    await kind.sample_cleanup("checks", None, made, False)
'''


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="inspect-ai needs Python 3.11 or later")
@pytest.mark.parametrize("kind", ["no image", "an image with users"])
def test_inspects_own_checks_pass(tmp_path: Path, kind: str) -> None:
    """Each check passes in one of the two kinds of session at least."""
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    cannot = CANNOT[kind]
    options = {"backend": "bwrap", "mem": "512M"}
    if kind != "no image":
        if os.getuid() != 0 or not shutil.which("debootstrap"):
            pytest.skip("the image needs root and debootstrap")
        options["image"] = debian_image("bookworm", tmp_path, ("adduser",))
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin/python")
    made = subprocess.run([python, "-m", "pip", "install", "-q", *NEEDS], capture_output=True,
                          text=True, check=False)
    if made.returncode:
        pytest.skip(f"inspect-ai cannot be installed here: {made.stderr[-200:]}")
    config = tmp_path / "tangram-sandbox.json"
    config.write_text(json.dumps(options))
    suite = tmp_path / "test_checks.py"
    suite.write_text("import tangram_hpc.hooks.inspect_sandbox\n" + SUITE % (cannot, str(config)))
    with LocalCluster(cpus=2, home=tmp_path / "home") as cluster:
        env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TANGRAM_ACCESS": str(cluster.access)}
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto",
             f"--rootdir={tmp_path}", str(suite)], env=env, cwd=tmp_path, capture_output=True,
            text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    print(f"{kind}: {last}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|xfailed)", last)}
    assert counts["passed"] >= CHECKS - len(cannot), last
    assert counts.get("xfailed", 0) == len(cannot), last


def test_a_sample_that_is_cancelled_while_it_waits_leaves_no_session(tmp_path: Path) -> None:
    config = tmp_path / "tangram-sandbox.json"
    config.write_text(json.dumps({"mem": 600}))
    running = LocalCluster(cpus=1, mem_mib=1000, home=tmp_path / "home")
    with inspect_stood_in() as module, running as client:
        module.TangramSandbox.client = client
        holding = client.session(mem=600)
        holding.opened.result(30)
        begun = module.TangramSandbox.sample_init("task", str(config), {})
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asyncio.wait_for(begun, 0.3))
        holding.close()
        holding.closed.result(30)
        with client.session(mem=1000) as after:  # opens if nothing else is left
            after.opened.result(30)
        assert eventually(lambda: sessions_open(running) == 0)


def test_a_sample_whose_files_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "tangram-sandbox.json"
    config.write_text(json.dumps({"files": {"/proc/nothing/here": "x"}}))
    running = LocalCluster(cpus=1, home=tmp_path / "home")
    with inspect_stood_in() as module, running as client:
        module.TangramSandbox.client = client
        with pytest.raises(FileNotFoundError, match="/proc/nothing/here"):
            asyncio.run(module.TangramSandbox.sample_init("task", str(config), {}))
        assert eventually(lambda: sessions_open(running) == 0)


def test_a_path_that_cannot_be_read_is_told_to_the_policy(tmp_path: Path) -> None:
    """Any type that Inspect does not know would end the sample, and the policy chose the path."""
    with inspect_stood_in() as module, LocalCluster(cpus=1, home=tmp_path / "home") as client:
        with client.session() as session:
            session.exec("touch plain; ln -s loop loop").result(60)
            sandbox = module.TangramSandbox(session)
            for path, kind, told in [
                    ("nothing", FileNotFoundError, "no such file: nothing"),
                    ("plain/x", FileNotFoundError, "plain/x: Not a directory"),
                    (".", IsADirectoryError, ".: it is a directory"),
                    ("loop", module.ToolError, "loop: too many links"),
                    ("a\0b", module.ToolError, r"'a\x00b': a path cannot hold a zero byte")]:
                with pytest.raises(kind) as caught:
                    asyncio.run(sandbox.read_file(path))
                assert str(caught.value) == told
            with pytest.raises(FileNotFoundError, match=r"^plain/x: Not a directory$"):
                asyncio.run(sandbox.write_file("plain/x", ""))


def test_an_agents_request_is_read_though_inspect_allows_more_than_can_be_kept(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect's bridge for agents in the sandbox reads their requests by `cat`, with a limit of
    150 MiB. Cut text would be taken for a request that is still being written."""
    with inspect_stood_in() as module, LocalCluster(
            cpus=1, home=tmp_path / "home", output_bound=2 << 20) as client:
        monkeypatch.setattr(module.SandboxEnvironmentLimits, "MAX_EXEC_OUTPUT_SIZE", 150 << 20)
        with client.session(files={"request.json": "{}"}) as session:
            sandbox = module.TangramSandbox(session)
            told = asyncio.run(sandbox.exec(["cat", "--", "request.json"]))
            assert (told.success, told.returncode, told.stdout, told.stderr) == (True, 0, "{}", "")
            with pytest.raises(module.OutputLimitExceededError, match="2 MiB"):
                asyncio.run(sandbox.exec(["head", "-c", str(3 << 20), "/dev/zero"]))


def test_a_configuration_that_is_not_json_is_named(tmp_path: Path) -> None:
    config = tmp_path / "tangram-sandbox.yaml"
    config.write_text("mem: 1G\n")
    with inspect_stood_in() as module, LocalCluster(cpus=1, home=tmp_path / "home") as client:
        module.TangramSandbox.client = client
        with pytest.raises(InvalidInput, match=f"{config}: it is not JSON .*; write the arguments"):
            asyncio.run(module.TangramSandbox.sample_init("task", str(config), {}))


def test_a_text_that_is_no_utf_8_is_told_to_the_policy(tmp_path: Path) -> None:
    """The JSON of a tool call can hold half of a surrogate pair, and the policy wrote it."""
    with inspect_stood_in() as module, LocalCluster(cpus=1, home=tmp_path / "home") as client:
        with client.session() as session:
            sandbox = module.TangramSandbox(session)
            for work, told in [
                    (lambda: sandbox.exec(["bash", "-c", "echo \ud83d"]), "the command cannot be"),
                    (lambda: sandbox.exec(["python3"], input="'\ud83d'"), "character 1 of it"),
                    (lambda: sandbox.write_file("there", "\ud83d"), "there: nothing was written")]:
                with pytest.raises(module.ToolError, match=f"{told}.*half of a surrogate pair"):
                    asyncio.run(work())
            assert session.exec("ls").result(60).text == ""
